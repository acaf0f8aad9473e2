"""Everything with a package here can be added by one file and one line, and the guard runs it.

Each toy is a module of its own in an empty folder. Its line is its import, in a script that is the
command line of this project otherwise: what an import adds is there in the guard's processes, too.
One process runs all of it: that of the imports and of the traffic's design would be most of the
time of several.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from textwrap import dedent
from typing import Any, NamedTuple

import pytest

from hybrid_kv.measure.results import read_rows

ROOT = Path(__file__).resolve().parents[1]
SCRIPT = """
import io, json, sys
from contextlib import redirect_stderr, redirect_stdout
from hybrid_kv.cli import main as guard
from hybrid_kv.errors import run_command

LINES

def ran(main, *arguments):
    sys.argv[1:] = arguments
    with redirect_stdout(io.StringIO()) as out, redirect_stderr(io.StringIO()) as err:
        try:
            run_command(main)
        except SystemExit as left:
            return left.code, out.getvalue(), err.getvalue()

if __name__ == "__main__":
    from bench.__main__ import main as bench
    runs = json.load(open("runs.json"))
    results = {name: ran(*(globals()[main], *rest)) for name, (main, *rest) in runs.items()}
    json.dump(results, open("ran.json", "w"))
"""
GUARD = ("guard", "guard", "--quick", "--json", "--jobs")
BENCH = ("bench", "--quick", "--suite")
RUNS = {
    # The rows of the design that have both.
    "mode and scheme": (*GUARD, "1", "--only", "mode=prompts only", "--only", "scheme=eager"),
    # Every eighth row of the design has the sanitizer on, none of those above: the scheme's own
    # rules run here.
    "scheme": (*GUARD, "1", "--only", "scheme=eager"),
    # The one row with an offload tier has a large pool: of this seed it loses a block, and loads
    # it.
    "layout": (*GUARD, "1", "--seed", "2", "--only", "layers=Q*"),
    "family": (*GUARD, "1", "--only", "family=tiny_mamba"),
    # Two sections, so that each runs in a process of its own.
    "check": (*GUARD, "2", "-k", "pool", "-k", "eviction"),
    "benchmark": (*BENCH, "sums", "--out", "rows.csv"),
    "wrong benchmark": (*BENCH, "wrong_sums"),
}


class Ran(NamedTuple):
    """How one command ended."""

    code: int
    out: str
    err: str

    @property
    def checks(self) -> list[dict[str, Any]]:
        """Of a guard, all of which passed."""
        assert self.code == 0, self.err[-2000:] + self.out[-5000:]
        checks: list[dict[str, Any]] = json.loads(self.out)["checks"]
        return checks


def example(page: str) -> str:
    """The first module of Python in a page of the documentation."""
    return (
        (ROOT / "docs" / page).read_text(encoding="utf-8").split("```python\n")[1].split("```")[0]
    )


def drawn(checks: list[dict[str, Any]]) -> dict[str, int]:
    """Return how often each pattern occurred in exact traffic with a toy in every engine."""
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
            late = longest if is_async else 0
            return EagerSpec(num_speculative_tokens, shortest_ring_len(longest), late)


    SCHEMES["eager"], RULES["eager"] = Eager, RecomputeRules
"""

SIZES = {
    "heads": 2,
    "head_dim": 4,
    "state": 3,
    "groups": 1,
    "taps": 4,
    "hidden_size": 8,
    "vocab_size": 101,
}
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
                per_group = mixer.num_heads // mixer.groups
                B, C = (part.repeat_interleave(per_group, 1).unsqueeze(2) for part in (B, C))
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


LAYOUT = """
    from hybrid_kv.models.exact import PARTS

    PARTS["Q"] = (2, 3)  # windows, states
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the toys lie, `RUNS` have run and `ran.json` says how they ended."""
    folder = tmp_path_factory.mktemp("toys")
    family = example("adding-a-family.md").replace(
        "build=Tiny,", f"build=Tiny, sizes={{'tiny': {TINY}}},"
    )
    benchmark = example("adding-a-benchmark.md")
    toys = {
        "mode": example("adding-a-mode.md"),
        "scheme": dedent(SCHEME),
        "layout": dedent(LAYOUT),
        "family": family + dedent(WRITER),
        "check": example("adding-a-check.md"),
    }
    lines = [
        "import bench as package; package.__path__.append('.')",
        *(f"import toy_{name}" for name in toys),
    ]
    lines[-2] = (
        # of transformers, which no process of the guard needs here
        f"if __name__ == '__main__': {lines[-2]}"
    )
    files = {f"toy_{name}": text for name, text in toys.items()}
    files |= {
        "sums": benchmark,
        "wrong_sums": benchmark.replace("// 2", "// 3").replace('"sums"', '"wrong_sums"'),
    }
    for name, text in (files | {"script": SCRIPT.replace("LINES", "\n".join(lines))}).items():
        (folder / f"{name}.py").write_text(text)
    (folder / "runs.json").write_text(json.dumps(RUNS))
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), *sys.path])}
    done = subprocess.run(
        [sys.executable, "script.py"],
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return folder


@pytest.fixture
def ran(folder: Path) -> dict[str, Ran]:
    """How each of `RUNS` ended."""
    return {
        name: Ran(*values) for name, values in json.loads((folder / "ran.json").read_text()).items()
    }


def test_a_mode_and_a_rollback_scheme_are_one_file_and_one_line_each(ran: dict[str, Ran]) -> None:
    seen = drawn(ran["mode and scheme"].checks)
    assert seen["hit_prompts only"] and seen["accepted_draft"] and seen["rejected_draft"]
    assert seen["preemption"]
    assert drawn(ran["scheme"].checks)["sanitized"]


def test_a_layout_of_states_is_one_file_and_one_line(ran: dict[str, Ran]) -> None:
    seen = drawn(ran["layout"].checks)
    assert seen["hit_align"] and seen["hit_all"] and seen["accepted_draft"] and seen["offload_hit"]


def test_a_family_is_one_file_and_one_line(ran: dict[str, Ran]) -> None:
    """The family of the documentation; transformers must know it before it can be written."""
    result, distance, narrow = ran["family"].checks
    assert narrow["name"] == "states in float32 beside bfloat16, tiny_mamba" and narrow["n"] == 4
    assert (
        distance["name"] == "distance from transformers, tiny_mamba"
        and 0 < distance["value"] < 2e-5
    )
    assert result["name"] == "largest logit difference, tiny_mamba" and result["n"] > 1000
    assert all(result["metrics"][what] for what in ("cached_tokens", "accepted", "preemptions"))


def test_a_check_is_one_file_and_one_line(ran: dict[str, Ran]) -> None:
    found = {result["section"]: result["n"] for result in ran["check"].checks}
    assert found["pool"] == 100 and found.keys() == {"pool", "eviction"}


def test_a_benchmark_is_one_file_and_one_line(ran: dict[str, Ran], folder: Path) -> None:
    """The guard checks each case before and after it is timed: a wrong result has no time."""
    assert ran["benchmark"].code == 0, ran["benchmark"].err
    (row,) = read_rows(folder / "rows.csv").to_dict("records")
    assert (row["suite"], row["benchmark"]) == ("sums", "total") and "checked_after" in row[
        "params"
    ]
    wrong = ran["wrong benchmark"]
    said = "error: wrong_sums/total[count=10]: another total; nothing was timed\n"
    assert (wrong.code, wrong.err) == (1, said)
