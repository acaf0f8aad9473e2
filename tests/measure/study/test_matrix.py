"""What a study's file declares."""

from itertools import combinations
from pathlib import Path

import pytest
import yaml

from hybrid_kv.config import ConfigError
from hybrid_kv.measure.study import matrix
from hybrid_kv.measure.study.matrix import read_study

STUDY = {
    "runs": ["accuracy --limit 2 --model {model} {drafts}", "guard --quick -k costs"],
    "axes": {
        "model": ["guard_model", "guard_model_qwen3_5"],
        "drafts": {"none": "", "ngram": "--speculative-method ngram"},
    },
    "without": [{"model": "guard_model_qwen3_5", "drafts": "none"}],
}


def cells(folder: Path, **parts: object) -> list[matrix.StudyCell]:
    file = folder / "study.yaml"
    file.write_text(
        yaml.safe_dump(
            {k: v for k, v in {**STUDY, **parts}.items() if v is not None}, sort_keys=False
        )
    )
    return read_study(file)


def test_a_run_stands_for_each_combination_of_the_axes_that_it_names(tmp_path: Path) -> None:
    assert [cell.text for cell in cells(tmp_path)] == [
        "accuracy --limit 2 --model guard_model",
        "accuracy --limit 2 --model guard_model --speculative-method ngram",
        "accuracy --limit 2 --model guard_model_qwen3_5 --speculative-method ngram",
        "guard --quick -k costs",
    ]


def test_a_cell_says_what_is_run_and_where_rows_go(tmp_path: Path) -> None:
    first, *_, last = cells(tmp_path, gpus=1)
    assert (
        first.levels == {"model": "guard_model", "drafts": "none"} and first.gpus == last.gpus == 1
    )
    assert last.command("rows")[1:] == [
        "-m",
        "hybrid_kv.cli",
        "guard",
        "--quick",
        "-k",
        "costs",
        "--results",
        "rows/",
    ]
    (bench,) = cells(tmp_path, runs=["bench --quick"], axes=None, without=None)
    assert bench.command("rows")[1:] == ["-m", "bench", "--quick", "--out", "rows/microbench.csv"]


def test_equal_commands_are_one_cell(tmp_path: Path) -> None:
    found = cells(
        tmp_path,
        runs=["guard {is_on}"],
        axes={"is_on": {True: "-k on", False: "-k on"}},
        without=None,
    )
    assert [(cell.text, cell.levels) for cell in found] == [("guard -k on", {"is_on": "off"})]


def test_a_cells_name_changes_with_the_code_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = [cell.id for cell in cells(tmp_path)]
    assert before == [cell.id for cell in cells(tmp_path)] and len(set(before)) == 4
    monkeypatch.setattr(matrix, "code_digest", lambda: "other code")
    assert not set(before) & {cell.id for cell in cells(tmp_path)}


@pytest.mark.parametrize(
    ("parts", "problem"),
    [
        ({"runs": None}, "runs must be a list of commands"),
        (
            {"runs": ["accuracy {size}"]},
            "names {size}, which is not an axis; there are model, drafts",
        ),
        (
            {"runs": ["rm -rf {model}"]},
            "does not begin with one of accuracy, bench, guard, kernels",
        ),
        (
            {"runs": ["guard --results={model}"]},
            "has --results=guard_model; a study sets the place of its rows",
        ),
        ({"runs": ["guard '{model}"]}, "No closing quotation"),
        ({"runs": ["guard {model"]}, "expected '}' before end of string"),
        ({"axes": {"model": "a"}}, "axis model must be a list of levels"),
        ({"axes": ["model"]}, "axes must be a table"),
        ({"without": [{"k": 0}]}, "k=0 is not a level of an axis"),
        (
            {"without": [{"drafts": "none"}, {"drafts": "ngram"}], "runs": STUDY["runs"][:1]},
            "'without' leaves nothing to run",
        ),
        (
            {"runs": ["guard {model:>2000000000}"]},
            "formats {model:>2000000000}; write the name of an axis alone",
        ),
        ({"runs": ["guard {model!r}"]}, "formats {model}; write the name of an axis alone"),
        ({"axes": {"model": [["a"]]}}, "a level must be a text or a number"),
        ({"gpus": "two"}, "gpus='two' is not a number of GPUs"),
        ({"axis": {}}, "it has 'axis'"),
    ],
)
def test_what_cannot_be_run_is_one_line(
    tmp_path: Path, parts: dict[str, object], problem: str
) -> None:
    with pytest.raises(ConfigError) as error:
        cells(tmp_path, **parts)
    assert problem in str(error.value) and str(error.value).startswith(
        f"study {tmp_path / 'study.yaml'}: "
    )


@pytest.mark.parametrize(
    ("size", "said"),
    [
        (7, "stands for 163,840,000,000 cells, more than 10,000"),
        (2, "it has more than 10,000 cells"),
    ],
)
def test_a_study_without_end_is_refused(tmp_path: Path, size: int, said: str) -> None:
    axes = {f"a{i}": list(range(40)) for i in range(7)}
    runs = [
        f"guard {' '.join(f'{{{name}}}' for name in some)}" for some in combinations(axes, size)
    ]
    with pytest.raises(ConfigError, match=said):
        cells(tmp_path, runs=runs, axes=axes, without=None)


@pytest.mark.parametrize(
    ("text", "problem"), [("a: [", "is not YAML"), ("- a", "it names no runs")]
)
def test_a_file_that_is_not_a_study_is_one_line(tmp_path: Path, text: str, problem: str) -> None:
    file = tmp_path / "study.yaml"
    file.write_text(text)
    with pytest.raises(ConfigError, match=problem) as error:
        read_study(file)
    assert "\n" not in str(error.value)
    with pytest.raises(ConfigError, match="cannot be read: No such file"):
        read_study(tmp_path / "none.yaml")
