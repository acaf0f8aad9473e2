"""Each command with odd arguments, config files, checkpoints, tokenizers, rows of results, answers.

`KINDS` maps a kind of case to the function that writes its files into an empty folder and returns
the arguments. The long work (traffic, compilers, timings, lm-eval) is replaced by a short result in
`stubs`: all code before and behind it runs.
"""

from __future__ import annotations

import atexit
import csv
import io
import json
import os
import random
import shutil
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import replace
from functools import cache, partial
from inspect import signature
from pathlib import Path
from tempfile import TemporaryDirectory, mkdtemp
from typing import Any, Literal, get_args, get_origin
from unittest.mock import patch

import yaml

from hybrid_kv.check.guard.replay import to_json as scenario_json
from hybrid_kv.check.guard.traffic import draw_scenario
from hybrid_kv.check.guard_model import FOLDER as GUARD_MODEL
from hybrid_kv.check.probes.reproducer import to_json
from hybrid_kv.check.probes.run import guard as guard_engine
from hybrid_kv.measure.accuracy.threshold import FILE as FLOORS
from hybrid_kv.measure.results import COLUMNS
from hybrid_kv.models.random_checkpoint import write_checkpoint
from hybrid_kv.models.registry import sized
from mutants.runner.mutant import FOLDER as MUTANTS
from tests.check.probes.toy import ToyOracle
from tests.check.targets import hostile as peer
from tests.cli import run as cli
from tests.fuzz import values
from tests.measure.dashboard.kinds import everything
from tests.measure.dashboard.rows import write
from tests.model_configs import CONFIGS
from tests.support.answers import logged, record
from tests.support.fitness import QUIET
from tests.support.reproducer import CASE

ROOT = Path(__file__).resolve().parents[2]
CHECKPOINT = (
    "config.json",
    "generation_config.json",
    "model.safetensors",
    "tokenizer.json",
    "tokenizer_config.json",
)
# options of type str that name a file
FILES = ("samples", "against", "gsm8k_dir", "rows", "kv_offload_folder")


# ---- arguments ----


@cache
def commands() -> dict[tuple[str, ...], dict[str, tuple[list[str], Any]]]:
    """By the words of a command, its options: name, spellings and type."""
    found: dict[tuple[str, ...], dict[str, tuple[list[str], Any]]] = {}

    def add(words: tuple[str, ...], command: Any) -> None:
        own = signature(command.callback, eval_str=True).parameters if command.callback else {}
        given = [
            one for one in command.params if one.param_type_name == "option" and one.name in own
        ]
        found[words] = {
            one.name: ([*one.opts, *one.secondary_opts], get_args(own[one.name].annotation)[0])
            for one in given
        }
        for name, inner in getattr(command, "commands", {}).items():
            add((*words, name), inner)

    for name, command in cli.commands().items():
        add((name,), command)
    return found


def options(
    rng: random.Random, *words: str, without: tuple[str, ...] = (), most: int = 4
) -> list[str]:
    """Some of a command's options, with odd and with usual values."""
    every = {name: option for name, option in commands()[words].items() if name not in without}
    given: list[str] = []
    for name in rng.sample(sorted(every), min(len(every), rng.choice((0, 1, 1, 2, 3, most)))):
        spellings, kind = every[name]
        given.append(rng.choice(spellings))
        if bool not in kinds_of(kind):
            given.append(option_value(rng, name, kinds_of(kind)))
    return given


def kinds_of(kind: Any) -> tuple[Any, ...]:
    """The parts of a union."""
    return (kind,) if isinstance(kind, type) or get_origin(kind) is Literal else get_args(kind)


def option_value(rng: random.Random, name: str, kinds: tuple[Any, ...]) -> str:
    """An odd value, one of the choices, a usual number, or a place in the case's folder."""
    if rng.random() < 0.25:
        return values.argument(rng)
    if choices := [
        choice for kind in kinds if get_origin(kind) is Literal for choice in get_args(kind)
    ]:
        return str(rng.choice(choices))
    if Path in kinds or name in FILES:
        return rng.choice(values.PLACES)
    if int in kinds:
        return str(rng.choice((*values.INTEGERS, 1, 2, 4, 16, 32, 64, 256, 2048)))
    return rng.choice((*values.NUMBERS, "0", "1", "0.9") if float in kinds else values.TEXTS)


