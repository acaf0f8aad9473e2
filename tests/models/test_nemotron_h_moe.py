"""NemotronH with experts, as in Nemotron-3: logits, exactness, and a draft head whose second half is a mixture."""

from itertools import pairwise

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import NemotronHConfig
from transformers.models.nemotron_h.modeling_nemotron_h import NemotronHAttention, NemotronHMoE

from hybrid_kv.config import EngineConfig
from hybrid_kv.models.loader import load_head, load_model
from tests.models.paged_head import CPU, Paged, pairs
from tests.models.parity import TOLERANCE, check_exactness, check_parity, checkpoint
from tests.models.refusals import check_refused

LATENT = {"moe_latent_size": 12, "mlp_bias": True}
VARIANTS = {
    "groups": {},
    "latent_biased": {**LATENT, "n_group": 1, "topk_group": 1, "norm_topk_prob": False},
    "one_group_of_experts": {"n_group": 1, "topk_group": 1, "num_experts_per_tok": 4, "routed_scaling_factor": 0.5},
    "more_experts_than_tokens": {"n_routed_experts": 48, "n_group": 8, "topk_group": 3, "num_experts_per_tok": 5},
}


@pytest.mark.parametrize("variant", VARIANTS)
def test_every_logit_equals_transformers(tmp_path_factory, variant):
    check_parity(*checkpoint(tmp_path_factory, "nemotron_h", VARIANTS[variant], seed=3))


def test_every_mode_is_exact(tmp_path_factory):
    """Drafts of the head among them."""
    check_exactness(checkpoint(tmp_path_factory, "nemotron_h")[1])


def test_experts_by_the_names_that_transformers_has_in_memory(tmp_path_factory):
    model, folder = checkpoint(tmp_path_factory, "nemotron_h", {"num_nextn_predict_layers": 0}, seed=3)
    assert "backbone.layers.4.mixer.experts.0.up_proj.weight" in load_file(folder / "model.safetensors")
    assert "model.layers.4.mixer.experts.up_proj" in model.state_dict()
    save_file({name: tensor.contiguous() for name, tensor in model.state_dict().items()}, folder / "model.safetensors")
    check_parity(model, folder)


@pytest.mark.parametrize("name", ["gate.weight", "e_score_correction_bias"])
def test_a_shifted_expert_is_seen(tmp_path_factory, name):
    """The parity test can fail: what an expert is chosen by belongs to the one before it."""
    model, folder = checkpoint(tmp_path_factory, "nemotron_h", seed=3)
    tensors = load_file(folder / "model.safetensors")
    shifted = {key: torch.roll(tensor, 1, 0) if key.endswith(name) else tensor for key, tensor in tensors.items()}
    save_file(shifted, folder / "model.safetensors")
    with pytest.raises(AssertionError):
        check_parity(model, folder)


def norm(x, weight, eps=1e-5):
    return torch.nn.functional.rms_norm(x, weight.shape, weight, eps)


class DenseHead:
    """transformers' attention and mixture in the places that the checkpoint's names give them."""

    def __init__(self, folder):
        config = NemotronHConfig.from_pretrained(folder)
        config._attn_implementation = "eager"
        self.tensors = load_file(folder / "model.safetensors")
        self.attention, self.moe = NemotronHAttention(config, 0), NemotronHMoE(config)
        own = {name.removeprefix("mtp.layers."): t for name, t in self.tensors.items() if name.startswith("mtp.")}
        self.own = own
        self.attention.load_state_dict(
            {name.removeprefix("0.mixer."): t for name, t in own.items() if name.startswith("0.mixer.")}
        )
        moe = {name.removeprefix("1.mixer."): t for name, t in own.items() if name.startswith("1.mixer.")}
        for kind in ("up_proj", "down_proj"):
            experts = range(config.n_routed_experts)
            moe[f"experts.{kind}"] = torch.stack([moe.pop(f"experts.{i}.{kind}.weight") for i in experts])
        self.moe.load_state_dict(moe)

    @torch.no_grad()
    def __call__(self, hidden, ids, grid):
        """Hidden states of tokens 0 … t-1 and ids of tokens 1 … t to logits of tokens 2 … t+1."""
        own, embedding = self.own, self.tensors["backbone.embeddings.weight"][ids]
        joined = [norm(embedding, own["0.enorm.weight"]), norm(hidden, own["0.hnorm.weight"])]
        x = torch.cat(joined, -1) @ own["0.eh_proj.weight"].T
        token = torch.arange(len(ids))
        hides = (token[:, None] < token) | ((token + 1) % grid == 0)
        mask = torch.zeros(hides.shape).masked_fill(hides, torch.finfo(torch.float32).min)
        x = x + self.attention(norm(x, own["0.norm.weight"])[None], attention_mask=mask[None, None])[0][0]
        x = x + self.moe(norm(x, own["1.norm.weight"])[None])[0]
        return norm(x, own["1.final_layernorm.weight"]) @ self.tensors["lm_head.weight"].T


