"""The tokens that a step samples, and the drafts that the target model would have produced."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import Any, NamedTuple

import numpy as np
import torch

from hybrid_kv.kernels.common.upload import Staged, move, together
from hybrid_kv.request import ScheduledRequest
from hybrid_kv.sampling import Draws, SamplingParams, sample, stage_draws


class Sampling(NamedTuple):
    """The sampling of a step, known before the model runs.

    Attributes:
        places: in the batch, of the requests that sample.
        first_positions: of the tokens that they get.
        rows: of the hidden states, one for each token and draft; None: the first `num_rows`.
        verification: the arguments of `verify` besides logits.
    """

    places: list[int]
    first_positions: list[int]
    num_rows: int
    rows: torch.Tensor | None
    verification: list[Any]


def stage_verify(
    draft_token_ids: Sequence[Sequence[int]],
    params: Sequence[SamplingParams],
    seeds: Sequence[int],
    first_positions: Sequence[int],
) -> Staged[list[Any]]:
    """Stage the arguments of `verify` other than logits.

    Row j of request r in the logits predicts the token at `first_positions[r] + j`.
    """
    if not any(draft_token_ids):
        arrays, make_draws = stage_draws(params, seeds, first_positions)

        def make(*moved: torch.Tensor) -> list[Any]:
            return [make_draws(*moved), ()]

        return arrays, make
    counts = [1 + len(drafts) for drafts in draft_token_ids]
    draws = stage_draws(params, seeds, first_positions, counts)
    longest = max(counts)
    ends = np.cumsum(counts)[:, None]
    padded = np.array([[*drafts, *[-1] * (longest - len(drafts))] for drafts in draft_token_ids])
    rows = np.minimum(np.arange(longest) + ends - np.array(counts)[:, None], ends - 1)
    return together(draws, move(padded, rows))


def stage_sampling(batch: Sequence[ScheduledRequest]) -> Staged[Sampling]:
    """Stage the sampling of a batch's requests, known before the model runs."""
    places = list[int]()
    first = list[int]()
    read = list[int]()
    end = 0
    for i, item in enumerate(batch):
        end += item.num_tokens
        if item.samples:
            places.append(i)
            first.append(item.num_computed_tokens + item.num_tokens - item.num_drafts)
            read += range(end - 1 - item.num_drafts, end)
    items = [batch[i] for i in places]
    requests = [item.request for item in items]
    params = [request.params for request in requests]
    seeds = [request.seed for request in requests]
    drafts = [item.drafts or () for item in items]
    arrays, make_verification = stage_verify(drafts, params, seeds, first)
    # Mostly decodes alone: then every token counts.
    reads_all = len(read) == end

    def make(*moved: torch.Tensor) -> Sampling:
        rows, rest = (None, moved) if reads_all else (moved[0], moved[1:])
        return Sampling(places, first, len(read), rows, make_verification(*rest))

    return arrays if reads_all else [np.array(read, dtype=np.int64), *arrays], make


def verify(
    logits: torch.Tensor, draws: Draws | None, drafts: Sequence[torch.Tensor]
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Return the target's tokens, and how many drafts of each request it accepts.

    The host reads nothing.

    At every position the target draws its own token `t` as if there were no draft
    (`sampling.sample`: the argmax, or with a temperature the argmax of logits plus Gumbel noise,
    which is a pure function of seed and position); a draft is accepted iff it equals `t`, and the
    first `t` that differs replaces it. So a request gets the very tokens that it would get without
    drafts, whatever is proposed.

    It is also rejection sampling (Leviathan et al. 2023, Chen et al. 2023), which keeps the
    target's distribution `p` (after temperature, top-k and top-p). That scheme accepts a draft `d`
    from a proposal distribution `q` with probability `min(1, p(d) / q(d))`, and else draws from
    `max(p - q, 0)`, renormalised. Our proposers are deterministic: `q` is 1 at `d`, so it accepts
    with probability `p(d)` and else draws from `p` without `d`. As `t ~ p` is independent of `d`
    (no proposer sees the noise of a position to come), `P(t = d) = p(d)`, and given `t != d`, `t`
    is distributed as `p` without `d`, renormalised: the same scheme, in one draw.

    Logits after a rejected draft are conditioned on a token that the request does not have, and
    are dropped. Nothing depends on their draws, so that the same noise may serve those positions
    again in the next step.

    Args:
        logits: [sum(1 + k_r), vocab_size], requests back to back; request r has k_r >= 0 drafts,
            for the positions from the first one on that it has no token for.
        draws: of these rows.
        drafts: [num_requests, 1 + longest] int64 each: the drafts of each request, then -1; and
            where the logits for their positions are, after a request's own ones the last of them.
            Empty: there are none.

    Returns:
        [sum(1 + k_r)] int64, and [num_requests] int64 or, without drafts, None.
    """
    tokens = sample(logits, draws)
    if not drafts:
        return tokens, None
    ids, rows = drafts
    # The first place that differs: there is one, for no token is -1.
    return tokens, (tokens.take(rows) != ids).view(torch.uint8).argmax(1)


def gained(
    tokens: Sequence[int] | None, accepted: Sequence[int] | None, num_drafts: Sequence[int]
) -> list[list[int]]:
    """Return the 1 to k_r + 1 tokens that each request gains: accepted drafts and one token more.

    Args:
        tokens, accepted: what `verify` gave; None: there is nothing to verify.
        num_drafts: k_r of each request.
    """
    tokens = tokens or []
    total = sum(num_drafts) + len(num_drafts)
    if total != len(tokens):
        raise ValueError(
            f"{len(tokens)} rows of logits for {total} tokens (drafts and one more per request)"
        )
    starts = accumulate((1 + count for count in num_drafts), initial=0)
    counts = accepted or [0] * len(num_drafts)
    return [
        list(tokens[start : start + count + 1])
        for start, count in zip(starts, counts, strict=False)
    ]
