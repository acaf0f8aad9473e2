"""Counters: they parse, and they move by as much as happened."""

from __future__ import annotations

import pytest
from prometheus_client.parser import text_string_to_metric_families

from hybrid_kv import LLM, SamplingParams
from hybrid_kv.check.guard_model import FOLDER
from hybrid_kv.check.serve.app import Access
from hybrid_kv.check.serve.metrics import Metrics
from hybrid_kv.models.exact import ExactConfig, ExactModel
from tests.check.serve.conftest import OPTIONS, Served, served
from tests.support.metrics import counters

PROMPT = [9 + 5 * i % 70 for i in range(200)]


def send(server: Served, **more: object) -> dict[str, float]:
    """What a request moves."""
    before = counters(server)
    body = {"prompt": PROMPT, "max_tokens": 20, "temperature": 0, "ignore_eos": True} | more
    assert server.http.post("/v1/completions", json=body).status_code == 200
    return {
        name: value - before.get(name, 0)
        for name, value in counters(server).items()
        if value != before.get(name)
    }


def test_a_hit_is_counted_in_tokens(server: Served) -> None:
    server.http.post("/reset_prefix_cache")
    first, again = send(server), send(server)
    assert (first["prefix_cache_queries_total"], first.get("prefix_cache_hits_total")) == (
        200,
        None,
    )
    assert (again["prefix_cache_queries_total"], again["prefix_cache_hits_total"]) == (200, 192)
    assert (again["prompt_tokens_total"], again["generation_tokens_total"]) == (200, 20)
    assert again["request_success_total length"] == 1
    scored = send(server, echo=True, logprobs=0)
    assert "prefix_cache_queries_total" not in scored


def test_a_shared_prefix_without_a_state_is_counted_as_thrown_away() -> None:
    """Of three prompts that share 64 tokens the second finds K and V of them and no state."""
    llm = LLM(
        ExactModel(ExactConfig("M*")),
        device="cpu",
        block_size=16,
        num_blocks=90,
        max_model_len=128,
        max_num_batched_tokens=128,
        mamba_cache_mode="align",
    )
    metrics = Metrics(llm, "exact")
    llm.observers.append(metrics)
    counts = []
    for last in (3, 4, 5):
        prompt = [*range(64), *[last] * 30]
        request = llm.add_request(prompt, SamplingParams(max_tokens=1))
        metrics.begun(request, 0.0)
        while llm.has_work:
            llm.step()
        families = text_string_to_metric_families(metrics.text().decode())
        samples = {sample.name: sample.value for family in families for sample in family.samples}
        counts.append(
            [samples[f"hybrid_kv:prefix_cache_{name}_total"] for name in ("hits", "thrown_away")]
        )
    assert counts == [[0, 0], [0, 64], [64, 64]]


def test_cached_tokens_in_usage_and_metrics_are_those_of_the_engine(server: Served) -> None:
    """An engine of the same settings runs the same requests in the same order."""
    engine = LLM(str(FOLDER), **OPTIONS)
    server.http.post("/reset_prefix_cache")
    expected, found = [], []
    for length, salt, n in [(200, "", 1)] * 2 + [
        (150, "", 2),
        (97, "", 3),
        (200, "b", 1),
        (250, "b", 2),
    ]:
        prompt = [9 + 5 * i % 70 for i in range(length)]
        params = SamplingParams(3, ignore_eos=True, cache_salt=salt)
        outputs = engine.generate([prompt] * n, params, progress=False)
        expected.append((outputs[0].cached_tokens, sum(output.cached_tokens for output in outputs)))
        before = counters(server)["prefix_cache_hits_total"]
        body = {
            "prompt": prompt,
            "max_tokens": 3,
            "n": n,
            "temperature": 0,
            "ignore_eos": True,
            "cache_salt": salt,
        }
        usage = server.http.post("/v1/completions", json=body).json()["usage"]
        hits = counters(server)["prefix_cache_hits_total"] - before
        found.append((usage["prompt_tokens_details"]["cached_tokens"], hits))
    assert found == expected
    assert len(set(expected)) > 3


