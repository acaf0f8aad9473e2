"""Bytes by count, and that one more of them fails."""

from __future__ import annotations

import itertools
from dataclasses import replace
from pathlib import Path

import pytest

from bench.static.counts import Shape

pytest.importorskip("triton")

import torch

from bench._shapes import DeltaShape
from bench.static import counts, gate
from bench.static.counts import Count, count_bytes, failures
from bench.static.gate import changed_rows, read_baseline
from bench.static.state_bytes import slots_bytes, step_bytes
from hybrid_kv.measure.results import append_rows, check_file, provenance
from tests.cli import run as cli
from tests.kernels.interpreter import interpreted


def bytes_of_a_step(shape: Shape, K: int, n_hist: int | None, flush: bool) -> int:
    """What the model says."""
    if n_hist is None:
        return sum(slots_bytes(shape, torch.float32, 1 + K).values())
    return sum(step_bytes(shape, torch.float32, 1 + K, n_hist, flush).values())


@pytest.mark.parametrize("shape", [(8, 64, 128, 1), DeltaShape(1, 2, 128, 128, per_channel=False)])
@pytest.mark.parametrize(("n_hist", "flush"), [(None, False), (0, False), (9, True)])
def test_bytes_are_those_of_the_model(shape: Shape, n_hist: int | None, flush: bool) -> None:
    args = shape, 3, n_hist, flush
    assert interpreted(counts.count_scheme, *args) == bytes_of_a_step(*args)


def shared_bytes() -> list[int]:
    from hybrid_kv.kernels.gated_norm import gated_rms_norm

    x, gate, weight = torch.ones(3, 8), torch.ones(3, 8), torch.ones(8)
    return [
        counts.distinct_bytes(lambda: gated_rms_norm(x, gate, weight, 2, 1e-5), shared)
        for shared in ([], [weight], [weight, x[:1]])
    ]


def test_every_address_counts_once_and_what_is_shared_not_at_all() -> None:
    # The weight is loaded by each of three tokens; of x and gate every element by one program.
    assert interpreted(shared_bytes) == [4 * (3 * 8 * 3 + 8), 4 * 3 * 8 * 3, 4 * 3 * 8 * 2]


def test_a_model_that_is_not_what_is_counted_is_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    def counted_bytes(shape: Shape, K: int, n_hist: int | None, flush: bool) -> int:
        return bytes_of_a_step(shape, K, n_hist, flush) + (flush and K == 5)

    monkeypatch.setattr(counts, "count_scheme", counted_bytes)
    found = {(one.kernel, one.shape): one for one in count_bytes()}
    assert {name for name, _ in found} == {"bytes.slots", "bytes.recompute", "bytes.record"}
    assert not found["bytes.recompute", "Nemotron-3-Nano, K=3"].wrong
    wrong = found["bytes.recompute", "Nemotron-3-Nano, K=5"].wrong
    assert wrong.startswith("recompute of 9 tokens, flushed moves ") and ";" not in wrong
    for model, K in itertools.product(("Nemotron-3-Nano", *counts.DELTA), (3, 5)):
        slots, own = (found[f"bytes.{scheme}", f"{model}, K={K}"].bytes for scheme in KINDS)
        assert slots / own >= 5
        assert model not in counts.DELTA or own <= found["bytes.record", f"{model}, K={K}"].bytes
    monkeypatch.setattr(counts, "FEWEST", 7.0)
    assert "6.46 times the bytes of recompute, it must be 7.0" in "".join(
        one.wrong for one in count_bytes()
    )


KINDS = ("slots", "recompute")

# ---- the gate ----

SLOTS = Count("bytes.slots", "Nemotron-3-Nano, K=3", "float32", "any", 6000)
BYTES = Count("bytes.recompute", "Nemotron-3-Nano, K=3", "float32", "any", 1000)


@pytest.fixture
def file(tmp_path: Path) -> Path:
    file = tmp_path / "kernels.csv"
    append_rows(file, changed_rows([SLOTS, BYTES], file))
    return file


def test_one_more_is_too_many_and_one_less_is_not(file: Path) -> None:
    known = read_baseline(file, provenance().triton)
    more = replace(BYTES, bytes=1001)
    assert failures(SLOTS, known) == failures(BYTES, known) == []
    assert failures(more, known) == ["1001 bytes instead of 1000"]
    assert failures(replace(more, wrong="no"), known) == ["no", "1001 bytes instead of 1000"]
    assert failures(replace(BYTES, bytes=999), known) == failures(more, {}) == []
    assert failures(replace(BYTES, wrong="no"), {}) == ["no"]
    assert failures(replace(more, dtype="bfloat16"), known) == []


def test_only_changes_become_rows(file: Path) -> None:
    assert not list(check_file(file))
    assert changed_rows([SLOTS, BYTES], file) == []
    (row,) = changed_rows([SLOTS, replace(BYTES, bytes=999)], file)
    assert (row.benchmark, row.metric, row.value, row.better) == (
        "bytes.recompute",
        "bytes",
        999,
        "lower",
    )


def test_the_command_counts_and_fails(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path, file: Path
) -> None:
    monkeypatch.setattr(gate, "run", lambda *args, **options: [])

    def run(found: list[Count], *arguments: str) -> tuple[int, str]:
        monkeypatch.setattr(counts, "count_all", lambda: found)
        return cli.run(capsys, "kernels", "--baseline", file, *arguments)[:2]

    more = replace(BYTES, bytes=1001)
    before = file.read_bytes()
    code, out = run([SLOTS, BYTES])
    assert code == 0 and "1,000" in out and "FAILED" not in out
    code, out = run([SLOTS, more])
    assert (
        code == 1
        and "bytes.recompute (Nemotron-3-Nano, K=3, float32): 1001 bytes instead of 1000" in out
    )
    code, _ = run([replace(BYTES, wrong="counted otherwise")], "--update")
    assert code == 1 and file.read_bytes() == before
    assert run([SLOTS, more], "--update")[0] == 0
    assert read_baseline(file, provenance().triton)[more.key]["bytes"] == 1001
    assert run([SLOTS, more])[0] == 0


def test_the_rate_of_flushes_is_that_of_the_chain() -> None:
    """Without drafts a ring of 33 tokens is folded every 32 steps, and once more at a boundary."""
    group = (1, 1, 1, 1)
    assert counts.mean_traffic(
        group, torch.float32, 0, block_size=None, steps=256
    ).flush_rate == pytest.approx(1 / 32)
    assert counts.mean_traffic(
        group, torch.float32, 0, block_size=8, steps=256
    ).flush_rate == pytest.approx(1 / 8)
    all_accepted = counts.mean_traffic(
        group, torch.float32, 3, acceptance=1.0, block_size=None, steps=320
    )
    assert all_accepted.flush_rate == pytest.approx(1 / 8)
