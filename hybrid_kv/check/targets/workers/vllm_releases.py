"""Changes that the exact model, written for vLLM 0.32, needs in other releases.

Each drift is here once. Scripts of `probes.script` contain this file, so it imports none of its
neighbours.
"""

import ctypes
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple


class Drift(NamedTuple):
    """A difference to 0.32.

    Attributes:
        releases: minor versions that have it, read from the sources of all from 0.22 to 0.33.
        file: of vLLM, where it is.
        what: is there, and not in 0.32.
        bridge: gets the module of the exact model; makes vLLM, or that module, fit.
    """

    releases: Collection[int]
    file: str
    what: str
    bridge: Callable[[Any], None]


def stay_in_process(model: Any) -> None:
    from vllm.platforms.cpu import CpuPlatform

    check = CpuPlatform.check_and_update_config.__func__

    def checked(cls: Any, config: Any) -> None:
        check(cls, config)
        config.parallel_config.distributed_executor_backend = "uni"

    CpuPlatform.check_and_update_config = classmethod(checked)


def pin_nothing(model: Any) -> None:
    from vllm.utils.torch_utils import async_tensor_h2d

    async_tensor_h2d.__defaults__ = (False,)


def take_the_config(model: Any) -> None:
    from vllm.v1.core import kv_cache_utils

    bytes_of: Callable[[Any], int] = kv_cache_utils._pool_bytes_per_block
    kv_cache_utils._pool_bytes_per_block = lambda *arguments: bytes_of(arguments[-1])


def plan_where_it_was(model: Any) -> None:
    from vllm.v1.core import kv_cache_config_builder, kv_cache_planning, kv_cache_utils

    def bytes_of(config: Any, groups: Any) -> int:
        builder = kv_cache_config_builder.get_kv_cache_config_builder(config)
        return kv_cache_planning._max_memory_usage_bytes_from_groups(builder, config, groups)

    groups_of = kv_cache_planning.get_global_kv_cache_groups
    kv_cache_utils.get_kv_cache_groups = lambda config, specs: groups_of(config, [specs])
    kv_cache_utils._max_memory_usage_bytes_from_groups = bytes_of
    kv_cache_utils._pool_bytes_per_block = kv_cache_planning._pool_bytes_per_block


def drop_the_precision(model: Any) -> None:
    from vllm.utils.cpu_triton_utils import sample_recovered_tokens_kernel as kernel

    run = kernel.func

    def run_without(*arguments: Any, **named: Any) -> Any:
        named.pop("USE_FP64_GUMBEL", None)
        return run(*arguments, **named)

    kernel.func = run_without


def copy_by_address(model: Any) -> None:
    from vllm.v1.worker import mamba_utils

    def copy(sources: Any, targets: Any, sizes: Any) -> None:
        for source, target, size in zip(
            sources.tolist(), targets.tolist(), sizes.tolist(), strict=True
        ):
            ctypes.memmove(target, source, size)

    mamba_utils.batch_memcpy = copy


def wait_for_nothing(model: Any) -> None:
    import torch
    import vllm.v1.worker.cpu_model_runner as runner

    stand_in = runner._torch_cuda_wrapper

    @contextmanager
    def with_wait() -> Iterator[None]:
        with stand_in():
            torch.cuda.Stream.wait_stream = lambda *_: None  # type: ignore[method-assign]
            yield

    runner._torch_cuda_wrapper = with_wait


def copy_all_alike(model: Any) -> None:
    def copy_func(cls: Any) -> Any:
        first, *others = {*cls.copy_funcs.values()}
        if others:
            raise ValueError(
                "this vLLM copies one kind of state; use --model exact:gdn or another of one kind"
            )
        return first

    model.ExactHybridForCausalLM.get_mamba_state_copy_func = classmethod(copy_func)


DRIFTS = (
    Drift((22,), "platforms/cpu.py", "the worker is always a process of its own", stay_in_process),
    Drift(
        (22, 23),
        "utils/torch_utils.py",
        "Mamba-2's metadata pins memory, which CPUs lack",
        pin_nothing,
    ),
    Drift(
        (22, 23, 29, 30, 31),
        "v1/core/kv_cache_utils.py",
        "a pool's bytes: by its groups alone",
        take_the_config,
    ),
    Drift(
        (33,),
        "v1/core/kv_cache_planning.py",
        "the plan of the cache has a file of its own",
        plan_where_it_was,
    ),
    Drift(
        (23, 24),
        "utils/cpu_triton_utils.py",
        "drafts are sampled with an option of GPUs",
        drop_the_precision,
    ),
    Drift(
        (22, 23, 24),
        "v1/worker/mamba_utils.py",
        "only a Triton kernel copies states",
        copy_by_address,
    ),
    Drift(
        (22, 23, 24),
        "v1/worker/cpu_model_runner.py",
        "the stream of a CPU cannot wait",
        wait_for_nothing,
    ),
    Drift(
        range(22, 29),
        "model_executor/models/interfaces.py",
        "one copy of states for all kinds",
        copy_all_alike,
    ),
)


def drifts_of(release: str) -> list[Drift]:
    """Return the drifts of a version such as `0.28.0`."""
    return [drift for drift in DRIFTS if int(release.split(".")[1]) in drift.releases]


def adapt(model: Any) -> None:
    """Make the release and the module of the exact model fit; called once, before `register`."""
    import vllm

    for drift in drifts_of(vllm.__version__):
        drift.bridge(model)
