"""The flags of vLLM's recipes for hybrid models: planned, and run by this engine.

    python -m bench.recipes [-k Kimi] [--page docs/recipes.md]

`bench/recipes.yaml` has each recipe's flags as vLLM spells them. `hybrid-kv plan --vllm-flags` gets
them with a config.json of the model's size. Then two engines get what they say of a cache, with
smaller blocks and units: the exact model with the same kinds of layers, whose tokens an oracle
knows, and a tiny checkpoint of the family, whose tokens are those of each request alone, without
a cache and without drafts. Prompts begin alike, come again and are preempted. The exit code is 1
where a recipe is refused, a token is another one, or nothing was cached, drafted or preempted.
"""

from __future__ import annotations

import io
import json
import random
import re
import sys
from collections.abc import Iterator, Sequence
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import dataclass, fields
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import yaml

from bench.harness.arguments import ArgumentParser
from hybrid_kv.cache.ranks import Ranks
from hybrid_kv.check.guard.exactness import preempting
from hybrid_kv.check.guard.play import play
from hybrid_kv.check.guard.scenario import Disturbance, Scenario, ScriptedProposer
from hybrid_kv.cli import main as main_of_commands
from hybrid_kv.cli.vllm_flags import VLLMFlags
from hybrid_kv.engine.llm import LLM, RequestOutput
from hybrid_kv.errors import CheckFailedError, ConfigError, run_command
from hybrid_kv.files import read_text, write_whole
from hybrid_kv.models.config_file import ConfigFile
from hybrid_kv.models.exact import BLOCK_HEADS, ExactConfig
from hybrid_kv.models.random_checkpoint import write_checkpoint
from hybrid_kv.models.shapes import has_head
from hybrid_kv.sampling import SamplingParams

FILE = Path(__file__).with_suffix(".yaml")
BLOCK, UNIT = 16, 4  # tokens, of the engines' blocks and of their hits inside a block
MAX_MODEL_LEN = 128
PREEMPT_EVERY = 5  # steps
_OF_STATES = {
    "dtype",
    "kv_cache_dtype",
    "mamba_ssm_cache_dtype",
    "enable_mamba_cache_stochastic_rounding",
    "mamba_cache_philox_rounds",
}
PARAMS = SamplingParams(max_tokens=16, ignore_eos=True)
_TABLE = re.compile(r"(<!-- recipes -->\n).*?(<!-- /recipes -->)", re.DOTALL)


@dataclass(frozen=True)
class Recipe:
    """The flags of one recipe, and what stands for its model here.

    Attributes:
        flags: of `vllm serve`.
        shape: a config.json.
        family: of a tiny checkpoint.
        layers: of the exact model, without a head for drafts.
        stand_in: what of the model these do not have; empty: nothing.
    """

    model: str
    flags: str
    shape: dict[str, Any]
    family: str
    layers: str
    stand_in: str = ""


@dataclass(frozen=True)
class Ran:
    """What an engine made of a recipe.

    Attributes:
        num_right: requests with the right tokens.
        problem: what is wrong, refused, or did not happen; empty if nothing is.
    """

    num_requests: int = 0
    num_right: int = 0
    problem: str = ""

    def __str__(self) -> str:
        count = f"{self.num_right} of {self.num_requests}"
        return f"{count}: {self.problem}" if self.problem else count


@dataclass(frozen=True)
class Planned:
    """What a plan made of a recipe.

    Attributes:
        block_size: tokens; 0 if it was refused.
        refused: why.
        notes: on flags that are left out, and on drafters.
    """

    block_size: int = 0
    refused: str = ""
    notes: tuple[str, ...] = ()

    def __str__(self) -> str:
        return self.refused or f"{self.block_size:,} tokens"


def read_recipes(file: Path = FILE) -> list[Recipe]:
    """Return all recipes, in the order of the file."""
    document = yaml.safe_load(read_text(file))
    return [
        Recipe(
            model["name"],
            f"{model.get('flags', '')} {more}".strip(),
            document["shapes"][model["shape"]],
            model["family"],
            model["layers"],
            model.get("stand_in", ""),
        )
        for model in document["models"]
        for more in model.get("recipes", [""])
    ]


