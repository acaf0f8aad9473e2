"""Routers and experts against loops over tokens in float64, and against transformers.

Tolerances are shares of max|ref|: in float32 1e-5, a hundred roundings of 6e-8; in float64 1e-12; in bfloat16 2e-2,
a few roundings of 4e-3. Expert ids are equal: drawn logits are apart by more than any rounding.
"""

from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st

from hybrid_kv.kernels.moe import apply_experts, route_sigmoid, route_softmax, route_topk_softmax

SHARE = {torch.float32: 1e-5, torch.float64: 1e-12, torch.bfloat16: 2e-2}


def gated(hidden):
    gate, up = hidden.chunk(2, dim=-1)
    return F.silu(gate) * up


def squared(hidden):
    return F.relu(hidden).square()


def assert_close(got, expected, share):
    assert float((got.double() - expected.double()).abs().max()) <= share * float(expected.abs().max())


def assert_routed(got, expected, share):
    """The same experts with the same weights, in any order."""
    (weights, ids), (expected_weights, expected_ids) = got, expected
    (ids, order), (expected_ids, expected_order) = ids.sort(-1), expected_ids.sort(-1)
    assert torch.equal(ids, expected_ids)
    assert_close(weights.gather(-1, order), expected_weights.gather(-1, expected_order), share)


def spread(shape, g, dtype=torch.float64):
    """Logits that are multiples of 1/8 and differ within a row: equal in every dtype, with no ties."""
    return (torch.stack([torch.randperm(shape[1], generator=g) for _ in range(shape[0])]) / 8 - 1).to(dtype)


@st.composite
def logits_of_tokens(draw):
    tokens, experts = draw(st.integers(1, 5)), draw(st.integers(1, 12))
    g = torch.Generator().manual_seed(draw(st.integers(0, 2**31)))
    dtype = draw(st.sampled_from([torch.float32, torch.float64, torch.bfloat16]))
    return spread((tokens, experts), g, dtype), draw(st.integers(1, experts))


def assert_wide(weights, logits):
    assert weights.dtype == (torch.float64 if logits.dtype == torch.float64 else torch.float32)


@given(logits_of_tokens(), st.booleans())
def test_softmax_routers_choose_and_weigh_as_the_definition_says(problem, renormalise):
    logits, top_k = problem
    probabilities = logits.double().exp() / logits.double().exp().sum(-1, keepdim=True)
    expected_ids = logits.double().argsort(descending=True)[:, :top_k]
    expected = probabilities.gather(-1, expected_ids)
    if renormalise:
        expected = expected / expected.sum(-1, keepdim=True)
    routers = [route_softmax(logits, top_k, renormalise)] + [route_topk_softmax(logits, top_k)] * renormalise
    for weights, ids in routers:
        assert_wide(weights, logits)
        assert_routed((weights, ids), (expected, expected_ids), SHARE[weights.dtype])


@given(st.data())
def test_the_sigmoid_router_chooses_and_weighs_as_the_definition_says(data):
    draw, tokens = data.draw, data.draw(st.integers(1, 4))
    num_groups, per_group = draw(st.integers(1, 4)), draw(st.integers(1, 4))
    top_k_groups = draw(st.integers(1, num_groups))
    top_k = draw(st.integers(1, top_k_groups * per_group))
    renormalise, scale = draw(st.booleans()), draw(st.sampled_from([1.0, 2.5]))
    g = torch.Generator().manual_seed(draw(st.integers(0, 2**31)))
    logits = spread((tokens, num_groups * per_group), g, draw(st.sampled_from([torch.float32, torch.float64])))
    # Below -1 for all, so that every score for the choice is negative.
    bias = draw(st.sampled_from([None, 0.0, -3.0]))
    if bias is not None:
        bias = bias + torch.randn(num_groups * per_group, generator=g)
    before = logits.clone()
    got = route_sigmoid(logits, bias, top_k, num_groups, top_k_groups, renormalise, scale, 1e-20)
    assert torch.equal(logits, before)
    expected_ids, expected = [], []
    for row in logits.double():
        scores = (1 / (1 + (-row).exp())).tolist()
        added = [0.0] * len(scores) if bias is None else bias.tolist()
        choice = [score + b for score, b in zip(scores, added, strict=True)]
        groups = [list(range(n * per_group, (n + 1) * per_group)) for n in range(num_groups)]
        groups.sort(key=lambda group: -sum(sorted((choice[e] for e in group), reverse=True)[:2]))
        allowed = [expert for group in groups[:top_k_groups] for expert in group]
        ids = sorted(allowed, key=lambda expert: -choice[expert])[:top_k]
        total = sum(scores[expert] for expert in ids) if renormalise else 1.0
        expected_ids.append(ids)
        expected.append([scores[expert] / total * scale for expert in ids])
    assert_wide(got[0], logits)
    assert_routed(got, (torch.tensor(expected, dtype=torch.float64), torch.tensor(expected_ids)), SHARE[got[0].dtype])


