"""Launches and bytes by count, and that one more of them fails."""

import itertools
from contextlib import contextmanager
from dataclasses import replace
from unittest.mock import patch

import pytest

pytest.importorskip("triton")

import torch

from bench._shapes import DeltaShape
from bench.static import counts, gate
from bench.static.counts import CASES, Count, changed_rows, count_bytes, count_launches, counted, failures
from bench.static.gate import read_baseline
from bench.static.state_bytes import slots_bytes, step_bytes
from hybrid_kv import cli
from hybrid_kv.results import append_rows, check_file, provenance
from tests.kernels.interpreter import interpreted

KERNELS = {
    ("launches.mamba_layer", "decode, slots, K=0"): ["_conv_update", "_state_update", "_gated_norm"],
    ("launches.mamba_layer", "decode, slots, K=3"): ["_conv_update", "_state_update", "_gated_norm"],
    ("launches.mamba_layer", "decode, recompute, K=3"): ["_conv_update", "recompute_kernel", "_gated_norm"],
    ("launches.attention_layer", "decode, K=0"): ["_store_kv", "_attention"],
    ("launches.attention_layer", "decode, K=3"): ["_store_kv", "_attention"],
    ("launches.block_tables", "step, 3 groups"): ["_block_tables"],
}
PROJECTIONS = {"launches.block_tables": 0}


def names():
    """The counts, and the names behind those of the Triton path."""
    seen = []

    @contextmanager
    def noted():
        with counted() as found:
            yield found
        seen.append(tuple(map(list, found)))

    with patch.object(counts, "counted", noted):
        by_count = count_launches()
    return {(name, shape): seen[2 * i + 1] for i, (name, shape, _) in enumerate(CASES)}, by_count


def test_a_layer_is_its_kernels_and_its_two_projections():
    found, by_count = interpreted(names)
    assert {key: kernels for key, (kernels, _) in found.items()} == KERNELS
    assert all(len(ops) == PROJECTIONS.get(name, 2) for (name, _), (_, ops) in found.items())
    of = {(one.name, one.shape, one.dtype): one.values for one in by_count}
    assert len(of) == len(by_count) == 2 * len(KERNELS)
    for key, kernels in KERNELS.items():
        wanted = {"launches": len(kernels), "torch_operations": PROJECTIONS.get(key[0], 2)}
        assert of[(*key, "triton")] == wanted
        plain = of[(*key, "torch")]
        if key[0] == "launches.block_tables":
            assert plain == {"launches": 0, "torch_operations": 0}, "the host's path is numpy"
        else:
            assert plain["launches"] == 0 and plain["torch_operations"] > 5 * sum(wanted.values()) / 3


def what_counts():
    x = torch.ones(4, 6)
    with counted() as (kernels, operations):
        y = x.view(2, 12)[:, 3:].unsqueeze(0).expand(3, -1, -1)
        y.transpose(0, 1).split(1)
        torch.empty_like(x), x.new_empty(3), torch.empty(2)
        views = list(operations)
        x.add_(1)
        x[0].copy_(x[1])
        (x * 2).contiguous()
        int(x[0, 0])
    return views, operations, kernels


def test_views_and_allocations_launch_nothing():
    views, operations, kernels = interpreted(what_counts)
    assert (views, kernels) == ([], [])
    assert operations == ["add_", "copy_", "mul", "_local_scalar_dense"]


# ---- bytes ----


def bytes_of_a_step(shape, n_hist, flush):
    return counts._count_scheme(shape, 3, n_hist, flush)


@pytest.mark.parametrize("shape", [(8, 64, 128, 1), DeltaShape(1, 2, 128, 128, per_channel=False)])
@pytest.mark.parametrize(("n_hist", "flush"), [(None, False), (0, False), (9, True)])
def test_bytes_are_those_of_the_model(shape, n_hist, flush):
    fp32 = torch.float32
    said = slots_bytes(shape, fp32, 4) if n_hist is None else step_bytes(shape, fp32, 4, n_hist, flush)
    assert interpreted(bytes_of_a_step, shape, n_hist, flush) == sum(said.values())


def shared_bytes():
    from hybrid_kv.kernels.gated_norm import gated_rms_norm

    x, gate, weight = torch.ones(3, 8), torch.ones(3, 8), torch.ones(8)
    return [
        counts.distinct_bytes(lambda: gated_rms_norm(x, gate, weight, 2, 1e-5), shared)
        for shared in ([], [weight], [weight, x[:1]])
    ]


def test_every_address_counts_once_and_what_is_shared_not_at_all():
    # The weight is loaded by each of three tokens; of x and gate every element by one program.
    assert interpreted(shared_bytes) == [4 * (3 * 8 * 3 + 8), 4 * 3 * 8 * 3, 4 * 3 * 8 * 2]


