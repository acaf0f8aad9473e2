"""The hand-over of a request to another engine, after its prompt: prefill and decode split.

    kv_transfer = prefill.send_request(request)
    request = decode.receive_request(kv_transfer)

Contract. What goes over is what the model has made of the request's tokens, in the layers' own
terms: of an attention layer K and V (or the latent) of every computed token, with a sliding window
of those that the next token sees, of a Mamba layer the window and the states after the last one. No
block, logical block, page or kernel block goes over: where these lie is each engine's own affair.
So the two may differ in block size, kernel block size, cache mode, number of blocks, drafts and
asynchronous scheduling.

- The state is read where the next step would read it (`StateCursor`,
  `Rollback.source_logical_blocks`): with drafts that is not the request's last block (asc!11262),
  and with a prefix cache a request has several blocks and gaps between them (vllm!50153). It is
  written where the first step of a request that starts after a hit reads it.
- A draft head's layer is an attention layer with one token more: the pair (hidden state of token n
  - 1, token n) is computed with token n - 1. Drafts themselves stay behind: the first step has
  none.
- `receive_request` refuses what does not fit before anything is allocated: other weights, another
  dtype or form of a layer's cache, a layer that the other engine does not have.
- A request that is taken over waits in the queue like any other, its tensors next to it. Its first
  step is that of a request whose hit leaves one token. It is preempted like any other: then its
  tokens are computed again.
- One that is handed over is gone from its engine; the prefixes that it has published stay.
  `KVTransfer` is good for any number of engines, and no engine must be notified if none takes it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

from hybrid_kv.cache.backend import AttentionGroup
from hybrid_kv.cache.request_blocks import NewBlocks
from hybrid_kv.cache.spec import KVCacheSpec, MambaSpec, SlidingWindowSpec, layer_specs
from hybrid_kv.config import ConfigError
from hybrid_kv.engine.runner import ModelRunner
from hybrid_kv.kernels.slot_mapping import slot_mapping
from hybrid_kv.request import Request
from hybrid_kv.sampling import SamplingParams, TokenLogprobs

Tensors = tuple[torch.Tensor, ...]
Form = tuple[tuple[int, ...], torch.dtype]  # of one token's K or V, or of a part of a state


@dataclass(frozen=True, eq=False)
class KVTransfer:
    """A request between two engines.

    Attributes:
        weights: identifies the model that computed it (`engine.build.weights_identity`).
        output_token_ids: at least one; all tokens but the last of these are computed.
        layers: by name, on the host. Attention: K and V [num_tokens, num_kv_heads, head_size], or
            latents [num_tokens, head_size]; with a sliding window of the last tokens alone. Mamba:
            of each part a window [kernel - 1, …], a state or its scales.
    """

    weights: str
    prompt_token_ids: list[int]
    output_token_ids: list[int]
    params: SamplingParams
    seed: int
    logprobs: list[TokenLogprobs]
    prompt_logprobs: list[TokenLogprobs]
    layers: dict[str, Tensors]

    @property
    def num_computed_tokens(self) -> int:
        return len(self.prompt_token_ids) + len(self.output_token_ids) - 1

    @property
    def nbytes(self) -> int:
        """Total bytes of the tensors."""
        return sum(tensor.nbytes for parts in self.layers.values() for tensor in parts)


def pack(request: Request, runner: ModelRunner, weights: str) -> KVTransfer:
    """Pack a running request, none of whose steps is in flight.

    Its states must be in their blocks.
    """
    row = request.row
    layers = dict[str, Tensors]()
    for group, name, spec in _layers(runner):
        views = runner.views[name]
        logical_blocks = runner.block_tables.tables[group.group_id][row].long()
        if isinstance(spec, MambaSpec):
            state_block_idx = runner.cursors.state_block_idx[[row]]
            window_rows = runner.cursors.window_row[[row]]
            rollback = runner.builders[group.group_id].rollback
            (source,) = rollback.source_logical_blocks(state_block_idx, window_rows)
            block_idx = int(state_block_idx[0])
            first = int(window_rows[0])
            window = int(logical_blocks[block_idx])
            state = int(logical_blocks[source])
            parts = (
                view[state] if rows is None else view[window, first : first + rows]
                for view, rows in zip(views, _window_rows(spec), strict=True)
            )
        else:
            kept = _kept_tokens(name, spec, request.num_computed_tokens, runner)
            places = _places(logical_blocks, kept, spec, views[0])
            parts = (view[places] for view in views)
        layers[name] = tuple(tensor.to("cpu", copy=True) for tensor in parts)
    return KVTransfer(
        weights,
        list(request.prompt_token_ids),
        list(request.output_token_ids),
        request.params,
        request.seed,
        list(request.logprobs),
        list(request.prompt_logprobs),
        layers,
    )


def check_fits(kv_transfer: KVTransfer, runner: ModelRunner, weights: str) -> None:
    """Raise `ConfigError` unless an engine of these `weights` can go on with the request."""
    if kv_transfer.weights != weights:
        raise ConfigError(
            "receive_request: the request was computed with another model, dtype or rounding of "
            "states; give both engines the same"
        )
    for _, name, spec in _layers(runner):
        if name not in kv_transfer.layers:
            raise ConfigError(
                f"receive_request: layer {name} is not in the engine that computed the request; if "
                "it is a draft head's, give both engines its speculative_method"
            )
        given = list(_forms_of(kv_transfer.layers[name], spec))
        wanted = list(_forms(runner.views[name], spec))
        if given != wanted:
            raise ConfigError(
                f"receive_request: layer {name} was cached as {_text(given)}, this engine caches "
                f"{_text(wanted)}; give both engines the same cache dtypes and state_scheme"
            )


def unpack(
    kv_transfer: KVTransfer, runner: ModelRunner, request: Request, blocks: NewBlocks
) -> None:
    """Write a request's tensors where its first step reads them.

    Args:
        blocks: those of all its logical blocks.
    """
    num_tokens = kv_transfer.num_computed_tokens
    ids = blocks.per_group()
    for group, name, spec in _layers(runner):
        views = runner.views[name]
        parts = kv_transfer.layers[name]
        logical_blocks = torch.from_numpy(ids[group.group_id]).to(runner.device).long()
        if isinstance(spec, MambaSpec):
            block = int(logical_blocks[spec.mode.state_block_idx(num_tokens - 1, spec.block_size)])
            for view, tensor, rows in zip(views, parts, _window_rows(spec), strict=True):
                view[block, slice(rows)] = tensor.to(view.device)
        else:
            kept = _kept_tokens(name, spec, num_tokens, runner)
            places = _places(logical_blocks, kept, spec, views[0])
            for view, tensor in zip(views, parts, strict=True):
                view[places] = tensor.to(view.device)
    for observer in runner.observers:
        observer.on_arrival(request, ids)


def _layers(runner: ModelRunner) -> Iterator[tuple[AttentionGroup, str, KVCacheSpec]]:
    """Yield every layer that has a cache."""
    for group in runner.groups:
        for name, spec in zip(
            group.layer_names, layer_specs(group.layer_names, group.spec), strict=True
        ):
            yield group, name, spec


def _kept_tokens(
    name: str, spec: KVCacheSpec, num_computed_tokens: int, runner: ModelRunner
) -> range:
    """Return the positions whose slots a layer has written and may read again.

    A draft head is one token ahead of the target.
    """
    begin = spec.first_seen(num_computed_tokens) if isinstance(spec, SlidingWindowSpec) else 0
    return range(begin, num_computed_tokens + (name not in runner.model.layer_specs))


def _places(
    logical_blocks: torch.Tensor, kept: range, spec: KVCacheSpec, view: torch.Tensor
) -> Tensors:
    """Kernel block and offset of a request's tokens at these positions."""
    positions = torch.arange(kept.start, kept.stop, device=logical_blocks.device)
    slots = slot_mapping(
        logical_blocks[None], torch.zeros_like(positions), positions, spec.block_size
    )
    return slots // view.shape[1], slots % view.shape[1]


