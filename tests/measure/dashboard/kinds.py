"""Rows of every kind that the page has a section for."""

from __future__ import annotations

from typing import Any

from hybrid_kv.measure.dashboard.charts import CHARTS
from tests.measure.dashboard.rows import RECEIPT, history, row

TIMED = {"receipt": RECEIPT}
BOX, GPU = {"machine": "box"}, {"machine": "rack", "device": "H200"}


def everything() -> list[dict[str, Any]]:
    """Return two machines: `box` with one bad comparison, `rack, H200` with a failed guard."""
    measured = [*guard_rows(), *stepped(), *block_ids(), *expansions(), *on_a_gpu(), *accuracy()]
    return [*measured, *static_metrics(), *comparison(), *operating_curve()]


def guard_rows() -> list[dict[str, Any]]:
    """A full run on `box` that passed, with answers, and one on `rack` with a failure."""
    guard = {"suite": "guard", "unit": "requests", "better": "equal", "value": 0.0, "n": 100}
    made = [
        row(
            40,
            {"limit": "0", "seconds": 1.5},
            benchmark="layout",
            metric="views",
            verdict="pass",
            **guard,
        )
    ]
    for mode, hits in (("none", 0.0), ("align", 0.712), ("all", 0.719)):
        for method, k, accepted in ((None, 0, 0), ("ngram", 3, 13), ("mtp", 3, 92)):
            params = {
                "mode": mode,
                "method": method,
                "K": k,
                "hit_rate": hits,
                "loaded_blocks": None,
            }
            params |= {
                "accepted": accepted,
                "drafted": 100 if k else 0,
                "limit": "0",
                "seconds": 4.0,
            }
            made.append(
                row(
                    40,
                    params,
                    benchmark="answers",
                    metric=f"{mode}/{method}",
                    verdict="pass",
                    **guard,
                )
            )
    failed = {**guard, **GPU, "value": 3.0}
    made.append(
        row(
            41,
            {"limit": "0", "seconds": 1},
            benchmark="layout",
            metric="views",
            verdict="fail",
            **failed,
        )
    )
    return made


def stepped() -> list[dict[str, Any]]:
    """A benchmark on both machines; on `rack` it became slower with run 20."""
    params = {**TIMED, "model": "nano", "K": 3}
    same = {"params": params, "ci_low": 90.0, "ci_high": 140.0}
    even = history([100.0 + i % 3 for i in range(40)], **same, **BOX)
    slower = history([100.0 + i % 3 + 20 * (i >= 20) for i in range(40)], **same, **GPU)
    slower[5]["dirty"] = True
    return even + slower


def block_ids() -> list[dict[str, Any]]:
    """Appends of block ids, by the engine and others."""
    made = []
    for size in (1, 16, 256):
        for factor, subject in ((1, "engine"), (4, "list"), (3, "numpy"), (2, "torch")):
            params = {**TIMED, "num_blocks": size, "blocks_per_kv_block": 8, "subject": subject}
            time = factor * (400.0 + size)
            expand = {"suite": "kernel_blocks", "benchmark": "expand", "params": params}
            made.append(row(39, value=time, ci_low=0.9 * time, ci_high=1.1 * time, **expand))
            if factor > 1:
                ratio = {
                    "metric": "ratio_to_engine",
                    "unit": "time ratio",
                    "better": "higher",
                    "verdict": "pass",
                }
                made.append(
                    row(
                        39,
                        value=factor,
                        ci_low=factor - 0.1,
                        ci_high=factor + 0.1,
                        **expand,
                        **ratio,
                    )
                )
    return made


# ns of the host's part: once, and for each id.
EXPANSIONS = {
    "list": (500, 400),
    "numpy": (2500, 20),
    "torch": (200, 12),
    "triton": (200, 12),
    "engine": (5000, 14),
}


def expansions() -> list[dict[str, Any]]:
    """Return ids to kernel blocks five ways, 8 per block; a list is slower from 6 ids on."""
    made = []
    for subject, (once, each_id) in EXPANSIONS.items():
        for num_ids in (1, 4, 32, 1024, 65536):
            params = {**TIMED, "num_ids": num_ids, "blocks_per_kv_block": 8, "subject": subject}
            time = float(once + each_id * num_ids)
            same = {"suite": "kernel_blocks", "params": params}
            made.append(
                row(
                    39,
                    benchmark="expand",
                    value=time,
                    ci_low=0.9 * time,
                    ci_high=1.1 * time,
                    **same,
                )
            )
            on_host = subject in ("list", "numpy")
            counts = {
                "upload_bytes": 4 * num_ids * (8 if on_host else 1),
                "launches": int(not on_host),
            }
            for metric, value in counts.items() if num_ids == 1024 else ():
                unit = "B" if metric == "upload_bytes" else "launches"
                exact = {"metric": metric, "unit": unit, "n": 1, **same}
                made.append(row(39, benchmark="expand_counts", value=value, **exact))
    return made


