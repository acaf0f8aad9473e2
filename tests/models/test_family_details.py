"""Details of single families: spellings of the hub, shared weights, caches of layers."""

from __future__ import annotations

import json
from collections.abc import Callable
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig

from hybrid_kv.attention.paged import TRITON
from hybrid_kv.cache.ranks import Ranks
from hybrid_kv.cache.spec import (
    FullAttentionSpec,
    MambaSpec,
    MLAAttentionSpec,
    SlidingWindowSpec,
    kind_of,
)
from hybrid_kv.check.guard.exactness import beside_transformers
from hybrid_kv.check.guard.scenario import SmallKVFirst
from hybrid_kv.config import ConfigError, EngineConfig
from hybrid_kv.engine import runner
from hybrid_kv.engine.llm import LLM
from hybrid_kv.engine.runner import ModelRunner
from hybrid_kv.models.layers import ForwardContext
from hybrid_kv.models.loader import load_model
from hybrid_kv.models.shapes import ModelShape, model_shape
from hybrid_kv.models.transformers_cache import cache_argument, cache_of
from hybrid_kv.sampling import SamplingParams
from tests.models.paged_head import CPU
from tests.models.parity import TOLERANCE, check_parity, check_refused, checkpoint, load, prompts


def rewrite(folder: Path, change: Callable[[dict[str, Any]], None]) -> None:
    """config.json after `change`, which is given its values."""
    config = json.loads((folder / "config.json").read_text())
    change(config)
    (folder / "config.json").write_text(json.dumps(config))


