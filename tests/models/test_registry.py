"""A family is one module that registers itself; the rest of the package learns of it by its `model_type` alone."""

import json
import sys
import textwrap
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import save_file

import hybrid_kv
from hybrid_kv.config import ConfigError
from hybrid_kv.engine.llm import LLM
from hybrid_kv.engine.record import record_logits
from hybrid_kv.models import registry
from hybrid_kv.models.config_file import ConfigFile
from hybrid_kv.models.shapes import model_shape
from hybrid_kv.sampling import SamplingParams
from tests.models.tiny_nemotron import Characters

# Mamba-2 (one head group, no gate of its own kind), attention and a "swish" MLP, all with names of their own.
FAMILY = '''
    """Toy: pre-normed layers `mix` (Mamba-2), `look` (attention) and `swish` (an MLP), tied embeddings."""

    import torch
    import torch.nn.functional as F
    from torch import nn

    from hybrid_kv.models.attention import PagedAttention
    from hybrid_kv.models.layers import Linear, RMSNorm, upcast
    from hybrid_kv.models.mixers.mamba2 import Mamba2Mixer
    from hybrid_kv.models.registry import Family, register
    from hybrid_kv.models.specs import Mamba2Spec, attention_spec


    class Swish(nn.Module):
        def __init__(self, size):
            super().__init__()
            self.up = Linear(size, size)

        def forward(self, x, context):
            return F.silu(self.up(x))


    def mix(file, name):
        sizes = [file.size(key) for key in ("d", "m_heads", "m_dim", "m_state")]
        return Mamba2Mixer(name, *sizes, 1, file.size("m_taps"), 4, 1e-5, conv_bias=False, bias=False)


    def look(file, name):
        return PagedAttention(name, file.size("d"), file.size("num_attention_heads"), 1, file.size("head_dim"))


    MIXERS = {"mix": mix, "look": look, "swish": lambda file, name: Swish(file.size("d"))}


    class Toy(nn.Module):
        def __init__(self, file, layer_specs):
            super().__init__()
            self.vocab_size, self.mamba_chunk_size, self.layer_specs = file.size("vocab_size"), 4, layer_specs
            self.embed = nn.Embedding(self.vocab_size, file.size("d"))
            kinds = file.values["order"]
            self.mixers = nn.ModuleList(MIXERS[kind](file, f"layers.{i}") for i, kind in enumerate(kinds))
            self.norms = nn.ModuleList(RMSNorm(file.size("d"), 1e-5) for _ in kinds)

        def forward(self, input_ids, positions, context):
            x = self.embed(input_ids)
            for norm, mixer in zip(self.norms, self.mixers, strict=True):
                x = x + mixer(norm(x), context)
            return x

        def flush(self, recomputes, context):
            for mixer in self.mixers:
                if mixer.name in recomputes:
                    mixer.flush(recomputes[mixer.name], context)

        def compute_logits(self, hidden):
            return upcast(F.linear(hidden, self.embed.weight))


    register(
        Family(
            kinds=lambda file: file.values["order"],
            caches={
                "mix": {"": Mamba2Spec("m_heads", "m_dim", "m_state", "m_groups", "m_taps")},
                "look": {"": attention_spec},
                "swish": {},
            },
            build=Toy,
            convert_weights=lambda tensors: {name.removeprefix("toy."): tensor for name, tensor in tensors.items()},
        ),
        "toy",
    )
'''
ORDER = ["mix", "swish", "look", "mix"]
D, HEADS, DIM, STATE, TAPS, QUERY_HEADS, SIZE, VOCAB = 12, 2, 6, 5, 3, 2, 4, 29
CONFIG = {
    **{"model_type": "toy", "order": ORDER, "hidden_size": D, "d": D, "vocab_size": VOCAB, "dtype": "float64"},
    **{"m_heads": HEADS, "m_dim": DIM, "m_state": STATE, "m_groups": 1, "m_taps": TAPS},
    **{"num_attention_heads": QUERY_HEADS, "num_key_value_heads": 1, "head_dim": SIZE},
}
PROMPTS = [torch.randint(0, VOCAB, (n,), generator=torch.Generator().manual_seed(n)).tolist() for n in (33, 1, 8, 33)]


