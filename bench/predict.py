"""`python -m bench.predict [--fit] [--write]`: predictions held against measurements of others.

The tables are those of `aiconfigurator-core`, of which nothing is copied here: install it beside
this package. `--fit` prints the constants of `hybrid_kv.measure.predict.gpu`, from the rows of
`FITTED_ON` alone, and the intervals of the committed ones; `--write` puts the first four tables of
errors into docs/predict.md.

Bytes of a row: a state update reads one float32 state of each request and writes one per token; a
convolution is `window_bytes`. TensorRT-LLM's rows and A100's updates are left out, because their
state's dtype is not recorded.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from importlib.metadata import version
from importlib.util import find_spec
from itertools import permutations
from pathlib import Path
from typing import Any

import duckdb
import numpy as np
import numpy.typing as npt
import pandas as pd

from bench.figures import markdown_table
from bench.harness.arguments import ArgumentParser
from bench.published import BATCHES, points, ratios
from hybrid_kv.cache.spec import MambaSpec, SlotsSpec, window_and_states
from hybrid_kv.config import HybridKVError, planned_dtype
from hybrid_kv.errors import run_command
from hybrid_kv.files import write_whole
from hybrid_kv.measure.predict.gpu import (
    BOUNDS,
    CHIPS,
    CONVOLUTION,
    FITTED_ON,
    GPUS,
    INTERVALS,
    UPDATE,
    WIDTH_LAST,
    Chip,
    bound_of,
    microseconds,
)
from hybrid_kv.measure.predict.step import update_bytes, window_bytes

Floats = npt.NDArray[np.float64]
PACKAGE, VERSION = "aiconfigurator-core", "0.12.0"
PAGE = Path(__file__).parents[1] / "docs" / "predict.md"
BEGIN, END = "<!-- predict -->", "<!-- /predict -->"
SYSTEMS = {
    "a100": "a100_sxm",
    "h100": "h100_sxm",
    "h200": "h200_sxm",
    "b200": "b200_sxm",
    "b300": "b300_sxm",
    "gb200": "gb200",
    "gb300": "gb300",
    "l40s": "l40s",
    "rtx_pro_6000": "rtx_pro_6000_server",
}
FUSED = (
    "fused_kda_decode",
    "kda_fused_decode",
    "fused_kda_decode_mtp_dspark",
)  # with the convolution and a norm
CONV, SGLANG_VERIFY = "causal_conv1d_update", "fused_sigmoid_gating_delta_rule_update"
UPDATES = (
    "fused_recurrent_gated_delta_rule_packed_decode",
    "fused_recurrent_kda_packed_decode",
    "fused_recurrent_kda",
)
READ = """
    select gpu, framework, kernel_source as kernel, phase, batch_size, seq_len, num_k_heads,
        head_k_dim, num_v_heads, head_v_dim, d_conv, kda, 1000 * avg(latency) as us
    from (select *, regexp_extract(filename, 'data/([^/]+)/', 1) as gpu,
            filename like '%/kda/%' as kda
        from read_parquet({files}, filename=true, union_by_name=true))
    where phase in ('generation', 'verify') and kernel_source in {kernels} group by all order by all
