"""Runs of many steps of a delta rule in scheme `recompute`, against the rule in float64.

Each step is compared with what the rule makes of the memory before it: what a ring holds is what
was learned, so errors do not add up. Tolerances are shares of the largest value of the head:
outputs and what tokens learn 2e-5 in float32 arithmetic, whose sums are in another order than the
rule's; 1.2e-2 with bfloat16 inputs, whose products take operands of 8 bits, twice behind each
other. Checkpoints are as in tests/kernels/recompute.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
from hypothesis.strategies import SearchStrategy

from hybrid_kv.kernels.gated_delta import (
    gated_delta_flush,
    gated_delta_recompute,
    gated_delta_recompute_reference,
)
from hybrid_kv.kernels.gated_delta import recompute as module
from hybrid_kv.kernels.recompute import (
    RecomputeRing,
    RecomputeStep,
    commit,
    commit_reference,
    read_states,
    recompute_flush_reference,
)
from tests.kernels.gated_delta.layer import operands, rule
from tests.kernels.harness import Shape, compiled, defined, flat_tokens, rejections, shapes
from tests.kernels.interpreter import interpreted
from tests.support import recompute as mamba2

OUTPUTS = {
    torch.float64: 1e-12,
    torch.float32: 2e-5,
    torch.float16: 2.0**-10,
    torch.bfloat16: 1.2e-2,
}
KEYS = {torch.float64: 1e-12, torch.float32: 1e-6, torch.float16: 2.0**-10, torch.bfloat16: 2.0**-8}
TINY = {torch.float16: 2.0**-24}  # where a key is denormal
CPU = torch.device("cpu")
BASE = mamba2.BASE.but(per_channel=False, beta_scale=1.0)


class Run(mamba2.Run):
    """`groups` are key heads, `head_dim` values and `size` keys."""

    def __init__(self, case: Shape, device: torch.device = CPU) -> None:
        super().__init__(case, device)
        gates = (self.heads, case.size) if case.per_channel else (self.heads,)
        sizes = (
            len(self.ring.x),
            self.ring_len,
            (self.heads, case.head_dim),
            (case.groups, case.size),
        )
        self.ring = RecomputeRing.allocate(*sizes, case.dtype, device, gates)
        for part in (self.ring.x, self.ring.B, self.ring.dt):
            part.fill_(torch.nan)
        self.dt_bias = torch.rand(gates, generator=self.g).sub(0.5).to(device, case.parameters)

    def inputs(self, num_tokens: int) -> tuple[torch.Tensor, ...]:
        """v, dt, k, q and beta of tokens, NaN in the last, which is no row's."""
        v, _, k, q = super().inputs(num_tokens)
        bends = torch.tensor(
            [-24.0, -7.0, -3.0, 0.0, 19.5, 21.0] if self.case.extreme else [-5.0, -4.0, -2.0, -1.0]
        )
        dt = bends[
            torch.randint(len(bends), (num_tokens + 1, *self.dt_bias.shape), generator=self.g)
        ]
        (beta,) = flat_tokens(
            num_tokens + 2, ((self.heads,),), self.case.gap, self.case.dtype, self.g, scale=2.0
        )
        # Queries so short that what keeps their root from 0 counts.
        return (
            v,
            dt.to(self.device, self.case.dtype),
            k,
            q.mul_(1e-3),
            beta[: num_tokens + 1].to(self.device),
        )

    def layer(
        self,
        v: torch.Tensor,
        dt: torch.Tensor,
        k: torch.Tensor,
        q: torch.Tensor,
        beta: torch.Tensor,
    ) -> tuple[torch.Tensor, ...]:
        return q, k, v, dt, self.dt_bias, self.A_log, beta

    def update(
        self,
        run_update: mamba2.Update,
        step: RecomputeStep,
        tokens: Sequence[torch.Tensor],
        cu_seqlens: torch.Tensor,
    ) -> torch.Tensor:
        # the default is left out
        scale = () if self.case.beta_scale == 1.0 else (self.case.beta_scale,)
        return run_update(self.state, self.ring, step, *self.layer(*tokens), cu_seqlens, *scale)

    def wide(self, *tokens: torch.Tensor) -> list[torch.Tensor]:
        raw = (part.cpu().double().numpy() for part in self.layer(*tokens))
        return [torch.from_numpy(part) for part in operands(*raw, np.float64(self.case.beta_scale))]

    def appended(self, *tokens: torch.Tensor) -> mamba2.Appended:
        _, k, _, g, _ = self.wide(*(part[:-1] for part in tokens))
        keys = k[:, :: self.case.per_group].to(self.device)
        return (None, 0.0), (keys, KEYS[self.case.dtype]), (g.to(self.device), 5e-6)

    def follow(
        self,
        chosen: list[mamba2.Request],
        lengths: list[int],
        y: torch.Tensor,
        appended: list[tuple[int, int]],
        *tokens: torch.Tensor,
    ) -> None:
        """Take the rule on, from what the memory says is true; some of the tokens are accepted."""
        first, scale = 0, torch.tensor(self.case.beta_scale)
        for request, length in zip(chosen, lengths, strict=True):
            span = slice(first, first + length)
            first += length
            raw = self.layer(*(part[span] for part in tokens))
            expected, passed = defined(rule, request.now, *raw, scale)
            self.outputs.append(y[span].double())
            self.expected.append(expected)
            request.drafts = [self.entry(*place) for place in appended[span]]
            request.accepted = (
                int(torch.randint(1, length + 1, (1,), generator=self.g)) if length else 5
            )
            if length:
                _, k, v, g, beta = self.wide(*(part[span] for part in tokens))
                for t, (u, *_) in enumerate(request.drafts):
                    before = (passed[t - 1] if t else request.now) * g[t].exp().view(
                        self.heads, 1, -1
                    )
                    wrong = v[t] - (before @ k[t].unsqueeze(-1))[..., 0]
                    self.outputs.append(u[None])
                    self.expected.append((beta[t].unsqueeze(-1) * wrong)[None])
                request.now = self.fold(request.now, request.drafts[: request.accepted])

    def entry(self, row: int, place: int) -> tuple[torch.Tensor, ...]:
        """u, log decay and key of a token in the ring."""
        u, g, k = (
            part[row, :, place].cpu().double().clone()
            for part in (self.ring.x, self.ring.dt, self.ring.B)
        )
        return u, g.view(self.heads, 1, -1), k.repeat_interleave(self.case.per_group, 0)

    def fold(self, state: torch.Tensor, tokens: list[tuple[torch.Tensor, ...]]) -> torch.Tensor:
        for u, g, k in tokens:
            state = state * g.exp() + u.unsqueeze(-1) * k.unsqueeze(-2)
        return state

    def finish(self) -> None:
        with patch.object(mamba2, "OUTPUTS", OUTPUTS):
            super().finish()