def test_falcon_mamba_counts_channels_before_what_they_are_a_multiple_of(
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    """tiiuae/falcon-mamba-7b says `expand` 16 and 8,192 channels, twice the hidden size."""
    _, folder = checkpoint(tmp_path_factory, "falcon_mamba")
    rewrite(folder, lambda config: config.update(expand=16, intermediate_size=80))
    spec = model_shape(folder).layers["layers.0"]
    assert [(part.name, part.shape) for part in spec.parts] == [("conv", (3, 80)), ("ssm", (80, 6))]


def test_mamba2_with_an_older_name_of_the_embedding(
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    model, folder = checkpoint(tmp_path_factory, "mamba2")
    tensors = load_file(folder / "model.safetensors")
    tensors["backbone.embedding.weight"] = tensors.pop("backbone.embeddings.weight")
    save_file(tensors, folder / "model.safetensors")
    check_parity(model, folder)


# ---- Jamba ----


def test_transformers_forgets_jambas_state_between_chunks(
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    """Why only a whole text and single tokens are compared; when this fails, chunks can be, too."""
    model, _ = checkpoint(tmp_path_factory, "jamba")
    ids = torch.arange(20)[None]
    with torch.inference_mode():
        whole = model(ids, use_cache=False).logits[0, 10:]
        past = {cache_argument(model.forward): cache_of(model(ids[:, :10], use_cache=True))}
        behind = model(ids[:, 10:], **past).logits[0]
    assert float((whole - behind).abs().max()) > 100 * TOLERANCE * float(whole.abs().max())


def test_a_missing_expert_of_jamba_is_named_and_layers_come_in_periods(
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    _, folder = checkpoint(tmp_path_factory, "jamba")
    layers = model_shape(folder).layers
    assert [name for name, spec in layers.items() if not hasattr(spec, "parts")] == [
        "layers.1",
        "layers.4",
    ]
    kept = {
        name: t
        for name, t in load_file(folder / "model.safetensors").items()
        if ".experts.2.down" not in name
    }
    save_file(kept, folder / "model.safetensors")
    with pytest.raises(ConfigError, match="of expert 2"):
        load(folder)


# ---- Kimi-Linear ----


def test_the_hubs_spelling_of_kimi_linear(tmp_path_factory: pytest.TempPathFactory) -> None:
    """moonshotai/Kimi-Linear-48B-A3B-Instruct counts layers from 1, in a nested object."""
    model, folder = checkpoint(tmp_path_factory, "kimi_linear")

    def spell(config: dict[str, Any]) -> None:
        kinds = config.pop("layer_types")
        config["linear_attn_config"] = {
            "full_attn_layers": [i + 1 for i, kind in enumerate(kinds) if kind == "full_attention"],
            "kda_layers": [i + 1 for i, kind in enumerate(kinds) if kind == "linear_attention"],
            "head_dim": config.pop("linear_head_dim"),
            "num_heads": config.pop("linear_num_heads"),
            "short_conv_kernel_size": config.pop("linear_conv_kernel_dim"),
        }
        config["first_k_dense_replace"] = config.pop("mlp_layer_types").count("dense")
        for hub, own in {
            "num_experts": "num_local_experts",
            "num_experts_per_token": "num_experts_per_tok",
            "moe_renormalize": "norm_topk_prob",
            "num_expert_group": "n_group",
            "num_shared_experts": "n_shared_experts",
        }.items():
            if own in config:
                config[hub] = config.pop(own)

    rewrite(folder, spell)
    tensors = load_file(folder / "model.safetensors")
    assert {"q_conv1d", "w1", "block_sparse_moe"} <= {
        part for name in tensors for part in name.split(".")
    }
    check_parity(model, folder)


def test_a_token_takes_one_vector_in_kimi_linears_latent_cache(
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    _, folder = checkpoint(tmp_path_factory, "kimi_linear")
    shape = model_shape(folder, num_speculative_tokens=2)
    layers = shape.layers
    assert shape.max_position_embeddings == 1048576
    spec = layers["layers.1"]
    assert isinstance(spec, MLAAttentionSpec)
    assert spec.page_size_bytes == (14 + 6) * 4
    assert [(part.name, part.shape) for part in layers["layers.0"].parts] == [
        ("conv", (5, 72)),
        ("ssm", (3, 8, 8)),
    ]
    llm = load(folder)
    (latents,) = llm.runner.views["layers.1"]
    assert latents.shape[2] == 20
    assert latents.numel() * 4 == llm.plan.config.num_blocks * llm.plan.config.page_size_bytes
    (output,) = load(folder, dtype="bfloat16").generate([[7, 8, 9]], progress=False)
    assert output.error is None and torch.tensor(output.token_ids).lt(101).all()


# ---- Lara-4-Mini, LFM3 ----

COUNTS = {
    "lara_mini": {"gdn_attention": 14, "window 512": 13, "attention": 7},
    "lfm3": {"short_conv": 13, "attention": 6, "window 256": 5},
}
# By hand: three rows of 2 * 8 * 128 + 16 * 128 channels, and six of the hidden size.
STATES = {
    "lara_mini": [("conv", (3, 4096)), ("ssm", (16, 128, 128))],
    "lfm3": [("conv", (6, 2048))],
}


@pytest.mark.parametrize("model_type", ["lara_mini", "lfm3"])
def test_published_models_with_windows_are_the_defaults_of_transformers(model_type: str) -> None:
    """With the layers listed, as transformers writes them, and by their number alone."""
    published = AutoConfig.for_model(model_type, dtype="bfloat16").to_dict()
    unlisted = {key: value for key, value in published.items() if key != "layer_types"}
    shape = model_shape(published)
    assert shape.layers == model_shape(unlisted).layers
    assert shape.counts == COUNTS[model_type]
    state = next(spec for spec in shape.layers.values() if isinstance(spec, MambaSpec))
    assert [(part.name, part.shape) for part in state.parts] == STATES[model_type]
    for spec in shape.layers.values():
        if isinstance(spec, FullAttentionSpec):
            assert (spec.num_kv_heads, spec.head_size, spec.dtype) == (4, 128, torch.bfloat16)


def test_windows_alone_turn_in_lara_mini(tmp_path_factory: pytest.TempPathFactory) -> None:
    _, folder = checkpoint(tmp_path_factory, "lara_mini")
    layers = load_model(folder, EngineConfig(dtype="float32"), CPU).layers
    ropes = [getattr(layer.mixer, "rope", "none") for layer in layers]
    assert [rope and rope != "none" for rope in ropes] == [False, True, False, None, True]


def test_each_kind_of_layer_turns_by_its_frequencies_in_lfm3(
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    """Of full attention half of the channels, by a base of a million; both in float32."""
    _, folder = checkpoint(tmp_path_factory, "lfm3")
    layers = load_model(folder, EngineConfig(dtype="bfloat16"), CPU).layers
    full, window = layers[1].mixer.rope, layers[2].mixer.rope
    assert full.frequencies == pytest.approx([1e6 ** (-i / 8) for i in range(4)] + 4 * [0.0])
    assert window.frequencies == pytest.approx([1e4 ** (-i / 8) for i in range(8)])
    for rope in (full, window):
        cosines, _ = rope.rotation(torch.arange(3), torch.bfloat16)
        assert cosines.dtype == torch.float32
        assert rope.rotation(torch.arange(3), torch.float64)[0].dtype == torch.float64


@pytest.mark.parametrize(
    ("model_type", "mode"),
    [*product(("inkling_text", "lara_mini", "lfm3"), ("align", "all")), ("dory", "none")],
)
def test_windows_next_to_states_are_given_back_and_restored(
    tmp_path_factory: pytest.TempPathFactory, model_type: str, mode: str
) -> None:
    """While a request runs, and with a hit; n-grams are drafted all the time."""
    model, folder = checkpoint(tmp_path_factory, model_type)
    llm = load(
        folder,
        mamba_cache_mode=mode,
        enable_prefix_caching=True,
        attention_backend=SmallKVFirst.name,
        max_num_batched_tokens=17,
        speculative_method="ngram",
        num_speculative_tokens=3,
    )
    specs = [group.spec for group in llm.plan.config.groups]
    windows = {i: spec for i, spec in enumerate(specs) if isinstance(spec, SlidingWindowSpec)}
    full = next(i for i, spec in enumerate(specs) if kind_of(spec) == "attention")
    assert windows and all(spec.num_tail_blocks > 1 for spec in windows.values())
    given_back: list[int] = []

    def count(llm: LLM) -> None:
        for request in llm.scheduler.running:
            held = [len(ids) for ids in llm.manager.block_ids(request.request_id)]
            for i, spec in windows.items():
                assert held[i] <= spec.max_blocks_per_request(64)
                given_back.append(held[full] - held[i])

    text = prompts(101)[0]
    for is_hit in (False, True):
        outputs = beside_transformers(model, llm, [text], SamplingParams(max_tokens=20), count)
        for output, _, expected, far in outputs:
            assert output.error is None and far <= TOLERANCE
            assert output.token_ids == expected[len(text) - 1 :].argmax(-1).tolist()
            assert bool(output.cached_tokens) == is_hit
    assert max(given_back) > 0


# ---- Dory ----


def published_dory(**keys: Any) -> dict[str, Any]:
    return AutoConfig.for_model("dory", dtype="bfloat16").to_dict() | keys


def test_a_looped_layer_has_a_cache_for_each_pass() -> None:
    """Of 36 layers 20 run twice, each fourth with full attention; MLPs count as layers."""
    shape = model_shape(published_dory())
    assert shape.counts == {"window 1024": 12 + 2 * 15, "attention": 4 + 2 * 5}
    assert list(shape.layers)[7:11] == ["layers.14", "layers.16", "layers.16.loop.1", "layers.18"]
    thrice = model_shape(published_dory(n_recurrent_loops=3))
    assert thrice.layers.keys() > shape.layers.keys() and "layers.16.loop.2" in thrice.layers
    shared = model_shape(published_dory(recurrent_kv_cache_mode="last_loop"))
    assert shared.counts == {"window 1024": 27, "attention": 9}
    stages = shape.stages(Ranks(pipeline_parallel_size=2))
    assert {"layers.34", "layers.34.loop.1"} <= set(stages[0])
    assert [len(stage) for stage in stages] == [8 + 2 * 10, 8 + 2 * 10]


def test_the_layers_of_dory_without_a_list() -> None:
    published = published_dory()
    halves = ("num_hidden_layers", "n_input_layers", "n_recurrent_layers", "n_output_layers")
    unlisted = {
        key: value // 2 if key in halves else value
        for key, value in published.items()
        if key != "layer_types"
    }
    assert model_shape(unlisted).counts == model_shape(published).counts
    assert "layers.8.loop.1" in model_shape(unlisted).layers


def test_the_hubs_spelling_of_dory(tmp_path_factory: pytest.TempPathFactory) -> None:
    """Attention and MLP of a layer have a number each."""
    model, folder = checkpoint(tmp_path_factory, "dory")
    stored = load_file(folder / "model.safetensors")

    def paired(name: str) -> str:
        before, found, rest = name.partition("layers.")
        number, _, part = rest.partition(".")
        for part_here, part_there, offset in (
            ("self_attn.", "mixer.", 0),
            ("mlp.", "mixer.", 1),
            ("lambda_1", "attn_alpha", 0),
            ("lambda_2", "mlp_alpha", 1),
        ):
            if found and part.startswith(part_here):
                renamed = part.replace(part_here, part_there, 1)
                return f"{before}layers.{2 * int(number) + offset}.{renamed}"
        return name

    hub = {paired(name): tensor for name, tensor in stored.items()}
    assert "backbone.layers.9.mixer.suv_up" in hub
    save_file(hub, folder / "model.safetensors")
    check_parity(model, folder)


def test_a_pass_finds_its_caches_and_no_others() -> None:
    own = {"layers.2": 1, "layers.2.loop.1": 2, "layers.2.loop.11": 3, "layers.3": 4}
    context = ForwardContext(dict(own), {}, dict(own), "triton")
    assert context.of_loop(0) is context
    assert context.of_loop(1).metadata == {"layers.2": 2} == context.of_loop(1).row_memory
    assert context.of_loop(11).metadata == {"layers.2": 3}
    assert context.of_loop(1).kernels == "triton"


# ---- Inkling ----


def published_inkling(model_type: str) -> ModelShape:
    return model_shape(AutoConfig.for_model(model_type, dtype="bfloat16").to_dict())


def test_a_layer_of_inkling_keeps_the_inputs_of_four_convolutions() -> None:
    shape = published_inkling("inkling_text")
    assert shape.counts == {"window 512": 55, "attention": 11, "short_conv": 66}
    kept = [shape.layers[f"layers.{i}.conv"] for i in (4, 5)]
    for spec, kv_heads in zip(kept, (16, 8), strict=True):
        assert isinstance(spec, MambaSpec)
        assert [part.shape for part in spec.parts] == [
            *[(3, kv_heads * 128)] * 2,
            *[(3, 6144)] * 2,
        ]
        assert {part.role for part in spec.parts} == {"window"}


def test_each_pass_through_a_looped_layer_of_inkling_2_keeps_its_own() -> None:
    """Layers 6 to 17 of 24 run three times."""
    shape = published_inkling("inkling2_loop_text")
    assert shape.counts == {"window 1024": 40, "attention": 2 + 3 * 2, "short_conv": 24 + 2 * 12}
    names = [name for name in shape.layers if name.startswith("layers.6.")]
    assert names == [
        *("layers.6.attention", "layers.6.conv"),
        *("layers.6.attention.loop.1", "layers.6.conv.loop.1"),
        *("layers.6.attention.loop.2", "layers.6.conv.loop.2"),
    ]
    assert published_inkling("inkling2_text").counts["short_conv"] == 48


def test_a_bias_by_distance_runs_on_torch_alone(
    tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, folder = checkpoint(tmp_path_factory, "inkling_text")
    monkeypatch.setattr(runner, "compute_of", lambda name: TRITON)
    monkeypatch.setattr(ModelRunner, "allocate_memory", lambda _: pytest.fail("allocated"))
    line = (
        r"layer layers\.\d\.attention has a bias of scores by distance, which \w+ does not "
        "compute here; use --kernels torch"
    )
    with pytest.raises(ConfigError, match=line):
        load(folder)


# ---- LFM2 ----


def test_the_hubs_older_keys_of_lfm2(tmp_path_factory: pytest.TempPathFactory) -> None:
    """`full_attn_idxs`, `block_ff_dim` and `tie_embedding`, as in LiquidAI/LFM2-1.2B."""
    model, folder = checkpoint(tmp_path_factory, "lfm2")

    def spell(config: dict[str, Any]) -> None:
        config["full_attn_idxs"] = [
            i for i, kind in enumerate(config.pop("layer_types")) if kind == "full_attention"
        ]
        config["block_ff_dim"], config["intermediate_size"] = config["intermediate_size"], 7
        config["tie_embedding"] = config.pop("tie_word_embeddings")

    rewrite(folder, spell)
    check_parity(model, folder)


def test_a_convolution_of_lfm2_keeps_a_window_and_no_state(
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    _, folder = checkpoint(tmp_path_factory, "lfm2", {"dtype": "bfloat16"})
    specs = model_shape(folder, num_speculative_tokens=2).layers
    spec = specs["layers.0"]
    assert isinstance(spec, MambaSpec)
    assert [(part.name, part.shape, part.role) for part in spec.parts] == [
        ("conv", (5, 40), "window")
    ]
    assert [name for name, spec in specs.items() if not isinstance(spec, MambaSpec)] == [
        "layers.1",
        "layers.4",
    ]


# ---- NemotronH ----


@pytest.mark.parametrize("prefix", ["backbone.", "model."])
def test_nemotron_hs_pattern_and_either_prefix(
    tmp_path_factory: pytest.TempPathFactory, prefix: str
) -> None:
    keys = {
        "layers_block_type": ["linear_attention", "mlp", "full_attention"],
        "num_nextn_predict_layers": 0,
    }
    model, folder = checkpoint(tmp_path_factory, "nemotron_h", {**keys, "num_hidden_layers": 3})
    letters = {
        "linear_attention": "M",
        "mamba": "M",
        "full_attention": "*",
        "attention": "*",
        "mlp": "-",
    }

    def spell(config: dict[str, Any]) -> None:
        kinds = config.pop("layers_block_type", None) or config.pop("layer_types")
        config["hybrid_override_pattern"] = "".join(letters[kind] for kind in kinds)

    rewrite(folder, spell)
    tensors = load_file(folder / "model.safetensors")
    assert any(name.startswith("backbone.") for name in tensors)
    renamed = {name.replace("backbone.", prefix, 1): tensor for name, tensor in tensors.items()}
    save_file({**renamed, "mtp.layers.0.norm.weight": torch.ones(3)}, folder / "model.safetensors")
    check_parity(model, folder)


def test_nemotron_hs_router_is_wide_where_the_model_is_not(
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    """In bfloat16 near scores would tie: transformers multiplies and keeps the bias in float32."""
    model, folder = checkpoint(tmp_path_factory, "nemotron_h", {"n_routed_experts": 48})
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


# ---- Zamba2 ----


def test_layers_of_zamba2_share_weights_and_no_cache(
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    layers = load_model(
        checkpoint(tmp_path_factory, "zamba2")[1], EngineConfig(dtype="float32"), CPU
    ).layers
    assert layers[1].shared is layers[4].shared is not layers[3].shared
    assert layers[1].attention.o_proj.weight is layers[4].attention.o_proj.weight
    assert layers[1].attention.name != layers[4].attention.name


def test_weights_that_zamba2_stores_with_every_layer_must_be_alike(
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    """A block's weights may be stored with each layer that runs it, as transformers does."""
    model, folder = checkpoint(tmp_path_factory, "zamba2")
    tensors = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    assert "model.layers.4.shared_transformer.self_attn.o_proj.weight" in tensors
    save_file(tensors, folder / "model.safetensors")
    check_parity(model, folder)
    tensors["model.layers.4.shared_transformer.self_attn.o_proj.weight"] += 1
    save_file(tensors, folder / "model.safetensors")
    check_refused(
        folder, {}, r"ties layers\.4\.shared\.o_proj\.weight to layers\.1\.shared\.o_proj\.weight"
    )


def test_an_adapter_of_a_layer_that_does_not_exist_is_rejected(
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    folder = checkpoint(tmp_path_factory, "zamba2")[1]
    tensors = load_file(folder / "model.safetensors")
    name = "model.layers.1.shared_transformer.feed_forward.gate_up_proj_adapter_list.7.0.weight"
    save_file({**tensors, name: torch.zeros(6, 36)}, folder / "model.safetensors")
    check_refused(
        folder,
        {},
        "does not know, the first is layers.1.shared.gate_up_proj_adapter_list.7.0.weight",
    )
