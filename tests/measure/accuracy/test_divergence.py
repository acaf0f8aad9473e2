"""Cached and uncached log-probabilities: exact in float64, with real bugs, over HTTP."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from hybrid_kv import LLM
from hybrid_kv.check.ci import exit_code
from hybrid_kv.check.guard_model import FOLDER
from hybrid_kv.check.targets.ours import Ours
from hybrid_kv.check.targets.target import Answer, Ask
from hybrid_kv.config import ConfigError
from hybrid_kv.engine import runner
from hybrid_kv.measure.accuracy import divergence
from hybrid_kv.measure.accuracy.divergence import Divergence, Passage, measure
from hybrid_kv.measure.results import read_rows
from tests.check.serve.conftest import OPTIONS, served
from tests.cli.run import printed, refused
from tests.support.acceptance import accepts_everything

ENGINE = {"device": "cpu", "max_model_len": 640, "mamba_cache_mode": "align"}
DOUBLE = {"dtype": "float64", "mamba_ssm_cache_dtype": "float64"}
PROMPTS = [tuple((3 * i + k) % 98 for k in range(200)) for i in range(10)]


def measured(target: Ours, **more: Any) -> Divergence:
    return measure(target, PROMPTS, "ids", {}, max_tokens=24, **more)


def ours(**options: Any) -> Ours:
    return Ours("", {}, LLM(str(FOLDER), **ENGINE, **options))


class Stale(Ours):
    """An engine whose cached states are spoiled before a hit, as a wrong copy leaves them."""

    def ask(self, requests: Sequence[Ask], preempt_every: int = 0) -> list[Answer]:
        if requests[0].logprobs and not requests[0].salt:
            for parts in self.llm.runner.views.values():
                for part in parts if isinstance(parts, tuple) else ():
                    part.mul_(0.5)
        return super().ask(requests, preempt_every)


def passages(kls: Sequence[float], cached: int = 64, unlikely: int = 0) -> tuple[Passage, ...]:
    return tuple(Passage(64, 128, cached, kl, unlikely) for kl in kls)


def made(warm: Sequence[float], cold: Sequence[float], **changes: Any) -> Divergence:
    return Divergence("gsm8k", {}, passages(cold, cached=0), passages(warm), **changes)


def test_in_float64_it_is_exactly_zero() -> None:
    found = measured(ours(**DOUBLE))
    assert found.kl == found.noise == 0.0 and found.unlikely_share == 0 and found.hit_rate > 0.3
    assert [one.word for one in found.verdicts] == ["ok", "ok"] and found.num_tokens == 240


def test_rounding_is_as_large_without_the_cache() -> None:
    found = measured(ours(dtype="bfloat16"))
    assert 0 < found.noise < 1e-3 and found.kl > 0 and found.verdicts[0].word == "ok"


def test_states_that_the_cache_spoils_are_seen() -> None:
    target = Stale("", {}, LLM(str(FOLDER), **ENGINE, **DOUBLE))
    found = measured(target)
    assert found.noise == 0 and found.kl > 1e-4
    assert (
        found.verdicts[0].word == "failed"
        and "the cache changes what the model says" in found.verdicts[0].message
    )


def test_a_verifier_that_accepts_wrong_drafts_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runner, "verify", accepts_everything)
    found = measured(ours(speculative_method="mtp", num_speculative_tokens=3))
    assert found.unlikely_share > 0.02 and found.verdicts[1].word == "failed"
    assert "greedy decoding did not choose them" in found.verdicts[1].message


def test_without_hits_it_is_void() -> None:
    found = Divergence("gsm8k", {}, passages([0.0] * 8, cached=0), passages([0.0] * 8, cached=0))
    assert (
        exit_code(found.verdicts) == 3
        and "no token came from the prefix cache" in found.verdicts[0].message
    )
    warm_alone = Divergence("gsm8k", {}, passages([0.0] * 8), passages([0.0] * 8))
    assert (
        exit_code(warm_alone.verdicts) == 3
        and "should be cold read 512" in warm_alone.verdicts[0].message
    )


def test_the_rule() -> None:
    noise = np.random.default_rng(0).uniform(0.8e-3, 1.2e-3, 32)
    # a little more, whatever p says
    assert made((noise * 1.5).tolist(), noise.tolist()).verdicts[0].word == "ok"
    assert made((noise * 3).tolist(), noise.tolist()).verdicts[0].word == "failed"
    # what float32 rounds is no error, however regular
    assert made((noise * 3e-9).tolist(), (noise * 1e-9).tolist()).verdicts[0].word == "ok"
    assert made((noise * 3e-6).tolist(), [0.0] * 32).verdicts[0].word == "failed"
    one_large = [*noise[:-1], 1.0]
    assert made(one_large, noise.tolist()).p > 0.01  # one prompt of 32 proves nothing …
    # … unless there is a limit
    assert made(one_large, noise.tolist(), max_kl=0.01).verdicts[0].word == "failed"
    broken = dataclasses.replace(made([0.0] * 8, [0.0] * 8), warm=passages([0.0] * 8, unlikely=1))
    assert broken.verdicts[1].word == "failed" and broken.rows()[2].verdict == "fail"


def test_false_alarms_are_as_rare_as_claimed() -> None:
    rng = np.random.default_rng(0)
    p_values = [made(*rng.exponential(1e-3, (2, 12)).tolist()).p for _ in range(200)]
    assert sum(p <= divergence.ALPHA for p in p_values) <= 7


@pytest.mark.parametrize(
    ("lacks", "text"),
    [
        ({"score"}, "it scores a prompt"),
        ({"cached"}, "it says how much it cached"),
        ({"salt", "reset"}, "it keeps a request from the cache"),
    ],
)
def test_an_engine_that_cannot_show_it_is_refused(lacks: set[str], text: str) -> None:
    target = ours()
    target.can = target.can - lacks
    with pytest.raises(ConfigError, match=f"target ours: there is no sign that {text}"):
        measured(target)


def test_a_reset_serves_where_there_are_no_salts() -> None:
    target = ours(**DOUBLE)
    target.can = target.can - {"salt"}
    found = measured(target)
    assert found.kl == found.noise == 0 and found.hit_rate > 0.3
    assert not any(one.num_cached_tokens for one in found.cold)


def test_too_few_prompts_are_refused() -> None:
    with pytest.raises(
        ConfigError, match="0 of 10 prompts fit twice, with their answers, into the 640 tokens"
    ):
        measure(ours(), PROMPTS, "ids", {}, max_tokens=300)


def test_over_http_on_the_command_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    options = {**OPTIONS, **DOUBLE, "mamba_cache_mode": "align", "max_model_len": 2048}
    given = ["accuracy", "divergence", "--limit", 8, "--max-tokens", 8, "--results", tmp_path]
    with served(LLM(str(FOLDER), **options)) as server:
        out = printed(capsys, *given, "--target", server.url)
    assert (
        "8 prompts, 64 forced tokens; " in out
        and "cached log-probabilities: ok: KL 0 per token" in out
    )
    rows = read_rows(tmp_path / "accuracy.csv").set_index("metric")
    assert rows["value"].to_dict() == {"cached_kl": 0.0, "uncached_kl": 0.0, "unlikely_tokens": 0.0}
    assert rows["verdict"].to_dict() == {
        "cached_kl": "pass",
        "uncached_kl": "",
        "unlikely_tokens": "pass",
    }
    assert "7 of 7 prompts fit twice" in refused(capsys, *given[:3], 7, "--results", tmp_path)
