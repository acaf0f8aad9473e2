"""Which draft tokens the target model itself would have produced."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from hybrid_kv.kernels.common.upload import Staged
from hybrid_kv.sampling import Draws, SamplingParams, sample, stage_draws


def stage_verify(
    draft_token_ids: Sequence[Sequence[int]],
    params: Sequence[SamplingParams],
    seeds: Sequence[int],
    first_positions: Sequence[int],
) -> Staged[Draws | None]:
    """How `verify` draws: logit row j of request r predicts the token at position `first_positions[r] + j`."""
    rows = [(request, j) for request, drafts in enumerate(draft_token_ids) for j in range(1 + len(drafts))]
    owners, positions = [request for request, _ in rows], [first_positions[request] + j for request, j in rows]
    return stage_draws([params[r] for r in owners], [seeds[r] for r in owners], positions)


def verify(logits: torch.Tensor, draft_token_ids: Sequence[Sequence[int]], draws: Draws | None) -> list[list[int]]:
    """The tokens that each request gains from one step: its accepted drafts and one token more.

    At every position the target draws its own token `t` as if there were no draft (`sampling.sample`: the
    argmax, or with a temperature the argmax of logits plus Gumbel noise, which is a pure function of seed and
    position); a draft is accepted iff it equals `t`, and the first `t` that differs replaces it. So a request gets the
    very tokens that it would get without drafts, whatever is proposed.

    It is also rejection sampling (Leviathan et al. 2023, Chen et al. 2023), which keeps the target's distribution `p`
    (after temperature, top-k and top-p). That scheme accepts a draft `d` from a proposal distribution `q` with
    probability `min(1, p(d) / q(d))`, and else draws from `max(p - q, 0)`, renormalised. Our proposers are
    deterministic: `q` is 1 at `d`, so it accepts with probability `p(d)` and else draws from `p` without `d`. As
    `t ~ p` is independent of `d` (no proposer sees the noise of a position to come), `P(t = d) = p(d)`, and given
    `t != d`, `t` is distributed as `p` without `d`, renormalised: the same scheme, in one draw.

    Logits behind a rejected draft are conditioned on a token that the request does not have, and are dropped. Nothing
    depends on their draws, so that the same noise may serve those positions again in the next step.

    Args:
        logits: [sum(1 + k_r), vocab_size], requests back to back.
        draft_token_ids: k_r >= 0 drafts of request r, for the positions from the first one on that it has no token for.
        draws: what `stage_verify` gave.

    Returns:
        1 to k_r + 1 tokens per request.
    """
    counts = [1 + len(drafts) for drafts in draft_token_ids]
    if sum(counts) != len(logits):
        raise ValueError(f"{len(logits)} rows of logits for {sum(counts)} tokens (drafts and one more per request)")
    tokens: list[int] = sample(logits, draws).tolist()
    if len(counts) == len(tokens):
        return [[token] for token in tokens]
    gained, start = [], 0
    for drafts, count in zip(draft_token_ids, counts, strict=True):
        own = tokens[start : start + count]
        wrong = (j for j, draft in enumerate(drafts) if draft != own[j])
        gained.append(own[: next(wrong, len(drafts)) + 1])
        start += count
    return gained
