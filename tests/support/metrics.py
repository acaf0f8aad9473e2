"""Counters of a server, from its page of metrics."""

from __future__ import annotations

from prometheus_client.parser import text_string_to_metric_families

from tests.check.serve.conftest import Served


def counters(server: Served) -> dict[str, float]:
    """By name, and by the label that tells samples of one name apart."""
    answer = server.http.get("/metrics")
    assert answer.headers["content-type"].startswith("text/plain")
    found = {}
    for family in text_string_to_metric_families(answer.text):
        for sample in family.samples:
            label = sample.labels.get("finished_reason", sample.labels.get("position", ""))
            found[f"{sample.name}{label and ' '}{label}"] = sample.value
    return {
        name.removeprefix("hybrid_kv:"): value
        for name, value in found.items()
        if not name.endswith("_created")
    }