def plan_of(recipe: Recipe, folder: Path) -> Planned:
    """Return what `hybrid-kv plan` says to a recipe; `folder` gets its config.json."""
    file = folder / "plan.json"
    file.write_text(json.dumps(recipe.shape), encoding="utf-8")
    out, errors = io.StringIO(), io.StringIO()
    with redirect_stdout(out), redirect_stderr(errors):
        try:
            main_of_commands(["plan", str(file), "--vllm-flags", recipe.flags, "--json"])
        except SystemExit as left:
            if left.code:
                return Planned(refused=errors.getvalue().strip())
    document = json.loads(out.getvalue())
    notes = [note for note in document["notes"] if "left out" in note or "drafter" in note]
    return Planned(document["block_size"], notes=tuple(notes))


def small_options(flags: str) -> dict[str, Any]:
    """Return engine options for flags: what they say of a cache, in small blocks on a CPU."""
    given = VLLMFlags.read(flags).options
    of_plan = {field.name for field in fields(Ranks)} | {"max_model_len", "num_blocks"}
    options = {name: value for name, value in given.items() if name not in of_plan}
    if "prefix_match_unit" in options:
        options["prefix_match_unit"] = UNIT
    return options | {
        "device": "cpu",
        "block_size": BLOCK,
        "max_model_len": MAX_MODEL_LEN,
        "max_num_seqs": 4,
        "max_num_batched_tokens": 48,
    }


def prompts_of(rng: random.Random, vocab_size: int) -> list[list[int]]:
    """Return prompts that part inside of blocks and on their ends, and one by itself."""

    def tokens(count: int) -> list[int]:
        return [rng.randrange(1, vocab_size) for _ in range(count)]

    shared = tokens(4 * BLOCK)
    lengths = (4 * BLOCK, 9), (2 * BLOCK, 21), (2 * BLOCK + 5, 12), (4 * BLOCK, 2), (0, 35)
    return [shared[:begin] + tokens(end) for begin, end in lengths]


def run_exact(recipe: Recipe) -> Ran:
    """Run a recipe on the exact model, under the rules of the guard's observer."""
    options = small_options(recipe.flags) | {"num_blocks": 120}
    options.pop("kv_cache_dtype", None)  # K and V of the exact model are integers
    layers, drafts = recipe.layers, "none"
    method = options.pop("speculative_method", None)
    if method == "dflash":
        layers += next(iter(BLOCK_HEADS))
        drafts = options["speculative_method"] = "dflash"
    elif method is not None:
        drafts = "mixed"
    prompts = prompts_of(random.Random(0), ExactConfig.vocab_size)
    scenario = Scenario(
        0,
        layers,
        options,
        prompts * 2,
        [PARAMS] * (2 * len(prompts)),
        (len(prompts), len(prompts)),
        drafts,
        (Disturbance("preempt", 3, PREEMPT_EVERY),),
    )
    differences, outputs = play(scenario)
    wrong = differences.wrong
    num_right = len(outputs) - len(wrong)
    problem = str(wrong[0]) if wrong else void_of(outputs, drafts != "none")
    return Ran(scenario.num_requests, num_right, problem)


def run_tiny(recipe: Recipe, folder: Path) -> Ran:
    """Run a recipe on the tiny checkpoint in a folder, and each of its requests alone.

    In float64, K and V as the flags say. States that are rounded wherever a step ends are others
    with every other step, in any engine: they are in float64, too. A run with the flags' own must
    come to its end.
    """
    options = small_options(recipe.flags) | {"dtype": "float64", "num_blocks": 400}
    given = options.get("mamba_ssm_cache_dtype")
    if not options.get("enable_mamba_cache_stochastic_rounding"):
        options["mamba_ssm_cache_dtype"] = "float64"
    dtypes = {name: value for name, value in options.items() if name in _OF_STATES}
    alone = LLM(folder, device="cpu", max_model_len=MAX_MODEL_LEN, **dtypes)
    prompts = prompts_of(random.Random(0), alone.model.vocab_size)
    due = [alone.generate([prompt], PARAMS, progress=False)[0].token_ids for prompt in prompts]
    has_drafts = "speculative_method" in options
    is_scripted = options.get("speculative_method") == "dflash" or not has_head(
        ConfigFile.read(folder)
    )
    if has_drafts and is_scripted:
        del options["speculative_method"]
        sequences = [[*prompt, *tokens] for prompt, tokens in zip(prompts, due, strict=True)] * 2
        options["proposer"] = ScriptedProposer(
            "mixed",
            options["num_speculative_tokens"],
            sequences,
            [len(prompt) for prompt in prompts] * 2,
            BLOCK,
            alone.model.vocab_size,
        )
    outputs = _outputs(folder, prompts, options)
    right = [output.token_ids == tokens for output, tokens in zip(outputs, due * 2, strict=True)]
    problem = void_of(outputs, has_drafts) if all(right) else "other tokens"
    if given not in (None, options["mamba_ssm_cache_dtype"]):
        ends = _outputs(folder, prompts, options | {"mamba_ssm_cache_dtype": given})
        problem = next((output.error for output in ends if output.error), problem)
    return Ran(len(outputs), sum(right), problem)


