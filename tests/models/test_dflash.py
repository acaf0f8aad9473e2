"""A DFlash drafter in the engine drafts as it does over a whole text, without a cache."""

from __future__ import annotations

import json
from collections.abc import Sequence
from copy import copy
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file

from hybrid_kv import LLM, SamplingParams
from hybrid_kv.config import ConfigError
from hybrid_kv.models.dflash import ContextAttention
from hybrid_kv.models.layers import ForwardContext
from hybrid_kv.models.random_checkpoint import write_checkpoint, write_drafter
from tests.support.block_drafts import MAX_MODEL_LEN, OPTIONS, PROMPTS, Drafted, preempt_some, run

# So few tokens that a random drafter is often right.
VOCAB_SIZE = 6
FEW = [[1 + token % (VOCAB_SIZE - 1) for token in prompt] for prompt in PROMPTS]


def norm(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return weight * x / (x.pow(2).mean(-1, keepdim=True) + 1e-6).sqrt()


def rotated(x: torch.Tensor, positions: torch.Tensor, theta: float) -> torch.Tensor:
    """Turn [heads, tokens, size] as complex numbers: channel i and channel i + size / 2."""
    half = x.shape[-1] // 2
    angles = positions[:, None] / theta ** (torch.arange(half) / half)
    turned = torch.complex(x[..., :half], x[..., half:]) * torch.polar(
        torch.ones_like(angles), angles
    )
    return torch.cat([turned.real, turned.imag], -1)


class WholeText:
    """A target in transformers, and its drafter on all tokens at once.

    Attributes:
        folder: with the folders `target` and `drafter`.
    """

    def __init__(self, folder: Path, family: str, keys: dict[str, Any]) -> None:
        self.folder = folder
        self.model: Any = write_checkpoint(family, folder / "target", keys=keys)
        write_drafter(folder / "drafter", folder / "target")
        self.config = json.loads((folder / "drafter" / "config.json").read_text())
        tensors = load_file(folder / "drafter" / "model.safetensors")
        self.weights = {name: tensor.double() for name, tensor in tensors.items()}
        self._answers: dict[tuple[int, ...], list[int]] = {}
        self._drafts: dict[tuple[int, ...], list[int]] = {}
        self._kept: dict[tuple[int, ...], torch.Tensor] = {}
        self._alone = self.engine(speculative_method=None, max_num_seqs=1, mamba_cache_mode="none")

    def engine(self, num_drafts: int = 0, **options: Any) -> LLM:
        """Build the engine under test; without drafts and requests beside it, the oracle's."""
        drafter = {"speculative_model": str(self.folder / "drafter")} if num_drafts else {}
        given = {**OPTIONS, **drafter, "num_speculative_tokens": num_drafts, **options}
        return LLM(self.folder / "target", dtype="float64", **given)

    def answer(
        self, prompt: Sequence[int], params: SamplingParams, max_model_len: int
    ) -> list[int]:
        key = (*prompt, params.max_tokens)
        if key not in self._answers:
            (output,) = self._alone.generate([list(prompt)], params, progress=False)
            self._answers[key] = output.token_ids
        return self._answers[key]

    @torch.no_grad()
    def kept(self, text: Sequence[int]) -> torch.Tensor:
        """Return the outputs of the target's layers that the drafter reads, next to each other."""
        key = tuple(text)
        if key not in self._kept:
            outputs: dict[int, torch.Tensor] = {}
            hooks = [
                self.model.model.layers[number].register_forward_hook(
                    lambda module, given, out, number=number: outputs.update(
                        {number: out[0] if isinstance(out, tuple) else out}
                    )
                )
                for number in self.config["dflash_config"]["target_layer_ids"]
            ]
            self.model(torch.tensor([key]), use_cache=False)
            for hook in hooks:
                hook.remove()
            self._kept[key] = torch.cat(
                [outputs[number][0].double() for number in sorted(outputs)], -1
            )
        return self._kept[key]

    def heads(self, x: torch.Tensor, layer: str, kind: str) -> torch.Tensor:
        return (x @ self.weights[f"{layer}.self_attn.{kind}_proj.weight"].T).unflatten(
            -1, (-1, self.config["head_dim"])
        )

    def drafts(self, sequence: Sequence[int], num_tokens: int, num_drafts: int) -> list[int]:
        key = (self.config["sliding_window"], *sequence, num_tokens, num_drafts)
        if key not in self._drafts:
            self._drafts[key] = self.drafted(sequence, num_tokens, num_drafts)
        return self._drafts[key]

    @torch.no_grad()
    def drafted(self, sequence: Sequence[int], num_tokens: int, num_drafts: int) -> list[int]:
        before = num_tokens - 1
        weights, theta = self.weights, self.config["rope_theta"]
        states = norm(
            self.kept(sequence)[:before] @ weights["fc.weight"].T, weights["hidden_norm.weight"]
        )
        mask = self.config["dflash_config"]["mask_token_id"]
        queries = torch.tensor([sequence[before], *[mask] * num_drafts])
        x = self.model.get_input_embeddings()(queries).double()
        positions = torch.arange(before + 1 + num_drafts).double()
        behind = positions[before:, None] - positions
        visible = (behind >= 0) & (behind < self.config["sliding_window"])
        for i in range(self.config["num_hidden_layers"]):
            layer = f"layers.{i}"
            normed = norm(x, weights[f"{layer}.input_layernorm.weight"])
            both = torch.cat([states, normed])
            q, k = (
                rotated(
                    norm(
                        self.heads(rows, layer, kind),
                        weights[f"{layer}.self_attn.{kind}_norm.weight"],
                    ).transpose(0, 1),
                    positions[-len(rows) :],
                    theta,
                )
                for rows, kind in ((normed, "q"), (both, "k"))
            )
            v = self.heads(both, layer, "v").transpose(0, 1)
            mixed = F.scaled_dot_product_attention(q, k, v, visible, enable_gqa=True)
            x = x + mixed.transpose(0, 1).flatten(1) @ weights[f"{layer}.self_attn.o_proj.weight"].T
            normed = norm(x, weights[f"{layer}.post_attention_layernorm.weight"])
            gate, up, down = (
                weights[f"{layer}.mlp.{name}_proj.weight"] for name in ("gate", "up", "down")
            )
            x = x + (F.silu(normed @ gate.T) * (normed @ up.T)) @ down.T
        head = self.model.get_output_embeddings().weight.double()
        logits = norm(x, weights["norm.weight"])[1:] @ head.T
        return logits.argmax(-1).tolist()


@pytest.fixture(scope="module")
def few(tmp_path_factory: pytest.TempPathFactory) -> WholeText:
    return WholeText(
        tmp_path_factory.mktemp("few"), "nemotron_h", {"vocab_size": VOCAB_SIZE, "pad_token_id": 0}
    )


def check(book: WholeText, num_drafts: int, **options: Any) -> Drafted:
    drafted = run(book.engine(num_drafts, **options), book, prompts=FEW)
    drafted.check()
    assert drafted.accepted > 10
    return drafted


# Mamba-2 and attention; delta nets, windows and attention; a block that sees the embedding, too.
@pytest.mark.parametrize(
    ("family", "num_drafts"), [("nemotron_h", 16), ("lara_mini", 5), ("zamba2", 1)]
)
def test_drafts_are_those_of_the_drafter_on_the_whole_text(
    tmp_path: Path, family: str, num_drafts: int
) -> None:
    book = WholeText(tmp_path, family, {})
    drafted = run(book.engine(num_drafts, sanitize=True), book)
    drafted.check()
    assert max(len(drafts) for drafts, _ in drafted.pairs) == num_drafts
    assert max(drafted.cached) >= 32 or family == "zamba2"


@pytest.mark.parametrize("mode", ["none", "align", "all"])
@pytest.mark.parametrize("async_scheduling", [False, True])
def test_every_mode_and_schedule(few: WholeText, mode: str, async_scheduling: bool) -> None:
    options = {"async_scheduling": async_scheduling, "sanitize": True}
    drafted = check(few, 5, mamba_cache_mode=mode, **options)
    assert (max(drafted.cached) > 0) == (mode != "none")


def test_preemptions_and_steps_that_propose_none(few: WholeText) -> None:
    llm = few.engine(6, num_speculative_tokens_per_batch_size=[[1, 1, 6], [2, 2, 3], [3, 4, 0]])
    drafted = run(llm, few, preempt_some, FEW)
    drafted.check(10)
    assert drafted.preemptions > 2 and {len(drafts) for drafts, _ in drafted.pairs} == {3, 6}


def test_a_wrong_row_of_the_cache_gives_other_drafts_and_the_same_tokens(
    few: WholeText, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Context states one position further, as a drafter of the EAGLE kind keeps them."""
    plain = ContextAttention.store

    def store(self: ContextAttention, states: torch.Tensor, context: ForwardContext) -> None:
        plain(self, states.roll(1, 0), context)

    monkeypatch.setattr(ContextAttention, "store", store)
    drafted = run(few.engine(4), few, prompts=FEW)
    assert [got for got, _ in drafted.pairs] != [due for _, due in drafted.pairs]


def test_cached_values_are_those_of_one_drafter(few: WholeText, tmp_path: Path) -> None:
    """Files of an engine with another drafter are not found, and its requests are refused."""
    write_drafter(tmp_path / "other", few.folder / "target", seed=1)
    options = {"kv_offload_folder": str(tmp_path / "files"), "num_blocks": 60}
    params = SamplingParams(max_tokens=4)
    hits = []
    for drafter in (few.folder / "drafter", few.folder / "drafter", tmp_path / "other"):
        llm = few.engine(2, speculative_model=str(drafter), **options)
        hits.append(llm.generate([FEW[1]], params, progress=False)[0].cached_tokens)
    assert hits == [0, 48, 0]
    request = llm.add_request(FEW[1], params)
    while not request.output_token_ids:
        llm.step()
    with pytest.raises(ConfigError, match="another model, dtype or rounding"):
        few.engine(2).receive_request(llm.send_request(request))


@pytest.mark.parametrize(
    ("keys", "problem"),
    [
        ({"architectures": ["Qwen3ForCausalLM"]}, "has no DFlashDraftModel"),
        ({"dflash_config": None}, "dflash_config=None must be an object"),
        ({"hidden_size": 64}, r"hidden_size=64, the target has \d+"),
        ({"layer_types": ["full_attention"] * 2}, "queries that see the masks after their own"),
        ({"layer_types": None}, "queries that see the masks after their own"),
        ({"is_causal": False}, "queries that see the masks after their own"),
        ({"dflash_config": {"target_layer_ids": [3, 1], "mask_token_id": 1}}, "in order"),
        ({"dflash_config": {"target_layer_ids": [99], "mask_token_id": 1}}, "layers of the target"),
        ({"dflash_config": {"target_layer_ids": [0]}}, "mask_token_id=None must be a token"),
        ({"num_hidden_layers": 1, "layer_types": ["sliding_attention"]}, "does not know"),
    ],
)
def test_another_drafter_is_refused(
    few: WholeText, tmp_path: Path, keys: dict[str, Any], problem: str
) -> None:
    write_drafter(tmp_path / "drafter", few.folder / "target")
    path = tmp_path / "drafter" / "config.json"
    path.write_text(json.dumps({**few.config, **keys}))
    with pytest.raises(ConfigError, match=problem):
        few.engine(2, speculative_model=str(tmp_path / "drafter"))


def test_full_attention_is_run_where_it_is_causal(few: WholeText, tmp_path: Path) -> None:
    write_drafter(tmp_path / "drafter", few.folder / "target")
    causal = {**few.config, "layer_types": None, "is_causal": True, "sliding_window": None}
    (tmp_path / "drafter" / "config.json").write_text(json.dumps(causal))
    llm = few.engine(4, speculative_model=str(tmp_path / "drafter"), sanitize=True)
    causal["sliding_window"] = MAX_MODEL_LEN
    everything = copy(few)
    everything.config = causal
    run(llm, everything, prompts=FEW).check()