def theirs(family, router, experts, top_k, **options):
    """A router of transformers whose logits are its input."""
    module = pytest.importorskip(f"transformers.models.{family}.modeling_{family}")
    config = SimpleNamespace(
        num_experts=experts, num_local_experts=experts, num_experts_per_tok=top_k, hidden_size=experts, **options
    )
    made = getattr(module, router)(config).requires_grad_(False)
    made.weight.copy_(torch.eye(experts))
    return made


@pytest.fixture
def logits():
    return spread((6, 16), torch.Generator().manual_seed(0), torch.float32)


def test_qwen_routes_as_transformers_does(logits):
    for renormalise in (True, False):
        router = theirs("qwen3_next", "Qwen3NextTopKRouter", 16, 3, norm_topk_prob=renormalise)
        assert_routed(route_softmax(logits, 3, renormalise), router(logits)[1:], SHARE[torch.float32])
    router = theirs("qwen3_5_moe", "Qwen3_5MoeTopKRouter", 16, 3)
    assert_routed(route_softmax(logits, 3, True), router(logits)[1:], SHARE[torch.float32])


def test_jamba_routes_as_transformers_does(logits):
    jamba = pytest.importorskip("transformers.models.jamba.modeling_jamba")
    ids, weights = jamba.JambaSparseMoeBlock.route_tokens_to_experts(SimpleNamespace(top_k=3), logits, logits)
    assert_routed(route_softmax(logits, 3, False), (weights, ids), SHARE[torch.float32])


def test_granite_routes_as_transformers_does(logits):
    ids, weights, _ = theirs("granitemoehybrid", "GraniteMoeHybridTopKRouter", 16, 3)(logits)
    assert_routed(route_topk_softmax(logits, 3), (weights, ids), SHARE[torch.float32])


@pytest.mark.parametrize(
    ("family", "router"), [("nemotron_h", "NemotronHTopkRouter"), ("kimi_linear", "KimiLinearTopkRouter")]
)
@pytest.mark.parametrize("renormalise", [True, False])
@pytest.mark.parametrize("groups", [(1, 1), (4, 2)])
def test_routers_with_groups_route_as_transformers_does(logits, family, router, renormalise, groups):
    options = {"n_group": groups[0], "topk_group": groups[1], "norm_topk_prob": renormalise}
    made = theirs(family, router, 16, 3, routed_scaling_factor=2.5, **options)
    made.e_score_correction_bias.copy_(torch.randn(16, generator=torch.Generator().manual_seed(1)))
    got = route_sigmoid(logits, made.e_score_correction_bias, 3, *groups, renormalise, 2.5, 1e-20)
    assert_routed(got, made(logits)[1:], SHARE[torch.float32])


@pytest.mark.parametrize("biased", [True, False])
def test_lfm2_routes_as_transformers_does(logits, biased):
    logits = logits - 12  # scores of 1e-5: the 1e-6 that it adds to their sum shows
    options = {"norm_topk_prob": True, "routed_scaling_factor": 1.5, "use_expert_bias": biased}
    router = theirs("lfm2_moe", "Lfm2MoeTopKRouter", 16, 3, **options)
    bias = torch.randn(16, generator=torch.Generator().manual_seed(1)) if biased else None
    got = route_sigmoid(logits, bias, 3, 1, 1, True, 1.5, epsilon=1e-6)
    assert_routed(got, router(logits, bias)[1:], SHARE[torch.float32])