def weights():
    """Random float64 tensors under the checkpoint's names."""
    g = torch.Generator().manual_seed(0)
    inner, channels = HEADS * DIM, HEADS * DIM + 2 * STATE
    mix = {"in_proj.weight": (inner + channels + HEADS, D), "conv_weight": (channels, TAPS), "norm.weight": (inner,)}
    mix |= {"out_proj.weight": (D, inner), "dt_bias": (HEADS,), "A_log": (HEADS,), "D": (HEADS,)}
    look = {"qkv_proj.weight": ((QUERY_HEADS + 2) * SIZE, D), "o_proj.weight": (D, QUERY_HEADS * SIZE)}
    shapes = {"embed.weight": (VOCAB, D)}
    for i, kind in enumerate(ORDER):
        parts = {"mix": mix, "look": look, "swish": {"up.weight": (D, D)}}[kind]
        shapes |= {f"mixers.{i}.{name}": shape for name, shape in parts.items()} | {f"norms.{i}.weight": (D,)}
    tensors = {f"toy.{name}": torch.randn(*shape, generator=g, dtype=torch.float64) for name, shape in shapes.items()}
    tensors["toy.embed.weight"] *= 0.3  # so that the mixers, not the last token alone, decide the next
    return tensors


def plain(w, ids):
    """Logits of every token, a token at a time and a head at a time: no cache, no chunk, no kernel."""
    x = w["embed.weight"][ids]
    for i, kind in enumerate(ORDER):
        part = {name.removeprefix(f"mixers.{i}."): tensor for name, tensor in w.items()}
        normed = F.rms_norm(x, (D,), w[f"norms.{i}.weight"], 1e-5)
        x = x + {"mix": plain_mamba, "look": plain_attention, "swish": plain_mlp}[kind](part, normed)
    return x @ w["embed.weight"].T


def plain_mlp(w, x):
    return F.silu(x @ w["up.weight"].T)


def plain_attention(w, x):
    qkv = (x @ w["qkv_proj.weight"].T).view(len(x), QUERY_HEADS + 2, SIZE)
    key, value = qkv[:, QUERY_HEADS], qkv[:, QUERY_HEADS + 1]
    rows = []
    for t in range(len(x)):
        scores = (qkv[t, :QUERY_HEADS] @ key[: t + 1].T * SIZE**-0.5).softmax(-1)
        rows.append((scores @ value[: t + 1]).flatten())
    return torch.stack(rows) @ w["o_proj.weight"].T


def plain_mamba(w, x):
    inner = HEADS * DIM
    gate, conv_in, raw_dt = (x @ w["in_proj.weight"].T).split([inner, inner + 2 * STATE, HEADS], dim=-1)
    padded = F.pad(conv_in, (0, 0, TAPS - 1, 0))
    state, rows = torch.zeros(HEADS, DIM, STATE, dtype=x.dtype), []
    for t in range(len(x)):
        taps = F.silu((padded[t : t + TAPS] * w["conv_weight"].T).sum(0))
        u, B, C = taps[:inner].view(HEADS, DIM), taps[inner : inner + STATE], taps[inner + STATE :]
        dt = F.softplus(raw_dt[t] + w["dt_bias"])
        decay = torch.exp(-torch.exp(w["A_log"]) * dt)
        state = decay[:, None, None] * state + (dt[:, None] * u)[..., None] * B
        rows.append((state @ C + w["D"][:, None] * u).flatten())
    mixed = torch.stack(rows) * F.silu(gate)
    return F.rms_norm(mixed, (inner,), w["norm.weight"], 1e-5) @ w["out_proj.weight"].T


@pytest.fixture
def toy(tmp_path, monkeypatch):
    """A checkpoint folder of the toy family, whose module lies outside the package and is imported from there."""
    monkeypatch.setattr(registry, "_FAMILIES", dict(registry._FAMILIES))
    (tmp_path / "toy_family.py").write_text(textwrap.dedent(FAMILY))
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "toy_family", raising=False)
    __import__("toy_family")
    folder = tmp_path / "checkpoint"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(CONFIG))
    save_file(weights(), folder / "model.safetensors")
    yield folder
    del sys.modules["toy_family"]


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"mamba_cache_mode": "align", "max_num_batched_tokens": 9},
        {"mamba_cache_mode": "all", "mamba_block_size": 4, "block_size": 4, "max_num_batched_tokens": 9},
        {"speculative_method": "ngram", "num_speculative_tokens": 2},
        {
            **{"speculative_method": "ngram", "num_speculative_tokens": 2, "prompt_lookup_min": 1},
            **{"mamba_cache_mode": "all", "mamba_block_size": 4, "block_size": 4, "state_scheme": "recompute"},
        },
    ],
    ids=["whole", "align", "all", "drafts", "recompute"],
)
def test_a_new_family_is_one_file(toy, options):
    """Every logit of the engine, sanitizer on, is that of a plain forward pass; float64 leaves rounding only."""
    llm = LLM(
        toy, tokenizer=Characters(), device="cpu", max_model_len=48, max_num_seqs=4, sanitize=True,
        **{"max_num_batched_tokens": 80, **options},
    )  # fmt: skip
    plain_weights = {name.removeprefix("toy."): tensor for name, tensor in weights().items()}
    params = SamplingParams(max_tokens=9)
    # Rejected drafts have logits too: compare tokens alone there.
    recorded = list(record_logits(llm, PROMPTS, params)) if "speculative_method" not in options else []
    again = [output for _ in range(2) for output in llm.generate(PROMPTS, params, progress=False)]
    outputs = [output for output, _ in recorded] + again
    for output in outputs:
        assert output.error is None
        expected = plain(plain_weights, output.prompt_token_ids + output.token_ids[:-1])
        assert output.token_ids == expected[len(output.prompt_token_ids) - 1 :].argmax(-1).tolist()
    for output, logits in recorded:
        expected = plain(plain_weights, output.prompt_token_ids + output.token_ids[:-1])[output.cached_tokens :]
        assert logits.shape == expected.shape
        assert float((logits - expected).abs().max()) <= 1e-9 * float(expected.abs().max())
    assert any(output.cached_tokens for output in outputs) == llm.config.cache.enable_prefix_caching