def _outputs(
    folder: Path, prompts: Sequence[Sequence[int]], options: dict[str, Any]
) -> list[RequestOutput]:
    """Run all prompts at once, and again."""
    llm = LLM(folder, **options)
    preempt = preempting(PREEMPT_EVERY)
    waves = [llm.generate(prompts, PARAMS, progress=False, on_step=preempt) for _ in range(2)]
    return [output for outputs in waves for output in outputs]


def void_of(outputs: Sequence[RequestOutput], has_drafts: bool) -> str:
    """Return what did not happen to any of the requests; empty if all of it did."""
    seen = {
        "cached": any(output.cached_tokens for output in outputs),
        "preempted": any(output.num_preemptions for output in outputs),
        "drafted": not has_drafts or any(output.num_draft_tokens for output in outputs),
    }
    return ", ".join(f"nothing was {name}" for name, happened in seen.items() if not happened)


@dataclass(frozen=True)
class Checked:
    """A recipe, and what the plan and the engines made of it."""

    recipe: Recipe
    planned: Planned
    exact: Ran
    tiny: Ran

    @property
    def is_right(self) -> bool:
        """True if the plan and both engines take the recipe, and all tokens are right."""
        return not (self.planned.refused or self.exact.problem or self.tiny.problem)

    @property
    def line(self) -> str:
        """The recipe's line of the table."""
        recipe = self.recipe
        flags = f"`{recipe.flags}`" if recipe.flags else "none"
        left_out = [
            *self.planned.notes,
            *([f"not here: {recipe.stand_in}"] * bool(recipe.stand_in)),
        ]
        cells = recipe.model, flags, self.planned, self.exact, self.tiny, "; ".join(left_out)
        return f"| {' | '.join(map(str, cells))} |".replace("|  |", "| |")


HEAD = """| model | flags | block of `plan` | right, exact | right, checkpoint | left out |
|---|---|--:|--:|--:|---|"""


def check(recipes: Sequence[Recipe]) -> Iterator[Checked]:
    """Yield each recipe with what became of it."""
    with TemporaryDirectory() as folder:
        for recipe in recipes:
            checkpoint = Path(folder, recipe.family)
            if not checkpoint.exists():
                checkpoint.mkdir()
                write_checkpoint(recipe.family, checkpoint)
            plan = plan_of(recipe, Path(folder))
            yield Checked(recipe, plan, run_exact(recipe), _run(recipe, checkpoint))


def _run(recipe: Recipe, checkpoint: Path) -> Ran:
    try:
        return run_tiny(recipe, checkpoint)
    except ConfigError as error:
        return Ran(problem=f"refused: {error}")


def with_table(page: str, table: str) -> str:
    """Return a page with this table between its marks.

    Raises:
        ConfigError: it has none.
    """
    new, count = _TABLE.subn(lambda found: f"{found[1]}{table}\n{found[2]}", page)
    if not count:
        raise ConfigError("the page has no place between <!-- recipes --> and <!-- /recipes -->")
    return new


def main() -> int:
    parser = ArgumentParser("python -m bench.recipes", __doc__)
    parser.add_argument("-k", default="", help="only models with this in their name")
    parser.add_argument("--page", type=Path, metavar="FILE.md", help="write the table into it")
    options = parser.parse_args()
    recipes = [recipe for recipe in read_recipes() if options.k in recipe.model]
    if not recipes:
        raise ConfigError(f"-k {options.k}: no model has this in its name")
    if options.page is not None:
        with_table(read_text(options.page), HEAD)  # minutes before it is written
    lines = [HEAD]
    wrong = list[str]()
    print(HEAD)
    for checked in check(recipes):
        lines.append(checked.line)
        print(checked.line, flush=True)
        if not checked.is_right:
            wrong.append(checked.recipe.model)
    if options.page is not None:
        write_whole(options.page, with_table(read_text(options.page), "\n".join(lines)))
    if wrong:
        raise CheckFailedError(f"{len(wrong)} of {len(recipes)} recipes: {', '.join(wrong)}")
    return 0


if __name__ == "__main__":
    sys.exit(run_command(main))