@st.composite
def expert_problems(draw):
    tokens, experts = draw(st.integers(1, 20)), draw(st.integers(1, 9))
    top_k = draw(st.integers(1, experts))
    # Rows of whole 16 bytes, and others: only those go through a grouped product.
    size, inner = draw(st.tuples(*[st.integers(1, 9)] * 2) | st.sampled_from([(8, 8), (16, 8)]))
    dtype = draw(st.sampled_from([torch.float32, torch.float64, torch.bfloat16]))
    activation = draw(st.sampled_from([gated, squared]))
    g = torch.Generator().manual_seed(draw(st.integers(0, 2**31)))
    x = torch.randn(tokens, size, generator=g).to(dtype)
    up = torch.randn(experts, inner * (1 + (activation is gated)), size, generator=g).to(dtype)
    down = torch.randn(experts, size, inner, generator=g).to(dtype)
    ids = torch.rand(tokens, experts, generator=g).topk(top_k).indices
    return (
        x,
        ids,
        torch.rand(tokens, top_k, generator=g).to(torch.promote_types(dtype, torch.float32)),
        up,
        down,
        activation,
    )


@given(expert_problems())
def test_every_token_gets_the_weighted_sum_of_its_experts_and_no_other_is_read(problem):
    x, ids, weights, up, down, activation = problem
    expected, magnitude = (torch.zeros(x.shape, dtype=torch.float64) for _ in range(2))
    wide_up, wide_down = up.double(), down.double()
    for t in range(len(x)):
        for e, weight in zip(ids[t].tolist(), weights[t].tolist(), strict=True):
            expected[t] += weight * (wide_down[e] @ activation(wide_up[e] @ x[t].double()))
            magnitude[t] += weight * (wide_down[e].abs() @ activation(wide_up[e].abs() @ x[t].double().abs()))
    unread = torch.ones(len(up), dtype=torch.bool).scatter_(0, ids.flatten(), False)
    up[unread], down[unread] = torch.nan, torch.nan
    before = [part.clone() for part in (x, ids, weights)]
    got = apply_experts(x, ids, weights, up, down, activation)
    assert all(torch.equal(part, old) for part, old in zip((x, ids, weights), before, strict=True))
    assert got.dtype == x.dtype
    # By token, and of what was added up: terms cancel, and bfloat16 rounds them before they do.
    assert bool(((got.double() - expected).abs().amax(1) <= SHARE[x.dtype] * magnitude.amax(1)).all())


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_token_gets_the_same_alone_and_in_a_batch(dtype):
    g = torch.Generator().manual_seed(0)
    x, up = torch.randn(40, 16, generator=g, dtype=dtype), torch.randn(8, 24, 16, generator=g, dtype=dtype)
    down, ids = torch.randn(8, 16, 12, generator=g, dtype=dtype), torch.rand(40, 8, generator=g).topk(3).indices
    weights = torch.rand(40, 3, generator=g, dtype=dtype)
    together = apply_experts(x, ids, weights, up, down, gated)
    for size in (1, 2):  # two tokens choose fewer experts than there are: another path
        for t in range(0, 40, size):
            span = slice(t, t + size)
            alone = apply_experts(x[span], ids[span], weights[span], up, down, gated)
            assert_close(alone, together[span], SHARE[dtype])


def test_transformers_experts_compute_the_same():
    module = pytest.importorskip("transformers.models.nemotron_h.modeling_nemotron_h")
    config = SimpleNamespace(
        n_routed_experts=6,
        hidden_size=8,
        moe_intermediate_size=5,
        moe_latent_size=None,
        mlp_hidden_act="relu2",
        _experts_implementation="eager",
    )
    experts = module.NemotronHExperts(config).requires_grad_(False)
    g = torch.Generator().manual_seed(0)
    for weight in experts.parameters():
        weight.copy_(torch.randn(weight.shape, generator=g))
    x, ids = torch.randn(7, 8, generator=g), torch.rand(7, 6, generator=g).topk(2).indices
    weights = torch.rand(7, 2, generator=g)
    got = apply_experts(x, ids, weights, experts.up_proj, experts.down_proj, squared)
    assert_close(got, experts(x, ids, weights), SHARE[torch.float32])
