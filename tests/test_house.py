"""Everything that has a package here can be added as one file and one line, and the quick guard then runs it.

Each test writes a module `toy` into an empty folder. The line is its import, in a script that is the command line of
this project otherwise: what an import adds is there in the guard's processes, too.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from textwrap import dedent
from typing import Any

import pytest

from hybrid_kv.results import read_rows

ROOT = Path(__file__).resolve().parents[1]
SCRIPT = """
from {module} import main
from hybrid_kv.errors import run_command

{line}

if __name__ == "__main__":
    run_command(main)
"""
# A few rows of the design that have drafts. The layout is played in all of its rows, and by workers.
FEW = ("--only", "drafts=boundary", "--jobs", "1")
Guard = Callable[..., list[dict[str, Any]]]


def example(page: str) -> str:
    """The first module of Python in a page of the documentation."""
    return (ROOT / "docs" / page).read_text(encoding="utf-8").split("```python\n")[1].split("```")[0]


@pytest.fixture
def command(tmp_path: Path) -> Callable[..., subprocess.CompletedProcess[str]]:
    """Writes the toy, adds the line and runs a command in the folder of both."""

    def run(
        toy: str, *arguments: str, name: str = "toy", line: str = "import toy", module: str = "hybrid_kv.cli"
    ) -> subprocess.CompletedProcess[str]:
        (tmp_path / f"{name}.py").write_text(dedent(toy))
        (tmp_path / "script.py").write_text(SCRIPT.format(module=module, line=line))
        path = os.pathsep.join([str(ROOT), *sys.path])
        return subprocess.run(
            [sys.executable, "script.py", *arguments], cwd=tmp_path, env={**os.environ, "PYTHONPATH": path},
            capture_output=True, text=True, check=False,
        )  # fmt: skip

    return run


@pytest.fixture
def guard(command: Callable[..., subprocess.CompletedProcess[str]]) -> Guard:
    """The checks of a quick guard that knows a toy and keeps to the given options; all of them passed."""

    def run(toy: str, *arguments: str) -> list[dict[str, Any]]:
        ran = command(toy, "guard", "--quick", "--json", *arguments)
        assert ran.returncode == 0, ran.stderr[-2000:] + ran.stdout[-5000:]
        checks: list[dict[str, Any]] = json.loads(ran.stdout)["checks"]
        return checks

    return run


def drawn(checks: list[dict[str, Any]]) -> dict[str, int]:
    """How often each pattern happened in exact traffic that had a toy in every engine, in all pairs of it."""
    unlike, settings = checks
    assert unlike["name"] == "wrong tokens, exact model" and unlike["n"] > 80
    assert settings["name"] == "pairs and triples of settings covered" and settings["value"] > 7
    return dict(settings["metrics"]["seen"])


SCHEME = """
    from hybrid_kv.attention.rollback import SCHEMES, Recompute, RecomputeSpec
    from hybrid_kv.kernels.recompute import shortest_ring_len
    from hybrid_kv.sanitizer.rules_rollback import RULES, RecomputeRules


    class EagerSpec(RecomputeSpec):
        scheme = "eager"


    class Eager(Recompute):
        "Writes the state in nearly every step: the ring holds the tokens of two."
        spec_type = EagerSpec

        @staticmethod
        def memory(cache, num_speculative_tokens, is_async, specs):
            longest = 1 + num_speculative_tokens
            return EagerSpec(num_speculative_tokens, shortest_ring_len(longest), longest if is_async else 0)


    SCHEMES["eager"], RULES["eager"] = Eager, RecomputeRules
