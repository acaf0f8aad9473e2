"""`LLM.generate`: prompts in, tokens out, with tiny models."""

from __future__ import annotations

from bench._models import VOCAB, Right, answers, exact_engine, tiny_engine
from bench._reference import equal
from bench._requests import prompts
from bench.harness.cells import Case, Cell, grid
from hybrid_kv.engine.llm import LLM
from hybrid_kv.sampling import SamplingParams


def _generate(llm: LLM, texts: list[list[int]], length: int) -> list[list[int]]:
    llm._num_requests = 0  # a proposer may know requests by number
    outputs = llm.generate(texts, SamplingParams(max_tokens=length), progress=False)
    return [output.token_ids for output in outputs]


def exact(seed: int, mode: str, K: int, num_reqs: int) -> Case:
    """Build the exact model's case, 16 tokens each, all drafts right."""
    length = 16
    texts = [[token % VOCAB for token in prompt] for prompt in prompts(seed, num_reqs, 56)]
    wanted = answers(texts, length)
    llm = exact_engine(mode, K, num_reqs, Right(texts, wanted, K))
    return Case(
        lambda: _generate(llm, texts, length),
        lambda: (llm.reset_prefix_cache(), equal("tokens", _generate(llm, texts, length), wanted))[
            1
        ],
        llm.reset_prefix_cache,
        1,
    )


def nemotron(seed: int, mode: str, num_reqs: int) -> Case:
    """Build the case of a tiny NemotronH, 8 tokens each.

    The whole text is computed again for every token to check it.
    """
    length = 8
    texts = [[token % VOCAB for token in prompt] for prompt in prompts(seed, num_reqs, 56)]
    llm = tiny_engine(seed, mode)
    wanted: list[list[int]] = []

    def recomputed() -> list[list[int]]:
        plain = tiny_engine(seed, "none")
        grown: list[list[int]] = [[] for _ in texts]
        for _ in range(length):
            for text, answer in zip(texts, grown, strict=True):
                answer += _generate(plain, [text + answer], 1)[0]
        return grown

    def check() -> float:
        wanted[:] = wanted or recomputed()
        llm.reset_prefix_cache()
        return equal("tokens", _generate(llm, texts, length), wanted)

    return Case(lambda: _generate(llm, texts, length), check, llm.reset_prefix_cache, 1)


def cells() -> list[Cell]:
    """Return the cells of both models."""
    modes = ("none", "align", "all")
    return [
        *grid(
            "end_to_end",
            "exact",
            "cpu",
            exact,
            {"mode": modes, "K": (0, 3), "num_reqs": (4,)},
            [("all", 3)],
        ),
        *grid(
            "end_to_end", "nemotron", "cpu", nemotron, {"mode": modes, "num_reqs": (4,)}, [("all",)]
        ),
    ]
