"""The GPU that is not there for vLLM: its parts without vLLM, and both runners where vLLM is."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest
import torch

from hybrid_kv.check.probes.registry import Round
from hybrid_kv.check.probes.reproducer import ProbeCase, write_files
from hybrid_kv.check.probes.script import GPU, WORKERS, script_of
from hybrid_kv.check.targets import vllm
from hybrid_kv.check.targets.exact import ExactAnswers, write_exact_checkpoint
from hybrid_kv.check.targets.target import Ask
from hybrid_kv.check.targets.workers import vllm_gpu
from hybrid_kv.check.targets.workers.vllm_gpu import copies, graphs, streams, uva
from tests.check.targets.models import PROMPT, installed


@pytest.fixture(autouse=True)
def host(monkeypatch: pytest.MonkeyPatch) -> streams.Host:
    """A host that has waited for nothing, and a main stream."""
    host = streams.Host()
    for module in (streams, copies, uva):
        monkeypatch.setattr(module, "HOST", host)
    monkeypatch.setattr(streams, "_current", [streams.Stream()])
    monkeypatch.setattr(copies, "order", "late")
    monkeypatch.setattr(copies, "changed_uploads", Counter())
    return host


@pytest.mark.parametrize(("order", "brought"), [("late", [5, 6]), ("early", [1, 2])])
def test_a_copy_to_the_host_is_noise_until_it_is_waited_for(order: str, brought: list[int]) -> None:
    copies.choose_order(order)
    device, event = torch.tensor([1, 2]), streams.Event()
    host = copies.to_host(device, torch.zeros(2, dtype=torch.long))
    event.record()
    device.copy_(torch.tensor([5, 6]))
    assert not {1, 2, 5, 6} & {*host.tolist()}
    event.synchronize()
    assert host.tolist() == brought


def test_an_event_covers_its_stream_and_what_that_waited_for() -> None:
    main, side = streams.current(), streams.Stream()
    host = copies.to_host(torch.tensor([7]), torch.tensor([0]))
    side.record_event().synchronize()
    assert host.tolist() != [7]
    side.wait_stream(main)
    with side:
        assert streams.current() is side
        streams.Event().synchronize()  # an event that was not recorded
        assert host.tolist() != [7]
        side.record_event().synchronize()
    assert host.tolist() == [7] and streams.current() is main


def test_what_an_upload_reads_may_change_once_it_was_waited_for() -> None:
    pinned = torch.tensor([1, 2])
    copies.watch_upload(pinned)
    streams.wait_for_all()
    pinned[0] = 3
    copies.watch_upload(pinned)
    assert not copies.changed_uploads
    pinned[0] = 4
    streams.wait_for_all()
    ((place, count),) = copies.changed_uploads.items()
    assert count == 1 and place.startswith("check/targets/test_vllm_gpu.py:")


def test_short_ways_through_the_interpreter_give_what_the_long_ones_do() -> None:
    script = Path(__file__).with_name("short_ways.py")
    environment = {**os.environ, "TRITON_INTERPRET": "1", "PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, "-W", "ignore", str(script)]
    run = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr
    num_operations, num_short = map(int, run.stdout.split())
    assert num_operations > 10_000 and num_short > 500


@pytest.mark.parametrize("waits", [True, False])
def test_a_slot_may_be_written_once_its_last_reader_was_waited_for(waits: bool) -> None:
    slot = torch.zeros(4)
    uva.hand_out(slot)
    uva.note_readers((3, slot[:2]))
    if waits:
        streams.current().synchronize()
        uva.hand_out(slot)
        return
    with pytest.raises(copies.TooEarlyError, match="a kernel that got it may still run"):
        uva.hand_out(slot)


def test_a_graph_replays_operations_on_the_memory_they_had() -> None:
    with torch.inference_mode():
        given, out, rows = torch.tensor([1.0, 2.0, 3.0]), torch.zeros(3), 2
        graph = graphs.Graph()
        with graphs.Capture(graph):
            made = given[:rows] * 2
            out[:rows].copy_(made.softmax(0) + made)
        given.copy_(torch.tensor([4.0, 5.0, 6.0]))
        rows = 3
        graph.replay()
        doubled = torch.tensor([8.0, 10.0])
        assert made.tolist() == doubled.tolist()
        assert out.tolist() == [*(doubled.softmax(0) + doubled).tolist(), 0.0]


@pytest.mark.parametrize("waits", ["item", "nonzero"])
def test_what_must_wait_for_the_device_cannot_be_captured(waits: str) -> None:
    with (
        pytest.raises(graphs.CaptureError, match="operation not permitted"),
        graphs.Capture(graphs.Graph()),
    ):
        getattr(torch.ones(1), waits)()
    assert graphs.recording() is None


def test_a_launch_is_one_step_of_a_graph() -> None:
    seen: list[float] = []
    graph, given = graphs.Graph(), torch.zeros(1)
    with graphs.Capture(graph):
        graphs.keep_launch(
            lambda tensor, scale: seen.append(float(tensor) * scale), (given,), {"scale": 3.0}
        )
    given += 2
    graph.replay()
    assert seen == [6.0] and len(graph.steps) == 1


def test_a_setting_becomes_options_and_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "environ", {})
    options = {"enforce_eager": True}
    vllm_gpu.choose({"runner": "v1", "graph": "decode", "copies": "late"}, options, None)
    assert os.environ == {"VLLM_USE_V2_MODEL_RUNNER": "0"} and options["enforce_eager"] is False
    assert options["compilation_config"]["cudagraph_mode"] == "FULL_DECODE_ONLY"


def test_a_runner_of_gpus_is_a_variant_that_the_exact_model_alone_has(tmp_path: Path) -> None:
    assert vllm.KIND.variant_of(str(tmp_path), {"runner": "v2"}) == ""
    write_exact_checkpoint("mixed", tmp_path)
    assert (
        vllm.KIND.variant_of(str(tmp_path), {})
        == vllm.KIND.variant_of(str(tmp_path), {"runner": "v1"})
        == "gpu"
    )
    assert vllm.KIND.variant_of(str(tmp_path), {"runner": "cpu"}) == ""


def test_weights_of_a_checkpoint_are_numbers(tmp_path: Path) -> None:
    write_exact_checkpoint("mixed", tmp_path)
    for layer in json.loads((tmp_path / "config.json").read_text())["exact"]["layers"]:
        assert [torch.tensor(value, dtype=torch.int64) for value in layer["weights"].values()]


def test_a_script_can_hold_the_folder() -> None:
    texts = [file.read_text() for file in (WORKERS / GPU).glob("*.py")]
    assert len(texts) > 8 and not any("'''" in text for text in texts)


SETTINGS = (
    {"runner": "v2", "graph": "decode", "spec": "mtp3", "prefix": "align"},
    {"runner": "v1", "graph": "full", "async": "on", "copies": "early"},
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    installed()
    folder = tmp_path_factory.mktemp("exact")
    write_exact_checkpoint("mixed", folder)
    yield folder


@pytest.mark.parametrize("settings", SETTINGS, ids=["v2", "v1"])
def test_a_runner_of_gpus_gives_the_oracles_tokens(settings: dict[str, str], folder: Path) -> None:
    answers = ExactAnswers(folder)
    requests = [Ask(PROMPT[i % 3 :], max_tokens=8 + i, step=3 * i) for i in range(4)]
    expected = [answers.tokens(ask.prompt, ask.max_tokens) for ask in requests]
    with closing(vllm.KIND.start(str(folder), settings)) as target:
        for _ in range(2):
            assert [list(one.token_ids) for one in target.ask(requests)] == expected
        counters = target.counters()
    assert counters["replays"] > 0 and counters["late copies"] > 0
    assert (counters["hits"] > 0) == ("prefix" in settings) and (counters["accepted"] > 0) == (
        "spec" in settings
    )


@pytest.mark.parametrize("wrong", [0, 1])
def test_a_script_pretends_too(wrong: int, folder: Path, tmp_path: Path) -> None:
    rounds = (Round((Ask(PROMPT, max_tokens=4), Ask(PROMPT[:2], max_tokens=3, step=2))),)
    expected = ExactAnswers(folder).tokens(PROMPT[:2], 3)
    expected[-1] += wrong
    settings = {"runner": "v2", "async": "on"}
    case = ProbeCase(
        "vllm",
        "0.32.0",
        "exact",
        settings,
        "p",
        "wrong",
        rounds,
        1,
        tuple(expected),
        (),
        0.0,
        None,
        None,
        0.0,
    )
    *_, script = write_files(case, tmp_path, script_of(case))
    done = subprocess.run([installed(), script], capture_output=True, text=True, check=False)
    assert done.returncode == wrong, done.stderr
    assert "  step 3: request 0 1 tokens; request 1 (new) 2 tokens" in done.stdout.splitlines()
