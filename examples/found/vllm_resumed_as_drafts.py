"""vllm 0.32.0, mamba2, n-gram drafts: one request, preempted behind 3 tokens; its tail of 2 output tokens is taken for a decode.

The model's arithmetic is exact: integers modulo a prime. It runs over vLLM's own cache, block tables and
metadata, so a wrong token is a wrong block, slot, state or column. Run it with vLLM's Python; the exit code
is 1 while the answer is wrong. The requests are in CASE, below the model.
"""

import os
import sys
from typing import Any

LIBRARIES = []

def prepare() -> None:
    """Before vLLM is imported: one process, and the operators of torchvision that a CPU build of torch lacks."""
    import torch

    for name, value in {
        "OMP_NUM_THREADS": "1",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_LOGGING_LEVEL": "ERROR",
    }.items():
        os.environ.setdefault(name, value)
    try:
        import torchvision  # noqa: F401
    except RuntimeError:
        library = torch.library.Library("torchvision", "DEF")
        LIBRARIES.append(library)
        for name in ("nms", "qnms"):
            library.define(f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
        for name in [name for name in sys.modules if name.split(".")[0] == "torchvision"]:
            del sys.modules[name]

prepare()
"""The exact model as a model of vLLM: integers modulo a prime, over vLLM's own cache and by vLLM's own metadata.

Scheduler, cache manager, block tables, metadata builders, state copies and sampler are vLLM's, only the layers are not.
They compute what `hybrid_kv.models.exact` computes: one wrong block, slot, state or column is a wrong token, without
any tolerance. The file needs vLLM 0.32 and nothing else: the weights are in the checkpoint's `config.json`.

`register` is what vLLM calls of a plugin (entry point `vllm.general_plugins`).
"""

from collections.abc import Iterable
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
from vllm.v1.kv_cache_interface import FullAttentionSpec

NAME = "ExactHybridForCausalLM"
PRIME = 2**31 - 1  # as in hybrid_kv.models.exact
CYCLE = 5
NULL_BLOCK = 0  # what padding writes goes there

kernel_block_size = 0  # if set, attention takes blocks of this size alone, and vLLM splits its own


def register() -> None:
    """Make the model known to vLLM."""
    ModelRegistry.register_model(NAME, ExactHybridForCausalLM)


def renew(llm: Any) -> None:
    """Make a pool in which nothing is held like a new one: its order of free blocks, and noise, always the same.

    What a request reads before it wrote it then shows, and what was wrong is wrong again.
    """
    pool = llm.engine_core.engine_core.scheduler.kv_cache_manager.block_pool
    queue = type(pool.free_block_queue)(pool.blocks)
    pool.free_block_queue, pool.null_block = queue, queue.popleft()
    noise = torch.Generator().manual_seed(0)
    for layer in llm.vllm_config.compilation_config.static_forward_context.values():
        for view in layer.kv_cache if isinstance(layer.kv_cache, tuple) else [layer.kv_cache]:
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
        return [kernel_block_size] if kernel_block_size else AttentionBackend.get_supported_kernel_block_sizes()

    @staticmethod
    def get_kv_cache_shape(num_blocks: int, block_size: int, heads: int, size: int, *_: Any, **__: Any) -> Any:
        return num_blocks, heads, block_size, 2 * size


class Builder(AttentionMetadataBuilder):
    """Hands on what all backends share."""

    _cudagraph_support = AttentionCGSupport.ALWAYS

    def __init__(self, *arguments: Any, **named: Any) -> None:
        super().__init__(*arguments, **named)

    def build(self, common_prefix_len: int, common_attn_metadata: Any, fast_build: bool = False) -> Any:
        return common_attn_metadata


def rows_of(starts: torch.Tensor, num_tokens: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The row of each token and its place there, of starts [rows + 1]; both [num_tokens]."""
    tokens = torch.arange(num_tokens, device=starts.device)
    row = torch.searchsorted(starts[1:].long(), tokens, right=True).clamp(max=len(starts) - 2)
    return row, (tokens - starts[row]).clamp(min=0)


class Layer(nn.Module):
    """What vLLM knows by its name, and finds the metadata of."""

    def __init__(self, vllm_config: Any, prefix: str, weights: dict[str, Any]) -> None:
        super().__init__()
        self.prefix = prefix
        for name, value in weights.items():
            self.register_buffer(name, torch.tensor(value, dtype=torch.int64), persistent=False)
        vllm_config.compilation_config.static_forward_context[prefix] = self

    def metadata(self) -> Any:
        """Of this step; None while vLLM measures memory."""
        found = get_forward_context().attn_metadata
        return None if found is None else found[self.prefix]


class Attention(Layer, AttentionLayerBase):
    """`o_i = sum_{j <= i} (q_i + k_j)^2 v_j`; k_j has the position of its token, v_j its place in the block table."""

    qkv: torch.Tensor
    write_mark: torch.Tensor
    read_mark: torch.Tensor

    def __init__(self, vllm_config: Any, prefix: str, weights: dict[str, Any]) -> None:
        super().__init__(vllm_config, prefix, weights)
        self.kv_cache = torch.tensor([])
        self.head_size = vllm_config.model_config.get_head_size()

    def get_attn_backend(self) -> type[AttentionBackend]:
        return Backend

    def get_kv_cache_spec(self, vllm_config: Any) -> Any:
        size = vllm_config.cache_config.block_size
        return FullAttentionSpec(block_size=size, num_kv_heads=1, head_size=self.head_size, dtype=torch.int32)

    def forward(self, x: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """[num_tokens, width] to the same."""
        m = self.metadata()
        if m is None:
            return x
        n, width = x.shape
        cache = self.kv_cache[:, 0, :, : 2 * width]  # [blocks, block size, k and v]
        size = cache.shape[1]
        q, k, v = x * self.qkv[:, None] % PRIME
        mark = (positions[:n, None] + 1) * self.write_mark % PRIME
        slots = m.slot_mapping[:n]
        blocks = torch.where(slots < 0, NULL_BLOCK, slots // size)
        cache[blocks, slots % size] = torch.cat([(k + mark * mark) % PRIME, v], 1).to(cache.dtype)

        starts, lengths = m.query_start_loc, m.seq_lens
        row, step = rows_of(starts, n)
        place = (lengths[row] - starts.diff()[row] + step).clamp(min=0)
        table = m.block_table_tensor[: len(starts) - 1, : -(-m.max_seq_len // size)].clamp(min=NULL_BLOCK)
        k, v = cache[table].flatten(1, 2).long().chunk(2, -1)  # [rows, keys, width]
        order = (torch.arange(k.shape[1], device=x.device)[:, None] + 1) * self.read_mark % PRIME
        v = v * (order * order % PRIME) % PRIME
        # (q + k)^2 v = q^2 v + 2 q k v + k^2 v: three sums over the keys serve all queries.
        sums = [part.cumsum(1)[row, place] % PRIME for part in (v, k * v % PRIME, k * k % PRIME * v % PRIME)]
        return (q * q % PRIME * sums[0] % PRIME + 2 * (q * sums[1] % PRIME) + sums[2]) % PRIME


class Mamba(Layer, MambaBase):
    """Windows [conv_kernel - 1, width] and states [state_size, width] that each token changes by its own affine map.

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
        self.shapes = state_shapes(weights, vllm_config.num_speculative_tokens)

    def get_state_shape(self) -> Iterable[tuple[int, ...]]:
        return self.shapes

    def get_state_dtype(self) -> tuple[torch.dtype, ...]:
        return (torch.int32,) * len(self.shapes)

    @property
    def mamba_type(self) -> Any:
        return self.kind

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[num_tokens, width] to the same, by the metadata of the kind's builder."""
        m = self.metadata()
        if m is None:
            return x
        y = torch.zeros_like(x)
        if hasattr(m, "spec_sequence_masks"):  # GDN's rows: those with drafts, whose tokens may lie among the others
            if m.num_spec_decodes:
                at, columns = m.spec_token_indx[: m.num_spec_decode_tokens].long(), m.spec_state_indices_tensor
                starts = m.spec_query_start_loc[: m.num_spec_decodes + 1]
                y[at] = self.advance(x[at], starts, columns[: m.num_spec_decodes], m.num_accepted_tokens, None)
            if rows := m.num_decodes + m.num_prefills:
                n, index = m.num_decode_tokens + m.num_prefill_tokens, m.non_spec_token_indx
                at = torch.arange(n, device=x.device) if index is None else index[:n].long()
                starts, columns = m.non_spec_query_start_loc[: rows + 1], m.non_spec_state_indices_tensor[:rows, None]
                y[at] = self.advance(
                    x[at], starts, columns, None, m.has_initial_state[:rows] if m.num_prefills else None
                )
        elif hasattr(m, "state_indices_tensor_d"):
            if m.num_decodes:
                starts, n = m.query_start_loc_d, m.num_decode_tokens
                if starts is None:
                    starts = torch.arange(m.num_decodes + 1, device=x.device)
                y[:n] = self.advance(x[:n], starts, m.state_indices_tensor_d, m.num_accepted_tokens, None)
            if m.num_prefills:
                first, n = m.num_decode_tokens, m.num_prefill_tokens
                columns, seen = m.state_indices_tensor_p[:, None], m.has_initial_states_p
                y[first : first + n] = self.advance(x[first : first + n], m.query_start_loc_p, columns, None, seen)
        else:  # linear attention: what is fresh has no tokens before these
            rows, n = m.num_decodes + m.num_prefills, m.num_decode_tokens + m.num_prefill_tokens
            starts = m.query_start_loc[: rows + 1]
            seen = m.seq_lens[:rows] > starts.diff()
            y[:n] = self.advance(x[:n], starts, m.state_indices_tensor[:rows, None], None, seen)
        return y

    def advance(
        self,
        x: torch.Tensor,
        starts: torch.Tensor,
        columns: torch.Tensor,
        accepted: torch.Tensor | None,
        seen: torch.Tensor | None,
    ) -> torch.Tensor:
        """Run tokens [n, width] of rows that begin at `starts` [rows + 1], and write their states.

        Args:
            columns: state blocks [rows, 1], or [rows, 1 + drafts]: then the state after token i goes to column i, and
                the window of column 0 keeps all tokens of the step.
            accepted: tokens [rows] that the step before kept: it says which state and which part of a window is read.
            seen: which rows [rows] have a state; None: all.
        """
        windows, states = self.kv_cache[: len(self.conv)], self.kv_cache[len(self.conv) :]
        columns, device, behind = columns.long(), x.device, self.conv.shape[1] - 1
        lengths = starts.diff().long()
        rows = len(lengths)
        has_drafts = columns.shape[1] > 1
        width = columns.shape[1] if seen is None else int(lengths.max())
        steps, past = torch.arange(width, device=device), torch.arange(behind, device=device)
        tokens = (starts[:-1, None] + torch.minimum(steps, lengths[:, None] - 1)).clamp(0, len(x) - 1)
        skip = torch.zeros_like(lengths) if accepted is None else accepted[:rows].long() - 1
        old = [view[columns[:, :1], skip[:, None] + past].long() for view in windows]
        begin = [view[columns.gather(1, skip[:, None])[:, 0]].long() for view in states]
        if seen is not None:
            old, begin = ([one * seen.view(-1, *[1] * (one.dim() - 1)) for one in part] for part in (old, begin))

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
                view[torch.where(steps < lengths[:, None], columns, NULL_BLOCK)] = after.to(view.dtype)
            else:
                view[columns[:, 0]] = after[every, last].to(view.dtype)
        for view, both in zip(windows, inputs, strict=True):
            if has_drafts:
                view[columns[:, 0]] = both[:, 1:].to(view.dtype)
            else:
                view[columns[:, 0], :behind] = both[every[:, None], lengths[:, None] + past].to(view.dtype)
        row, step = rows_of(starts, len(x))
        return y[row, step.clamp(max=width - 1)]


def scan(maps: torch.Tensor, start: torch.Tensor) -> torch.Tensor:
    """The state [rows, len, state_size, width] after each token of affine maps [rows, len, 2, state_size, width]."""
    a, b = maps[:, :, 0].clamp(min=1), maps[:, :, 1].clone()
    b[:, 0] = (a[:, 0] * start + b[:, 0]) % PRIME
    shift = 1
    while shift < a.shape[1]:
        b[:, shift:] = (a[:, shift:] * b[:, :-shift] + b[:, shift:]) % PRIME
        a = torch.cat([a[:, :shift], a[:, shift:] * a[:, :-shift] % PRIME], 1)
        shift *= 2
    return b


def state_shapes(weights: dict[str, Any], num_drafts: int) -> tuple[tuple[int, ...], ...]:
    """Of a layer's windows, which keep the tokens of a step with drafts, and states."""
    windows, states = torch.tensor(weights["conv"]).shape, torch.tensor(weights["out"]).shape
    return ((windows[1] - 1 + num_drafts, windows[2]),) * windows[0] + (tuple(states[1:]),) * states[0]


class ExactHybridForCausalLM(nn.Module, HasInnerState, IsHybrid):
    """The model. Logits are one-hot: a checksum of the whole history draws one token in `echo`, the others follow.

    A token that follows its predecessor in a cycle of five is what n-grams guess, so that drafts are right at times.
    """

    @classmethod
    def _mamba(cls, vllm_config: Any) -> list[tuple[str, dict[str, Any]]]:
        layers = vllm_config.model_config.hf_config.exact["layers"]
        return [(one["kind"], one["weights"]) for one in layers if one["kind"]]

    @classmethod
    def get_mamba_state_shape_from_config(cls, vllm_config: Any) -> Any:
        found = [state_shapes(weights, vllm_config.num_speculative_tokens) for _, weights in cls._mamba(vllm_config)]
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
            self.register_buffer(name, torch.tensor(exact[name], dtype=torch.int64), persistent=False)
        self.layers = nn.ModuleList(
            Mamba(vllm_config, f"layers.{i}", one["weights"], one["kind"])
            if one["kind"]
            else Attention(vllm_config, f"layers.{i}", one["weights"])
            for i, one in enumerate(exact["layers"])
        )
        for kind, weights in self._mamba(vllm_config):
            parts = (get_conv_copy_spec,) * len(weights["conv"]) + (get_temporal_copy_spec,) * len(weights["out"])
            self.copy_funcs[MambaAttentionBackendEnum[kind]] = parts

    def embed_input_ids(self, input_ids: torch.Tensor) -> torch.Tensor:
        return self.embedding[input_ids]

    def forward(self, input_ids: torch.Tensor, positions: torch.Tensor, *_: Any, **__: Any) -> torch.Tensor:
        """[num_tokens] each to [num_tokens, width + 1]: the last one is the token itself."""
        x = self.embedding[input_ids]
        for layer in self.layers:
            y = layer(x, positions) if isinstance(layer, Attention) else layer(x)
            x = (x * 3 + y) % PRIME
        return torch.cat([x, input_ids[:, None].long()], 1)

    def compute_logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """[num_tokens, width + 1] to [num_tokens, vocabulary]."""
        x, token = hidden[:, :-1], hidden[:, -1]
        mixed = (x[:, None] * self.logit_map[0] + self.logit_map[1]) % PRIME
        scores = (mixed * mixed % PRIME).sum(-1) % PRIME
        follower = token - token % CYCLE + (token + 1) % CYCLE
        chosen = torch.where(scores[:, 0] % self.echo == 0, scores.argmax(1), follower)
        return functional.one_hot(chosen, scores.shape[1]).float() * 100

    def load_weights(self, weights: Any) -> set[str]:
        """All of them are in the configuration."""
        return set()


CONFIG = {'architectures': ['ExactHybridForCausalLM'], 'model_type': 'llama', 'hidden_size': 2, 'head_dim': 2, 'num_attention_heads': 1, 'num_key_value_heads': 1, 'intermediate_size': 2, 'num_hidden_layers': 5, 'layers_block_type': ['mamba', 'attention', 'mamba', 'mamba', 'attention'], 'mamba_chunk_size': 8, 'vocab_size': 100, 'max_position_embeddings': 4096, 'torch_dtype': 'float32', 'tie_word_embeddings': False, 'bos_token_id': 0, 'eos_token_id': 0, 'exact': {'name': 'mamba2', 'echo': 1, 'embedding': [[1826701614, 1367864807], [1097657232, 579362556], [661058652, 87989973], [161576975, 35492827], [376383646, 1746484539], [1394609702, 1960127675], [1081530687, 1302740408], [2084654369, 1566581935], [1357791199, 1167425779], [1202413558, 2008052738], [595598246, 1752032165], [1440696407, 5880884], [846428920, 1841261662], [1190382223, 72124474], [1642588603, 1566923139], [1818006482, 377217573], [191741831, 1853662620], [47463575, 1162779116], [172656924, 643626384], [1033071480, 907713895], [865948038, 60816031], [11494708, 266896304], [17790420, 1440154964], [1128755549, 1389828892], [552547096, 1321529463], [1640795441, 823941273], [989821581, 2141492029], [1728701086, 2106327850], [815020182, 1472190201], [2040324894, 1396850658], [1804554973, 1478428095], [1511830743, 835202398], [1879383516, 290117535], [1243185674, 1549384412], [1815655708, 1128189816], [806201100, 666239354], [908297868, 1043323488], [1543657889, 1910160578], [156652361, 2005843176], [1141051469, 768359334], [1444696808, 1227350965], [546762614, 691209254], [1545136977, 1276249596], [1083230752, 725658831], [1633503581, 840995399], [704750837, 1911849612], [566779217, 487817218], [1533673821, 1338284202], [104252792, 180421577], [809899614, 1788089690], [860813095, 1690280743], [679605936, 514041965], [1700138881, 1882235552], [170294838, 125773897], [1441526998, 721805891], [1231901275, 322722698], [1846923786, 967096425], [1921983830, 1710093347], [1514711733, 495300372], [1647140547, 111714893], [1224268757, 868768460], [2140277469, 426303517], [2032646511, 194890681], [1338252685, 1246254308], [1930469648, 641445060], [1937191049, 1443098011], [1912112502, 428456153], [1628312689, 2023172498], [104360714, 784068116], [1366900981, 226549388], [1095352899, 1350999467], [1640650566, 1991049240], [880091738, 945702738], [1018360728, 2049967474], [420376858, 1073518085], [107014968, 913171518], [2030045015, 1331898245], [750782388, 2136953472], [1296558497, 2037841023], [35072564, 987939414], [1793051917, 1627210303], [875079009, 1068207104], [902462479, 1136689208], [494452713, 1687461942], [166879143, 890466656], [605291690, 1577291459], [1609096917, 1527167701], [1985281331, 2001582934], [396530696, 246815951], [284241474, 1565548042], [2083753425, 1991627720], [1435036779, 2078605664], [1871024368, 31581549], [256059214, 1854652970], [176863877, 2107100303], [1776774048, 2055593207], [773786671, 319468284], [1109958447, 2088704472], [788603698, 1911122052], [824272794, 1766034346]], 'logit_map': [[[493018053, 1030766217], [701897159, 499017045], [1917029159, 1722025429], [299909237, 1983265915], [2085146283, 571510407], [915743487, 1157352827], [1411099205, 950804460], [319457531, 1999344461], [1486119656, 86996090], [1748708618, 1571971334], [393575410, 1319356501], [1077333835, 60914158], [1991575180, 1544512700], [666191121, 34341978], [196017831, 1627687382], [320704862, 1101140973], [1929953604, 1995236120], [575371960, 141911081], [1062733147, 1806715099], [1341434674, 143215703], [1396231713, 739400049], [485792375, 924059490], [1875379230, 2074602520], [302913356, 1207383687], [1635307037, 555907480], [585528511, 518994644], [450152622, 1907219570], [469485975, 485050904], [269386936, 267479194], [1671748609, 619185585], [1722230529, 1258689696], [1843405230, 1189900292], [1641032421, 1738840649], [131069159, 1203612941], [976358674, 619379841], [971614502, 886688144], [1056188273, 1756901406], [1772735651, 1345412382], [1525331520, 2059603553], [1367752506, 793289932], [176283769, 1186724182], [497074430, 1275442510], [55205954, 1821691497], [2028429921, 312402044], [1759114057, 872974300], [89514545, 1954121989], [2020595744, 92485439], [1274239749, 1766748282], [1696194208, 892030427], [1846657787, 1781990488], [243444660, 21377257], [219536275, 783930654], [235553101, 168856719], [555678127, 1401479130], [1125662722, 588086461], [2041104818, 1508933831], [1362392981, 2026798130], [1686949517, 272337653], [79354822, 1857097247], [875830024, 127698293], [1023419372, 817698440], [925758968, 922932768], [674631158, 1049796408], [1055562760, 2096936868], [1487642553, 1665784141], [17257122, 663266136], [2112488123, 579470084], [1095136094, 1853536523], [1371385240, 1892592741], [353044763, 1096733869], [1364944092, 739369452], [1233058892, 2136568735], [1581761358, 678483597], [137321581, 392371846], [584160037, 1889996323], [581917525, 1744476983], [588053791, 1434281576], [1131487508, 2058177601], [1216325249, 1987956916], [2065840828, 1606851424], [1349431588, 1848342201], [2139873756, 530743583], [1208033237, 303324671], [225336198, 1438946864], [102092474, 1534631621], [1762818387, 358743433], [1461111208, 849452775], [1918513088, 1954759372], [1240184093, 1205598967], [1525958284, 1241966919], [1601735539, 416890513], [1679665482, 1129624176], [1614599411, 1124067517], [658332664, 190987833], [1128218303, 2108705875], [76953177, 1227062708], [960169881, 13762971], [1167302081, 1659251524], [1592403293, 2100809622], [1136182737, 1266736239]], [[2074068892, 686511086], [1714768789, 402669753], [777213504, 1444239948], [1244721829, 418989948], [1415983256, 1240575302], [1976691419, 1293298782], [1899189787, 2066787853], [188070710, 155188476], [1079200426, 1073683463], [1191879035, 1597937168], [677186467, 380591527], [1460534081, 833366960], [1996560372, 135067054], [1522979206, 1558817284], [582027100, 188480102], [683416593, 848452983], [2103281005, 1875875565], [496254107, 1014257250], [1288245594, 1959840678], [289993664, 1644794485], [1986944590, 1965643235], [594949506, 273595879], [1275194774, 157975136], [279162561, 151024480], [452892286, 1865850388], [1444535965, 1361654911], [2116130273, 1066379592], [85898468, 351206812], [558975054, 1446831540], [766760085, 682937140], [240915550, 1526602881], [52580667, 988605541], [1598640628, 1089783226], [1475383484, 1695794246], [482945971, 199169392], [121012641, 1242874421], [567020276, 423558824], [1578280309, 1735460458], [2049571150, 1049788868], [1122282164, 2123207060], [1081734388, 392867798], [549260787, 2068067855], [92794863, 1719956238], [1390493183, 1033499046], [1789927145, 1747051098], [944888643, 1294608165], [1640037303, 1406861771], [1042672249, 1962135971], [1895794837, 140167152], [1174906485, 1793123513], [181316224, 819940996], [1092418183, 699103887], [1493268087, 2134656235], [781393582, 1677593828], [251580341, 1042678771], [11507717, 907587570], [30122970, 1884478975], [2081748799, 186433518], [1756702899, 1521317695], [645939061, 1694696649], [2066547046, 1716261155], [1487200419, 692105471], [1302388738, 1710769617], [1534632091, 483889144], [884788598, 778050399], [1491964130, 896462994], [900767155, 1162669086], [1244199845, 241836005], [1986310577, 873913747], [376807922, 645727], [933735439, 1598545437], [636300172, 1829389590], [428669386, 298353509], [839878378, 1511368430], [643323834, 1763305454], [44846462, 2108460267], [101210933, 1812026434], [7592670, 910761742], [664542660, 2103865480], [1406364329, 2091615581], [890259340, 1081638076], [1078627883, 1618014120], [1093393903, 1962451447], [412216004, 1022518051], [529894210, 1854966827], [294976780, 1506607023], [1958199453, 631197533], [599538114, 1648520696], [1269833621, 1225536245], [1898703231, 201530932], [586415635, 840483065], [1970261970, 158357620], [972018090, 1022560767], [31166653, 920281801], [1393151831, 909969229], [656389835, 1259070421], [2106435001, 263476186], [614627891, 2005253464], [636542532, 1468987151], [754646726, 1769056995]]], 'layers': [{'kind': 'MAMBA2', 'weights': {'conv': [[[1257027453, 1925865980], [1369052290, 1252670261], [1049182742, 86367972], [259146964, 1527906320]]], 'to_map': [[[[1373500221, 1221973716], [250978654, 1773729627]], [[1709792113, 1142805914], [546129952, 1746428395]], [[1120401407, 2141063300], [602431219, 752810725]], [[1725762600, 367265746], [691213916, 841115227]]]], 'out': [[[1559527836, 1617162538], [1693159808, 943236948]]]}}, {'kind': '', 'weights': {'qkv': [[1321516691, 1263536663], [1658097530, 273500236], [683208708, 1559338365]], 'write_mark': [433243808, 601472378], 'read_mark': [2101448338, 409348094]}}, {'kind': 'MAMBA2', 'weights': {'conv': [[[2143332914, 1853171009], [335114982, 1212067303], [695215397, 1040453556], [1309583381, 1930209337]]], 'to_map': [[[[1999946148, 184710300], [384379269, 1494980298]], [[442733244, 704336604], [1257265993, 376689570]], [[2135488785, 1449119065], [487971976, 779154206]], [[1391888845, 708445905], [1335149573, 2026532568]]]], 'out': [[[784818245, 427989928], [613679013, 1099884554]]]}}, {'kind': 'MAMBA2', 'weights': {'conv': [[[1193421927, 51567956], [1381206184, 350830304], [1352665113, 1897127283], [415380886, 1694896203]]], 'to_map': [[[[73060873, 1195795109], [1432436442, 477715030]], [[1678406708, 1197753812], [897596911, 26084466]], [[289187333, 1531142163], [873929859, 1539210365]], [[2063825496, 1387371123], [1592700839, 1312839827]]]], 'out': [[[644623455, 158304834], [1316683215, 529152789]]]}}, {'kind': '', 'weights': {'qkv': [[259701711, 1233467465], [1310220351, 846509634], [1352139329, 2130353660]], 'write_mark': [1628300042, 1983728048], 'read_mark': [145712548, 326434485]}}]}}
CASE = {'options': {'max_model_len': 640,
             'max_num_seqs': 8,
             'max_num_batched_tokens': 40,
             'enable_prefix_caching': False,
             'async_scheduling': False,
             'dtype': 'float32',
             'speculative_config': {'method': 'ngram',
                                    'num_speculative_tokens': 3,
                                    'prompt_lookup_min': 1,
                                    'prompt_lookup_max': 3},
             'load_format': 'dummy',
             'kv_cache_memory_bytes': 268435456,
             'num_gpu_blocks_override': 1024,
             'block_size': 16},
 'kernel_block_size': 0,
 'changes': [],
 'rounds': [{'requests': [{'prompt': (0, 7, 14, 21, 28, 35, 42, 49, 56, 63, 70, 77, 84, 91, 98, 0, 7, 14, 21,
                                      28, 35, 42, 49, 56, 63, 70, 77, 84, 91, 98, 0, 7, 14, 21, 28, 35, 42,
                                      49, 56),
                           'max_tokens': 6}],
             'preempt_every': 3}],
 'index': 0,
 'expected': [57, 99, 71, 82, 25, 77]}
CASE["config"] = CONFIG

def make_tight() -> None:
    """The pool of the next engine holds what its longest request takes, for which vLLM has no option."""
    import vllm.v1.engine.core as core
    from vllm.v1.core import kv_cache_utils

    plan: Callable[..., Any] = core.get_kv_cache_configs

    def tight(config: Any, specs: Any, memory: list[int]) -> Any:
        groups = kv_cache_utils.get_kv_cache_groups(config, dict(specs[0]))
        needed = kv_cache_utils._max_memory_usage_bytes_from_groups(config, groups)
        block = kv_cache_utils._pool_bytes_per_block(config, groups)
        config.cache_config.num_gpu_blocks_override = 1 + -(-needed // block)  # the first one is the null block
        return plan(config, specs, memory)

    core.get_kv_cache_configs = tight

# The end of a reproducer, see `probes.script`: plays a case over vLLM alone. `model` is the module that has `register`.

import json
import os
import sys
import tempfile
from typing import Any


def prepare() -> None:
    """Before vLLM is imported: one process, and the operators of torchvision that a CPU build of torch lacks."""
    import torch

    for name, value in {
        "OMP_NUM_THREADS": "1",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_LOGGING_LEVEL": "ERROR",
    }.items():
        os.environ.setdefault(name, value)
    try:
        import torchvision  # noqa: F401
    except RuntimeError:
        library = torch.library.Library("torchvision", "DEF")
        LIBRARIES.append(library)
        for name in ("nms", "qnms"):
            library.define(f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
        for name in [name for name in sys.modules if name.split(".")[0] == "torchvision"]:
            del sys.modules[name]


LIBRARIES: list[Any] = []  # a library that is collected takes its operators along


def engine(case: dict[str, Any], model: Any) -> Any:
    import vllm
    from vllm.v1.engine.llm_engine import LLMEngine

    model.kernel_block_size = case["kernel_block_size"]
    model.register()
    for name in case["changes"]:
        getattr(model, name)()
    folder = tempfile.mkdtemp()
    with open(f"{folder}/config.json", "w") as file:
        json.dump(case["config"], file)
    options = {"enforce_eager": True, "skip_tokenizer_init": True, **case["options"]}
    llm = LLMEngine.from_engine_args(vllm.EngineArgs(folder, **options))
    model.renew(llm)
    return llm


def print_steps(llm: Any) -> None:
    """Print what each step runs."""
    scheduler, number = llm.engine_core.engine_core.scheduler, 0
    schedule = scheduler.schedule

    def and_print(*arguments: Any) -> Any:
        nonlocal number
        found, number = schedule(*arguments), number + 1
        new = {one.req_id for one in found.scheduled_new_reqs}
        rows = []
        for name, count in found.num_scheduled_tokens.items():
            drafts = len(found.scheduled_spec_decode_tokens.get(name, ()))
            is_new, with_drafts = " (new)" * (name in new), f", {drafts} of them drafts" * (drafts > 0)
            rows.append(f"request {name.split('-')[0]}{is_new} {count} tokens{with_drafts}")
        print(f"  step {number}: {'; '.join(rows) or 'nothing'}")
        return found

    scheduler.schedule = and_print


def play(llm: Any, requests: list[dict[str, Any]], preempt_every: int) -> list[list[int]]:
    """As `Engine.ask` of `vllm.py` does, without aborted requests' last tokens."""
    from vllm import SamplingParams

    found: list[list[int]] = [[] for _ in requests]
    waiting, running, step, undisturbed = list(range(len(requests))), set[int](), 0, 0
    while waiting or running:
        ended = len(requests) - len(waiting) - len(running)
        ready = [i for i in waiting if requests[i].get("after", 0) <= ended and requests[i].get("step", 0) <= step]
        for i in ready or (waiting[:1] if not running else []):
            one = requests[i]
            waiting.remove(i)
            running.add(i)
            prompt = {"prompt_token_ids": list(one["prompt"])} | (
                {"cache_salt": one["salt"]} if one.get("salt") else {}
            )
            params = SamplingParams(
                max_tokens=one["max_tokens"], temperature=one.get("temperature", 0.0), seed=one.get("seed"),
                ignore_eos=True, detokenize=False,
            )  # fmt: skip
            llm.add_request(str(i), prompt, params)
        known = sum(map(len, found))
        if preempt_every and known - undisturbed >= preempt_every:
            undisturbed = known
            llm.reset_prefix_cache(reset_running_requests=True)
        step += 1
        for output in llm.step():
            i = int(output.request_id)
            found[i] = list(output.outputs[0].token_ids)
            limit = requests[i].get("abort_after")
            if limit is not None and not output.finished and len(found[i]) >= limit:
                llm.abort_request([output.request_id])
            elif not output.finished:
                continue
            running.discard(i)
    return found


def main(case: dict[str, Any], model: Any) -> None:
    import vllm

    print(f"vLLM {vllm.__version__}")
    llm = engine(case, model)
    print_steps(llm)
    for number, one in enumerate(case["rounds"], 1):
        print(f"round {number}, {len(one['requests'])} requests:")
        answers = play(llm, one["requests"], one.get("preempt_every", 0))
    got = answers[case["index"]][: len(case["expected"])]
    print(f"request {case['index']}: expected {case['expected']}\n           got      {got}")
    sys.stdout.flush()
    os._exit(got != case["expected"])

if __name__ == "__main__":
    main(CASE, sys.modules[__name__])
