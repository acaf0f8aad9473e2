"""What is tried: each command with odd arguments, config files, checkpoints, tokenizers, rows of results, answers.

A case is made from its number alone, in a folder of its own: `KINDS` maps a kind to how often it is drawn and to the
function that writes the files and returns the arguments. The long work (traffic, compilers, timings, lm-eval) is
replaced by a short result in `stubs`: what is tried is all that stands before and behind it.
"""

from __future__ import annotations

import atexit
import csv
import io
import json
import random
import shutil
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from functools import cache
from inspect import unwrap
from pathlib import Path
from tempfile import mkdtemp
from types import NoneType
from typing import Any, Literal, get_args, get_origin, get_type_hints
from unittest.mock import patch

import typer
import yaml

from hybrid_kv.accuracy.guard_model import FOLDER as GUARD_MODEL
from hybrid_kv.accuracy.threshold import FILE as FLOORS
from hybrid_kv.cli import app
from hybrid_kv.models.random_checkpoint import write_checkpoint
from hybrid_kv.models.registry import sized
from hybrid_kv.mutation.mutant import FOLDER as MUTANTS
from hybrid_kv.probes.registry import Round
from hybrid_kv.probes.reproducer import Case, to_json
from hybrid_kv.results import COLUMNS
from hybrid_kv.targets.target import Ask
from tests.accuracy.test_compare import logged, record
from tests.dashboard.kinds import everything
from tests.dashboard.rows import write
from tests.fuzz import values
from tests.model_configs import CONFIGS
from tests.timing.test_fitness import QUIET

Make = Callable[[random.Random, Path], list[str]]
ROOT = Path(__file__).resolve().parents[2]


# ---- arguments ----


@dataclass(frozen=True)
class Option:
    """What the command line calls it, and the annotation of the function's parameter."""

    name: str
    opts: tuple[str, ...]
    is_flag: bool
    hint: Any


@cache
def commands() -> dict[tuple[str, ...], list[Option]]:
    """The options of every command, by its words."""
    found: dict[tuple[str, ...], list[Option]] = {}

    def add(words: tuple[str, ...], command: Any) -> None:
        hints = get_type_hints(unwrap(command.callback)) if command.callback else {}
        given = [p for p in command.params if p.param_type_name == "option" and p.name in hints]
        found[words] = [Option(p.name, tuple(p.opts), p.is_flag, hints[p.name]) for p in given]
        for name, inner in getattr(command, "commands", {}).items():
            add((*words, name), inner)

    for name, command in typer.main.get_command(app).commands.items():  # type: ignore[attr-defined]
        add((name,), command)
    return found


def options(rng: random.Random, words: tuple[str, ...], leave_out: tuple[str, ...] = (), most: int = 4) -> list[str]:
    """Some of a command's options, with odd and with usual values."""
    parameters = [option for option in commands()[words] if option.name not in leave_out]
    chosen = rng.sample(parameters, min(len(parameters), rng.choice((0, 1, 1, 2, 3, most))))
    given: list[str] = []
    for parameter in chosen:
        given.append(rng.choice(parameter.opts))
        if not parameter.is_flag:
            given.append(option_value(rng, parameter))
    return given


def option_value(rng: random.Random, parameter: Option) -> str:
    """An odd value, one of the choices, a usual number, or a place in the case's folder."""
    if rng.random() < 0.25:
        return values.argument(rng)
    kinds = {kind for kind in (get_args(parameter.hint) or (parameter.hint,)) if kind is not NoneType}
    if choices := [
        choice for kind in (parameter.hint, *kinds) if get_origin(kind) is Literal for choice in get_args(kind)
    ]:
        return str(rng.choice(choices))
    if Path in kinds or parameter.name in ("samples", "against", "gsm8k_dir", "rows", "kv_offload_folder"):
        return place(rng)
    if int in kinds:
        return str(rng.choice((*values.INTEGERS, 1, 2, 4, 16, 32, 64, 256, 2048)))
    if float in kinds:
        return rng.choice((*values.NUMBERS, "0", "1", "0.9"))
    return rng.choice(values.TEXTS)


def place(rng: random.Random) -> str:
    """A place for a file: new, taken, impossible."""
    names = [
        "new.json",
        "new/deep/er.json",
        ".",
        "taken.txt",
        "taken.txt/x",
        "results",
        "rows.csv",
        "/dev/null",
        "/dev/full",
    ]
    names += [
        "/dev/null/x",
        "/proc/x",
        "n" * 300,
        "é.json",
        "\udcff.json",
        "a b.json",
        "-",
        "new.jsonl.gz",
        "",
        "~",
        "/",
    ]
    return rng.choice(names)