def _window_rows(spec: MambaSpec) -> list[int | None]:
    """Return, per part, the rows of a window that the next step reads; None for a state.

    Those for drafts are left out.
    """
    return [
        state_part.shape[0] - spec.num_speculative_tokens if state_part.role == "window" else None
        for state_part in spec.parts
    ]


def _forms(views: Sequence[torch.Tensor], spec: KVCacheSpec) -> Iterator[Form]:
    """Yield the per-part shape and dtype of an engine's tensors."""
    if not isinstance(spec, MambaSpec):
        yield from ((tuple(view.shape[2:]), view.dtype) for view in views)
        return
    for view, rows in zip(views, _window_rows(spec), strict=True):
        yield (tuple(view.shape[1:]) if rows is None else (rows, *view.shape[2:])), view.dtype


def _forms_of(parts: Tensors, spec: KVCacheSpec) -> Iterator[Form]:
    """Yield the per-part shape and dtype of the received tensors."""
    first = 0 if isinstance(spec, MambaSpec) else 1
    yield from ((tuple(tensor.shape[first:]), tensor.dtype) for tensor in parts)


def _text(forms: Sequence[Form]) -> str:
    return ", ".join(f"{str(dtype).removeprefix('torch.')} {list(shape)}" for shape, dtype in forms)
