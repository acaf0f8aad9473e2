"""`LLM.generate` against transformers' `generate`: same checkpoint, same greedy tokens, one thread.

Both must give the tokens that transformers gives for each prompt alone, before and after they are
timed. A time holds everything from token ids to token ids: prefill, every step, sampling,
scheduling; no loading and no tokeniser. Each side's best: transformers runs with sdpa, its cache,
in inference mode, and stops by token id.

`greedy`: prompts of one length and 32 tokens each, whatever they are. Nothing is padded, shared or
cached: it is what a step costs.

`questions`: what people run. Five-shot questions of gsm8k_synth, 278 to 298 tokens long, the first
261 of them common to all, each answered until its end. transformers takes them sorted by length, in
left-padded batches that end with their longest answer. The engine takes them all at once and runs
`batch` at a time:

- `plain`: as it is, without a prefix cache. A request that has ended makes room for the next one.
- `cached`: prefix caching, mode `all`, empty when the clock starts. Blocks of 128 tokens, so that
  two of them hold 256 of the common tokens; those of 96 tokens that the engine chooses by itself
  hold 192.
- `drafts`: that, and 3 drafts of the checkpoint's MTP head in every step.

transformers could keep a common prefix as well, but not through `generate` on a batch, nor does
lm-eval do it.

`python -m bench.generate [--quick] [--out results/microbench.csv]` prints the tables. It fails
where a ratio's whole interval lies below what is promised: 3 for `drafts` with 8 at a time, 1 for
everything else.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from itertools import chain
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch

from bench._reference import equal
from bench.harness.arguments import ArgumentParser
from bench.harness.cells import Case, Cell, grid, promised
from bench.harness.command import measure
from bench.harness.measurement import ROUNDS
from hybrid_kv.check.guard_model import FOLDER as GUARD_MODEL
from hybrid_kv.engine.llm import LLM
from hybrid_kv.errors import run_command
from hybrid_kv.measure.timing.case import ENGINE
from hybrid_kv.models.random_checkpoint import write_checkpoint
from hybrid_kv.sampling import SamplingParams

NUM_TOKENS = 32
LONGEST_ANSWER = 64
CACHED: dict[str, Any] = {
    "enable_prefix_caching": True,
    "mamba_cache_mode": "all",
    "block_size": 128,
}
VARIANTS: dict[str, dict[str, Any]] = {
    "plain": {},
    "cached": CACHED,
    "drafts": CACHED | {"speculative_method": "mtp", "num_speculative_tokens": 3},
}
# Large enough that most of a step goes into weights and states, small enough for nine rounds.
RANDOM = {
    "vocab_size": 4096,
    "hidden_size": 512,
    "intermediate_size": 1536,
    "layers_block_type": ["linear_attention", "mlp", "linear_attention", "full_attention", "mlp"]
    * 2,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "mamba_num_heads": 16,
    "mamba_head_dim": 64,
    "ssm_state_size": 64,
    "n_groups": 1,
    "conv_kernel": 4,
    "chunk_size": 64,
    # the library clamps dt from below in a chunk only; see `models.nemotron_h`
    "time_step_min": 1e-9,
    "tie_word_embeddings": False,
    "num_nextn_predict_layers": 0,
}


@cache
def _random_checkpoint() -> TemporaryDirectory[str]:
    """Write random weights with healthy margins between the best two tokens.

    They are deleted when the process ends.
    """
    folder = TemporaryDirectory()
    write_checkpoint("nemotron_h", folder.name, keys=RANDOM)
    return folder


def load_transformers(folder: str | Path, dtype: torch.dtype) -> Any:
    """Return a checkpoint in transformers, where no token ends an answer."""
    from transformers import AutoModelForCausalLM
    from transformers.utils import logging

    logging.disable_progress_bar()
    logging.set_verbosity_error()
    found = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype).eval()
    found.generation_config.eos_token_id = None
    return found


@cache
def _transformers(model: str) -> Any:
    return load_transformers(
        GUARD_MODEL if model == "guard" else _random_checkpoint().name, torch.float32
    )


@cache
def build_engine(model: str, batch: int = 8, variant: str = "plain") -> LLM:
    folder = GUARD_MODEL if model == "guard" else _random_checkpoint().name
    options = {
        "device": "cpu",
        "dtype": "float32",
        "max_num_seqs": batch,
        "max_model_len": 512,
    } | VARIANTS[variant]
    return LLM(folder, tokenizer=NoText(), **options)


class NoText:
    """The prompts are token ids."""

    eos_token_id = None

    def encode(self, text: str) -> list[int]:
        raise NotImplementedError

    def decode(self, token_ids: object) -> str:
        return ""


@cache
def prompts_and_answers(
    model: str, batch: int, prompt: int, seed: int
) -> tuple[torch.Tensor, list[list[int]]]:
    """Return token ids [batch, prompt], and those that follow them."""
    g = torch.Generator().manual_seed(seed)
    ids = torch.randint(1, _transformers(model).config.vocab_size, (batch, prompt), generator=g)
    return ids, [_generate(model, row[None])[0] for row in ids]


def continued(model: Any, ids: torch.Tensor, num_tokens: int, **options: Any) -> list[list[int]]:
    """Return what transformers' greedy `generate` puts after ids [batch, len]."""
    fixed = {"max_new_tokens": num_tokens, "do_sample": False, "use_cache": True, "pad_token_id": 0}
    with torch.inference_mode():
        out = model.generate(ids, **{"attention_mask": torch.ones_like(ids), **fixed, **options})
    found: list[list[int]] = out[:, ids.shape[1] :].tolist()
    return found