def anything(rng: random.Random, folder: Path) -> list[str]:
    """Any command with any arguments."""
    words = rng.choice(list(commands()))
    rows_folder(rng, folder, odd=False)
    arguments = [values.argument(rng) if rng.random() < 0.5 else place(rng) for _ in range(rng.choice((0, 0, 1, 2)))]
    given = options(rng, words)
    if rng.random() < 0.05:
        given += rng.choice((["--help"], ["--version"], ["--"], ["--nope"], ["--show-completion"]))
    return [*words, *given, *(["--"] if rng.random() < 0.2 else []), *arguments]


# ---- models ----


def plan(rng: random.Random, folder: Path) -> list[str]:
    """A real config, usual and odd options."""
    (folder / "config.json").write_text(json.dumps(rng.choice(list(CONFIGS.values()))))
    return ["plan", "config.json", *enough(rng), *options(rng, ("plan",))]


def plan_config(rng: random.Random, folder: Path) -> list[str]:
    """A config with odd keys and types."""
    (folder / "config.json").write_bytes(values.odd_file(rng, rng.choice(list(CONFIGS.values()))))
    return ["plan", rng.choice(("config.json", ".")), *enough(rng), *options(rng, ("plan",), most=2)]


def enough(rng: random.Random) -> list[str]:
    return rng.choice((["--num-blocks", "500"], ["--gpu-memory", "40GiB"], []))


def checkpoint(folder: Path) -> None:
    for name in (
        "config.json",
        "generation_config.json",
        "model.safetensors",
        "tokenizer.json",
        "tokenizer_config.json",
    ):
        shutil.copy(GUARD_MODEL / name, folder / name)


def generate(rng: random.Random, folder: Path) -> list[str]:
    """A checkpoint with one odd file, or odd options."""
    checkpoint(folder)
    odd = rng.choice(
        ("config", "config", "weights", "weights", "tokenizer", "generation", "index", "options", "options")
    )
    file = {
        "tokenizer": rng.choice(("tokenizer.json", "tokenizer_config.json")),
        "generation": "generation_config.json",
    }
    name = file.get(odd, "config.json")
    if odd in ("config", "tokenizer", "generation"):
        (folder / name).write_bytes(values.odd_file(rng, json.loads((folder / name).read_text())))
    elif odd == "weights":
        weights = folder / "model.safetensors"
        weights.write_bytes(values.odd_safetensors(rng, weights.read_bytes()))
    elif odd == "index":
        index = {"metadata": {"total_size": 1}, "weight_map": {"backbone.embeddings.weight": "model.safetensors"}}
        (folder / "model.safetensors.index.json").write_bytes(values.odd_file(rng, index))
    given = ["--max-tokens", "3", "--device", "cpu", "--model", "."]
    if odd == "options":
        given += options(rng, ("generate",), leave_out=("max_tokens", "model", "help"))
    prompts = [rng.choice(("Question: 1 + 1?", values.argument(rng))) for _ in range(rng.choice((1, 1, 2)))]
    return ["generate", *given, "--", *prompts]