def test_a_new_family_can_be_planned(toy):
    assert model_shape(toy).counts == {"mamba2": 2, "attention": 1}
    assert list(model_shape(toy).layers) == ["layers.0", "layers.2", "layers.3"]


def test_its_config_is_checked_like_any_other(toy):
    (toy / "config.json").write_text(json.dumps({**CONFIG, "m_heads": "two"}))
    with pytest.raises(ConfigError, match=r"m_heads='two' must be an integer >= 1"):
        LLM(toy, tokenizer=Characters(), device="cpu", max_model_len=40)


def test_a_family_without_a_head_says_so(toy):
    drafts = {"speculative_method": "mtp", "num_speculative_tokens": 1}
    with pytest.raises(ConfigError, match="toy checkpoints have no draft head that can be run; draft with n-grams"):
        LLM(toy, tokenizer=Characters(), device="cpu", max_model_len=40, **drafts)


def test_a_family_that_is_not_registered_is_named(tmp_path):
    with pytest.raises(ConfigError, match="model_type 'toy' is not supported; supported are bamba"):
        model_shape(CONFIG)


def test_a_model_type_has_one_family(monkeypatch):
    monkeypatch.setattr(registry, "_FAMILIES", dict(registry._FAMILIES))
    family = registry.family_of(ConfigFile({"model_type": "bamba"}, "config.json"))
    with pytest.raises(ValueError, match="model_type 'bamba' is registered already"):
        registry.register(family, "new", "bamba")
    assert "new" not in registry._FAMILIES


def test_engine_cache_sanitizer_and_loader_name_no_family():
    package = Path(hybrid_kv.__file__).parent
    rooms = ("engine/**/*.py", "cache/**/*.py", "attention/**/*.py", "sanitizer*/**/*.py", "sanitizer*.py")
    files = [path for room in rooms for path in package.glob(room)]
    files += [package / "models" / name for name in ("loader.py", "registry.py", "layers.py", "specs.py")]
    assert len(files) > 15
    words = ["nemotron_h", "NemotronH", "qwen3", "bamba", "zamba", "falcon_h1", '"mtp.']
    named = {path.name: [word for word in words if word in path.read_text(encoding="utf-8")] for path in files}
    assert {name: found for name, found in named.items() if found} == {}


def test_the_family_of_the_documentation_runs(tmp_path, monkeypatch):
    monkeypatch.setattr(registry, "_FAMILIES", dict(registry._FAMILIES))
    page = (Path(__file__).parents[2] / "docs" / "adding-a-family.md").read_text(encoding="utf-8")
    exec(page.split("```python\n")[1].split("```")[0], {})
    sizes = {"heads": 2, "head_dim": 4, "state": 3, "groups": 1, "taps": 4, "hidden_size": 8, "vocab_size": 11}
    config = {"model_type": "tiny_mamba", "num_hidden_layers": 2, "dtype": "float64", **sizes}
    (tmp_path / "config.json").write_text(json.dumps(config))
    file = ConfigFile.read(tmp_path)
    model = registry.family_of(file).build(file, model_shape(file).layers)
    g = torch.Generator().manual_seed(0)
    shapes = {name: weight.shape for name, weight in model.named_parameters()}
    tensors = {name: torch.randn(shape, generator=g, dtype=torch.float64) for name, shape in shapes.items()}
    save_file(tensors, tmp_path / "model.safetensors")
    options = {"tokenizer": Characters(), "device": "cpu", "max_model_len": 64, "max_num_seqs": 2, "sanitize": True}
    prompts = [[1, 2, 3] * 7, [4] * 5]
    whole = LLM(tmp_path, **options)
    chunks = LLM(tmp_path, **options, max_num_batched_tokens=5, mamba_cache_mode="all")
    tokens = [[output.token_ids for output in llm.generate(prompts, progress=False)] for llm in (whole, chunks)]
    assert tokens[0] == tokens[1]
    assert len({*tokens[0][0], *tokens[0][1]}) > 1, "a model that repeats one token shows nothing"