def check(case: Shape, every: int = 4) -> None:
    """The interpreter is slow and the kernel's memory is the reference's, so they take turns."""
    run = Run(case)
    with (
        mamba2.rounding_of_the_hardware(),
        patch.multiple(module, warp_size=lambda: case.lanes, ROWS=case.rows),
    ):
        for index in range(case.steps):
            run.step(
                commit,
                gated_delta_recompute_reference if (index + 1) % every else gated_delta_recompute,
            )
    run.finish()


def cases(
    dtypes: Sequence[torch.dtype], states: Sequence[torch.dtype | str]
) -> SearchStrategy[Shape]:
    drawn = mamba2.cases(dtypes, states)
    more = {"per_channel": [False, True], "beta_scale": [1.0, 2.0], "rows": [16, 64]}
    return drawn.flatmap(lambda case: shapes(case, **more))


# The first differs from the second in time steps alone.
EDGES = [
    edge.but(per_channel=i % 2 == 0, beta_scale=1.0 + i % 2, rows=16)
    for i, edge in enumerate(mamba2.EDGES[1:])
]
EDGES[1] = EDGES[1].but(head_dim=16, rows=64)  # values of a head that fill a program


def check_reference(case: Shape) -> None:
    mamba2.check_run(
        case.but(steps=16), commit_reference, gated_delta_recompute_reference, kind=Run
    )


def check_kernels(case: Shape) -> None:
    interpreted(check, case)