def on_a_gpu() -> list[dict[str, Any]]:
    """Both schemes and plain torch, a convolution and an expansion."""
    made = []
    for k in (1, 3):
        for subject, factor in (
            ("slots", 1.0 + k),
            ("recompute_step", 1.2),
            ("recompute", 1.5),
            ("torch", 9.0),
        ):
            params = {**TIMED, "model": "nano", "num_reqs": 16, "K": k, "subject": subject}
            params["launch"] = "eager" if subject == "torch" else "graph"
            same = {"params": params, "suite": "gpu", "benchmark": "state_update", "n": 51, **GPU}
            time = 10_000 * factor
            made.append(
                row(
                    36, metric="gpu_time", value=time, ci_low=0.9 * time, ci_high=1.1 * time, **same
                )
            )
            rate = {"better": "higher", **same}
            made.append(row(36, metric="bandwidth", unit="GB/s", value=3000.0 / factor, **rate))
            made.append(
                row(36, metric="share_of_copy", unit="time ratio", value=0.9 / factor, **rate)
            )
            if subject != "slots":
                made.append(
                    row(
                        36,
                        metric="ratio_to_slots",
                        unit="time ratio",
                        value=factor / (1 + k),
                        **same,
                    )
                )
    for benchmark, size in (
        ("conv_update", {"model": "nano", "K": 3}),
        ("expansion", {"num_rows": 256}),
    ):
        params = {**TIMED, **size, "subject": "triton", "launch": "graph"}
        made.append(
            row(
                36, params, suite="gpu", benchmark=benchmark, metric="gpu_time", value=9000.0, **GPU
            )
        )
    return made


def accuracy() -> list[dict[str, Any]]:
    """Shares of two runs, and a paired test that lost answers."""
    made = []
    for run, share in ((30, 0.96), (31, 0.98)):
        params = {"model": "guard_model", "seed": run}
        same = {
            "suite": "accuracy",
            "benchmark": "gsm8k_synth",
            "unit": "",
            "better": "higher",
            "n": 250,
        }
        made.append(
            row(
                run,
                params,
                metric="exact_match_strict",
                value=share,
                ci_low=0.93,
                ci_high=0.99,
                **same,
            )
        )
    gates = {
        "suite": "accuracy",
        "benchmark": "gsm8k_synth",
        "unit": "",
        "n": 2048,
        "params": {"model": "guard_model"},
    }
    made.append(
        row(31, metric="acceptance_length", value=3.78, **gates | {"unit": "tokens", "n": 180})
    )
    made.append(row(33, metric="cached_kl", value=0.0, verdict="pass", **gates))
    made.append(row(33, metric="uncached_kl", value=0.0, **gates))
    paired = {
        **same,
        "params": {"filter": "strict-match", "candidate_commit": "c" * 40},
        "baseline_commit": "b" * 40,
    }
    figures = {
        "mcnemar_p": 0.0004,
        "questions_lost": 15,
        "questions_gained": 2,
        "detectable_loss": 0.038,
    }
    made.append(
        row(
            32,
            metric="paired_difference",
            value=-0.052,
            ci_low=-0.084,
            ci_high=-0.02,
            verdict="pass",
            **paired,
        )
    )
    return made + [row(32, metric=name, value=value, **paired) for name, value in figures.items()]


def static_metrics() -> list[dict[str, Any]]:
    """Two kernels on two targets."""
    made = []
    for kernel, registers in (("state_update.slots", 64), ("conv.update", 98)):
        for target in ("sm_90", "gfx942"):
            params = {"shape": "Nemotron-3-Nano, K=3", "dtype": "float32", "target": target}
            metrics = {
                "registers": registers + (target == "gfx942"),
                "spill_bytes": 0,
                "shared_bytes": 32,
            }
            metrics |= {"blocks_per_sm": 16, "load_bits": 128, "store_bits": 64}
            metrics |= {"sass_instructions" if target == "sm_90" else "amdgcn_instructions": 525}
            same = {"suite": "kernels", "benchmark": kernel, "unit": "", "verdict": "pass", "n": 1}
            made += [
                row(37, params, metric=name, value=value, **same) for name, value in metrics.items()
            ]
    return made


VERDICTS = {"slower": "fail", "inconclusive": ""}
OUTCOMES = [(1.0, "same"), (1.08, "slower"), (0.9, "faster"), (1.01, "same"), (1.5, "inconclusive")]


