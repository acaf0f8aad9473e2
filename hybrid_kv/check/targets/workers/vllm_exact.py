"""The exact model as a model of vLLM.

It computes integers modulo a prime, over vLLM's own cache and by vLLM's own metadata. Scheduler,
cache manager, block tables, metadata builders, state copies and sampler are vLLM's, only the layers
are not. They compute what `hybrid_kv.models.exact` computes: one wrong block, slot, state or column
is a wrong token, without any tolerance. The file needs vLLM 0.32 and nothing else: the weights are
in the checkpoint's `config.json`.

vLLM calls `register` of a plugin (entry point `vllm.general_plugins`).
"""

import json
import tempfile
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn import functional
from vllm import ModelRegistry
from vllm.forward_context import get_forward_context
from vllm.model_executor.layers.attention_layer_base import AttentionLayerBase
from vllm.model_executor.layers.mamba.abstract import MambaBase
from vllm.model_executor.layers.mamba.mamba_utils import get_conv_copy_spec, get_temporal_copy_spec
from vllm.model_executor.models.interfaces import HasInnerState, IsHybrid
from vllm.v1.attention.backend import AttentionBackend, AttentionCGSupport, AttentionMetadataBuilder
from vllm.v1.attention.backends.registry import MambaAttentionBackendEnum
from vllm.v1.kv_cache_interface import FullAttentionSpec, SlidingWindowSpec

NAME = "ExactHybridForCausalLM"
# vLLM knows heads for drafts by the names of models; this one's configuration is read as any
# Llama's.
DRAFTED, DRAFT = "MiMoForCausalLM", "MiMoMTPModel"
PRIME = 2**31 - 1  # as in hybrid_kv.models.exact
CYCLE = 5
MARKS = ((1, 2),)  # one state more, of the sanitizer
NULL_BLOCK = 0  # what padding writes goes there

sanitizer: Any = None  # of `vllm_sanitizer.py`, if the head size has room for its marks
kernel_block_size = 0  # if set, attention takes blocks of this size alone, and vLLM splits its own


def register() -> None:
    """Make the model known to vLLM, and its head for drafts."""
    ModelRegistry.register_model(NAME, ExactHybridForCausalLM)
    ModelRegistry.register_model(DRAFT, ExactHead)


def add_head(options: dict[str, Any], folder: str) -> None:
    """Name the checkpoint of the head in engine arguments that draft with it.

    It is made of the model's own checkpoint.
    """
    drafts = options.get("speculative_config", {})
    if drafts.get("method") == "mtp":
        config = json.loads((Path(folder) / "config.json").read_text())
        config |= {"architectures": [DRAFTED], "num_nextn_predict_layers": 1}
        config["hidden_size"] = 2 * config["hidden_size"] + 1  # see `pack`
        drafts["model"] = tempfile.mkdtemp()
        (Path(drafts["model"]) / "config.json").write_text(json.dumps(config))


def renew(llm: Any) -> None:
    """Make a pool in which nothing is held like a new one.

    Its order of free blocks and its noise are always the same. What a request reads before it wrote
    it then shows, and what was wrong is wrong again.
    """
    pool = llm.engine_core.engine_core.scheduler.kv_cache_manager.block_pool
    queue = type(pool.free_block_queue)(pool.blocks)
    pool.free_block_queue, pool.null_block = queue, queue.popleft()
    noise = torch.Generator().manual_seed(0)
    for layer in llm.vllm_config.compilation_config.static_forward_context.values():
        for view in (
            [layer.kv_cache] if isinstance(layer.kv_cache, torch.Tensor) else layer.kv_cache
        ):
            drawn = torch.randint(1, PRIME, view.shape, generator=noise, dtype=view.dtype)
            view.copy_(drawn)


class Backend(AttentionBackend):
    """No kernel; the metadata is what the runner says of every batch."""

    supported_dtypes = [torch.float32, torch.float16, torch.bfloat16]  # noqa: RUF012  (vLLM's)

    @staticmethod
    def get_name() -> str:
        return "EXACT"

    @staticmethod
    def get_impl_cls() -> Any:
        raise NotImplementedError("the exact model attends by itself")

    @staticmethod
    def get_builder_cls() -> Any:
        return Builder

    @staticmethod
    def get_supported_kernel_block_sizes(kv_cache_spec: Any = None) -> list[Any]:
        return (
            [kernel_block_size]
            if kernel_block_size
            else AttentionBackend.get_supported_kernel_block_sizes()
        )

    @staticmethod
    def get_kv_cache_shape(
        num_blocks: int, block_size: int, heads: int, size: int, *_: Any, **__: Any
    ) -> Any:
        return num_blocks, heads, block_size, 2 * size


