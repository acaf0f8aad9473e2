"""`hybrid-kv check ENGINE`: a check of another engine."""

from __future__ import annotations

from dataclasses import replace
from typing import Annotated

import typer

from hybrid_kv.cli.options import Amount, Output, SubjectOptions, dataclass_options, given_options

Engine = Annotated[
    str,
    typer.Argument(
        help="vllm, sglang, mlx, llamacpp, transformers, the URL of a server with OpenAI's API; "
        "ours or serve.",
        show_default=False,
    ),
]


@dataclass_options
def check(
    context: typer.Context, engine: Engine, subject: SubjectOptions, amount: Amount, output: Output
) -> None:
    """Check another engine from outside: token ids in, token ids out, against an oracle.

    Exit code 0: all is well. 1: an answer was wrong. 2: it could not run. 3: nothing was wrong, but
    a check was void: something that it must see did not happen.
    """
    refuse_pairs(given_options(context))
    raise typer.Exit(check_engine(f"hybrid-kv check {engine}", engine, subject, amount, output))


def refuse_pairs(given: dict[str, str]) -> None:
    """Raise `ConfigError` for two options of a run of which only one can hold."""
    from hybrid_kv.config import ConfigError

    for first, second in (("quick", "long"), ("weights", "exact")):
        if given.keys() >= {first, second}:
            raise ConfigError(f"--{first} and --{second} exclude each other; give one of them")


def check_engine(
    title: str, engine: str, subject: SubjectOptions, amount: Amount, output: Output
) -> int:
    """Check an engine once, or after each change of its files; return the exit code.

    Raises:
        HybridKVError: it cannot run with these options.
    """
    from hybrid_kv.check.ci import published
    from hybrid_kv.check.targets.kinds import kind_of
    from hybrid_kv.cli.publish import FILE
    from hybrid_kv.cli.target import EngineCheck, watch
    from hybrid_kv.files import check_outputs
    from hybrid_kv.measure.results import check_writable

    check_outputs(output.out, output.junit_xml, output.repro / "case.json")
    if subject.publish is not None:
        check_writable(subject.publish / FILE)
    if subject.exact:
        subject = replace(subject, weights="exact")
    if subject.watch:
        amount = replace(amount, jobs=1)
    with published(title, output.junit_xml) as keep:

        def run() -> int:
            return EngineCheck(engine, subject, amount, output, keep).run()

        if subject.watch:
            watch(subject.watch, kind_of(engine, subject.python), run)
        return run()