def comparison() -> list[dict[str, Any]]:
    """Times, one of them slower, one quarantined and one inconclusive, and a count that changed."""
    made = []
    compared = {"suite": "compare", "baseline_commit": "f" * 40, "n": 6}
    for index, (ratio, outcome) in enumerate(OUTCOMES):
        params = {**TIMED, "K": index, "outcome": outcome} | (
            {"quarantined": True} if index == 3 else {}
        )
        same = {**compared, "metric": "cpu_time_ratio", "unit": "time ratio"}
        same |= {
            "ci_low": ratio - 0.01,
            "ci_high": ratio + 0.01,
            "verdict": VERDICTS.get(outcome, "pass"),
        }
        made.append(row(42, params, benchmark="engine_step/decode", value=ratio, **same))
    changed = {"outcome": "changed", "was": 12, "K": 3}
    exact = {
        **compared,
        "benchmark": "memory/held",
        "metric": "mamba",
        "unit": "blocks",
        "verdict": "fail",
    }
    made.append(row(42, changed, value=14, **exact))
    return made


def operating_curve() -> list[dict[str, Any]]:
    """Two benchmarks, one of which does not keep its rate."""

    def rate(
        benchmark: str, metric: str, percent: int, hits: int, n: int, verdict: str = ""
    ) -> dict[str, Any]:
        params = {"experiment": "e", "inject_percent": percent}
        share = hits / n
        ends = {"ci_low": max(0.0, share - 0.1), "ci_high": min(1.0, share + 0.1)}
        same = {"suite": "operating_curve", "unit": "", "n": n, "verdict": verdict, **ends}
        return row(43, params, benchmark=benchmark, metric=metric, value=share, **same)

    return [
        row(
            43,
            {"number": 0},
            suite="operating_curve",
            benchmark="trial",
            metric="alarms",
            unit="alarms",
        ),
        rate("any benchmark", "false_alarm_rate", 0, 1, 50),
        rate("calm/step[K=3]", "false_alarm_rate", 0, 0, 50, "pass"),
        rate("wild/step[K=3]", "false_alarm_rate", 0, 3, 50, "fail"),
        rate("quiet/step[K=3]", "false_alarm_rate", 0, 0, 50, "pass"),
        rate("calm/step[K=3]", "detection_rate", 5, 19, 20),
        rate("calm/step[K=3]", "detection_rate", 10, 20, 20),
    ]


def swarms() -> list[dict[str, Any]]:
    """Return a swarm kept twice that broke no rule, and one on the other machine that broke two."""
    made = []
    for day, (seeds, patterns, verdict) in enumerate(((1000, 80, ""), (5000, 86, "pass"))):
        own = {"run_id": "swarm", "time_utc": f"2026-02-{day + 1:02}T00:00:00Z", **BOX}
        made += swarm(44, seeds, patterns, 0, verdict, **own)
    made += swarm(45, 300, 70, 2, "fail", **GPU)
    same = {
        "suite": "swarm",
        "benchmark": "exact model",
        "metric": "failures",
        "unit": "",
        "verdict": "fail",
    }
    return made + [
        row(45, {"rule": rule}, value=n, **same | GPU)
        for rule, n in (("copy-bytes", 7), ("<b>tokens", 1))
    ]


def swarm(
    run: int, seeds: int, patterns: int, broken: int, verdict: str, **own: Any
) -> list[dict[str, Any]]:
    """What a swarm has counted."""
    same = {
        "suite": "swarm",
        "benchmark": "exact model",
        "better": "equal",
        "unit": "",
        "n": seeds,
        **own,
    }
    return [
        row(run, metric="seeds", value=seeds, **same),
        row(run, metric="requests", value=18 * seeds, **same | {"unit": "requests"}),
        row(run, metric="requests_per_cpu_second", value=74.5, **same | {"unit": "requests"}),
        row(run, metric="patterns", value=patterns, **same | {"unit": "patterns", "n": 87}),
        row(run, metric="settings", value=1700, **same | {"unit": "settings", "n": 1814}),
        row(run, metric="rules_broken", value=broken, **same | {"verdict": verdict}),
    ]


def charted(runs: int = 30, slower: str = "scheduler/decode") -> list[dict[str, Any]]:
    """Return a series for each chart on `box`; one became a fifth slower with run 20."""
    made = []
    for chart in CHARTS:
        for line in filter(None, (chart.line, chart.second)):
            params = {**TIMED, **dict(word.split("=") for word in line.case)}
            unit = "ns" if line.metric == "cpu_time" else ""
            same = {
                "suite": line.suite,
                "benchmark": line.benchmark,
                "metric": line.metric,
                "unit": unit,
                **BOX,
            }
            levels = [
                100.5 + run % 2 + 20 * (f"{line.suite}/{line.benchmark}" == slower and run >= 20)
                for run in range(runs)
            ]
            made += history(levels, params=params, **same)
    return made
