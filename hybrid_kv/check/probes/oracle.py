"""The oracle: a text computed as a whole by transformers, without cache, batch or chunks."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

import torch

from hybrid_kv.config import ConfigError, parse_model_dtype
from hybrid_kv.models.config_file import first_line
from hybrid_kv.models.random_checkpoint import quiet

# Of the texts that are remembered: thousands with a vocabulary of 100, a few with one of 150,000.
KEPT_BYTES = 2**29
NUM_DRAWS = 12  # of them one in 4,096 misses what each second one shows


class Oracle:
    """Log-probabilities in float64, and how far the target's own dtype alone moves them.

    Args:
        folder: a checkpoint that transformers loads.
        dtype: what the target computes in; auto: what the checkpoint names.

    Attributes:
        vocab_size: tokens that it has embeddings of.
        rounding: the largest difference of a likely token's log-probability between the two dtypes,
            of all texts so far that `rounds` was called with.

    Raises:
        ConfigError: transformers does not load it.
    """

    # A log-probability of -20 is moved by rounding that moves no answer.
    LIKELY = -8.0

    def __init__(self, folder: str | Path, dtype: str = "float32") -> None:
        from transformers import AutoModelForCausalLM

        try:
            with quiet():
                # Grouped products, which experts are computed with by default, know no float64.
                exact = AutoModelForCausalLM.from_pretrained(
                    folder, dtype=torch.float32, experts_implementation="eager"
                )
                chosen = dtype if dtype == "auto" else parse_model_dtype(dtype)
                rounded = AutoModelForCausalLM.from_pretrained(folder, dtype=chosen)
        except (ValueError, OSError, KeyError) as error:
            raise ConfigError(f"transformers does not load {folder}: {first_line(error)}") from None
        self.exact = exact.double().train(mode=False)
        self._rounded = rounded.train(mode=False)
        self.vocab_size: int = self.exact.get_input_embeddings().weight.shape[0]
        self.rounding = 0.0
        self.known: dict[tuple[int, ...], torch.Tensor] = {}
        self._num_bytes = 0

    def logprobs(self, token_ids: Sequence[int]) -> torch.Tensor:
        """Return the log-probabilities of the token after each one.

        Returns:
            [len(token_ids), vocab_size], float64.
        """
        key = tuple(token_ids)
        if key not in self.known:
            self.known[key] = self.whole_logprobs(self.exact, key)
            self._num_bytes += self.known[key].nbytes
            while self._num_bytes > KEPT_BYTES and len(self.known) > 1:
                self._num_bytes -= self.known.pop(next(iter(self.known))).nbytes
        return self.known[key]

    def rounds(self, token_ids: Sequence[int]) -> None:
        """Measure the rounding in this text, and keep the largest."""
        self.rounding = max(self.rounding, self.rounding_of(token_ids))

    def rounding_of(self, token_ids: Sequence[int]) -> float:
        """Return the largest difference that rounding makes in this text."""
        return self._off(token_ids, self.whole_logprobs(self._rounded, token_ids))

    def moves(self, token_ids: Sequence[int], roundings: float) -> Iterator[float]:
        """Yield how far log-probabilities go if the numbers of the embeddings are off a little.

        A router that is about to choose another expert does so by the least of them, and then they
        go far. A few draws, which are the same every time (Monte Carlo arithmetic: Parker, 1997).

        Args:
            roundings: standard deviation of the relative error, in half units in the last place of
                the target's dtype.
        """
        spread = roundings * torch.finfo(self._rounded.dtype).eps / 2
        rng = torch.Generator().manual_seed(0)

        def move(_: torch.nn.Module, __: object, embedded: torch.Tensor) -> torch.Tensor:
            return embedded * (
                1 + spread * torch.randn(embedded.shape, generator=rng, dtype=embedded.dtype)
            )

        for _ in range(NUM_DRAWS):
            handle = self.exact.get_input_embeddings().register_forward_hook(move)
            try:
                rows = self.whole_logprobs(self.exact, token_ids)
            finally:
                handle.remove()
            yield self._off(token_ids, rows)

    def _off(self, token_ids: Sequence[int], logprobs: torch.Tensor) -> float:
        exact = self.logprobs(token_ids)
        return float((exact - logprobs).abs()[exact > self.LIKELY].max())

    def within(self, token_ids: Sequence[int], limit: float) -> float:
        """Return the share of all tokens that are no further than a limit from the best.

        Those are the tokens that could follow each token of a text.
        """
        rows = self.logprobs(token_ids)
        return float((rows.amax(-1, keepdim=True) - rows <= limit).double().mean())

    @staticmethod
    def whole_logprobs(model: torch.nn.Module, token_ids: Sequence[int]) -> torch.Tensor:
        with torch.inference_mode():
            logits = model(torch.tensor([list(token_ids)]), use_cache=False).logits[0]
        return logits.double().log_softmax(-1)


class ExactWeightsOracle(Oracle):
    """An oracle of a checkpoint whose every operation is exact.

    float32 says what float64 does, twice as fast.
    """

    def __init__(self, folder: str | Path) -> None:
        super().__init__(folder)
        self.exact = self._rounded