@cache
def tiny(model_type: str) -> Path:
    """A checkpoint of a family, written once a process."""
    folder = Path(mkdtemp(prefix="hybrid-kv-fuzz-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    write_checkpoint(model_type, folder)
    return folder


def family(rng: random.Random, folder: Path) -> list[str]:
    """A tiny checkpoint of any family with an odd config or odd weights; or an odd one is asked for."""
    if rng.random() < 0.1:
        kind = rng.choice((*sized(), values.argument(rng)))
        return ["checkpoint", *options(rng, ("checkpoint",)), "--", kind, place(rng)]
    shutil.copytree(tiny(rng.choice(sorted(sized()))), folder, dirs_exist_ok=True)
    name = rng.choice(("config.json", "config.json", "config.json", "model.safetensors"))
    data = (folder / name).read_bytes()
    odd = values.odd_file(rng, json.loads(data)) if name.endswith("json") else values.odd_safetensors(rng, data)
    (folder / name).write_bytes(odd)
    return ["generate", "--max-tokens", "3", "--device", "cpu", "--model", ".", "--", "w7 w8 w9"]


# ---- results ----


@cache
def good_rows() -> list[list[str]]:
    from tempfile import TemporaryDirectory

    with TemporaryDirectory() as folder:
        text = (write(Path(folder), everything()) / "made.csv").read_text()
    header, *rows = csv.reader(io.StringIO(text))
    assert tuple(header) == COLUMNS
    return [header, *rows]


def rows_folder(rng: random.Random, folder: Path, odd: bool = True) -> None:
    """`results/` with a file or two, and another CSV beside it."""
    (folder / "results").mkdir(exist_ok=True)
    header, *rows = good_rows()
    for name in ("rows.csv", "results/made.csv", "results/kernels.csv"):
        some = [header, *rng.sample(rows, rng.choice((1, 5, 40)))]
        data = values.odd_csv(rng, some) if odd and rng.random() < 0.7 else values.plain_csv(some)
        (folder / name).write_bytes(data)


def results(rng: random.Random, folder: Path) -> list[str]:
    """Odd rows, listed and checked."""
    rows_folder(rng, folder)
    places = rng.choice(([], ["results"], ["rows.csv"], ["rows.csv", "results"]))
    if rng.random() < 0.3:
        return ["results", rng.choice(("export", "merge")), "--to", rng.choice(("new.parquet", place(rng))), *places]
    return ["results", *rng.choice(([], [], ["--check"])), *options(rng, ("results", "list"), most=2), *places]


def report(rng: random.Random, folder: Path) -> list[str]:
    """Odd rows, drawn."""
    rows_folder(rng, folder)
    if rng.random() < 0.1:
        shutil.rmtree(folder / "results")
        (folder / "results").mkdir()
    return ["report", *options(rng, ("report",), most=2)]


def kernels(rng: random.Random, folder: Path) -> list[str]:
    """An odd baseline."""
    rows_folder(rng, folder)
    header, *_ = good_rows()
    row = dict(zip(header, good_rows()[1], strict=True)) | {
        "suite": "kernels",
        "benchmark": "planted",
        "metric": "registers",
    }
    row["params"] = json.dumps(values.odd_json(rng, {"shape": "any", "dtype": "float32", "target": "sm_90"}))
    (folder / "results/kernels.csv").write_bytes(values.plain_csv([header, [row[name] for name in header]]))
    return ["kernels", *options(rng, ("kernels",), most=3)]


def guard(rng: random.Random, folder: Path) -> list[str]:
    """Rows that are there already, odd places for new ones."""
    rows_folder(rng, folder)
    shutil.copy(folder / "rows.csv", folder / "results/guard.csv")
    return ["guard", *rng.choice(([], ["--quick"], ["--record"])), *options(rng, ("guard",), most=3)]


def compare(rng: random.Random, folder: Path) -> list[str]:
    """Odd acknowledgements and rates of false alarms, odd revisions."""
    rows_folder(rng, folder)
    for name in ("acknowledged.csv", "operating_curve.csv"):
        shutil.copy(folder / "results/made.csv", folder / "results" / name)
    revisions = [rng.choice((".", "HEAD", values.argument(rng))) for _ in range(rng.choice((0, 1, 2)))]
    return ["compare", *options(rng, ("compare",), leave_out=("self_test",), most=3), "--", *revisions]


# ---- accuracy ----


def answers(rng: random.Random, folder: Path) -> list[str]:
    """Odd files of answers, ours and lm-eval's, and odd floors."""
    rows_folder(rng, folder)
    outcomes = [rng.choice(("right", "wrong", "invalid")) for _ in range(rng.choice((1, 12, 40)))]
    for name in ("a.jsonl", "b.jsonl"):
        lines: list[dict[str, Any]] = []
        for number, outcome in enumerate(outcomes):
            lines += logged(number, outcome) if name == "b.jsonl" and rng.random() < 0.1 else [record(number, outcome)]
        encoded = [json.dumps(line).encode() for line in lines]
        for _ in range(rng.choice((0, 1, 2))):
            number = rng.randrange(len(lines))
            encoded[number] = values.odd_file(rng, lines[number])
        (folder / name).write_bytes(b"\n".join(encoded) + b"\n")
    floors = yaml.safe_load(FLOORS.read_text())
    (folder / "floors.yaml").write_bytes(values.odd_file(rng, floors))
    which = rng.randrange(4)
    if which == 0:
        return ["accuracy", "threshold", "--rows", "rows.csv", *options(rng, ("accuracy", "threshold"), most=2)]
    if which == 1:
        return ["accuracy", "--against", "a.jsonl", *options(rng, ("accuracy",), most=2)]
    if which == 2:
        return ["accuracy", "--check-floor", *options(rng, ("accuracy",), most=2)]
    return ["accuracy", "compare", "a.jsonl", "b.jsonl", *options(rng, ("accuracy", "compare"), most=2)]


# ---- other engines ----


def target(rng: random.Random, folder: Path) -> list[str]:
    """Odd engines, models and settings."""
    kind = rng.choice(("ours", "ours", "transformers", "vllm", "mlx", "http://127.0.0.1:9", values.argument(rng)))
    factors = ("prefix=align", "spec=ngram3,none", "chunk=17", "prefix=", "prefix", "=", "x=y", values.argument(rng))
    given = ["--matrix", " ".join(rng.sample(factors, rng.choice((1, 1, 2))))] if rng.random() < 0.7 else []
    model = rng.choice((str(tiny("lfm2")), "lfm2:small", "lfm2:huge", ".", values.argument(rng)))
    wanted = options(rng, ("guard",), leave_out=("target", "model", "matrix", "replay"), most=3)
    return ["guard", "--target", kind, "--model", model, *given, *wanted]


def failure(rng: random.Random, folder: Path) -> list[str]:
    """An odd file of a target's failure, played again on our own engine."""
    asks = (Ask((3, 4, 5), 3), Ask((3, 4), 2, logprobs=True, after=1))
    parts = {"settings": {"prefix": "align"}, "probe": "repeat", "problem": "token 1 is 5; alone it was 6"}
    ends = {"expected": (7, 8), "got": (7, 9), "margin": 0.5, "logprob": -1.0, "most_cached": 0, "limit": 1e-4}
    case = Case("ours", "0.1.0", str(tiny("lfm2")), rounds=(Round(asks),), index=1, **parts, **ends)  # type: ignore[arg-type]
    (folder / "case.json").write_bytes(values.odd_file(rng, json.loads(to_json(case))))
    return ["guard", "--replay", "case.json"]


def mutant(rng: random.Random, folder: Path) -> list[str]:
    """Odd files of planted bugs."""
    found = yaml.safe_load(rng.choice(sorted(MUTANTS.glob("*.yaml"))).read_text())
    (folder / "mutants").mkdir()
    (folder / "mutants/A01.yaml").write_bytes(values.odd_file(rng, found))
    return ["mutants", "--folder", "mutants", *options(rng, ("mutants",), leave_out=("folder",), most=2)]


KINDS: dict[str, tuple[int, Make]] = {
    "anything": (18, anything),
    "plan": (12, plan),
    "plan_config": (18, plan_config),
    "generate": (10, generate),
    "family": (20, family),
    "results": (12, results),
    "report": (4, report),
    "kernels": (4, kernels),
    "guard": (4, guard),
    "compare": (4, compare),
    "answers": (8, answers),
    "target": (6, target),
    "failure": (8, failure),
    "mutant": (4, mutant),
}


def stubs(folder: Path, rng: random.Random) -> ExitStack:
    """The long work, replaced."""
    from bench.harness import compare as driver
    from bench.harness import operating_curve
    from bench.harness.versions import find_revision
    from hybrid_kv.accuracy import run, threshold
    from hybrid_kv.bisect import self_test as bisect_test
    from hybrid_kv.cli import target as guard_target
    from hybrid_kv.guard import run as guard_run
    from hybrid_kv.guard.registry import CheckResult
    from hybrid_kv.mutation import hunt
    from hybrid_kv.serve import server
    from hybrid_kv.static import compile, counts, gate
    from hybrid_kv.study import swarm
    from hybrid_kv.timing import fitness
    from tests.accuracy.test_threshold import result_of

    passed = rng.random() < 0.7
    metrics = compile.Metrics(32, 0, 0, 8, 128, 128, "sass", 100, None, {"sass": {}})
    measured = [compile.Measurement("planted", "any", "float32", "sm_90", False, metrics)]

    def no_measurement(base: str, head: str, *, design: Any, seed: int, **_: Any) -> Any:
        revisions = [find_revision(ROOT, one) for one in (base, head)]
        return driver.Comparison(*revisions, seed, design, driver.Measured([]))

    stack = ExitStack()
    for target, name, value in (
        (guard_run, "run_guard", lambda *_, **__: [CheckResult("layout", "views", passed, 0, "views", "0", 1, 0.1)]),
        (guard_target, "guard", lambda *_: []),
        (swarm.Swarm, "run", lambda one, _: one.tally),
        (hunt, "hunt_all", lambda *_: iter(())),
        (gate, "measure", lambda *_: iter(measured)),
        (gate, "jobs", lambda *_: [None]),
        (counts, "count_all", list),
        (driver, "ROOT", folder),
        (driver, "compare", no_measurement),
        (fitness, "examine", lambda *_: QUIET),
        (operating_curve, "self_test", lambda *_, **__: []),
        (bisect_test, "self_test", lambda *_: []),
        (
            run,
            "evaluate",
            lambda *_, limit=None, **__: result_of(["right" if passed else "wrong"] * min(limit or 250, 300)),
        ),
        (server.Server, "run", lambda *_, **__: None),
        (threshold, "FILE", folder / "floors.yaml"),
        (threshold.find_floor, "__defaults__", (folder / "floors.yaml",)),
    ):
        stack.enter_context(patch.object(target, name, value))
    return stack
