"""`hybrid-kv kernels`: every kernel compiled ahead of time and compared."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from hybrid_kv.cli.options import AsJson, OutFile, Select, show

if TYPE_CHECKING:
    from bench.static.gate import Measured


def kernels(
    targets: Annotated[
        str, typer.Option(help="Of sm_80, sm_90, sm_100 and gfx942.")
    ] = "sm_80,sm_90,sm_100,gfx942",
    baseline: Annotated[
        Path | None,
        typer.Option(help="CSV to compare with; default: results/kernels.csv if there is one."),
    ] = None,
    update: Annotated[
        bool, typer.Option("--update", help="Accept what changed: append it to the baseline.")
    ] = False,
    select: Select = None,
    with_peers: Annotated[
        bool,
        typer.Option(
            "--peers", help="Also compile the Triton kernels of vLLM and mamba_ssm, for comparison."
        ),
    ] = False,
    as_json: AsJson = False,
    out: OutFile = None,
) -> None:
    """Compile every kernel ahead of time and compare registers, spills, access and instructions.

    Needs no GPU.

    Also count, in Triton's interpreter, the bytes of both state schemes.
    """
    from bench.static import compile, counts, gate, table
    from hybrid_kv.config import ConfigError
    from hybrid_kv.errors import require
    from hybrid_kv.files import check_outputs
    from hybrid_kv.measure.results import check_writable, provenance

    require("triton")
    names = compile.parse_targets(targets)
    if baseline is not None and not update and not baseline.exists():
        raise ConfigError(
            f"{baseline} does not exist, so nothing would be compared; --update makes it"
        )
    baseline = baseline or Path("results/kernels.csv")
    if update:
        check_writable(baseline)
    check_outputs(out)
    absent: list[str] = []
    if with_peers:
        from bench.peers import kernels as peers

        absent = peers.find()[1]
    verdicts = gate.run(compile.MODULES, names, baseline, accept=update, select=select)
    counted = [
        count
        for count in counts.count_all()
        if not select or any(part.lower() in count.kernel for part in select)
    ]
    known = {} if update else gate.read_baseline(baseline, provenance().triton)
    wrong = [counts.failures(count, known) for count in counted]
    others = gate.run_peers(names) if with_peers else []
    failed = any(verdict.failures for verdict in verdicts) or any(wrong)

    def tables() -> None:
        table.print_table(verdicts)
        counts.print_counts(counted, wrong)
        if with_peers:
            print("\nkernels of other packages, not gated:\n")
            table.print_table(others)
            print(*absent, sep="\n")

    try:
        if update and not failed:
            measured = [*(verdict.measurement for verdict in verdicts), *counted]
            _accept(measured, baseline, is_whole=not select)
    finally:
        show(table.document(verdicts, others), as_json, out, tables)
    if failed:
        raise typer.Exit(1)


def _accept(measured: list[Measured], baseline: Path, *, is_whole: bool) -> None:
    """Append to the baseline what changed; if all was compared, at least one row.

    The newest row says at which commit all kernels were last compared.
    """
    from bench.static import gate
    from hybrid_kv.measure.results import append_rows

    rows = gate.changed_rows(measured, baseline)
    if not rows and is_whole:
        rows = gate.result_rows(measured[0])
    append_rows(baseline, rows)