"""

SIZES = {"heads": 2, "head_dim": 4, "state": 3, "groups": 1, "taps": 4, "hidden_size": 8, "vocab_size": 101}
TINY = {**SIZES, "num_hidden_layers": 2}
WRITER = """
    from types import SimpleNamespace

    import torch
    from transformers import AutoConfig, AutoModelForCausalLM, PretrainedConfig, PreTrainedModel

    from hybrid_kv.models.config_file import ConfigFile
    from hybrid_kv.models.shapes import model_shape


    class TinyConfig(PretrainedConfig):
        model_type = "tiny_mamba"


    class TinyForCausalLM(PreTrainedModel):
        config_class = TinyConfig

        def __init__(self, config):
            super().__init__(config)
            file = ConfigFile({**config.to_dict(), "dtype": "float32"}, "config.json")
            for name, part in Tiny(file, model_shape(file).layers).named_children():
                self.add_module(name, part)
            for weight in self.parameters():
                nn.init.ones_(weight)
            self.post_init()

        def forward(self, input_ids, use_cache):
            x = self.embed(input_ids[0])
            for norm, mixer in zip(self.norms, self.mixers):
                gate, conv_in, dt = mixer.in_proj(norm(x)).split(mixer.splits, dim=-1)
                seen = F.pad(conv_in, (0, 0, mixer.kernel - 1, 0)).unfold(0, mixer.kernel, 1)
                conv_out = F.silu((seen * mixer.conv_weight).sum(-1) + mixer.conv_bias)
                heads, B, C = mixer._parts(conv_out, conv_out.dtype)
                B, C = (part.repeat_interleave(mixer.num_heads // mixer.groups, 1).unsqueeze(2) for part in (B, C))
                dt = F.softplus(dt + mixer.dt_bias).unsqueeze(-1)
                decay, state, outputs = (-dt * mixer.A_log.exp()[:, None]).exp(), 0, []
                for t in range(len(x)):
                    state = decay[t][..., None] * state + (dt[t] * heads[t]).unsqueeze(-1) * B[t]
                    outputs.append((state * C[t]).sum(-1) + mixer.D[:, None] * heads[t])
                x = x + mixer.out_proj(mixer.norm(torch.stack(outputs).flatten(1), gate))
            return SimpleNamespace(logits=upcast(F.linear(x, self.embed.weight))[None])


    AutoConfig.register("tiny_mamba", TinyConfig)
    AutoModelForCausalLM.register(TinyConfig, TinyForCausalLM)
"""


def test_a_mode_is_one_file_and_one_line(guard: Guard) -> None:
    seen = drawn(guard(example("adding-a-mode.md"), "--only", "mode=prompts only", *FEW))
    assert seen["hit_prompts only"] and seen["accepted_draft"] and seen["preemption"] and seen["sanitized"]


def test_an_rollback_scheme_is_one_file_and_one_line(guard: Guard) -> None:
    seen = drawn(guard(SCHEME, "--only", "scheme=eager", *FEW))
    assert seen["accepted_draft"] and seen["rejected_draft"] and seen["preemption"] and seen["sanitized"]


def test_a_layout_of_states_is_one_file_and_one_line(guard: Guard) -> None:
    toy = """
        from hybrid_kv.models.exact import PARTS

        PARTS["Q"] = (2, 3)  # windows, states
    """
    # Eight rows have it; with some seeds their host tiers never have what a prompt wants.
    seen = drawn(guard(toy, "--only", "layers=Q*", "--seed", "2"))
    assert seen["hit_align"] and seen["hit_all"] and seen["accepted_draft"] and seen["offload_hit"]


def test_a_family_is_one_file_and_one_line(guard: Guard) -> None:
    """The family of the documentation, which transformers must know too before it can write a checkpoint."""
    toy = example("adding-a-family.md").replace("build=Tiny,", f"build=Tiny, sizes={{'tiny': {TINY}}},") + dedent(
        WRITER
    )
    result, distance = guard(toy, "--only", "family=tiny_mamba")
    assert distance["name"] == "distance from transformers, tiny_mamba" and 0 < distance["value"] < 2e-5
    assert result["name"] == "largest logit difference, tiny_mamba" and result["n"] > 1000
    assert all(result["metrics"][what] for what in ("cached_tokens", "accepted", "preemptions"))


def test_a_check_is_one_file_and_one_line(guard: Guard) -> None:
    (result,) = guard(example("adding-a-check.md"), "-k", "pool")
    assert (result["section"], result["n"]) == ("pool", 100)


def test_a_benchmark_is_one_file_and_one_line(
    command: Callable[..., subprocess.CompletedProcess[str]], tmp_path: Path
) -> None:
    """Its guard is the check of each case, before and after it is timed: a wrong result has no time."""
    suite = example("adding-a-benchmark.md")
    added = {"name": "sums", "line": "import bench; bench.__path__.append('.')", "module": "bench.__main__"}
    ran = command(suite, "--quick", "--suite", "sums", "--out", "rows.csv", **added)
    assert ran.returncode == 0, ran.stderr
    (row,) = read_rows(tmp_path / "rows.csv").to_dict("records")
    assert (row["suite"], row["benchmark"]) == ("sums", "total") and "checked_after" in row["params"]
    wrong = suite.replace("// 2", "// 3")
    ran = command(wrong, "--quick", "--suite", "sums", **added)
    assert (ran.returncode, ran.stderr) == (1, "error: sums/total[count=10]: another total; nothing was timed\n")
