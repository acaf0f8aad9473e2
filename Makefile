# Each target makes .venv when it is missing and installs through constraints.txt.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed

.PHONY: guard test bench lint clean
guard: $(STAMP)
	$(BIN)/hybrid-kv guard

test: $(STAMP)
	$(BIN)/python -m pytest -n 2

bench: $(STAMP)
	$(BIN)/python -m bench --out results/microbench.csv

lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

$(STAMP): pyproject.toml constraints.txt .ci/install
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@bash .ci/install $(BIN)/python
	@touch $@

clean:
	rm -rf $(VENV) .asv .pytest_cache .mypy_cache .ruff_cache .hypothesis .benchmarks build dist *.egg-info
