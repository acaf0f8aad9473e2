"""Logits of every token through the engine against transformers' NemotronH with the same random weights.

Tolerance: 2e-5 of max|logit|, the difference of chunked and recurrent float32 arithmetic (see
tests/kernels/ssd/test_reference.py). Greedy tokens are compared too, where margins are wider than rounding.
"""

import json

import pytest
import torch
from safetensors.torch import load_file, save_file

from hybrid_kv.engine.llm import LLM
from hybrid_kv.engine.record import record_logits
from hybrid_kv.guard.scenario import SmallKVFirst
from hybrid_kv.sampling import SamplingParams
from tests.models.tiny_nemotron import VOCAB, Characters, build

TOLERANCE = 2e-5
GEOMETRIES = {
    "gqa_mlp": ("M-M*-M*-", {"n_groups": 1, "num_key_value_heads": 1}),
    "groups": ("MM*M", {"n_groups": 4, "use_conv_bias": False, "head_dim": 24}),
    "mha": ("M*M-", {"num_key_value_heads": 4, "head_dim": 8, "mamba_num_heads": 6, "hidden_size": 40}),
    "odd": ("*M", {"conv_kernel": 3, "chunk_size": 5}),
}
ENGINES = (
    {"max_num_batched_tokens": 200, "attention_backend": "TORCH"},
    {"max_num_batched_tokens": 17, "attention_backend": "FLASH_ATTN"},
    {"max_num_batched_tokens": 7, "attention_backend": SmallKVFirst.name, "captured_batch_sizes": (3, 4)},
)
LENGTHS = (40, 1, 23, 16)


@pytest.fixture(scope="module", params=GEOMETRIES)
def checkpoint(request, tmp_path_factory):
    pattern, overrides = GEOMETRIES[request.param]
    model = build(pattern, **overrides)
    folder = tmp_path_factory.mktemp(request.param)
    model.save_pretrained(folder)
    return model, folder


def prompts():
    g = torch.Generator().manual_seed(5)
    return [torch.randint(0, VOCAB, (length,), generator=g).tolist() for length in LENGTHS]


def load(folder, **options):
    options = {"max_num_seqs": 4, "max_model_len": 64, "device": "cpu", "dtype": "float32"} | options
    return LLM(folder, tokenizer=Characters(), **options)


def compare(reference, llm, disturb=None):
    """Assert equal logits and tokens; returns the number of preemptions."""
    preemptions = 0
    for output, logits in record_logits(llm, prompts(), SamplingParams(max_tokens=8), disturb):
        assert output.error is None
        ids = output.prompt_token_ids + output.token_ids
        with torch.inference_mode():
            expected = reference(torch.tensor([ids]), use_cache=False).logits[0, : len(logits)]
        assert len(logits) == len(ids) - 1
        scale = float(expected.abs().max())
        assert float((logits - expected).abs().max()) <= TOLERANCE * scale
        start = len(output.prompt_token_ids) - 1
        top = expected[start:].topk(2).values
        assert float((top[:, 0] - top[:, 1]).min()) > 4 * TOLERANCE * scale, "margins too small to compare tokens"
        assert expected[start:].argmax(-1).tolist() == output.token_ids
        preemptions += output.num_preemptions
    return preemptions


@pytest.mark.parametrize("engine", ENGINES, ids=lambda engine: str(engine["max_num_batched_tokens"]))
def test_every_logit_equals_transformers(checkpoint, engine):
    model, folder = checkpoint
    compare(model, load(folder, **engine))


@pytest.mark.parametrize("dtypes", [("float64", "float32"), ("float32", "float64")], ids="-".join)
def test_states_of_another_dtype_than_the_model(checkpoint, dtypes):
    model, folder = checkpoint
    compare(model, load(folder, dtype=dtypes[0], mamba_ssm_cache_dtype=dtypes[1], max_num_batched_tokens=17))


def test_after_preemption(checkpoint):
    model, folder = checkpoint

    def preempt(llm):
        if llm.num_steps % 4 == 3 and len(llm.scheduler.running) > 1:
            llm.scheduler.preempt(llm.scheduler.running[-1])

    assert compare(model, load(folder, max_num_batched_tokens=33), preempt) > 0


def test_a_pool_too_small_for_all_preempts(checkpoint):
    model, folder = checkpoint
    least = 1 + load(folder, block_size=4).plan.config.max_blocks_per_request(48)
    engines = (load(folder, block_size=4, num_blocks=least + more) for more in range(12))
    assert sum(compare(model, engine) for engine in engines) > 0


def test_poisoned_memory_changes_nothing(checkpoint):
    """Every byte of the cache is -1, NaN in float32, before the first step."""
    model, folder = checkpoint
    llm = load(folder, captured_batch_sizes=(8,), max_num_batched_tokens=19)
    for raw in llm.runner.raw_buffers:
        raw.fill_(-1)
    compare(model, llm)


@pytest.mark.parametrize("prefix", ["backbone.", "model."])
def test_pattern_spelling_and_either_prefix(checkpoint, tmp_path, prefix):
    model, folder = checkpoint
    config = json.loads((folder / "config.json").read_text())
    letters = {"linear_attention": "M", "mamba": "M", "full_attention": "*", "attention": "*", "mlp": "-"}
    config["hybrid_override_pattern"] = "".join(letters[kind] for kind in config.pop("layers_block_type"))
    (tmp_path / "config.json").write_text(json.dumps(config))
    tensors = load_file(folder / "model.safetensors")
    assert any(name.startswith("backbone.") for name in tensors)
    renamed = {name.replace("backbone.", prefix, 1): tensor for name, tensor in tensors.items()}
    save_file({**renamed, "mtp.layers.0.norm.weight": torch.ones(3)}, tmp_path / "model.safetensors")
    compare(model, load(tmp_path))
