"""Small layers against float64. Mamba layers alone: any course of prefill chunks and verify steps equals one plain pass
over the accepted tokens.

The cache starts poisoned, pages have gaps between them, and every step is checked for what it wrote: all of what it
owes, at the right place, and nothing else.
"""

from collections import Counter
from copy import deepcopy
from dataclasses import dataclass, field

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

from hybrid_kv.attention.common import CommonAttentionMetadata
from hybrid_kv.attention.mamba import (
    MambaMetadataBuilder,
    boundaries_inside,
    boundary_copies,
    last_scheduled_block_idx,
    postprocess_mamba,
)
from hybrid_kv.cache.spec import MambaSpec, RollbackSpec, StatePart, window_and_states
from hybrid_kv.models import layers
from hybrid_kv.models.exact import PRIME, ExactAttention, ExactConfig, ExactMamba, ExactOracle
from hybrid_kv.models.layers import Derived, ForwardContext, GatedRMSNorm, Linear, RMSNorm
from hybrid_kv.models.mixers import conv, mamba2
from hybrid_kv.models.mixers.mamba2 import Mamba2Mixer

NAME, CPU = "mamba", torch.device("cpu")


class Exact:
    """`ExactMamba` and the oracle's loop."""

    dtype, poison, hidden = torch.int32, -1, 2

    def __init__(self, kernel, rng):
        self.config = ExactConfig(conv_kernel=kernel, width=self.hidden, state_size=3, seed=int(rng.integers(99)))
        self.layer = ExactMamba(NAME, self.config, np.random.default_rng(self.config.seed))
        self.channels, self.state_shape = self.hidden, (3, self.hidden)

    def draw(self, rng, count):
        return torch.from_numpy(rng.integers(0, PRIME, (count, self.hidden)))

    def run(self, x, context):
        return torch.from_numpy(self.layer(x.numpy(), context))

    def plain(self, x):
        """Outputs, and window and state after 0, 1, … tokens."""
        weights = {name: [part.tolist() for part in getattr(self.layer, name)] for name in ("conv", "to_map", "out")}
        window = [[0] * self.hidden for _ in range(self.config.conv_kernel - 1)]
        state = [[0] * self.hidden for _ in range(3)]
        outputs, windows, states = [], [torch.tensor(window)], [torch.tensor(state)]
        for token in x.tolist():
            outputs.append(ExactOracle._mamba(weights, token, [window], [state]))
            windows.append(torch.tensor(window))
            states.append(torch.tensor(state))
        return torch.tensor(outputs), windows, states


class Mixer:
    """`Mamba2Mixer` in float64 and a loop over tokens and heads."""

    dtype, poison = torch.float64, torch.nan

    def __init__(self, kernel, rng):
        self.groups, per_group = (int(n) for n in rng.integers(1, 3, 2))
        self.heads, self.head_dim, self.size = self.groups * per_group, 3, 2
        self.hidden = 5
        self.layer = Mamba2Mixer(
            NAME,
            self.hidden,
            num_heads=self.heads,
            head_dim=self.head_dim,
            state_size=self.size,
            groups=self.groups,
            conv_kernel=kernel,
            chunk_size=int(rng.integers(1, 7)),
            eps=1e-5,
            conv_bias=bool(rng.integers(2)),
            bias=bool(rng.integers(2)),
        ).double()
        for parameter in self.layer.parameters():
            parameter.copy_(torch.from_numpy(rng.normal(size=parameter.shape)))
        self.channels = self.heads * self.head_dim + 2 * self.groups * self.size
        self.state_shape = (self.heads, self.head_dim, self.size)

    def draw(self, rng, count):
        return torch.from_numpy(rng.normal(size=(count, self.hidden)))

    def run(self, x, context):
        return self.layer(x, context)

    def plain(self, x):
        layer, inner, shared = self.layer, self.heads * self.head_dim, self.groups * self.size
        kernel = layer.conv_weight.shape[1]
        window, state = torch.zeros(kernel - 1, self.channels).double(), torch.zeros(self.state_shape).double()
        outputs, windows, states = [], [window], [state]
        for token in x:
            gate, conv_in, dt = layer.in_proj(token).split((inner, self.channels, self.heads))
            window = torch.cat([window, conv_in[None]])
            conv = (window * layer.conv_weight.T).sum(0) + (0 if layer.conv_bias is None else layer.conv_bias)
            window = window[1:]
            u, B, C = F.silu(conv).split((inner, shared, shared))
            u, B, C = u.view(self.heads, -1), B.view(self.groups, -1), C.view(self.groups, -1)
            dt = F.softplus(dt + layer.dt_bias)
            state, y = state.clone(), []
            for h in range(self.heads):
                group = h * self.groups // self.heads
                decay = torch.exp(-dt[h] * layer.A_log[h].exp())
                state[h] = decay * state[h] + dt[h] * torch.outer(u[h], B[group])
                y.append(state[h] @ C[group] + layer.D[h] * u[h])
            outputs.append(layer.out_proj(layer.norm(torch.cat(y), gate)))
            windows.append(window)
            states.append(state)
        return torch.stack(outputs), windows, states


