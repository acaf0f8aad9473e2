"""A scenario survives as a file, and a broken file is one clear error."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from hybrid_kv.check.guard.cases import tell
from hybrid_kv.check.guard.replay import from_json, to_json
from hybrid_kv.check.guard.traffic import draw_scenario
from hybrid_kv.config import ConfigError
from tests.cli.run import run
from tests.support.forced import forced, no_copies

BOUNDARY = forced("rejected_at_boundary")


@pytest.mark.parametrize("number", [0, 4, BOUNDARY, *range(20, 400, 37)])
def test_a_scenario_is_the_same_behind_its_file(number: int) -> None:
    scenario = draw_scenario(number)
    assert from_json(to_json(scenario, "tokens")) == scenario


def test_a_replay_tells_what_ran_and_what_broke(monkeypatch: pytest.MonkeyPatch) -> None:
    no_copies(monkeypatch)
    scenario = draw_scenario(BOUNDARY)
    rule, out = tell(scenario)
    assert "step 0: request 0 prefills tokens 0 to 4 of 5" in out and "drafts" in out
    assert rule == "step-tokens" and out.endswith("broken rule: step-tokens")


def changed(**values: Any) -> Callable[[dict[str, Any]], None]:
    return lambda document: document.update(values)


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        (changed(format="something"), "format 'hybrid-kv scenario' is not named"),
        (changed(version=2), "version 2, not 1"),
        (lambda document: document.pop("events"), "'events' is unknown or missing"),
        (lambda document: document.pop("requests"), "'requests' is unknown or missing"),
        (changed(colour="red"), "'colour' is unknown or missing"),
        (changed(layers="M*Q"), "layers 'M*Q' are not 1 to 64 of"),
        (changed(drafts="clever"), "drafts 'clever' are none of none, ngram"),
        (changed(waves=[1]), "waves of [1] requests, but 4 requests"),
        (changed(options={"colour": "red"}), "EngineConfig does not know colour"),
        (changed(options={}), "options have no max_model_len"),
        (
            changed(events=[{"what": "explode", "first": 1}]),
            "event 'explode' at step 1 and every 0 is none of preempt",
        ),
        (
            changed(requests=[{"prompt": [1, 97]}], waves=[]),
            "token 97 is outside the vocabulary of 97",
        ),
        (changed(requests=[{"prompt": [1, 2.5]}], waves=[]), "2.5 is no integer"),
        (
            changed(requests=[{"prompt": [1], "max_tokens": 0}]),
            "max_tokens=0 must be an integer >= 1",
        ),
        (
            changed(requests=[{"prompt": [1], "max_tokens": 10**9}] * 2000, waves=[]),
            "tokens, more than 100,000",
        ),
        (
            lambda document: document["options"].update(max_model_len=10**9),
            "max_model_len=1000000000 is more than 1,048,576",
        ),
        (
            changed(events=[{"what": "preempt", "first": 1, "every": 10**9}]),
            "event 'preempt' at step 1 and every 10",
        ),
        (changed(requests=[{"prompt": [1], "tokens": 0}]), "unexpected keyword argument 'tokens'"),
    ],
)
def test_a_broken_file_is_one_clear_error(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    change: Callable[[dict[str, Any]], None],
    problem: str,
) -> None:
    document = json.loads(to_json(draw_scenario(BOUNDARY)))
    change(document)
    file = tmp_path / "broken.json"
    file.write_text(json.dumps(document))
    code, out, err = run(capsys, "guard", "--replay", str(file))
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert err.startswith(f"error: {file} is no scenario of this version: ") and problem in err


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b"null", b"[" * 100_000])
def test_what_is_no_scenario_at_all_is_refused(tmp_path: Path, content: bytes) -> None:
    file = tmp_path / "file"
    file.write_bytes(content)
    with pytest.raises(ConfigError, match="is no scenario"):
        from_json(file.read_text())
