"""The checkpoint in transformers, for what measures it."""

from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer

from accuracy.tokenizer import NEXT_QUESTION

MAX_NEW_TOKENS = 64  # the longest reference answer has 40

Cache = Any  # transformers.DynamicCache


class Runner:
    """The checkpoint in transformers, one sequence at a time."""

    def __init__(self, folder: Path) -> None:
        self.tokenizer = AutoTokenizer.from_pretrained(folder)
        self.model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
        self.config = self.model.config
        self.stop = self.tokenizer.convert_tokens_to_ids(NEXT_QUESTION)
        kinds = self.config.layer_types
        self.recurrent = [i for i, kind in enumerate(kinds) if kind == "linear_attention"]
        self.attention = [i for i, kind in enumerate(kinds) if kind == "full_attention"]

    def encode(self, text: str) -> list[int]:
        return self.tokenizer.encode(text, add_special_tokens=False)

    def forward(self, ids: list[int], cache: Cache = None) -> tuple[Tensor, Cache]:
        """Logits (t, vocab) of ``ids`` after ``cache``, and the cache behind them."""
        out = self.model(torch.tensor([ids]), past_key_values=cache, use_cache=True)
        return out.logits[0], out.past_key_values

    def hidden(self, ids: list[int]) -> Tensor:
        """Hidden states after the final norm, (1, t, d)."""
        return self.model.model(torch.tensor([ids]), use_cache=False).last_hidden_state

    def greedy(self, prompt: list[int], gaps: list[float]) -> list[int]:
        """Greedy continuation up to the next question; appends every top-2 logit gap."""
        logits, cache = self.forward(prompt)
        out: list[int] = []
        while len(out) < MAX_NEW_TOKENS:
            best = logits[-1].topk(2)
            gaps.append(float(best.values[0] - best.values[1]))
            out.append(int(best.indices[0]))
            if out[-1] == self.stop:
                break
            logits, cache = self.forward(out[-1:], cache)
        return out