def batch(computed, lengths, num_decodes, padding=0):
    computed, lengths = np.append(computed, [0] * padding).astype(int), np.append(lengths, [1] * padding).astype(int)
    return CommonAttentionMetadata(
        num_reqs=len(lengths) - padding,
        num_reqs_padded=len(lengths),
        num_decodes=num_decodes + padding,
        num_decode_tokens=int(lengths[: num_decodes + padding].sum()),
        query_lens=lengths,
        num_computed_tokens=computed,
        positions=torch.zeros(int(lengths.sum()), dtype=torch.int64),
    )


@dataclass
class Request:
    inputs: torch.Tensor  # of its true tokens
    prompt: int
    table: list[int]
    outputs: torch.Tensor
    windows: list[torch.Tensor]
    states: list[torch.Tensor]
    computed: int = 0
    prev: int = 0
    accepted: int = 1
    published: set[int] = field(default_factory=set)  # columns whose boundary state must be there for good


class Course:
    """One layer, its cache and its requests."""

    def __init__(self, subject, mode, k, block_size, kernel, num_requests, rng):
        self.subject, self.mode, self.k, self.kernel, self.rng = subject, mode, k, kernel, rng
        self.window = kernel - 1
        shapes = ((self.window + k, subject.channels), subject.state_shape)
        self.spec = MambaSpec(
            block_size,
            window_and_states(*((shape, subject.dtype) for shape in shapes)),
            mamba_cache_mode=mode,
            rollback=RollbackSpec(k),
        )
        lengths = rng.integers(1, 4 * block_size, (num_requests, 2))
        widths = [self.spec.block_table_width(int(sum(pair)) + k) for pair in lengths]
        num_blocks = 1 + sum(widths)
        blocks = (1 + rng.permutation(num_blocks - 1)).tolist()
        sizes = [int(np.prod(shape)) for shape in shapes]
        # As `cache.layout` hands them out: views with gaps between the pages.
        self.raw = torch.full((num_blocks, sum(sizes) + 3), subject.poison, dtype=subject.dtype)
        starts = (0, sizes[0])
        self.views = tuple(
            self.raw[:, a : a + n].unflatten(1, s) for a, n, s in zip(starts, sizes, shapes, strict=True)
        )
        self.requests = []
        for (prompt, more), width in zip(lengths.tolist(), widths, strict=True):
            inputs = subject.draw(rng, prompt + more)
            table, blocks = blocks[:width], blocks[width:]
            self.requests.append(Request(inputs, prompt, table, *subject.plain(inputs)))
        self.table_width = max(widths)
        self.builder = MambaMetadataBuilder(self.spec, num_requests + 2, CPU, False)
        self.seen = Counter()

    def live(self):
        return [request for request in self.requests if request.computed < len(request.inputs)]

    def step(self):
        """Some of the live requests, decodes first; then everything that must hold."""
        rng, live = self.rng, self.live()
        chosen = [live[i] for i in rng.permutation(len(live))[: rng.integers(1, len(live) + 1)]]
        decodes = [request for request in chosen if request.computed >= request.prompt]
        prefills = [request for request in chosen if request.computed < request.prompt]
        lengths, accepted, chunks = [], [], []
        for request in decodes:
            left = len(request.inputs) - request.computed
            length = int(rng.integers(1, 2 + self.k))
            accepted.append(int(rng.integers(1, min(length, left) + 1)))
            true = request.inputs[request.computed : request.computed + accepted[-1]]
            chunks += [true, self.subject.draw(rng, length - len(true))]
            lengths.append(length)
        for request in prefills:
            length = int(rng.integers(1, request.prompt - request.computed + 1))
            chunks.append(request.inputs[request.computed : request.computed + length])
            lengths.append(length)
            accepted.append(length)
        padding = 0 if prefills else int(rng.integers(0, 3))
        chunks.append(self.subject.draw(rng, padding))
        rows, computed = decodes + prefills, np.array([r.computed for r in decodes + prefills])
        common = batch(computed, np.array(lengths), len(decodes), padding)
        table = torch.zeros(len(rows) + padding, self.table_width, dtype=torch.int32)
        for row, request in enumerate(rows):
            table[row, : len(request.table)] = torch.tensor(request.table)
        neutral = [0] * padding
        self.seen["mixed step"] += bool(decodes and prefills)
        self.seen["padding rows"] += padding > 0
        self.seen["draft rejected"] += sum(a < q for a, q in zip(accepted, lengths, strict=True))
        self.seen["drafts accepted"] += sum(a > 1 for a in accepted[: len(decodes)])
        self.seen["chunk shorter than the window"] += sum(q < self.window for q in lengths[len(decodes) :])
        metadata = self.builder.build(
            common,
            table,
            np.array([r.prev for r in rows] + neutral),
            np.array([r.accepted - 1 for r in rows] + [0] * padding),
        )
        self.seen["boundary inside a chunk"] += 0 if metadata.boundaries is None else len(metadata.boundaries.rows)
        before = self.raw.clone()
        out = self.subject.run(torch.cat(chunks), ForwardContext({NAME: metadata}, {NAME: self.views}))
        current_blocks = last_scheduled_block_idx(self.spec, computed, np.array(lengths))
        self.check_writes(before, rows, len(decodes), lengths, current_blocks)
        outputs = out.split([*lengths, padding])
        for row, request in enumerate(rows):
            span = slice(request.computed, request.computed + accepted[row])
            self.equal(outputs[row][: accepted[row]], request.outputs[span])
        split = len(decodes)
        copies = boundary_copies(self.spec, computed[:split], np.array(lengths[:split]), np.array(accepted[:split]))
        before = self.raw.clone()
        postprocess_mamba(copies, table, [self.views], self.spec, True)
        size = self.spec.block_size
        full = [r for r, count in zip(decodes, accepted, strict=False) if r.computed % size + count >= size]
        changed = self.changed(before).any(1).nonzero()[:, 0].tolist()
        assert set(changed) <= {r.table[r.computed // size] for r in full if self.mode != "none"}
        self.seen["boundary state copied"] += len(copies.rows)
        self.seen["... over the current state block's window"] += int(
            (copies.current_blocks == copies.logical_blocks).sum()
        )
        for row, request in enumerate(rows):
            self.advance(request, row < split, int(current_blocks[row]), accepted[row])

    def changed(self, before):
        """Which elements of which page, bit for bit."""
        pages = self.raw.view(torch.uint8).ne(before.view(torch.uint8))
        return pages.view(*self.raw.shape, -1).any(2)

    def check_writes(self, before, rows, num_decodes, lengths, current_blocks):
        """Only the blocks that the step owns may change, and of a draft's block only the SSM state."""
        conv, ssm = {0}, {0}
        for row, request in enumerate(rows):
            current_block = int(current_blocks[row])
            conv.add(request.table[current_block])
            ssm.add(request.table[current_block])
            if row < num_decodes:
                ssm.update(request.table[current_block : current_block + lengths[row]])
            elif self.mode == "all":
                _, columns, _ = boundaries_inside(self.spec, np.array([request.computed]), np.array([current_block]))
                inside = {request.table[column] for column in columns}
                conv |= inside
                ssm |= inside
        changed = self.changed(before)
        edge = self.views[0][0].numel()
        end = edge + self.views[1][0].numel()
        assert set(changed[:, :edge].any(1).nonzero()[:, 0].tolist()) <= conv
        assert set(changed[:, edge:end].any(1).nonzero()[:, 0].tolist()) <= ssm
        assert not changed[:, end:].any()

    def advance(self, request, decode, current_block, accepted):
        first, request.computed = request.computed, request.computed + accepted
        request.prev, request.accepted = current_block, accepted if decode else 1
        if self.mode != "none":
            size = self.spec.block_size
            if request.computed % size == 0:
                # The copy moved the window to the first row of the boundary's own block.
                request.prev, request.accepted = request.computed // size - 1, 1
                request.published.add(request.prev)
            if decode or self.mode == "all":
                request.published.update(range(first // size, request.computed // size))
        for column in request.published:
            tokens = (column + 1) * self.spec.block_size
            self.equal(self.views[0][request.table[column]][: self.window], request.windows[tokens])
            self.equal(self.views[1][request.table[column]], request.states[tokens])

    def equal(self, got, expected):
        if self.subject.dtype == torch.int32:
            assert torch.equal(got.long(), expected)
        else:
            scale = max(1.0, float(expected.abs().max())) if expected.numel() else 1.0
            torch.testing.assert_close(got, expected, rtol=0, atol=1e-12 * scale)


@st.composite
def courses(draw, kind):
    k, kernel = draw(st.integers(0, 5)), draw(st.integers(2, 5))
    rng = np.random.default_rng(draw(st.integers(0, 2**31)))
    mode = draw(st.sampled_from(["none", "align", "all"]))
    block_size = draw(st.integers(1 + k, 9))
    return Course(kind(kernel, rng), mode, k, block_size, kernel, draw(st.integers(1, 4)), rng)


@given(courses(Exact))
def test_exact(course):
    while course.live():
        course.step()


@settings(max_examples=settings.default.max_examples // 3)
@given(courses(Mixer))
def test_mixer(course):
    while course.live():
        course.step()


def test_courses_contain_what_they_are_for():
    seen = Counter()
    for seed in range(40):
        rng = np.random.default_rng(seed)
        course = Course(Exact(4, rng), ("align", "all")[seed % 2], seed % 6, 6, 4, 3, rng)
        while course.live():
            course.step()
        seen += course.seen
    assert {name for name in course.seen if not seen[name]} == set()


def test_half_precision_keeps_its_states_in_float32():
    """Bound: 4 % of the largest output; bf16 rounds by 0.4 %, here some twenty times on the way."""
    subject = Mixer(4, np.random.default_rng(0))
    layer = subject.layer.bfloat16()
    window = torch.zeros(3, 3 + 2, subject.channels, dtype=torch.bfloat16)
    state = torch.zeros(3, *subject.state_shape)
    spec = MambaSpec(1, (StatePart("state", (1,), torch.float32),), rollback=RollbackSpec(2))
    builder, table = MambaMetadataBuilder(spec, 1, CPU, False), torch.tensor([[1, 2, 0]], dtype=torch.int32)
    x = subject.draw(np.random.default_rng(1), 7).bfloat16()
    outputs = []
    for start, length in ((0, 5), (5, 2)):
        common = batch(np.array([start]), np.array([length]), int(start > 0))
        metadata = builder.build(common, table, np.array([0]), np.array([0]))
        context = ForwardContext({NAME: metadata}, {NAME: (window, state)})
        outputs.append(layer(x[start : start + length], context))
    got = torch.cat(outputs)
    assert got.dtype == torch.bfloat16
    assert state[2].any()
    layer.double()
    expected, _, states = subject.plain(x.double())
    assert float((got - expected).abs().max()) <= 0.04 * float(expected.abs().max())
    assert float((state[2] - states[7]).abs().max()) <= 0.04 * float(states[7].abs().max())


@pytest.mark.parametrize(("dtype", "cached"), [(torch.float64, torch.float32), (torch.float32, torch.float64)])
def test_states_of_another_dtype(dtype, cached):
    """The recurrence runs in the wider of the two; bound: 2e-5 of the largest, where one of them is float32."""
    subject = Mixer(4, np.random.default_rng(0))
    layer = subject.layer.to(dtype)
    window = torch.zeros(3, 3 + 2, subject.channels, dtype=cached)
    state = torch.zeros(3, *subject.state_shape, dtype=cached)
    spec = MambaSpec(1, (StatePart("state", (1,), cached),), rollback=RollbackSpec(2))
    builder, table = MambaMetadataBuilder(spec, 1, CPU, False), torch.tensor([[1, 2, 0]], dtype=torch.int32)
    x = subject.draw(np.random.default_rng(1), 7).to(dtype)
    outputs = []
    for start, length in ((0, 5), (5, 2)):
        metadata = builder.build(batch([start], [length], int(start > 0)), table, np.array([0]), np.array([0]))
        outputs.append(layer(x[start : start + length], ForwardContext({NAME: metadata}, {NAME: (window, state)})))
    got = torch.cat(outputs)
    assert (got.dtype, state.dtype) == (dtype, cached)
    layer.double()
    expected, _, states = subject.plain(x.double())
    assert float((got - expected).abs().max()) <= 2e-5 * float(expected.abs().max())
    assert float((state[2] - states[7]).abs().max()) <= 2e-5 * float(states[7].abs().max())


@given(st.integers(1, 12), st.integers(0, 99))
def test_the_oracles_sums_are_attention(length, seed):
    config = ExactConfig(width=3)
    rng = np.random.default_rng(seed)
    layer = ExactAttention(NAME, config, rng)
    x, positions = rng.integers(0, PRIME, (length, 3)), np.arange(length)
    query, key, value = layer.project(x, positions)[:, None]
    expected = layer.attend(query, key, value, positions[None])[0]
    weights = {name: getattr(layer, name).tolist() for name in ("qkv", "write_mark", "read_mark")}
    sums = [[0] * 3 for _ in range(3)]
    got = [ExactOracle._attention(weights, token, i, sums) for i, token in enumerate(x.tolist())]
    assert got == expected.tolist()


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("tokens", [1, 8, 300])
def test_rms_norm(dtype, tokens):
    """float32: sum, root and two products round, 1e-6 of the value; bfloat16 rounds the result, 2^-8."""
    g = torch.Generator().manual_seed(0)
    norm = RMSNorm(96, 0.1)
    norm.weight.copy_(torch.randn(96, generator=g))
    x, before = (torch.randn(tokens, 96, generator=g) * 0.3).to(dtype), norm.weight.clone()
    wide = x.double()
    expected = wide / (wide.square().mean(-1, keepdim=True) + 0.1).sqrt() * norm.to(dtype).weight.double()
    kept = x.clone()
    got = norm(x)
    assert got.dtype == dtype and torch.equal(x, kept) and torch.equal(norm.weight, before.to(dtype))
    relative = {torch.float64: 1e-14, torch.float32: 1e-6, torch.bfloat16: 2.0**-8}[dtype]
    assert bool(((got.double() - expected).abs() <= relative * expected.abs()).all())


@pytest.fixture
def packed(monkeypatch):
    """How often a weight was packed."""
    counts = []
    reorder = torch.ops.mkldnn._reorder_linear_weight
    monkeypatch.setattr(layers, "PACKED_ELEMENTS", 24 * 16)
    monkeypatch.setattr(
        torch.ops.mkldnn, "_reorder_linear_weight", lambda *args: (counts.append(1), reorder(*args))[1], raising=False
    )
    return counts


def linear(bias=True, size_out=24):
    g = torch.Generator().manual_seed(0)
    layer = Linear(16, size_out, bias)
    for parameter in layer.parameters():
        parameter.copy_(torch.randn(parameter.shape, generator=g))
    return layer


def assert_linear(layer, x):
    """Sums of 16 products of order one."""
    with torch.inference_mode():
        got = layer(x)
        expected = x.double() @ layer.weight.double().T + (0 if layer.bias is None else layer.bias.double())
        assert got.dtype == x.dtype and float((got - expected).abs().max()) <= 1e-5


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("rows", [1, 8, 33])
def test_a_packed_weight_is_packed_once(packed, bias, rows):
    layer, x = linear(bias), torch.randn(rows, 16)
    for _ in range(3):
        assert_linear(layer, x)
    assert len(packed) == 1


def test_a_changed_weight_is_packed_again(packed):
    layer, x = linear(), torch.randn(8, 16)
    assert_linear(layer, x)
    with torch.no_grad():
        layer.weight.mul_(2)
    assert_linear(layer, x)
    layer.weight.data = torch.randn(24, 16)
    assert_linear(layer, x)
    layer.load_state_dict(linear().state_dict())
    assert_linear(layer, x)
    assert len(packed) == 4
    assert_linear(layer.double(), x.double())
    assert len(packed) == 4
    assert_linear(layer.float(), x)


def test_what_is_not_packed(packed):
    """Small weights, other dtypes, tensors that do not tell of changes, and outside of inference."""
    x = torch.randn(8, 16)
    assert_linear(linear(size_out=23), x)
    assert_linear(linear().double(), x.double())
    with torch.inference_mode():
        made = linear()
    assert_linear(made, x)
    torch.testing.assert_close(linear()(x), made(x))
    assert not packed


def test_a_model_with_packed_weights_can_be_copied(packed):
    layer, x = linear(), torch.randn(8, 16)
    assert_linear(layer, x)
    assert_linear(deepcopy(layer), x)
    assert layer.state_dict().keys() == {"weight", "bias"}


def test_what_weights_give_is_computed_once_until_one_changes():
    calls = []

    def compute(a, b, scale):
        calls.append(scale)
        return (a + b) * scale

    derived, a, b = Derived(compute), torch.ones(2), torch.ones(2)

    def assert_calls(wanted, scale=1):
        for _ in range(2):
            torch.testing.assert_close(derived(a, b, scale=scale), (a + b) * scale)
        assert len(calls) == wanted

    assert_calls(1)
    b.mul_(3)
    assert_calls(2)
    a.data = torch.full((2,), 5.0)
    assert_calls(3)
    assert_calls(4, scale=2)
    copied = deepcopy(derived)
    torch.testing.assert_close(copied(a, b, scale=2), (a + b) * 2)
    assert len(calls) == 5
    with torch.inference_mode():
        a = torch.ones(2)  # does not tell of changes
        assert_calls(7)
        a.mul_(2)
        assert_calls(9)


def test_a_mixer_whose_weights_change_computes_with_the_new_ones():
    g = torch.Generator().manual_seed(0)
    tensors = [torch.randn(4, generator=g) for _ in range(3)]
    derived = Derived(mamba2._heads)
    for tensor in tensors:
        derived(*tensors, dtype=torch.float64)
        tensor.add_(1)
        A_log, D, dt_bias = tensors
        found = derived(*tensors, dtype=torch.float64)
        assert found.A.dtype == found.D.dtype == torch.float64
        torch.testing.assert_close(found.A, -A_log.double().exp())
        torch.testing.assert_close(found.D, D.double())
        assert torch.equal(found.dt_bias, dt_bias)


def test_taps_of_all_channels_lie_together():
    weight = torch.randn(12, 3)
    derived = Derived(conv._taps)
    assert torch.equal(derived(weight), weight) and derived(weight)[:, 0].is_contiguous()
    weight.add_(1)
    assert torch.equal(derived(weight), weight)


@pytest.mark.parametrize("groups", [1, 2])
@pytest.mark.parametrize("shape", [(3, 16), (2, 3, 16)])
def test_gated_rms_norm(groups, shape):
    g = torch.Generator().manual_seed(groups)
    norm = GatedRMSNorm(16, groups, 0.1)
    norm.weight.copy_(torch.randn(16, generator=g))
    x, gate = torch.randn(2, *shape, generator=g)
    kept = x.clone(), gate.clone()
    got = norm.double()(x.double(), gate.double())
    gated = (x * gate * gate.sigmoid()).double().unflatten(-1, (groups, -1))
    expected = gated / (gated.square().mean(-1, keepdim=True) + 0.1).sqrt()
    torch.testing.assert_close(got, expected.flatten(-2) * norm.weight, rtol=1e-6, atol=1e-6)
    assert torch.equal(x, kept[0]) and torch.equal(gate, kept[1])