def test_a_model_that_is_not_what_is_counted_is_wrong(monkeypatch):
    def counted_bytes(shape, K, n_hist, flush):
        said = (
            slots_bytes(shape, torch.float32, 1 + K)
            if n_hist is None
            else step_bytes(shape, torch.float32, 1 + K, n_hist, flush)
        )
        return sum(said.values()) + (flush and K == 5)

    monkeypatch.setattr(counts, "_count_scheme", counted_bytes)
    found = {(one.name, one.shape): one for one in count_bytes()}
    assert {name for name, _ in found} == {"bytes.slots", "bytes.recompute", "bytes.record"}
    assert not found["bytes.recompute", "Nemotron-3-Nano, K=3"].wrong
    wrong = found["bytes.recompute", "Nemotron-3-Nano, K=5"].wrong
    assert wrong.startswith("recompute of 9 tokens, flushed moves ") and ";" not in wrong
    for model, K in itertools.product(("Nemotron-3-Nano", *counts.DELTA), (3, 5)):
        slots, own = (found[f"bytes.{scheme}", f"{model}, K={K}"].values["bytes"] for scheme in KINDS)
        assert slots / own >= 5
        assert model not in counts.DELTA or own <= found["bytes.record", f"{model}, K={K}"].values["bytes"]
    monkeypatch.setattr(counts, "FEWEST", 7.0)
    assert "6.46 times the bytes of recompute, it must be 7.0" in "".join(one.wrong for one in count_bytes())


KINDS = ("slots", "recompute")

# ---- the gate ----

LAYER = Count("launches.mamba_layer", "decode, K=3", "triton", {"launches": 3.0, "torch_operations": 2.0})
BYTES = Count("bytes.recompute", "Nemotron-3-Nano, K=3", "float32", {"bytes": 1000.0})


@pytest.fixture
def file(tmp_path):
    file = tmp_path / "kernels.csv"
    append_rows(file, changed_rows([LAYER, BYTES], file))
    return file


def test_one_more_is_too_many_and_one_less_is_not(file):
    known = read_baseline(file, provenance().triton)
    assert failures(LAYER, known) == failures(BYTES, known) == []
    more = replace(LAYER, values={"launches": 4.0, "torch_operations": 2.0})
    assert failures(more, known) == ["4 launches instead of 3"]
    assert failures(replace(LAYER, values={"launches": 2.0, "torch_operations": 3.0}), known) == [
        "3 torch operations instead of 2"
    ]
    assert failures(replace(BYTES, values={"bytes": 1001.0}), known) == ["1001 bytes instead of 1000"]
    assert failures(replace(LAYER, values={"launches": 2.0, "torch_operations": 1.0}), known) == []
    assert failures(more, {}) == []
    assert failures(replace(LAYER, wrong="no"), {}) == ["no"]
    assert failures(replace(more, dtype="torch"), known) == []


def test_only_changes_become_rows(file):
    assert not list(check_file(file))
    assert changed_rows([LAYER, BYTES], file) == []
    (row,) = changed_rows([LAYER, replace(BYTES, values={"bytes": 999.0})], file)
    assert (row.benchmark, row.metric, row.value, row.unit, row.better) == (
        "bytes.recompute",
        "bytes",
        999,
        "B",
        "lower",
    )
    append_rows(file, [row])
    assert read_baseline(file, provenance().triton)[BYTES.key] == {"bytes": 999}


def test_the_command_counts_and_fails(monkeypatch, capsys, tmp_path, file):
    monkeypatch.setattr(gate, "run", lambda *args, **options: [])

    def run(found, *arguments):
        monkeypatch.setattr(counts, "count_all", lambda: found)
        try:
            cli.main(["kernels", "--baseline", str(file), *arguments])
        except SystemExit as done:
            return done.code or 0, capsys.readouterr().out
        return 0, capsys.readouterr().out

    more = replace(LAYER, values={"launches": 4.0, "torch_operations": 2.0})
    before = file.read_bytes()
    code, out = run([LAYER, BYTES])
    assert code == 0 and "1,000" in out and "FAILED" not in out
    code, out = run([more, BYTES])
    assert code == 1 and "launches.mamba_layer (decode, K=3, triton): 4 launches instead of 3" in out
    code, _ = run([replace(BYTES, wrong="counted otherwise")], "--update")
    assert code == 1 and file.read_bytes() == before
    assert run([more, BYTES], "--update")[0] == 0
    assert read_baseline(file, provenance().triton)[more.key]["launches"] == 4
    assert run([more, BYTES])[0] == 0


def test_the_rate_of_flushes_is_that_of_the_chain():
    """Without drafts everything is known: a ring of 33 tokens is folded every 32 steps, each block has one more."""
    group = (1, 1, 1, 1)
    assert counts.mean_traffic(group, torch.float32, 0, block_size=None, steps=256).flush_rate == pytest.approx(1 / 32)
    assert counts.mean_traffic(group, torch.float32, 0, block_size=8, steps=256).flush_rate == pytest.approx(1 / 8)
    all_accepted = counts.mean_traffic(group, torch.float32, 3, acceptance=1.0, block_size=None, steps=320)
    assert all_accepted.flush_rate == pytest.approx(1 / 8)