"""


def _data() -> Path:
    found = find_spec("aiconfigurator_core")
    if found is None or found.origin is None or version(PACKAGE) != VERSION:
        raise HybridKVError(
            f"{PACKAGE} {VERSION} is not installed; pip install --no-deps {PACKAGE}=={VERSION}"
        )
    return Path(found.origin).parent / "systems" / "data"


def tables() -> pd.DataFrame:
    """Return the rows of all GPUs, with `family`, `bytes`, `footprint`, `tokens` and `table`.

    Raises:
        HybridKVError: this version of the package is not installed.
    """
    data = _data()
    files = [
        str(file)
        for system in SYSTEMS.values()
        for pattern in ("linear_attention/*/*/gdn_perf.parquet", "kda/*/*/kda_perf.parquet")
        for file in sorted((data / system).glob(pattern))
        if "trtllm" not in file.parts
    ]
    rows = duckdb.sql(
        READ.format(files=files, kernels=(*FUSED, *UPDATES, CONV, SGLANG_VERIFY))
    ).df()
    rows["gpu"] = rows["gpu"].map({system: gpu for gpu, system in SYSTEMS.items()})
    return rows.join(pd.DataFrame([traffic_of(row) for row in rows.itertuples()], index=rows.index))


def traffic_of(row: Any) -> dict[str, Any]:
    """Return what the kernel of a row moves."""
    tokens, batch, is_conv = int(row.seq_len), int(row.batch_size), row.kernel == CONV
    if is_conv and row.framework.lower() == "sglang":
        tokens, batch = 1, batch * tokens  # each token of a draft is a row of its own
    spec = layer(
        row.num_k_heads, row.head_k_dim, row.num_v_heads, row.head_v_dim, row.d_conv, tokens - 1
    )
    window, state = spec.parts
    moved = batch * (window_bytes(spec) if is_conv else update_bytes(spec, 1.0))
    read_again = batch * (
        window.nbytes * (row.d_conv - 1) / window.shape[0] if is_conv else state.nbytes
    )
    if row.kernel in FUSED:
        moved += batch * window_bytes(spec)
    is_kda = "kda" in row.kernel or row.kda
    table = f"{'KDA' if is_kda else 'GDN'} {'convolution' if is_conv else 'update'}"
    return {
        "family": UPDATE if not is_conv else CONVOLUTION if is_kda else WIDTH_LAST,
        "bytes": moved,
        "footprint": moved - (0 if row.kernel == SGLANG_VERIFY else read_again),
        "tokens": tokens,
        "table": table if row.phase == "generation" else f"{table}, {row.seq_len} tokens",
    }


def layer(
    key_heads: int, key_dim: int, value_heads: int, value_dim: int, kernel: int, drafts: int
) -> MambaSpec:
    """Return a delta-rule layer with float32 states and bfloat16 windows."""
    channels = 2 * key_heads * key_dim + value_heads * value_dim
    window = (kernel - 1 + drafts, channels), planned_dtype("bfloat16")
    state = (value_heads, value_dim, key_dim), planned_dtype("float32")
    return MambaSpec(1, window_and_states(window, state), rollback=SlotsSpec(drafts))


def parts(rows: pd.DataFrame, gpu: str, chip: Chip) -> Floats:
    """Return µs by part, [3, n], as `BOUNDS`."""
    found, families = np.empty((len(BOUNDS), len(rows))), rows["family"].to_numpy()
    sizes = rows[["bytes", "footprint", "tokens"]].to_numpy().T
    for family in chip.kernels:
        own = families == family
        found[:, own] = microseconds(GPUS[gpu], chip, family, 1, *sizes[:, own])
    return found


def fit(rows: pd.DataFrame, gpu: str, matmul: float) -> Chip:
    """Return the constants of a chip from the rows of one GPU.

    They are the robust least squares of log(predicted / measured).

    Args:
        matmul: its own, which these rows do not have.
    """
    from scipy.optimize import least_squares

    families = sorted(rows["family"].unique())

    def chip(x: Floats) -> Chip:
        kernels = {
            name: (float(x[4 + 2 * i]), float(x[5 + 2 * i])) for i, name in enumerate(families)
        }
        return Chip(float(x[0]), float(x[1]), float(x[1] + x[2]), float(x[3]), matmul, kernels)

    def error(x: Floats) -> Floats:
        return np.log(parts(rows, gpu, chip(x)).sum(0) / rows["us"].to_numpy())

    low, high = (
        [0.3, 0, 0.02, 0] + [0.1, 0.5] * len(families),
        [1.2, 1, 1.5, 20] + [20, 100] * len(families),
    )
    starts = [
        [0.85, fits, wide, 0.4] + [3, 5] * len(families)
        for fits, wide in ((0.1, 1.0), (0.7, 0.5), (0.4, 0.6))
    ]
    tries = [
        least_squares(error, start, bounds=(low, high), loss="soft_l1", f_scale=0.05)
        for start in starts
    ]
    return chip(min(tries, key=lambda found: found.cost).x)


def judged(rows: pd.DataFrame, gpu: str, chip: Chip) -> pd.DataFrame:
    """Return the rows of a GPU with `error`, `bound` and whether the interval `holds`.

    The error is predicted over measured less one.
    """
    floor, cached, memory = parts(rows, gpu, chip)
    ratio = rows["us"].to_numpy() / (floor + cached + memory)
    bound = [bound_of(*each) for each in zip(floor, cached, memory, strict=True)]
    low, high = np.array([INTERVALS[name] for name in bound]).T
    return rows.assign(
        error=1 / ratio - 1, ratio=ratio, bound=bound, holds=(low <= ratio) & (ratio <= high)
    )


def intervals(rows: pd.DataFrame, chips: Mapping[str, Chip]) -> dict[str, tuple[float, float]]:
    """Return by bound the 5th and 95th percentile of measured over predicted.

    The predictions are those with the constants of another chip.
    """
    pairs = [
        judged(rows[rows["gpu"] == FITTED_ON[own]], FITTED_ON[own], chips[other])
        for own, other in permutations(FITTED_ON, 2)
    ]
    found = pd.concat(pairs).groupby("bound")["ratio"].quantile([0.05, 0.95]).unstack()
    return {
        bound: (float(low), float(high))
        for bound, (low, high) in zip(found.index, found.to_numpy(), strict=True)
    }


def matmul(gpu: str) -> float:
    """Return the share of a data sheet's flops that vLLM's bfloat16 products reach, their median.

    The products are those of 1,024 to 4,096 tokens.
    """
    file = _data() / SYSTEMS[gpu] / "gemm" / "vllm" / "0.24.0" / "gemm_perf.parquet"
    flops = f"""select median(2e3 * m * n * k / latency) from '{file}'
        where gemm_dtype = 'bfloat16' and m between 1024 and 4096 and n >= 2048 and k >= 2048"""
    return float(duckdb.sql(flops).fetchall()[0][0]) / (GPUS[gpu].tflops * 1e12)


def _print_fit(rows: pd.DataFrame) -> None:
    for name, gpu in FITTED_ON.items():
        chip = fit(rows[rows["gpu"] == gpu], gpu, matmul(gpu))
        numbers = [
            f"{value:.3g}"
            for value in (chip.reached, chip.fits, chip.spills, chip.serial, chip.matmul)
        ]
        kernels = {
            family: (f"{floor:.3g}", f"{rate:.3g}")
            for family, (floor, rate) in chip.kernels.items()
        }
        print(name, *numbers, kernels)
    print(
        {
            bound: (f"{low:.3g}", f"{high:.3g}")
            for bound, (low, high) in intervals(rows, CHIPS).items()
        }
    )


def report(rows: pd.DataFrame) -> tuple[str, str]:
    """Return the tables of the page, and those that it sums up.

    They are of each verify step's tokens, and of each published kernel.
    """
    every = pd.concat(
        [judged(rows[rows["gpu"] == gpu], gpu, CHIPS[GPUS[gpu].chip]) for gpu in GPUS]
    )
    every["fitted"] = every["gpu"].isin(FITTED_ON.values())

    def line(name: str, own: pd.DataFrame) -> list[str]:
        error = own["error"].abs()
        near = [f"{100 * error.quantile(q):.1f} %" for q in (0.5, 0.9)]
        return [name, f"{len(own):,}", *near, f"{100 * own['holds'].mean():.1f} %"]

    head = ["rows", "median error", "9 of 10 below", "interval holds"]
    held = every[~every["fitted"]]
    names = every["gpu"].where(~every["fitted"], every["gpu"] + ", fitted")
    by_gpu = [line("all but the fitted", held)]
    by_gpu += [line(str(name), own) for (_, name), own in every.groupby(["fitted", names])]
    merged = held["table"].str.replace(r"\d tokens", "verify", regex=True)
    by_kernel, by_tokens = (
        [line(str(name), own) for name, own in held.groupby(key)] for key in (merged, "table")
    )
    found = [(one, us, 100 * (us / one.measured - 1)) for one, us in points()]
    each = [
        [one.name, one.source, one.gpu, f"{one.measured:g}", f"{us:.3g}", f"{error:+.0f} %"]
        for one, us, error in found
    ]
    sources: dict[tuple[str, str, str], list[tuple[float, float]]] = {}
    for one, _, error in found:
        sources.setdefault((one.source, one.gpu, one.name.partition(",")[0]), []).append(
            (one.measured, error)
        )
    by_source = []
    for (source, gpu, kind), own in sources.items():
        measured, errors = zip(*own, strict=True)
        by_source += [
            [source, gpu, f"{len(own)} {kind}", _span(measured, "g"), f"{_span(errors, '+.0f')} %"]
        ]
    steps: dict[str, list[str]] = {}
    for model, _, was, says in ratios():
        steps.setdefault(model, [model]).append(f"{says:.2f} ({was:.2f})")
    short = [
        markdown_table(["GPU", *head], by_gpu),
        markdown_table(["all but the fitted", *head], by_kernel),
        markdown_table(["published in", "GPU", "kernels", "measured µs", "error"], by_source),
        markdown_table(
            ["predicted ratio (published)", *(f"batch {n}" for n in BATCHES)], [*steps.values()]
        ),
    ]
    summed_up = [
        markdown_table(["all but the fitted", *head], by_tokens),
        markdown_table(
            ["kernel", "published in", "GPU", "measured µs", "predicted µs", "error"], each
        ),
    ]
    return "\n\n".join(short), "\n\n".join(summed_up)


def _span(values: Sequence[float], form: str) -> str:
    return " to ".join(dict.fromkeys(format(value, form) for value in (min(values), max(values))))


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the constants or the tables of errors."""
    parser = ArgumentParser("python -m bench.predict")
    parser.add_argument("--fit", action="store_true", help="print constants, fitted anew")
    parser.add_argument(
        "--write", action="store_true", help="write the first four tables into docs/predict.md"
    )
    options = parser.parse_args(arguments)
    rows = tables()
    if options.fit:
        _print_fit(rows[rows["gpu"].isin(FITTED_ON.values())])
        return 0
    text, summed_up = report(rows)
    print(f"{text}\n\n{summed_up}")
    if options.write:
        before, _, rest = PAGE.read_text(encoding="utf-8").partition(BEGIN)
        write_whole(PAGE, f"{before}{BEGIN}\n{text}\n{END}{rest.partition(END)[2]}")
    return 0


if __name__ == "__main__":
    run_command(main)
