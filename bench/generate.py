"""`LLM.generate` against transformers' `generate`: same checkpoint, prompts and number of tokens, greedy, one thread.

Prompts are equally long, so that transformers has no padding to compute. Both must give the tokens that transformers
gives for each prompt alone. `python -m bench.generate [--quick]` prints the table.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch

from bench._reference import equal
from bench.cases import Case, Cell, WrongResultError, grid
from bench.measurement import ENGINE, Counted, Measurement, groups, measure_together
from hybrid_kv.engine.llm import LLM
from hybrid_kv.sampling import SamplingParams

NUM_TOKENS = 32
GUARD_MODEL = Path(__file__).resolve().parents[1] / "accuracy" / "guard_model"
# Large enough that most of a step goes into weights and states, small enough for nine rounds.
RANDOM = {
    "vocab_size": 4096,
    "hidden_size": 512,
    "intermediate_size": 1536,
    "layers_block_type": ["linear_attention", "mlp", "linear_attention", "full_attention", "mlp"] * 2,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "mamba_num_heads": 16,
    "mamba_head_dim": 64,
    "ssm_state_size": 64,
    "n_groups": 1,
    "conv_kernel": 4,
    "chunk_size": 64,
    "time_step_min": 1e-9,  # the library clamps dt from below in a chunk only; see `models.nemotron_h`
    "tie_word_embeddings": False,
}


@cache
def _random_checkpoint() -> TemporaryDirectory[str]:
    """Random weights with healthy margins between the best two tokens; deleted when the process ends."""
    from transformers import NemotronHConfig, NemotronHForCausalLM

    folder = TemporaryDirectory()
    model = NemotronHForCausalLM(NemotronHConfig(**RANDOM))
    g = torch.Generator().manual_seed(0)
    for name, weight in model.named_parameters():
        noise = torch.randn(weight.shape, generator=g)
        if name.endswith("A_log"):
            value = (torch.rand(weight.shape, generator=g) * 3.5 + 0.5).log()
        elif name.endswith("dt_bias"):
            value = torch.rand(weight.shape, generator=g) * 2 - 2
        elif name.endswith(".D") or "norm" in name:
            value = 1 + 0.1 * noise
        elif weight.dim() == 2 and "embeddings" not in name:
            value = noise * 1.2 / weight.shape[1] ** 0.5
        else:
            value = noise
        weight.data.copy_(value)
    model.save_pretrained(folder.name)
    return folder


@cache
def _transformers(model: str) -> Any:
    from transformers import AutoModelForCausalLM
    from transformers.utils import logging

    logging.disable_progress_bar()
    folder = GUARD_MODEL if model == "guard" else _random_checkpoint().name
    found = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    found.generation_config.eos_token_id = None
    return found


@cache
def _engine(model: str) -> LLM:
    _transformers(model)  # writes the checkpoint
    folder = GUARD_MODEL if model == "guard" else _random_checkpoint().name
    return LLM(folder, tokenizer=_NoText(), device="cpu", dtype="float32", max_num_seqs=8, max_model_len=512)


class _NoText:
    """The prompts are token ids."""

    eos_token_id = None

    def encode(self, text: str) -> list[int]:
        raise NotImplementedError

    def decode(self, token_ids: object) -> str:
        return ""


@cache
def _prompts(model: str, batch: int, prompt: int, seed: int) -> tuple[torch.Tensor, list[list[int]]]:
    """Token ids [batch, prompt], and what follows them."""
    g = torch.Generator().manual_seed(seed)
    ids = torch.randint(1, _transformers(model).config.vocab_size, (batch, prompt), generator=g)
    return ids, [_generate(model, row[None])[0] for row in ids]


def _generate(model: str, ids: torch.Tensor) -> list[list[int]]:
    with torch.inference_mode():
        out = _transformers(model).generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=NUM_TOKENS,
            do_sample=False,
            use_cache=True,
            pad_token_id=0,
        )
    found: list[list[int]] = out[:, ids.shape[1] :].tolist()
    return found


def greedy(seed: int, model: str, batch: int, prompt: int, subject: str) -> Case:
    """`batch` prompts of `prompt` tokens together, 32 new ones each."""
    ids, wanted = _prompts(model, batch, prompt, seed)
    texts = ids.tolist()
    params = SamplingParams(max_tokens=NUM_TOKENS, ignore_eos=True)

    def run() -> list[list[int]]:
        if subject == ENGINE:
            return [output.token_ids for output in _engine(model).generate(texts, params, progress=False)]
        return _generate(model, ids)

    if subject == ENGINE:
        _engine(model)
    return Case(run, lambda: equal("tokens", run(), wanted), max_repeats=1)


def cells() -> list[Cell]:
    """The guard model, and 21 M random weights in ten layers."""
    values = {"model": ("guard", "random"), "batch": (1, 8), "prompt": (32, 256), "subject": (ENGINE, "transformers")}
    return list(
        grid(
            "generate",
            "greedy",
            "cpu",
            greedy,
            values,
            [("guard", 8, 32)],
            lambda subject, **_: 1.0 if subject != ENGINE else None,
        )
    )


def run(quick: bool = False) -> Iterator[list[Measurement] | list[Counted]]:
    """Measure cell by cell; each list is the engine and transformers with one set of parameters.

    Raises:
        WrongResultError: one of them gave other tokens.
    """
    for group in groups([cell for cell in cells() if cell.quick or not quick]):
        yield measure_together(group)


def main() -> int:
    """Print the table. Returns 1 if a result is wrong or the engine is slower than transformers, else 0."""
    parser = argparse.ArgumentParser(prog="python -m bench.generate")
    parser.add_argument("--quick", action="store_true", help="the guard model with 8 prompts of 32 tokens only")
    options = parser.parse_args()
    failed = False
    print(f"{'model':8}{'batch':>6}{'prompt':>7}{'engine':>10}{'transformers':>14}  ratio [95 % interval]")
    try:
        for pair in run(options.quick):
            ours, theirs = sorted(pair, key=lambda one: one.cell.params["subject"] != ENGINE)
            params, ratio = ours.cell.params, theirs.ratio
            failed |= theirs.verdict == "fail"
            print(
                f"{params['model']:8}{params['batch']:6}{params['prompt']:7}{ours.time.value:8.3f} s"
                f"{theirs.time.value:12.3f} s  {ratio.value:.2f} [{ratio.low:.2f}, {ratio.high:.2f}]",
                flush=True,
            )
    except WrongResultError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
