"""Sampling and verification of requests, without an engine."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from hybrid_kv.kernels.common.upload import download, now
from hybrid_kv.sampling import SamplingParams, sample, stage_draws
from hybrid_kv.spec_decode.verify import gained, stage_verify, verify


def sampled(
    logits: torch.Tensor,
    params: Sequence[SamplingParams],
    seeds: Sequence[int],
    positions: Sequence[int],
) -> list[int]:
    """A token for each row."""
    return sample(logits, now(logits.device, stage_draws(params, seeds, positions))).tolist()


def verified(
    logits: torch.Tensor,
    drafts: Sequence[Sequence[int]],
    params: Sequence[SamplingParams],
    seeds: Sequence[int],
    first_positions: Sequence[int],
) -> list[list[int]]:
    """What each request gains."""
    step = now(logits.device, stage_verify(drafts, params, seeds, first_positions))
    return gained(*download(*verify(logits, *step)), [len(own) for own in drafts])