def anything(rng: random.Random, folder: Path) -> list[str]:
    """Any command with any arguments."""
    words = rng.choice(list(commands()))
    rows_folder(rng, folder, odd=False)
    given = options(rng, *words) + rng.choice([[]] * 20 + [["--help"], ["--version"], ["--nope"]])
    arguments = [
        rng.choice((values.argument(rng), rng.choice(values.PLACES)))
        for _ in range(rng.choice((0, 0, 1, 2)))
    ]
    return [*words, *given, *rng.choice(([], [], ["--"])), *arguments]


# ---- models ----


def plan(rng: random.Random, folder: Path) -> list[str]:
    """Usual and odd options, of a real config or one with odd keys and types."""
    config = rng.choice(list(CONFIGS.values()))
    odd = rng.random() < 0.6
    (folder / "config.json").write_bytes(
        values.odd_file(rng, config) if odd else json.dumps(config).encode()
    )
    enough = rng.choice((["--num-blocks", "500"], ["--gpu-memory", "40GiB"], []))
    return [
        "plan",
        rng.choice(("config.json", ".")),
        *enough,
        *options(rng, "plan", most=2 if odd else 4),
    ]


def generate(rng: random.Random, folder: Path) -> list[str]:
    """A checkpoint with one odd file, or odd options."""
    for name in CHECKPOINT:
        shutil.copy(GUARD_MODEL / name, folder / name)
    given = ["--max-tokens", "3", "--device", "cpu", "--model", "."]
    match rng.choice(("options", "options", "index", *CHECKPOINT, *CHECKPOINT)):
        case "options":
            given += options(rng, "generate", without=("max_tokens", "model"))
        case "index":
            index = {
                "metadata": {"total_size": 1},
                "weight_map": {"backbone.embeddings.weight": "model.safetensors"},
            }
            (folder / "model.safetensors.index.json").write_bytes(values.odd_file(rng, index))
        case name:
            spoil(rng, folder / name)
    prompts = [
        rng.choice(("Question: 1 + 1?", values.argument(rng))) for _ in range(rng.choice((1, 1, 2)))
    ]
    return ["generate", *given, "--", *prompts]


def spoil(rng: random.Random, file: Path) -> None:
    data = file.read_bytes()
    is_json = file.suffix == ".json"
    file.write_bytes(
        values.odd_file(rng, json.loads(data)) if is_json else values.odd_safetensors(rng, data)
    )


