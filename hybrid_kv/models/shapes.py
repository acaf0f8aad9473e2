"""The cache that a checkpoint's config.json describes, one `KVCacheSpec` per layer; no weights.

Reads the raw JSON, so that a plan needs no transformers version that knows the model.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import hybrid_kv.models.families  # noqa: F401  (registers them)
from hybrid_kv.cache.ranks import Ranks
from hybrid_kv.cache.spec import KVCacheSpec, MambaSpec, kind_of
from hybrid_kv.config import (
    DTYPES,
    STATE_DTYPES,
    CacheConfig,
    ConfigError,
    MakeDtype,
    parse_dtype,
    parse_model_dtype,
    torch_dtype,
)
from hybrid_kv.models.config_file import ConfigFile
from hybrid_kv.models.registry import family_of, head_of, require_head
from hybrid_kv.models.specs import SpecOptions, cache_name, chunk_size, head_spec

if TYPE_CHECKING:
    import torch

# Above it the file is wrong, and a list of its layers would take the memory of the machine.
_MAX_LAYERS = 10_000


@dataclass(frozen=True)
class ModelShape:
    """The cache-relevant shape of a model.

    The specs' block sizes are placeholders until a plan decides them.

    Attributes:
        num_hidden_layers: those of a draft head left out.
        layers: the spec of each; a draft head's after those of the model.
    """

    model_type: str
    dtype: torch.dtype
    max_position_embeddings: int | None
    mamba_chunk_size: int | None
    num_hidden_layers: int
    layers: dict[str, KVCacheSpec]

    @property
    def counts(self) -> dict[str, int]:
        """Layers per kind of cache (`attention`, `window 512`, `mamba2`, `gdn_attention`)."""
        return dict(Counter(map(kind_of, self.layers.values())))

    def stages(self, ranks: Ranks) -> list[list[str]]:
        """Return the names of the layers with a cache in each pipeline stage.

        The last one has the draft head.
        """
        of_model = [name for name in self.layers if name.startswith("layers.")]
        stages = [
            [name for name in of_model if int(name.split(".")[1]) in numbers]
            for numbers in ranks.stages(self.num_hidden_layers)
        ]
        stages[-1] += [name for name in self.layers if name not in of_model]
        return stages


def model_shape(
    source: str | Path | dict[str, Any] | ConfigFile,
    *,
    cache: CacheConfig | None = None,
    num_speculative_tokens: int = 0,
    dtype: str = "auto",
    ranks: Ranks | None = None,
    make_dtype: MakeDtype = torch_dtype,
    has_draft_head: bool = False,
) -> ModelShape:
    """Return the shape of the model that `source` (file, folder or parsed config) describes.

    Args:
        cache: its `kv_cache_dtype` is that of K and V, `auto` takes the model's; its
            `mamba_ssm_cache_dtype` is that of the SSM state, `auto` takes the config's, else the
            family's default in vLLM (float32 for nemotron_h and kimi_linear, the model's for the
            others).
        num_speculative_tokens: K; widens each convolution window by K rows.
        dtype: model dtype; `auto` takes the config's.
        ranks: the specs are those of one tensor parallel rank; default: of the only one.
        make_dtype: `config.planned_dtype` where nothing is allocated, which needs no torch.
        has_draft_head: the layers of the checkpoint's draft head are among them.

    Raises:
        ConfigError: an unknown family, a missing key, keys that contradict each other, or heads
            that the ranks can't divide; a checkpoint without a draft head.
    """
    if num_speculative_tokens < 0:
        raise ConfigError(f"num_speculative_tokens={num_speculative_tokens} must be >= 0")
    config = source if isinstance(source, ConfigFile) else ConfigFile.read(source)
    family = family_of(config)
    num_layers = config.maybe_size("num_hidden_layers") or 0
    if num_layers > _MAX_LAYERS:
        raise config.fail(
            f"num_hidden_layers={num_layers} must be at most {_MAX_LAYERS}; correct the file"
        )
    kinds = family.kinds(config)
    unknown = sorted(set(kinds) - set(family.caches))
    if unknown:
        raise config.fail(
            f"a {config.model_type} model has no layers of kind {', '.join(unknown)}; correct the "
            "file"
        )
    if num_layers not in (0, len(kinds)):
        raise config.fail(
            f"num_hidden_layers={num_layers}, but {len(kinds)} layers are named; correct one of "
            "them"
        )
    named = dtype if dtype != "auto" else config.text("dtype", "torch_dtype")
    if named is None:
        raise config.fail("dtype is missing; give --dtype")
    model_dtype = parse_model_dtype(named.removeprefix("torch."), make=make_dtype)
    cache = cache or CacheConfig()

    def parsed(
        option: str, default: str = "auto", dtypes: Mapping[str, str] = DTYPES
    ) -> torch.dtype:
        given = getattr(cache, option)
        given = default if given == "auto" else given
        return model_dtype if given == "auto" else parse_dtype(given, option, make_dtype, dtypes)

    family_dtype = family.default_ssm_dtype or "auto"
    ssm_dtype = (
        config.text("mamba_ssm_cache_dtype", "mamba_ssm_dtype", default=family_dtype)
        or family_dtype
    )
    options = SpecOptions(
        num_speculative_tokens=num_speculative_tokens,
        dtype=model_dtype,
        kv_dtype=parsed("kv_cache_dtype"),
        ssm_dtype=parsed("mamba_ssm_cache_dtype", ssm_dtype, STATE_DTYPES),
        wide_dtype=model_dtype if model_dtype.itemsize >= 4 else make_dtype("float32"),
        scale_dtype=make_dtype("float32"),
        ranks=ranks or Ranks(),
    )
    specs = {
        kind: {end: read(config, options) for end, read in family.caches[kind].items()}
        for kind in dict.fromkeys(kinds)
    }
    passes = [1] * len(kinds) if family.passes is None else family.passes(config)
    layers = {
        cache_name(i, end, loop): spec
        for i, kind in enumerate(kinds)
        for loop in range(passes[i])
        for end, spec in specs[kind].items()
    }
    if has_draft_head:
        layers |= _head_layers(config, layers)
    return ModelShape(
        model_type=config.model_type,
        dtype=options.dtype,
        max_position_embeddings=config.maybe_size("max_position_embeddings", "model_max_length"),
        mamba_chunk_size=chunk_size(config)
        if any(isinstance(spec, MambaSpec) for spec in layers.values())
        else None,
        num_hidden_layers=len(kinds),
        layers=layers,
    )


def has_head(config: ConfigFile) -> bool:
    """Return whether the layers of a draft head can be planned from a config.json."""
    head = head_of(config)
    return head is not None and head.num_layers(config) > 0


def _head_layers(config: ConfigFile, layers: dict[str, KVCacheSpec]) -> dict[str, KVCacheSpec]:
    """Return the specs of the draft head's layers, under the names that they have in the engine.

    Raises:
        ConfigError: the checkpoint has no head, or the model no attention.
    """
    head = require_head(config)
    num_layers = head.num_layers(config)
    if not num_layers:
        raise config.fail("the file names no draft head; draft with n-grams instead")
    return {f"{head.prefix}layers.{i}": head_spec(layers) for i in range(num_layers)}