class Builder(AttentionMetadataBuilder):
    """Hands on what all backends share."""

    _cudagraph_support = AttentionCGSupport.ALWAYS

    def __init__(self, *arguments: Any, **named: Any) -> None:
        super().__init__(*arguments, **named)

    def build(
        self, common_prefix_len: int, common_attn_metadata: Any, fast_build: bool = False
    ) -> Any:
        return common_attn_metadata


def rows_of(starts: torch.Tensor, num_tokens: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the row of each token and its place there, both [num_tokens], by starts [rows + 1]."""
    tokens = torch.arange(num_tokens, device=starts.device)
    row = torch.searchsorted(starts[1:].long(), tokens, right=True).clamp(max=len(starts) - 2)
    return row, (tokens - starts[row]).clamp(min=0)


class VllmLayer(nn.Module):
    """A layer that vLLM knows by its name, and has attention metadata for."""

    def __init__(self, vllm_config: Any, prefix: str, weights: dict[str, Any]) -> None:
        super().__init__()
        self.prefix = prefix
        for name, value in weights.items():
            self.register_buffer(name, torch.tensor(value, dtype=torch.int64), persistent=False)
        vllm_config.compilation_config.static_forward_context[prefix] = self

    def metadata(self) -> Any:
        """Return the attention metadata of this step; None while vLLM measures memory."""
        found = get_forward_context().attn_metadata
        return None if found is None else found[self.prefix]


class VllmAttention(VllmLayer, AttentionLayerBase):
    """Attention with `o_i = sum_{i - window < j <= i} (q_i + k_j)^2 v_j`.

    k_j has the position of its token, v_j its place in the block table. Without a window the sum is
    over all j <= i.
    """

    is_watched = True  # by the sanitizer
    qkv: torch.Tensor
    write_mark: torch.Tensor
    read_mark: torch.Tensor

    def __init__(self, vllm_config: Any, prefix: str, weights: dict[str, Any]) -> None:
        tensors = {name: value for name, value in weights.items() if isinstance(value, list)}
        super().__init__(vllm_config, prefix, tensors)
        self.window: int | None = weights.get("window")  # tokens that a query sees; None: all
        self.num_kv_heads = weights.get("heads", 1)  # all but the first one are unused
        self.kv_cache = torch.tensor([])
        self.head_size = vllm_config.model_config.get_head_size()

    def get_attn_backend(self) -> type[AttentionBackend]:
        return Backend

    def get_kv_cache_spec(self, vllm_config: Any) -> Any:
        # Wider tokens have smaller blocks, as some drafters' have: pages stay as large.
        shape = {
            "block_size": vllm_config.cache_config.block_size // self.num_kv_heads,
            "num_kv_heads": self.num_kv_heads,
            "head_size": self.head_size,
        }
        if self.window is None:
            return FullAttentionSpec(**shape, dtype=torch.int32)
        return SlidingWindowSpec(**shape, dtype=torch.int32, sliding_window=self.window)

    def forward(self, x: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """Return the output [num_tokens, width] for x; tokens without slots are padding."""
        m = self.metadata()
        if m is None:
            return x
        padding = max(0, len(x) - len(m.slot_mapping))
        return functional.pad(self.attend(x[: len(x) - padding], positions, m), (0, 0, 0, padding))

    def attend(self, x: torch.Tensor, positions: torch.Tensor, m: Any) -> torch.Tensor:
        """Write keys and values of tokens x [num_tokens, width], and read all that they may see.

        Both follow the metadata m.
        """
        n, width = x.shape
        # [blocks, size, …]
        cache, marks = self.kv_cache[:, 0].split([2 * width, 2 * (self.head_size - width)], -1)
        size = cache.shape[1]
        q, k, v = x * self.qkv[:, None] % PRIME
        mark = (positions[:n, None] + 1) * self.write_mark % PRIME
        slots = m.slot_mapping[:n]
        blocks = torch.where(slots < 0, NULL_BLOCK, slots // size)
        cache[blocks, slots % size] = torch.cat([(k + mark * mark) % PRIME, v], 1).to(cache.dtype)

        if sanitizer is not None and self.is_watched:
            sanitizer.pages(self.prefix, marks, slots, m.block_table_tensor, self.window)
        starts, lengths = m.query_start_loc, m.seq_lens
        row, step = rows_of(starts, n)
        # A graph's padding comes after the last row, and beyond what its keys go to.
        place = torch.where(slots < 0, 0, lengths[row] - starts.diff()[row] + step).clamp(min=0)
        table = m.block_table_tensor[: len(starts) - 1, : -(-m.max_seq_len // size)].clamp(
            min=NULL_BLOCK
        )
        k, v = cache[table].flatten(1, 2).long().chunk(2, -1)  # [rows, keys, width]
        order = (torch.arange(k.shape[1], device=x.device)[:, None] + 1) * self.read_mark % PRIME
        v = v * (order * order % PRIME) % PRIME
        # (q + k)^2 v = q^2 v + 2 q k v + k^2 v: three sums over the keys serve all queries.
        upto = [part.cumsum(1) for part in (v, k * v % PRIME, k * k % PRIME * v % PRIME)]
        sums = [part[row, place] for part in upto]
        if self.window is not None:  # what a freed block holds now is in both sums
            behind = (place >= self.window)[:, None]
            hidden = (place - self.window).clamp(min=0)
            sums = [
                total - part[row, hidden] * behind for total, part in zip(sums, upto, strict=True)
            ]
        sums = [total % PRIME for total in sums]
        return (q * q % PRIME * sums[0] % PRIME + 2 * (q * sums[1] % PRIME) + sums[2]) % PRIME


class VllmMamba(VllmLayer, MambaBase):
    """Windows [conv_kernel - 1, width] and states [state_size, width].

    Each token changes them by its own affine map.

    Args:
        kind: one of `MambaAttentionBackendEnum`, which has the builder.
    """

    conv: torch.Tensor
    to_map: torch.Tensor
    out: torch.Tensor

    def __init__(self, vllm_config: Any, prefix: str, weights: dict[str, Any], kind: str) -> None:
        super().__init__(vllm_config, prefix, weights)
        self.kind = MambaAttentionBackendEnum[kind]
        self.kv_cache: tuple[torch.Tensor, ...] = ()
        self.shapes = state_shapes(weights, vllm_config.num_speculative_tokens) + MARKS * (
            sanitizer is not None
        )

    def get_state_shape(self) -> Iterable[tuple[int, ...]]:
        return self.shapes

    def get_state_dtype(self) -> tuple[torch.dtype, ...]:
        return (torch.int32,) * len(self.shapes)

    @property
    def mamba_type(self) -> Any:
        return self.kind

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the output [num_tokens, width] for x, by the metadata of the kind's builder."""
        m = self.metadata()
        if m is None:
            return x
        y, tokens = torch.zeros_like(x), torch.arange(len(x), device=x.device)
        # GDN's rows: those with drafts, whose tokens may lie among the others.
        if hasattr(m, "spec_sequence_masks"):
            if m.num_spec_decodes:
                at, columns = (
                    m.spec_token_indx[: m.num_spec_decode_tokens].long(),
                    m.spec_state_indices_tensor,
                )
                starts = m.spec_query_start_loc[: m.num_spec_decodes + 1]
                y[at] = self.advance(
                    x, at, starts, columns[: m.num_spec_decodes], m.num_accepted_tokens, None
                )
            if rows := m.num_decodes + m.num_prefills:
                n, index = m.num_decode_tokens + m.num_prefill_tokens, m.non_spec_token_indx
                at = torch.arange(n, device=x.device) if index is None else index[:n].long()
                starts, columns = (
                    m.non_spec_query_start_loc[: rows + 1],
                    m.non_spec_state_indices_tensor[:rows, None],
                )
                y[at] = self.advance(
                    x,
                    at,
                    starts,
                    columns,
                    None,
                    m.has_initial_state[:rows] if m.num_prefills else None,
                )
        elif hasattr(m, "state_indices_tensor_d"):
            if m.num_decodes:
                starts, n = m.query_start_loc_d, m.num_decode_tokens
                if starts is None:
                    starts = torch.arange(m.num_decodes + 1, device=x.device)
                y[:n] = self.advance(
                    x, tokens[:n], starts, m.state_indices_tensor_d, m.num_accepted_tokens, None
                )
            if m.num_prefills:
                first, n = m.num_decode_tokens, m.num_prefill_tokens
                columns, seen = m.state_indices_tensor_p[:, None], m.has_initial_states_p
                y[first : first + n] = self.advance(
                    x, tokens[first : first + n], m.query_start_loc_p, columns, None, seen
                )
        else:
            self.advance_linear(x, y, m)
        return y

    def advance_linear(self, x: torch.Tensor, y: torch.Tensor, m: Any) -> None:
        """Write linear attention's output for x to y, both [num_tokens, width].

        As the layer does, it takes the state of a decode for what its block holds.
        """
        first, n = m.num_decodes, m.num_decode_tokens
        tokens, columns = torch.arange(len(x), device=x.device), m.state_indices_tensor[:, None]
        if first:
            starts = m.query_start_loc[: first + 1]
            y[:n] = self.advance(x, tokens[:n], starts, columns[:first], None, None)
        if m.num_prefills:
            last = first + m.num_prefills
            starts = m.query_start_loc[first : last + 1]
            seen = m.seq_lens[first:last] > starts.diff()
            at = tokens[n : n + m.num_prefill_tokens]
            y[at] = self.advance(x, at, starts - n, columns[first:last], None, seen)

    def advance(
        self,
        x: torch.Tensor,
        at: torch.Tensor,
        starts: torch.Tensor,
        columns: torch.Tensor,
        accepted: torch.Tensor | None,
        seen: torch.Tensor | None,
    ) -> torch.Tensor:
        """Run the tokens `at` [n] of x and write their states.

        `starts` [rows + 1] is the place in `at` at which each row begins.

        Args:
            columns: state blocks [rows, 1], or [rows, 1 + drafts]: then the state after token i
                goes to column i, and the window of column 0 keeps all tokens of the step.
            accepted: tokens [rows] that the step before kept: it says which state and which part of
                a window is read.
            seen: which rows [rows] have a state; None: all.
        """
        windows, states = (
            self.kv_cache[: len(self.conv)],
            self.kv_cache[len(self.conv) :][: len(self.out)],
        )
        columns, device, behind = columns.long(), x.device, self.conv.shape[1] - 1
        lengths, x = starts.diff().long(), x[at]
        rows = len(lengths)
        if sanitizer is not None:
            marks = self.kv_cache[-1][:, 0]
            sanitizer.states(
                self.prefix, marks, at[starts[:-1].long()], lengths, columns, accepted, seen
            )
        has_drafts = columns.shape[1] > 1
        width = columns.shape[1] if seen is None else int(lengths.max())
        steps, past = torch.arange(width, device=device), torch.arange(behind, device=device)
        tokens = (starts[:-1, None] + torch.minimum(steps, lengths[:, None] - 1)).clamp(
            0, len(x) - 1
        )
        skip = torch.zeros_like(lengths) if accepted is None else accepted[:rows].long() - 1
        old = [view[columns[:, :1], skip[:, None] + past].long() for view in windows]
        begin = [view[columns.gather(1, skip[:, None])[:, 0]].long() for view in states]
        if seen is not None:
            old, begin = (
                [one * seen.view(-1, *[1] * (one.dim() - 1)) for one in part]
                for part in (old, begin)
            )

        new = [x, *((x * (i + 2) + i) % PRIME for i in range(len(windows) - 1))]
        inputs = [torch.cat([one, own[tokens]], 1) for one, own in zip(old, new, strict=True)]
        taps, c = steps[:, None] + torch.arange(behind + 1, device=device), x.new_zeros(())
        for conv, both in zip(self.conv, inputs, strict=True):
            mixed = ((both[:, taps] + conv) * conv % PRIME).sum(-2) % PRIME
            c = (c + mixed * mixed) % PRIME
        y, last, every = c, (lengths - 1).clamp(min=0), torch.arange(rows, device=device)
        for to_map, out, view, start in zip(self.to_map, self.out, states, begin, strict=True):
            after = scan((c[..., None, None, :] * to_map[::2] + to_map[1::2]) % PRIME, start)
            mixed = (after * out % PRIME).sum(-2) % PRIME
            y = (mixed + y) * mixed % PRIME
            if has_drafts:
                view[torch.where(steps < lengths[:, None], columns, NULL_BLOCK)] = after.to(
                    view.dtype
                )
            else:
                view[columns[:, 0]] = after[every, last].to(view.dtype)
        for view, both in zip(windows, inputs, strict=True):
            if has_drafts:
                view[columns[:, 0]] = both[:, 1:].to(view.dtype)
            else:
                view[columns[:, 0], :behind] = both[every[:, None], lengths[:, None] + past].to(
                    view.dtype
                )
        row, step = rows_of(starts, len(x))
        return y[row, step.clamp(max=width - 1)]


def scan(maps: torch.Tensor, start: torch.Tensor) -> torch.Tensor:
    """Return the state [rows, len, state_size, width] after each token of affine maps.

    These are [rows, len, 2, state_size, width].
    """
    a, b = maps[:, :, 0].clamp(min=1), maps[:, :, 1].clone()
    b[:, 0] = (a[:, 0] * start + b[:, 0]) % PRIME
    shift = 1
    while shift < a.shape[1]:
        b[:, shift:] = (a[:, shift:] * b[:, :-shift] + b[:, shift:]) % PRIME
        a = torch.cat([a[:, :shift], a[:, shift:] * a[:, :-shift] % PRIME], 1)
        shift *= 2
    return b


def state_shapes(weights: dict[str, Any], num_drafts: int) -> tuple[tuple[int, ...], ...]:
    """Return the shapes of a layer's windows and states.

    Windows keep the tokens of a step with drafts.
    """
    windows, states = torch.tensor(weights["conv"]).shape, torch.tensor(weights["out"]).shape
    return ((windows[1] - 1 + num_drafts, windows[2]),) * windows[0] + (
        tuple(states[1:]),
    ) * states[0]


def pack(x: torch.Tensor, token: torch.Tensor) -> torch.Tensor:
    """Return hidden states [num_tokens, 2 * width + 1], exact in float32.

    They hold residues [num_tokens, width] and tokens [num_tokens].
    """
    return torch.cat([x >> 16, x & 0xFFFF, token[:, None]], 1).float()


def unpack(hidden: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the residues and the tokens that `pack` was given."""
    # vLLM up to 0.31 draws some hidden states.
    high, low, token = hidden.long().split([hidden.shape[1] // 2] * 2 + [1], 1)
    return (high << 16) + low, token[:, 0]


class ExactHybridForCausalLM(nn.Module, HasInnerState, IsHybrid):
    """The exact model.

    Logits are one-hot: a checksum of the whole history draws one token in `echo`, the others
    follow. A token that follows its predecessor in a cycle of five is what n-grams guess, so that
    drafts are right at times.
    """

    @classmethod
    def _mamba(cls, vllm_config: Any) -> list[tuple[str, dict[str, Any]]]:
        layers = vllm_config.model_config.hf_config.exact["layers"]
        return [(one["kind"], one["weights"]) for one in layers if one["kind"]]

    @classmethod
    def get_mamba_state_shape_from_config(cls, vllm_config: Any) -> Any:
        drafts, marks = vllm_config.num_speculative_tokens, MARKS * (sanitizer is not None)
        found = [state_shapes(weights, drafts) + marks for _, weights in cls._mamba(vllm_config)]
        return max(found, key=lambda shapes: sum(torch.Size(shape).numel() for shape in shapes))

    @classmethod
    def get_mamba_state_dtype_from_config(cls, vllm_config: Any) -> Any:
        return (torch.int32,) * len(cls.get_mamba_state_shape_from_config(vllm_config))

    @classmethod
    def get_mamba_state_copy_func(cls) -> Any:
        return get_conv_copy_spec, get_temporal_copy_spec

    embedding: torch.Tensor
    logit_map: torch.Tensor
    copy_funcs: dict[Any, Any] = {}  # noqa: RUF012  (by kind; vLLM asks the class)

    @classmethod
    def get_mamba_state_copy_funcs(cls, mamba_types: Any) -> Any:
        return {kind: cls.copy_funcs[kind] for kind in mamba_types}

    def __init__(self, *, vllm_config: Any, prefix: str = "") -> None:
        super().__init__()
        exact = vllm_config.model_config.hf_config.exact
        self.echo = exact["echo"]
        for name in ("embedding", "logit_map"):
            self.register_buffer(
                name, torch.tensor(exact[name], dtype=torch.int64), persistent=False
            )
        self.layers = nn.ModuleList(
            VllmMamba(vllm_config, f"layers.{i}", one["weights"], one["kind"])
            if one["kind"]
            else VllmAttention(vllm_config, f"layers.{i}", one["weights"])
            for i, one in enumerate(exact["layers"])
        )
        for kind, weights in self._mamba(vllm_config):
            states = len(weights["out"]) + (sanitizer is not None)
            parts = (get_conv_copy_spec,) * len(weights["conv"]) + (
                get_temporal_copy_spec,
            ) * states
            self.copy_funcs[MambaAttentionBackendEnum[kind]] = parts

    def embed_input_ids(self, input_ids: torch.Tensor) -> torch.Tensor:
        return self.embedding[input_ids]

    def forward(
        self, input_ids: torch.Tensor, positions: torch.Tensor, *_: Any, **__: Any
    ) -> torch.Tensor:
        """Return hidden states [num_tokens, 2 * width + 1] of [num_tokens] each; see `pack`."""
        x = self.embedding[input_ids]
        if sanitizer is not None and get_forward_context().attn_metadata is not None:
            sanitizer.step(positions)
        for layer in self.layers:
            y = layer(x, positions) if isinstance(layer, VllmAttention) else layer(x)
            x = (x * 3 + y) % PRIME
        return pack(x, input_ids.long())

    @property
    def model(self) -> nn.Module:
        """Return the module from which a head for drafts takes its embedding."""
        return self

    def compute_logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Return logits [num_tokens, vocabulary] of hidden states [num_tokens, 2 * width + 1].

        They are multiples of a quarter: a greedy request that draws, even at a temperature of 1,
        draws another token three times out of four.
        """
        x, token = unpack(hidden)
        mixed = (x[:, None] * self.logit_map[0] + self.logit_map[1]) % PRIME
        scores = (mixed * mixed % PRIME).sum(-1) % PRIME
        follower = token - token % CYCLE + (token + 1) % CYCLE
        chosen = torch.where(scores[:, 0] % self.echo == 0, scores.argmax(1), follower)
        tokens = torch.arange(scores.shape[1], device=scores.device)
        return (tokens - chosen[:, None]) % scores.shape[1] * -0.25

    def load_weights(self, weights: Any) -> set[str]:
        """Load nothing: all weights are in the configuration."""
        return set()


class ExactHead(nn.Module):
    """A head for drafts (MTP).

    It is one attention layer over the model's hidden states, with a cache of its own. It guesses as
    the model draws, from another checksum: of eight drafts that follow a right one, about six are
    right.
    """

    embed_tokens: torch.Tensor  # the model's, which vLLM hands over

    def __init__(self, *, vllm_config: Any, prefix: str = "") -> None:
        super().__init__()
        exact = vllm_config.speculative_config.draft_model_config.hf_config.exact
        place = f"layers.{len(exact['layers'])}"
        self.attention = VllmAttention(vllm_config, place, exact["head"])
        self.attention.is_watched = False  # it reads what was rejected: a guess may be wrong
        self.echo, self.logit_map = (
            exact["echo"],
            torch.tensor(exact["logit_map"], dtype=torch.int64),
        )

    model = ExactHybridForCausalLM.model
    compute_logits = ExactHybridForCausalLM.compute_logits
    load_weights = ExactHybridForCausalLM.load_weights

    def forward(
        self,
        input_ids: torch.Tensor,
        positions: torch.Tensor,
        hidden_states: torch.Tensor,
        **_: Any,
    ) -> Any:
        """Return hidden states [num_tokens, 2 * width + 1] after the head's layer.

        input_ids and positions are [num_tokens], hidden_states has the shape of the result.
        """
        x = (self.embed_tokens[input_ids] + unpack(hidden_states)[0]) % PRIME
        return pack((x * 3 + self.attention(x, positions)) % PRIME, input_ids.long())