@cache
def tiny(model_type: str) -> Path:
    """A checkpoint of a family, written once a process."""
    folder = Path(mkdtemp(prefix="hybrid-kv-fuzz-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    write_checkpoint(model_type, folder)
    return folder


def family(rng: random.Random, folder: Path) -> list[str]:
    """Write a tiny checkpoint of any family, with odd config or weights; or ask for an odd one."""
    if rng.random() < 0.1:
        kind = rng.choice((*sized(), values.argument(rng)))
        return ["checkpoint", *options(rng, "checkpoint"), "--", kind, rng.choice(values.PLACES)]
    shutil.copytree(tiny(rng.choice(sorted(sized()))), folder, dirs_exist_ok=True)
    spoil(
        rng, folder / rng.choice(("config.json", "config.json", "config.json", "model.safetensors"))
    )
    return ["generate", "--max-tokens", "3", "--device", "cpu", "--model", ".", "--", "w7 w8 w9"]


# ---- results ----


@cache
def good_rows() -> list[list[str]]:
    with TemporaryDirectory() as folder:
        text = (write(Path(folder), everything()) / "made.csv").read_text()
    header, *rows = csv.reader(io.StringIO(text))
    assert tuple(header) == COLUMNS
    return [header, *rows]


def rows_folder(rng: random.Random, folder: Path, odd: bool = True) -> None:
    """`results/` with some files, and another CSV beside it."""
    (folder / "results").mkdir(exist_ok=True)
    header, *rows = good_rows()
    for name in (
        "rows",
        "results/made",
        "results/kernels",
        "results/acknowledged",
        "results/operating_curve",
    ):
        some = [header, *rng.sample(rows, rng.choice((1, 5, 40)))]
        data = values.odd_csv(rng, some) if odd and rng.random() < 0.7 else values.plain_csv(some)
        (folder / f"{name}.csv").write_bytes(data)
    shutil.copy(folder / "rows.csv", folder / "results/guard.csv")


def results(rng: random.Random, folder: Path) -> list[str]:
    """Odd rows, listed, checked or drawn."""
    rows_folder(rng, folder)
    places = rng.choice(([], ["results"], ["rows.csv"], ["rows.csv", "results"]))
    match rng.choice(("report", "red", "export", "merge", "list", "list", "list")):
        case "report" | "red" as name:
            return [name, *options(rng, name, most=2)]
        case "list":
            return [
                "results",
                *rng.choice(([], ["--check"])),
                *options(rng, "results", "list", most=2),
                *places,
            ]
        case name:
            return [
                "results",
                name,
                "--to",
                rng.choice(("new.parquet", rng.choice(values.PLACES))),
                *places,
            ]


def kernels(rng: random.Random, folder: Path) -> list[str]:
    """An odd baseline."""
    rows_folder(rng, folder)
    header, first, *_ = good_rows()
    row = dict(zip(header, first, strict=True)) | {
        "suite": "kernels",
        "benchmark": "injected",
        "metric": "registers",
    }
    row["params"] = json.dumps(
        values.odd_json(rng, {"shape": "any", "dtype": "float32", "target": "sm_90"})
    )
    (folder / "results/kernels.csv").write_bytes(
        values.plain_csv([header, [row[name] for name in header]])
    )
    return ["kernels", *options(rng, "kernels", most=3)]


def guard(rng: random.Random, folder: Path) -> list[str]:
    """Rows that are there already, odd places for new ones."""
    rows_folder(rng, folder)
    return ["guard", *rng.choice(([], ["--quick"], ["--record"])), *options(rng, "guard", most=3)]


def compare(rng: random.Random, folder: Path) -> list[str]:
    """Odd acknowledgements and rates of false alarms, odd revisions."""
    rows_folder(rng, folder)
    revisions = [
        rng.choice((".", "HEAD", values.argument(rng))) for _ in range(rng.choice((0, 1, 2)))
    ]
    return ["compare", *options(rng, "compare", without=("self_test",), most=3), "--", *revisions]


def answers(rng: random.Random, folder: Path) -> list[str]:
    """Odd files of answers, ours and lm-eval's, and odd floors."""
    rows_folder(rng, folder)
    outcomes = [rng.choice(("right", "wrong", "invalid")) for _ in range(rng.choice((1, 12, 40)))]
    for name in ("a.jsonl", "b.jsonl"):
        lines: list[dict[str, Any]] = []
        for number, outcome in enumerate(outcomes):
            lines += (
                logged(number, outcome)
                if name == "b.jsonl" and rng.random() < 0.1
                else [record(number, outcome)]
            )
        encoded = [json.dumps(line).encode() for line in lines]
        for _ in range(rng.choice((0, 1, 2))):
            number = rng.randrange(len(lines))
            encoded[number] = values.odd_file(rng, lines[number])
        (folder / name).write_bytes(b"\n".join(encoded) + b"\n")
    (folder / "floors.yaml").write_bytes(values.odd_file(rng, yaml.safe_load(FLOORS.read_text())))
    return rng.choice(
        (
            [
                "accuracy",
                "threshold",
                "--rows",
                "rows.csv",
                *options(rng, "accuracy", "threshold", most=2),
            ],
            ["accuracy", "--against", "a.jsonl", *options(rng, "accuracy", most=2)],
            ["accuracy", "--check-floor", *options(rng, "accuracy", most=2)],
            [
                "accuracy",
                "compare",
                "a.jsonl",
                "b.jsonl",
                *options(rng, "accuracy", "compare", most=2),
            ],
        )
    )


# ---- other engines, mutants ----


def target(rng: random.Random, folder: Path) -> list[str]:
    """Odd engines, models and settings."""
    kind = rng.choice(
        ("ours", "ours", "transformers", "vllm", "mlx", "http://127.0.0.1:9", values.argument(rng))
    )
    factors = (
        "prefix=align",
        "spec=ngram3,none",
        "chunk=17",
        "prefix=",
        "prefix",
        "=",
        "x=y",
        values.argument(rng),
    )
    given = (
        ["--matrix", " ".join(rng.sample(factors, rng.choice((1, 1, 2))))]
        if rng.random() < 0.7
        else []
    )
    model = rng.choice((str(tiny("lfm2")), "lfm2:small", "lfm2:huge", ".", values.argument(rng)))
    if rng.random() < 0.5:
        more = options(rng, "check", without=("model", "matrix", "watch"), most=3)
        return ["check", *more, "--model", model, *given, "--", kind]
    more = options(rng, "guard", without=("target", "model", "matrix", "recompute"), most=3)
    return ["guard", "--target", kind, "--model", model, *given, *more]


def failure(rng: random.Random, folder: Path) -> list[str]:
    """An odd file of a failure, of an exact scenario or of a target, replayed on our own engine."""
    if rng.random() < 0.5:
        scenario = json.loads(scenario_json(draw_scenario(rng.randrange(3000))))
        (folder / "case.json").write_bytes(values.odd_file(rng, scenario))
        return ["replay", "case.json"]
    case = replace(CASE, model=str(tiny("lfm2")))
    (folder / "case.json").write_bytes(values.odd_file(rng, json.loads(to_json(case))))
    return ["guard", "--replay", "case.json"]


def mutant(rng: random.Random, folder: Path) -> list[str]:
    """Odd files of injected faults."""
    found = yaml.safe_load(rng.choice(sorted(MUTANTS.glob("*.yaml"))).read_text())
    (folder / "mutants").mkdir()
    (folder / "mutants/A01.yaml").write_bytes(values.odd_file(rng, found))
    return ["mutants", "--folder", "mutants", *options(rng, "mutants", without=("folder",), most=2)]


def study(rng: random.Random, folder: Path) -> list[str]:
    """An odd file of runs and axes."""
    found = yaml.safe_load((ROOT / "examples/modes.yaml").read_text())
    (folder / "study.yaml").write_bytes(values.odd_file(rng, found))
    return ["study", "study.yaml", "--dry", *options(rng, "study", without=("dry", "ray"), most=1)]


# Commands that read `x`.
READERS = (
    "plan x",
    "plan config.json --num-blocks 9 --requests x.jsonl",
    "generate --model .",
    "replay x",
    "study x",
    "results x.csv",
    "results x.parquet",
    "report --results .",
    "red --results .",
    "accuracy compare x x",
    "accuracy --against x.gz",
    "accuracy threshold --rows x.csv",
    "mutants --folder .",
    "serve --chat-template x",
    "bisect HEAD --replay x",
    "results export x.parquet --to y.parquet",
    "results trim x.csv",
)


def no_file(rng: random.Random, folder: Path) -> list[str]:
    """A device, a pipe, a link to itself, a folder or a large file, where a file is read."""
    for name in CHECKPOINT:
        shutil.copy(GUARD_MODEL / name, folder / name)
    words = rng.choice(READERS).split()
    name = next(
        (word for word in words if word[0] == "x"), rng.choice((*CHECKPOINT, "x.csv", "A01.yaml"))
    )
    place = folder / name
    place.unlink(missing_ok=True)
    links = ("/dev/zero", "/dev/null", "/dev/ptmx", "/proc/self/mem", name)
    rng.choice((os.mkfifo, os.mkdir, Path.touch, *(partial(os.symlink, one) for one in links)))(
        place
    )
    if place.is_file():
        os.truncate(place, 2**29)
    return words


def hostile(rng: random.Random, folder: Path) -> list[str]:
    """A server whose replies are broken."""
    return against(peer.draw(rng), folder, rng.choice(("alone", "repeat", "cut off", "preempted")))


def against(case: peer.Case, folder: Path, probe: str) -> list[str]:
    """The guard of a server that serves this case."""
    (folder / "config.json").write_text('{"model_type": "toy", "vocab_size": 50}')
    return ["guard", "--quick", "--target", peer.serve(case), "--model", ".", "-k", probe]


Make = Callable[[random.Random, Path], list[str]]
# How often each kind is drawn.
KINDS: dict[Make, int] = {
    anything: 9,
    plan: 15,
    family: 10,
    results: 8,
    generate: 5,
    answers: 4,
    failure: 4,
    no_file: 4,
    target: 3,
    kernels: 2,
    guard: 2,
    compare: 2,
    mutant: 2,
    study: 2,
    hostile: 6,
}


def stubs(folder: Path, passes: bool) -> ExitStack:
    """The long work, replaced."""
    from bench.harness.compare import Comparison, Measured
    from bench.harness.versions import find_revision
    from bench.static.compile import Measurement, Metrics
    from hybrid_kv.check.guard.registry import CheckResult
    from tests.support.answers import result_of

    check = CheckResult(
        "views", 0, "views", "0", 1, "" if passes else "page 1 is elsewhere", section="layout"
    )
    metrics = Metrics(32, 0, 0, 8, 128, 128, "sass", 100, None, {"sass": {}})

    def no_measurement(base: str, head: str, *_: Any, design: Any, seed: int, **__: Any) -> Any:
        return Comparison(
            *(find_revision(ROOT, one) for one in (base, head)), seed, design, Measured([])
        )

    def evaluated(*_: Any, limit: int | None = None, **__: Any) -> Any:
        return result_of(["right" if passes else "wrong"] * min(limit or 250, 300))

    def guarded(runs: Any, _: int) -> None:
        guard_engine([run for run in runs if run.guarded.kind.name.startswith(peer.address())])

    stack = ExitStack()
    for name, value in {
        "hybrid_kv.check.guard.run.run_guard": lambda *_, **__: [check],
        "hybrid_kv.cli.target.guard": guarded,
        "hybrid_kv.cli.target.SHRINK_SECONDS": {"quick": 0.1, "full": 0.1, "long": 0.1},
        "hybrid_kv.check.probes.guarded.Oracle": lambda *_: ToyOracle(),
        "hybrid_kv.check.targets.server.SECONDS": 0.5,
        "hybrid_kv.measure.study.swarm.Swarm.run": lambda one, _: one.tally,
        "mutants.runner.run.run_all": lambda *_: iter(()),
        "bench.static.gate.measure": lambda *_: iter(
            [
                Measurement(
                    "injected", "any", "float32", "sm_90", state_access=False, metrics=metrics
                )
            ]
        ),
        "bench.static.gate.jobs": lambda *_: [None],
        "bench.static.counts.count_all": list,
        "bench.harness.compare.ROOT": folder,
        "bench.harness.compare.compare": no_measurement,
        "hybrid_kv.measure.timing.fitness.examine": lambda *_: QUIET,
        "bench.harness.operating_curve.self_test": lambda *_, **__: [],
        "bench.bisect.self_test.self_test": lambda *_: [],
        "hybrid_kv.measure.accuracy.run.evaluate": evaluated,
        "hybrid_kv.check.serve.server.Server.run": lambda *_, **__: None,
        "hybrid_kv.measure.accuracy.threshold.FILE": folder / "floors.yaml",
        "hybrid_kv.measure.accuracy.threshold.find_floor.__defaults__": (folder / "floors.yaml",),
    }.items():
        stack.enter_context(patch(name, value))
    return stack
