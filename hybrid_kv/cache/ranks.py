"""The division of a model's cache over several GPUs: the rules of vLLM 0.32.

- Tensor parallel ranks divide the heads and channels of every layer (`models.specs`, where these
  have names). What is fewer than the ranks is repeated: a KV head, a group of Mamba-2, MLA's one
  vector.
- Pipeline stages divide the layers. One scheduler hands out the same block ids on every rank, so
  groups are those of the whole model, each stage keeps its own layers of them, and the pool has the
  blocks of the stage that affords least (`get_kv_cache_configs`).
- Context parallel ranks divide the tokens. They are tensor parallel ranks that would repeat a KV
  head: a block of n tokens on each of them stands for n tokens times their number. A state has no
  tokens to divide.

Expert parallelism divides weights alone, and on which node a rank runs changes nothing that it
keeps.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, fields, replace
from itertools import pairwise
from typing import Annotated

from hybrid_kv.cache.spec import (
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    KVCacheSpec,
    UniformTypeKVCacheSpecs,
    with_block_size,
)
from hybrid_kv.errors import ConfigError


@dataclass(frozen=True)
class Ranks:
    """The division of a model over GPUs.

    The decode context parallel ranks are among the tensor parallel ones.
    """

    tensor_parallel_size: Annotated[int, "GPUs that divide the heads of every layer."] = 1
    pipeline_parallel_size: Annotated[int, "Stages that divide the layers."] = 1
    decode_context_parallel_size: Annotated[
        int, "Of the tensor parallel GPUs, how many divide the tokens that each KV head keeps."
    ] = 1

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if value < 1:
                raise ConfigError(f"{field.name}={value} must be an integer >= 1")
        if self.tensor_parallel_size % self.decode_context_parallel_size:
            raise ConfigError(
                f"--decode-context-parallel-size {self.decode_context_parallel_size} must divide "
                f"--tensor-parallel-size {self.tensor_parallel_size}: its ranks are among those"
            )

    @property
    def num_gpus(self) -> int:
        return self.tensor_parallel_size * self.pipeline_parallel_size

    def stages(self, num_layers: int) -> list[range]:
        """Return the layers of each pipeline stage (`get_pp_indices`).

        What does not divide goes to the stages before the last, from the back: the last one has the
        logits to compute.

        Raises:
            ConfigError: fewer layers than stages.
        """
        each, left = divmod(num_layers, self.pipeline_parallel_size)
        if not each:
            raise ConfigError(
                f"--pipeline-parallel-size {self.pipeline_parallel_size}: the model has "
                f"{num_layers} layers; "
                "use at most as many stages"
            )
        begins = [0]
        for place in range(self.pipeline_parallel_size, 0, -1):
            begins.append(begins[-1] + each + (2 <= place <= left + 1))
        return [range(*ends) for ends in pairwise(begins)]


def of_stage(config: KVCacheConfig, layer_names: Iterable[str]) -> KVCacheConfig:
    """Return the groups with those of their layers alone that a pipeline stage has.

    A group may have none there.
    """
    present = set(layer_names)
    groups = (
        KVCacheGroupSpec(tuple(name for name in group.layer_names if name in present), group.spec)
        for group in config.groups
    )
    return KVCacheConfig(config.num_blocks, tuple(groups))


def over_context(config: KVCacheConfig, context_parallel: int) -> KVCacheConfig:
    """Return the groups as a block manager counts them.

    An attention block's tokens are those on all context parallel ranks together.

    Its pages are not those of a rank: take bytes from the configuration of one.
    """
    groups = (
        replace(group, spec=_over_context(group.spec, context_parallel)) for group in config.groups
    )
    return replace(config, groups=tuple(groups))


def _over_context(spec: KVCacheSpec, context_parallel: int) -> KVCacheSpec:
    if isinstance(spec, UniformTypeKVCacheSpecs):
        layers = tuple((name, _over_context(layer, context_parallel)) for name, layer in spec.specs)
        return UniformTypeKVCacheSpecs(layers[0][1].block_size, layers)
    if not isinstance(spec, FullAttentionSpec):
        return spec
    return with_block_size(spec, spec.block_size * context_parallel)