def test_times_are_counted_for_each_request_and_step(server: Served) -> None:
    moved = send(server, max_tokens=9, n=2, prompt=PROMPT[:50])
    names = (
        "request_queue_time",
        "time_to_first_token",
        "e2e_request_latency",
        "inter_token_latency",
    )
    assert [moved[f"{name}_seconds_count"] for name in names[:3]] == [2, 2, 2]
    queue, first, e2e, between = (moved[f"{name}_seconds_sum"] for name in names)
    steps = moved["inter_token_latency_seconds_count"] + 2
    assert steps == 18 - moved.get("spec_decode_num_accepted_tokens_total", 0)
    assert 0 < queue < first < first + between < e2e


def test_drafts_are_counted_step_by_step(server: Served) -> None:
    moved = send(server, prompt=[7, 8, 9] * 20, max_tokens=40)
    assert moved["spec_decode_num_drafts_total"] > 0
    assert moved["spec_decode_num_draft_tokens_total"] >= moved["spec_decode_num_drafts_total"]
    per_position = [
        moved.get(f"spec_decode_num_accepted_tokens_per_pos_total {i}", 0) for i in range(3)
    ]
    assert sum(per_position) == moved.get("spec_decode_num_accepted_tokens_total", 0)
    assert per_position == sorted(per_position, reverse=True)


def test_the_cache_is_described_so_that_a_guard_finds_its_boundaries(server: Served) -> None:
    text = server.http.get("/metrics").text
    (sample,) = [
        sample
        for family in text_string_to_metric_families(text)
        for sample in family.samples
        if sample.name == "hybrid_kv:cache_config_info"
    ]
    plan = server.llm.plan
    assert sample.labels["block_size"] == str(plan.sizes.block_size)
    assert sample.labels["hit_granularity"] == "96" and sample.labels["mamba_cache_mode"] == "all"
    assert (
        sample.labels["num_gpu_blocks"] == "64" and sample.labels["num_speculative_tokens"] == "3"
    )


def test_nothing_is_held_when_no_client_sends(server: Served) -> None:
    send(server)
    found = counters(server)
    assert (
        found["kv_cache_usage_perc"]
        == found["num_requests_running"]
        == found["num_requests_waiting"]
        == 0
    )


@pytest.mark.parametrize(
    ("query", "status"),
    [("", 200), ("?reset_running_requests=false", 200), ("?reset_running_requests=1", 400)],
)
def test_a_reset_forgets_what_was_cached(server: Served, query: str, status: int) -> None:
    send(server)
    answer = server.http.post(f"/reset_prefix_cache{query}")
    assert answer.status_code == status
    assert ("prefix_cache_hits_total" in send(server)) == (status != 200)


def test_where_groups_disagree_it_is_what_was_restored_that_is_reported() -> None:
    """Attention has two blocks of the last prompt, the states only that after the first."""
    model = ExactModel(ExactConfig(pattern="*M"))
    llm = LLM(
        model, device="cpu", block_size=8, mamba_cache_mode="align", max_model_len=96, num_blocks=60
    )
    text = [9 + 5 * i % 70 for i in range(30)]
    body = {"max_tokens": 2, "temperature": 0}
    with served(llm, Access("guard_model")) as server:
        for prompt, due in ((text, 0), (text[:9], 0), ([*text[:20], *range(9)], 8)):
            before = counters(server).get("prefix_cache_hits_total", 0)
            reply = server.http.post("/v1/completions", json=body | {"prompt": prompt}).json()
            hits = counters(server)["prefix_cache_hits_total"] - before
            assert (reply["usage"]["prompt_tokens_details"]["cached_tokens"], hits) == (due, due)
