"""Sampling and verification of requests, without an engine."""

import torch

from hybrid_kv.kernels.common.upload import download, now
from hybrid_kv.sampling import sample, stage_draws
from hybrid_kv.spec_decode.verify import gained, stage_verify, verify


def sampled(logits: torch.Tensor, params, seeds, positions) -> list[int]:
    """A token for each row."""
    return sample(logits, now(logits.device, stage_draws(params, seeds, positions))).tolist()


def verified(logits: torch.Tensor, drafts, params, seeds, first_positions) -> list[list[int]]:
    """What each request gains."""
    step = now(logits.device, stage_verify(drafts, params, seeds, first_positions))
    return gained(*download(*verify(logits, *step)), [len(own) for own in drafts])
