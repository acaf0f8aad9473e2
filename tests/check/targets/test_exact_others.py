"""The exact model inside transformers and mlx-lm answers as the oracle; planted bugs do not."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from pkgutil import resolve_name
from typing import Any

import pytest

from hybrid_kv.check.probes.judge import ExactJudge
from hybrid_kv.check.targets import remote
from hybrid_kv.check.targets.exact import ExactAnswers, write_exact_checkpoint
from hybrid_kv.check.targets.mlx import KIND
from hybrid_kv.check.targets.target import Ask, Target
from hybrid_kv.check.targets.transformers import Transformers
from hybrid_kv.config import ConfigError
from tests.check.targets.models import installed

Settings = dict[str, str]
FolderOf = Callable[[str], str]
Start = Callable[..., Target]

PROMPTS = [tuple(range(1, length)) for length in (31, 8, 2, 24)]
# What a plant adds behind mlx's worker, before it serves.
MLX_BUGS = {
    "padding enters the state": "cache.ArraysCache.make_mask = lambda self, N: None",
    "a row has its neighbour's state": (
        "extend = cache.ArraysCache.extend\n"
        "def swapped(self, other):\n"
        "    extend(self, other)\n"
        "    self.cache = [part[::-1] for part in self.cache]\n"
        "cache.ArraysCache.extend = swapped"
    ),
    "what is trimmed stays": "cache.KVCache.trim = lambda self, n: n",
}


@pytest.fixture(scope="module")
def folder_of(tmp_path_factory: pytest.TempPathFactory) -> FolderOf:
    def made(name: str) -> str:
        folder = tmp_path_factory.mktemp(name)
        write_exact_checkpoint(name, folder)
        return str(folder)

    return made


def verdicts(target: Target, folder: str) -> set[str]:
    """Of two turns, the second with the answers of the first."""
    judge, found, prompts = ExactJudge(folder), [], PROMPTS
    for _ in range(2):
        requests = [
            Ask(prompt, max_tokens=14 + i, step=i // 2 * 2) for i, prompt in enumerate(prompts)
        ]
        answers = target.ask(requests)
        found += [
            judge.judge(ask, one, None).verdict for ask, one in zip(requests, answers, strict=True)
        ]
        known = ExactAnswers(folder)
        prompts = [
            (*ask.prompt, *known.tokens(ask.prompt, ask.max_tokens), 5, 6) for ask in requests
        ]
    return set(found)


def test_transformers_refuses_drafts_and_pages_for_states(folder_of: FolderOf) -> None:
    for settings, words in (
        ({"spec": "lookup3"}, "stateful models"),
        ({"batch": "continuous"}, "layer type: linear"),
    ):
        with pytest.raises(ConfigError, match=words):
            Transformers(folder_of("mixed"), settings)


@pytest.mark.parametrize(
    ("place", "plant", "model", "settings"),
    [
        (
            "transformers.cache_utils.LinearAttentionLayer.crop",
            lambda crop: lambda self, n: crop(self, 0),
            "short_conv",
            {"spec": "lookup3"},
        ),
        (
            "hybrid_kv.check.targets.transformers_exact.create_recurrent_attention_mask",
            lambda _: lambda **_: None,
            "mixed",
            {"batch": "left"},
        ),
    ],
    ids=["a window is not cropped", "padding enters the state"],
)
def test_a_bug_in_transformers_is_wrong(
    place: str,
    plant: Callable[[Any], Callable[..., Any]],
    model: str,
    settings: Settings,
    folder_of: FolderOf,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(place, plant(resolve_name(place)))
    assert "wrong" in verdicts(Transformers(folder := folder_of(model), settings), folder)


@pytest.fixture
def started(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> Start:
    """mlx-lm with a bug planted in its worker; empty: none."""
    installed("mlx", "mlx_lm")

    def start(folder: str, settings: Settings, bug: str = "") -> Target:
        workers = shutil.copytree(remote.WORKERS, tmp_path / "workers")
        worker = workers / "mlx.py"
        text, serve = worker.read_text(), "    pipe.serve(MlxEngine())\n"
        plant = ["from mlx_lm.models import cache", *MLX_BUGS[bug].splitlines()] if bug else []
        assert serve in text
        worker.write_text(text.replace(serve, "".join(f"    {line}\n" for line in plant) + serve))
        monkeypatch.setattr(remote, "WORKERS", workers)
        target = KIND.start(folder, settings)
        request.addfinalizer(target.close)
        return target

    return start


@pytest.mark.parametrize(
    ("engine", "model", "settings"),
    [
        ("transformers", "kda", {"prefix": "kept", "cache": "static"}),
        ("transformers", "mixed", {"batch": "left", "cache": "static", "chunk": "17"}),
        ("transformers", "short_conv", {"spec": "draft2"}),
        ("transformers", "short_conv", {"spec": "lookup3"}),
        ("transformers", "attention", {"batch": "continuous", "chunk": "17"}),
        ("mlx", "kda", {"prefix": "saved", "chunk": "17"}),
        ("mlx", "mixed", {"batch": "together", "prefix": "lru", "chunk": "17"}),
        ("mlx", "attention", {"spec": "draft2"}),
    ],
)
def test_answers_are_the_oracles(
    engine: str, model: str, settings: Settings, folder_of: FolderOf, request: pytest.FixtureRequest
) -> None:
    folder = folder_of(model)
    start = Transformers if engine == "transformers" else request.getfixturevalue("started")
    target = start(folder, settings)
    assert verdicts(target, folder) == {"right"}
    counters = target.counters()
    assert 0 < counters["accepted"] < counters["drafts"] or "spec" not in settings
    assert counters["hits"] > 0 or "prefix" not in settings


@pytest.mark.parametrize(
    ("bug", "model", "settings"),
    [
        ("padding enters the state", "mixed", {"batch": "together"}),
        ("a row has its neighbour's state", "mixed", {"batch": "together"}),
        ("what is trimmed stays", "attention", {"spec": "draft2"}),
    ],
)
def test_a_bug_in_mlx_is_wrong(
    bug: str, model: str, settings: Settings, folder_of: FolderOf, started: Start
) -> None:
    assert "wrong" in verdicts(started(folder := folder_of(model), settings, bug), folder)
