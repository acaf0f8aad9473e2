"""The pytest plugin: with `--hybrid-kv-target URL` each probe of an engine is a test item.

Without the option nothing is imported.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from hybrid_kv.check.probes.registry import Probe
    from hybrid_kv.check.targets.target import Kind


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the engine, and the model that it serves."""
    group = parser.getgroup("hybrid-kv", "probes of an engine's cache")
    group.addoption(
        "--hybrid-kv-target",
        metavar="URL|ENGINE",
        help="Probe this engine: hybrid-kv check.",
    )
    group.addoption(
        "--hybrid-kv-model",
        metavar="FAMILY|FOLDER|HUB",
        help="The model that it serves; default: exact.",
    )
    group.addoption(
        "--hybrid-kv-python",
        metavar="PATH",
        help="The engine's Python; default: that in .venv-ENGINE.",
    )


@pytest.hookimpl(tryfirst=True)  # before -k chooses among the items
def pytest_collection_modifyitems(
    session: pytest.Session, config: pytest.Config, items: list[pytest.Item]
) -> None:
    """Add each probe, in the plainest setting and each level of the engine's prefix cache.

    With the exact model, in the settings that the engine names for it.

    Raises:
        pytest.UsageError: the engine or its model is not known, or a package is missing.
    """
    target = config.getoption("--hybrid-kv-target")
    if target is None:
        return
    from hybrid_kv.check.probes.guarded import runs_in
    from hybrid_kv.check.probes.registry import load_probes
    from hybrid_kv.check.probes.run import default_matrix
    from hybrid_kv.check.targets.kinds import for_model, kind_of, model_folder
    from hybrid_kv.errors import HybridKVError

    try:
        python = config.getoption("--hybrid-kv-python")
        model = config.getoption("--hybrid-kv-model")
        kind = kind_of(target, python)
        if model is None and not kind.inside:
            raise HybridKVError(
                "--hybrid-kv-target needs --hybrid-kv-model: the family, folder or hub id that it "
                "has"
            )
        model = model or "exact"
        weights = "exact" if model.startswith("exact") else "random"
        if weights == "exact":
            with model_folder(model) as folder:
                kind = for_model(kind, folder)
        thorough = weights == "random"
        again = f"hybrid-kv check {target} --model {model}"
        again += f" --python {python}" if python else ""
        for settings in default_matrix(kind, "quick"):
            probes = [
                probe
                for probe in load_probes()
                if runs_in(probe, kind, settings, weights, thorough)
            ]
            setting = Setting.from_parent(
                session,
                kind=partial(kind_of, target, python),
                model=model,
                settings=settings,
                probes=probes,
                again=again,
            )
            items += setting.collect()
    except (HybridKVError, ModuleNotFoundError) as error:
        raise pytest.UsageError(str(error)) from None


class Setting(pytest.Collector):
    """An engine in one setting, started for its first item and closed after its last.

    `again` is the command that reduces a failure.
    """

    def __init__(
        self,
        kind: Callable[[], Kind],
        model: str,
        settings: dict[str, str],
        probes: list[Probe],
        again: str,
        **given: Any,
    ) -> None:
        levels = ",".join(f"{factor}={level}" for factor, level in settings.items()) or "plain"
        super().__init__(name=f"hybrid-kv[{levels}]", **given)
        self.kind = kind
        self.model = model
        self.settings = settings
        self.probes = probes
        self.again = again

    def collect(self) -> list[Item]:
        return [Item.from_parent(self, name=probe.name, probe=probe) for probe in self.probes]

    def setup(self) -> None:
        from hybrid_kv.check.probes.guarded import Guarded
        from hybrid_kv.check.probes.known import name_known
        from hybrid_kv.check.probes.session import Outcome
        from hybrid_kv.check.targets.kinds import model_folder
        from hybrid_kv.check.targets.target import TargetError
        from hybrid_kv.errors import HybridKVError
        from hybrid_kv.threads import threads_for

        stack = ExitStack()
        self.addfinalizer(stack.close)
        try:
            folder = stack.enter_context(model_folder(self.model))
            stack.enter_context(threads_for(folder))
            self.guarded = Guarded(self.kind(), folder)
            stack.callback(self.guarded.close)
            self.engine = self.guarded.session(self.settings)
        except TargetError as error:
            start = Outcome("start", self.settings, "wrong", str(error))
            name_known(self.guarded.kind, self.guarded.version, start)
            if start.verdict == "known":
                pytest.xfail(start.detail)
            pytest.fail(start.detail, pytrace=False)
        except HybridKVError as error:
            pytest.fail(str(error), pytrace=False)
        stack.callback(self._close)

    def _close(self) -> None:
        self.engine.target.close()  # a probe may have started another one


class Item(pytest.Item):
    """A probe in its parent's setting.

    A void or inconclusive probe fails, too; a known failure is expected.
    """

    def __init__(self, probe: Probe, **given: Any) -> None:
        super().__init__(**given)
        self.probe = probe

    def runtest(self) -> None:
        setting = self.parent
        assert isinstance(setting, Setting)
        outcome = setting.engine.run(self.probe, setting.guarded.vocab_size)
        setting.guarded.hear(outcome)
        if outcome.verdict == "known":
            pytest.xfail(outcome.detail)
        if outcome.verdict == "not supported":
            pytest.skip(outcome.detail)
        if outcome.verdict != "right":
            problem = f"{outcome.verdict}: {outcome.detail}"
            again = f"{setting.again} -k '{self.name}'"
            pytest.fail(f"{problem}\nreduce it: {again}", pytrace=False)

    def reportinfo(self) -> tuple[Any, None, str]:
        return self.path, None, self.nodeid.lstrip(":")
