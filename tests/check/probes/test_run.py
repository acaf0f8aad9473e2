from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from hybrid_kv.check.probes.guarded import Guarded
from hybrid_kv.check.probes.oracle import Oracle
from hybrid_kv.check.probes.run import default_matrix, matrix_of
from hybrid_kv.check.targets import ours
from hybrid_kv.config import ConfigError
from hybrid_kv.models.random_checkpoint import write_checkpoint
from tests.check.probes.toy import ToyKind, guard


def test_all_combinations_of_one_text_after_another_with_the_plainest_engine_first() -> None:
    assert matrix_of(ToyKind(), ["prefix=on", "prefix=on,off chunk=whole,no"]) == [
        {},
        {"prefix": "on"},
        {"prefix": "on", "chunk": "whole"},
        {"prefix": "on", "chunk": "no"},
        {"prefix": "off", "chunk": "no"},
    ]


def test_by_default_each_level_is_met_once_with_the_cache_on() -> None:
    assert default_matrix(ToyKind()) == [
        {},
        {"prefix": "on"},
        {"prefix": "on", "chunk": "no"},
        {"prefix": "on", "chunk": "broken"},
    ]
    assert default_matrix(ToyKind(), "quick") == [{}, {"prefix": "on"}]


def test_levels_that_differ_in_a_number_are_all_met_by_a_long_guard_alone() -> None:
    kind = ToyKind()
    kind.factors = {"spec": ("none", "ngram3", "mtp3", "mtp1"), "chunk": ("whole", "17", "100")}
    named = [{"spec": "ngram3"}, {"spec": "mtp3"}, {"chunk": "17"}]
    assert default_matrix(kind) == [{}, *named]
    assert default_matrix(kind, "long") == [
        {},
        *named[:2],
        {"spec": "mtp1"},
        named[2],
        {"chunk": "100"},
    ]


def test_a_probe_of_drafts_runs_with_drafts_and_in_the_plainest_setting(
    guarded: Callable[..., Guarded],
) -> None:
    some = guarded()
    some.kind.factors["spec"] = ("none", "ngram3")
    cells = [{}, {"prefix": "on"}, {"spec": "ngram3"}]
    settings = [
        dict(one.settings) for one in guard(some, cells, ["drafts"]) if one.probe == "drafts"
    ]
    assert settings == [{}, {"spec": "ngram3"}]


def test_what_excludes_the_cache_is_met_without_it() -> None:
    kind = ToyKind()
    kind.apart = ("chunk",)
    assert default_matrix(kind) == [{}, {"prefix": "on"}, {"chunk": "no"}, {"chunk": "broken"}]


@pytest.mark.parametrize(
    "text, said",
    [
        ("prefix", "prefix=: use one of off, on"),
        ("size=1", "toy has prefix, chunk"),
        ("prefix=1", "off, on"),
    ],
)
def test_an_unknown_factor_or_level_is_refused(text: str, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        matrix_of(ToyKind(), [text])


def test_a_setting_that_does_not_start_is_an_outcome(guarded: Callable[..., Guarded]) -> None:
    found = guard(guarded(), [{}, {"chunk": "no"}, {"chunk": "broken"}], ["repeat"])
    assert [(one.probe, one.verdict) for one in found] == [
        ("alone", "right"),
        ("repeat", "right"),
        ("start", "not supported"),
        ("start", "wrong"),
    ]


def test_by_default_an_engine_runs_in_the_first_dtype_that_it_takes(
    guarded: Callable[..., Guarded],
) -> None:
    some = guarded()
    some.kind.factors = {"prefix": ("off", "on"), "dtype": ("float8", "float32", "bfloat16")}
    found = guard(some, select=["repeat"])
    assert [(one.probe, one.verdict, one.settings) for one in found] == [
        ("start", "not supported", {}),
        ("alone", "right", {"dtype": "float32"}),
        ("repeat", "right", {"dtype": "float32"}),
        ("alone", "right", {"dtype": "float32", "prefix": "on"}),
        ("repeat", "right", {"dtype": "float32", "prefix": "on"}),
    ]


def test_an_engine_that_supports_nothing_has_not_passed(guarded: Callable[..., Guarded]) -> None:
    with pytest.raises(ConfigError, match="no setting is supported: toy, start: no chunks here"):
        guard(guarded(), [{"chunk": "no"}])


def test_once_the_plain_engine_errs_alone_the_rest_is_held_against_itself(
    guarded: Callable[..., Guarded],
) -> None:
    found = guard(guarded(bug="a tie"), [{}, {"prefix": "on"}])
    assert [one.probe for one in found if one.verdict == "wrong"] == ["alone"]


def test_this_engine_is_right_by_the_real_oracle(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ours, "MAX_MODEL_LEN", 256)  # the longest prompts find out what a block has
    write_checkpoint("lfm2", tmp_path)
    found = guard(Guarded(ours.KIND, str(tmp_path)), [{}, {"prefix": "align"}], ["salts"])
    assert {(one.probe, one.verdict) for one in found} == {
        ("alone", "right"),
        ("salts isolate", "right"),
    }
    assert found[-1].moved["cached"] > 0


def test_what_transformers_does_not_read_is_refused(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "no such family"}')
    with pytest.raises(ConfigError, match="transformers does not load"):
        Oracle(tmp_path)