def _generate(
    model: str, ids: torch.Tensor, num_tokens: int | None = None, **options: Any
) -> list[list[int]]:
    return continued(_transformers(model), ids, num_tokens or NUM_TOKENS, **options)


def greedy(seed: int, model: str, batch: int, prompt: int, subject: str) -> Case:
    """Build `batch` prompts of `prompt` tokens together, 32 new ones each."""
    ids, wanted = prompts_and_answers(model, batch, prompt, seed)
    texts = ids.tolist()
    params = SamplingParams(max_tokens=NUM_TOKENS, ignore_eos=True)

    def run() -> list[list[int]]:
        if subject == ENGINE:
            return [
                output.token_ids
                for output in build_engine(model).generate(texts, params, progress=False)
            ]
        return _generate(model, ids)

    if subject == ENGINE:
        build_engine(model)
    return Case(run, lambda: equal("tokens", run(), wanted), max_repeats=1)


@cache
def questions_and_answers(count: int) -> tuple[list[list[int]], int, list[list[int]]]:
    """Return the prompts, the token that ends an answer, and the answers, that token included."""
    from accuracy.tokenizer import NEXT_QUESTION, encode, token_ids
    from hybrid_kv.check.guard_model.problems import dataset

    made = dataset(0, count, shots=5)
    shots = "".join(
        f"Question: {shot['question']}\nAnswer: {shot['answer']}\n\n" for shot in made.shots
    )
    texts = [encode(f"{shots}Question: {doc['question']}\nAnswer:") for doc in made.docs]
    stop = token_ids()[NEXT_QUESTION]
    return texts, stop, _in_batches(texts, 1, stop)


def _in_batches(texts: list[list[int]], batch: int, stop: int) -> list[list[int]]:
    """Return transformers' answers, in the order of the texts.

    The batches are left-padded, the longest texts first.
    """
    answers: list[list[int]] = [[] for _ in texts]
    order = sorted(range(len(texts)), key=lambda i: -len(texts[i]))
    for start in range(0, len(order), batch):
        chosen = order[start : start + batch]
        width = len(texts[chosen[0]])
        ids, mask = torch.zeros(2, len(chosen), width, dtype=torch.int64)
        for row, i in enumerate(chosen):
            ids[row, width - len(texts[i]) :] = torch.tensor(texts[i])
            mask[row, width - len(texts[i]) :] = 1
        out = _generate("guard", ids, LONGEST_ANSWER, attention_mask=mask, eos_token_id=stop)
        for i, tokens in zip(chosen, out, strict=True):
            answers[i] = tokens[: tokens.index(stop) + 1] if stop in tokens else tokens
    return answers


def questions(seed: int, count: int, batch: int, variant: str, subject: str) -> Case:
    """Build `count` five-shot questions, `batch` at a time, each until the end of its answer."""
    texts, stop, wanted = questions_and_answers(count)
    if subject != ENGINE:
        return Case(
            lambda: _in_batches(texts, batch, stop),
            lambda: require_same(_in_batches(texts, batch, stop), wanted),
            max_repeats=1,
        )
    llm = build_engine("guard", batch, variant)
    params = SamplingParams(max_tokens=LONGEST_ANSWER, stop_token_ids=(stop,))

    def run() -> list[list[int]]:
        return [output.token_ids for output in llm.generate(texts, params, progress=False)]

    def check() -> float:
        llm.reset_prefix_cache()
        return require_same(run(), wanted)

    return Case(run, check, llm.reset_prefix_cache, max_repeats=1)


def require_same(answers: list[list[int]], wanted: list[list[int]]) -> float:
    """Answers have different lengths: those come first."""
    equal(
        "lengths of answers",
        [len(answer) for answer in answers],
        [len(answer) for answer in wanted],
    )
    return equal("tokens", [*chain(*answers)], [*chain(*wanted)])


def _promise(subject: str, batch: int = 0, variant: str = "", **_: Any) -> float | None:
    if subject == ENGINE:
        return None
    return 3.0 if (batch, variant) == (8, "drafts") else 1.0


def contests() -> list[Cell]:
    """Equal prompts: the guard model, and 21 M random weights in ten layers.

    Questions: the guard model.
    """
    values: dict[str, tuple[Any, ...]]
    values = {
        "model": ("guard", "random"),
        "batch": (1, 8),
        "prompt": (32, 256),
        "subject": (ENGINE, "transformers"),
    }
    found = [*grid("generate", "greedy", "cpu", greedy, values, [("guard", 8, 32)])]
    for counts, batch in (((24, 64), 8), ((24,), 1)):
        values = {
            "count": counts,
            "batch": (batch,),
            "variant": tuple(VARIANTS),
            "subject": (ENGINE, "transformers"),
        }
        found += grid("generate", "questions", "cpu", questions, values, [(24, 8)])
    return [*promised(_promise, found)]


def main(arguments: Sequence[str] | None = None) -> int:
    """See `bench.harness.command.measure`."""
    parser = ArgumentParser("python -m bench.generate")
    parser.add_argument(
        "--quick", action="store_true", help="8 prompts of 32 tokens and 24 questions, 8 at a time"
    )
    parser.add_argument("--out", metavar="CSV", help="append one row per measurement")
    options = parser.parse_args(arguments)
    return measure(
        [cell for cell in contests() if cell.quick or not options.quick], ROUNDS, options.out
    )


if __name__ == "__main__":
    run_command(main)
