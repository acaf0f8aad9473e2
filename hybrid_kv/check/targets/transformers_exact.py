"""The exact model as a model of transformers.

It computes integers modulo a prime, over transformers' own caches and masks. `generate`, the cache
classes, masks, positions and drafts are transformers', only the layers are not: they are those of
`hybrid_kv.models.exact`. One state that is not rolled back, one padding that enters it, is a wrong
token.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import torch
from transformers import DynamicCache, GenerationMixin, PreTrainedConfig, PreTrainedModel
from transformers.masking_utils import create_causal_mask, create_recurrent_attention_mask
from transformers.modeling_outputs import CausalLMOutputWithPast

from hybrid_kv.check.targets.exact import CYCLE, ECHO, model_of
from hybrid_kv.models.exact import PRIME, ExactAttention, ExactMamba, Residues, affine_scan
from hybrid_kv.models.transformers_cache import cache_argument


class ExactForCausalLM(PreTrainedModel, GenerationMixin):  # type: ignore[no-untyped-call]
    """The model of a folder; see `exact.ExactAnswers` for what it says.

    Attributes:
        echo: a checksum draws one token in so many. A draft model with another one is right as a
            rule.
    """

    config_class = PreTrainedConfig
    config: PreTrainedConfig

    def __init__(self, folder: str) -> None:
        self.exact, self.echo = model_of(folder), ECHO
        layers = self.exact.layers
        config = PreTrainedConfig(
            vocab_size=self.exact.vocab_size,
            hidden_size=self.exact.config.width,
            num_hidden_layers=len(layers),
            num_attention_heads=1,
            layer_types=[
                "linear_attention" if isinstance(one, ExactMamba) else "full_attention"
                for one in layers
            ],
            number_of_conv_states=max(
                (len(one.conv) for one in layers if isinstance(one, ExactMamba)), default=1
            ),
            attn_implementation="eager",  # whose mask is never left out
        )  # type: ignore[call-arg]
        super().__init__(config)
        # A state cannot be rolled back, a window can: transformers drafts with these alone.
        self._is_stateful = any(one.out for one in layers if isinstance(one, ExactMamba))
        # Says which dtype caches have: one that holds every residue.
        self.place = torch.nn.Parameter(torch.zeros((), dtype=torch.float64), requires_grad=False)

    def forward(
        self,
        input_ids: torch.Tensor,
        attention_mask: Any = None,
        position_ids: torch.Tensor | None = None,
        past_key_values: Any = None,
        cache: Any = None,
        **paged: Any,
    ) -> CausalLMOutputWithPast:
        """Return logits [batch, len, vocabulary], one-hot, of input_ids [batch, len].

        Args:
            past_key_values: the cache; its name up to 5.23.
            cache: the same since 5.24; of continuous batching before, with what its `update` needs
                in `paged`.
        """
        cache = cache or past_key_values or DynamicCache(config=self.config)
        if position_ids is None:
            position_ids = torch.arange(input_ids.shape[1])[None] + cache.get_seq_length()
        if not isinstance(attention_mask, dict):
            shape = {
                "inputs_embeds": self.place.expand(*input_ids.shape, 1),
                "attention_mask": attention_mask,
            }
            attention_mask = {
                "full_attention": create_causal_mask(
                    config=self.config,
                    position_ids=position_ids,
                    **{cache_argument(create_causal_mask): cache},
                    **shape,
                ),
                "linear_attention": create_recurrent_attention_mask(config=self.config, **shape),
            }
        exact, ids = self.exact, input_ids.numpy()
        x = exact.embedding[ids]
        for i, layer in enumerate(exact.layers):
            mask = attention_mask[self.config.layer_types[i]]
            if isinstance(layer, ExactMamba):
                y = _mamba(layer, i, x, mask, cache)
            else:
                update = partial(cache.update, layer_idx=i, kwargs=dict(paged))
                y = _attention(layer, x, position_ids.expand(ids.shape).numpy(), mask, update)
            x = (x * 3 + y) % PRIME
        residues = exact.logits(x)
        follower = ids - ids % CYCLE + (ids + 1) % CYCLE
        chosen = torch.from_numpy(
            np.where(residues[..., 0] % self.echo == 0, residues.argmax(-1), follower)
        )
        logits = torch.nn.functional.one_hot(chosen, exact.vocab_size).float() * 100
        given = {cache_argument(CausalLMOutputWithPast): cache}
        return CausalLMOutputWithPast(logits=logits, **given)


def _mamba(
    layer: ExactMamba, i: int, x: Residues, mask: torch.Tensor | None, cache: Any
) -> Residues:
    """Return the layer's output for x [batch, len, width], in the same shape.

    mask is [batch, len]; None: no token is padding.
    """
    rows, length, width = x.shape
    kernel = len(layer.conv[0])
    real = np.ones((rows, length, 1), np.int64) if mask is None else mask.numpy()[..., None]
    begin = [cache.get_recurrent_state(i, s) for s in range(len(layer.out))]
    taps = []
    for s, own in enumerate(layer.inputs(x)):
        new = _to_cache(own * real).transpose(1, 2)
        seen = _from_cache(cache.update_conv_state(new, i, s, conv_kernel_size=kernel)).swapaxes(
            1, 2
        )
        seen = np.concatenate([np.zeros((rows, kernel - 1, width), np.int64), seen], 1)[
            :, -(length + kernel - 1) :
        ]
        taps.append(seen[:, np.arange(length)[:, None] + np.arange(kernel)])
    c = layer.convolve(taps)
    after = []
    for s, state in enumerate(begin):
        a, b = layer.maps(c, s)
        a, b = np.where(real[..., None], a, 1), np.where(real[..., None], b, 0)
        if state is not None:
            b[:, 0] = (a[:, 0] * _from_cache(state) + b[:, 0]) % PRIME
        affine_scan(a, b)
        cache.update_recurrent_state(_to_cache(b[:, -1]), i, s)
        after.append(b)
    return layer.read(c, after)


def _attention(
    layer: ExactAttention,
    x: Residues,
    positions: Residues,
    mask: torch.Tensor,
    update: Callable[..., Any],
) -> Residues:
    """Return the attention of x [batch, len, width], in the same shape.

    positions is [batch, len]; mask is [batch, 1, len, keys], 0 where a key is seen.
    A key is marked by its position, a value by how many keys are seen before it.
    """
    shape = 3, len(x), 1, *x.shape[1:]
    query, *new = layer.project(x.reshape(-1, x.shape[2]), positions.reshape(-1)).reshape(shape)
    key, value = (_from_cache(part)[:, 0] for part in update(*map(_to_cache, new)))
    visible = mask[:, 0].numpy() == 0
    order = visible.cumsum(-1)[..., None] * layer.read_mark % PRIME
    weighted = value[:, None] * (order * order % PRIME) % PRIME
    score = (query[:, 0, :, None] + key[:, None]) % PRIME
    return (score * score % PRIME * weighted % PRIME).sum(2, where=visible[..., None]) % PRIME


def _to_cache(residues: Residues) -> torch.Tensor:
    return torch.from_numpy(residues).double()


def _from_cache(part: torch.Tensor) -> Residues:
    return part.long().numpy()