test_the_reference_follows_the_rule = mamba2.follows_the_recurrence(
    check_reference,
    cases(
        [torch.float64, torch.float32, torch.bfloat16],
        [mamba2.PLANES, torch.float64, torch.bfloat16],
    ),
    [*EDGES, mamba2.DOUBLE.but(per_channel=True, beta_scale=2.0)],
    max_examples=6,
)
test_the_kernel_follows_the_rule = mamba2.follows_the_recurrence(
    check_kernels,
    cases(
        [torch.float32, torch.float16, torch.bfloat16],
        [mamba2.PLANES, torch.bfloat16, torch.float16],
    ),
    EDGES,
    max_examples=2,
)


def check_flush(per_channel: bool) -> None:
    """A flush alone leaves what its reference does, and touches no ring and no other block."""
    run, one = (
        Run(BASE.but(per_channel=per_channel, size=33, head_dim=65, slack=14)),
        torch.ones(1).long(),
    )
    for part in (run.ring.x, run.ring.B, run.ring.dt):
        part.copy_(torch.randn(part.shape, generator=run.g) - 4 * (part is run.ring.dt))
    rings = [part.clone() for part in (run.ring.x, run.ring.B, run.ring.dt)]
    source, target = run.table[0, 1:3].long().split(1)
    step = RecomputeStep(one, source, target, 7 * one, 21 * one, 20 * one, 4)
    recompute_flush_reference(run.state, run.ring, step, None)
    expected, before = read_states(run.state, target), run.storage.clone()
    gated_delta_flush(run.state, run.ring, step)
    # 20 tokens and a state are 21 roundings of 2^-24; two terms of eight bits, as for bfloat16,
    # would err by 2^-16.
    assert bool(
        ((read_states(run.state, target) - expected).abs() <= 2e-6 * expected.abs().max()).all()
    )
    run.state[target] = before.as_strided(run.state.shape, run.state.stride(), 2)[target]
    assert torch.equal(run.storage, before)
    for part, old in zip((run.ring.x, run.ring.B, run.ring.dt), rings, strict=True):
        assert torch.equal(part, old)


def test_a_flush_by_itself_equals_its_reference() -> None:
    for per_channel in (False, True):
        interpreted(check_flush, per_channel)


def test_a_state_keeps_every_bit_and_padding_does_nothing() -> None:
    for checked in (mamba2.check_kept, mamba2.check_null):
        interpreted(checked, gated_delta_recompute, Run, BASE)


test_compiles_without_spills_to_128_bit_accesses = compiled(
    "delta_recompute",
    lambda case: case.kernel.endswith("recompute") and case.dtype == "float32",
    least=lambda *_: 2,
)


def arguments() -> dict[str, Any]:
    """Return the arguments of `gated_delta_recompute` as `flattened` names their parts."""
    run = Run(BASE.but(starts=(3, 4), groups=2, per_group=1, dtype=torch.bfloat16))
    v, dt, k, q, beta = run.inputs(2)
    layer = dict(
        zip(
            ("q", "k", "v", "dt", "dt_bias", "A_log", "beta"),
            run.layer(v, dt, k, q, beta),
            strict=True,
        )
    )
    return (
        mamba2.ring_and_step(run)
        | layer
        | {"state": run.state, "cu_seqlens": torch.tensor([0, 1, 2])}
    )


test_rejects_what_the_kernel_would_misread = rejections(
    arguments,
    mamba2.flattened(gated_delta_recompute),
    special=[
        ("state", lambda t: t[:, 0], r"has shape \(\d+, 2, 3, 5\); it must be \(\d+, 2, 2, 3, 5\)"),
        (
            "dt",
            lambda t: t[:, :, None].expand(-1, -1, 5),
            r"ring.dt has shape .* it must be \(3, 2, 11, 5\)",
        ),
        ("v", lambda t: t.float(), "v is torch.float32; it must be one of torch.bfloat16"),
        ("k", lambda t: t[:, :1], "must be"),
        ("q", lambda t: t.float(), "q is torch.float32; it must be one of torch.bfloat16"),
    ],
    allowed=["state, short", "step.rows, flat"],
)