@pytest.mark.parametrize("keys", [{}, LATENT], ids=["plain", "latent"])
@pytest.mark.parametrize("grid", [4, 10**6])
def test_the_draft_head_equals_a_dense_one(tmp_path_factory, grid, keys):
    """In chunks and token by token; `Paged` fills what no pair has written with NaN."""
    folder = checkpoint(tmp_path_factory, "nemotron_h", keys)[1]
    head = load_head(folder, load_model(folder, EngineConfig(dtype="float32"), CPU))
    head.grid = grid
    g = torch.Generator().manual_seed(2)
    request = torch.randint(0, 101, (21,), generator=g), torch.randn(21, 32, generator=g)
    expected = DenseHead(folder)(request[1][:-1], request[0][1:], grid)
    paged = Paged(head, 1, dtype=torch.float32)
    cuts = (0, 1, 7, 8, 9, 20, 21)
    outputs = [paged.step([(0, a, *pairs(request, a, b))])[0] for a, b in pairwise(cuts)]
    logits = head.compute_logits(torch.cat(outputs)[1:])
    assert float((logits - expected).abs().max()) <= TOLERANCE * float(expected.abs().max())


def test_the_router_is_wide_where_the_model_is_not(tmp_path_factory):
    """In bfloat16 neighbouring scores round to one: transformers multiplies in float32, and keeps the bias so."""
    model, folder = checkpoint(tmp_path_factory, "nemotron_h", {"n_routed_experts": 48}, seed=3)
    theirs = model.model.layers[4].mixer.gate
    bias = theirs.e_score_correction_bias.add_(4).clone()
    model.save_pretrained(folder)
    theirs.bfloat16().e_score_correction_bias = bias
    ours = load_model(folder, EngineConfig(dtype="bfloat16"), CPU).layers[4].mixer
    x = torch.randn(500, 32, generator=torch.Generator().manual_seed(1)).bfloat16()
    routed = []
    ours.experts.forward = lambda x, weights, ids: routed.append(ids) or x
    with torch.no_grad():
        ours(x, None)
        _, _, ids = theirs(x)
    assert torch.equal(routed[0].sort(-1).values, ids.sort(-1).values)


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"n_shared_experts": 2}, "n_shared_experts=2 can't be run, 1 can"),
        ({"topk_group": 4}, "num_experts_per_tok=2 of topk_group=4 out of n_group=3 groups can't be chosen"),
        ({"num_experts_per_tok": 5}, "num_experts_per_tok=5 of topk_group=2 out of n_group=3 groups can't be chosen"),
        ({"mlp_hidden_act": "silu"}, r"activations \('silu', 'silu'\) are not supported"),
        ({"moe_latent_size": 0}, "moe_latent_size=0 must be an integer >= 1"),
    ],
)
def test_what_cannot_be_run_is_refused(tmp_path_factory, keys, message):
    check_refused(checkpoint(tmp_path_factory, "nemotron_h")[1], keys, message)
