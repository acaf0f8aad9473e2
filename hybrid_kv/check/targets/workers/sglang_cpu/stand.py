"""Stand-ins for what SGLang imports and a CPU lacks, and for checks that refuse its name.

Anything that is not foreseen here raises.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import os
import sys
import types
from importlib import import_module
from typing import Any

import torch

from . import kernels

LIBRARIES: list[Any] = []  # a library that is collected takes its operators along
# Modules where SGLang has kernels of its own for CPUs: they get Triton's, which are CUDA's.
SPECULATIVE = "sglang.kernels.ops.speculative"
INTERPRETED = (
    "sglang.srt.mem_cache.allocation",
    "sglang.kernels.ops.kvcache.cache_move",
    "sglang.srt.speculative.ngram_worker",
    *(
        f"{SPECULATIVE}.{name}"
        for name in ("cache_locs", "eagle", "multi_layer_eagle", "spec_tree", "reconstruct_tree")
    ),
)
NO_MODELS = "sglang_cpu_models"  # a package of models without any: importing SGLang's takes long
SCATTER = "sglang.kernels.ops.mamba.mamba_state_scatter_triton"
COMMIT = "accept_index.is_cuda:\n        from sglang.kernels.ops.mamba.mamba_state_scatter_triton"
# Conditions that a tensor on a CPU does not meet, by module: text, and what stands for it.
CONDITIONS: dict[str, tuple[str, str]] = {
    SCATTER: ("not (dst.is_cuda or dst.is_xpu) or ", ""),
    "sglang.srt.speculative.spec_utils": (COMMIT, COMMIT.replace("accept_index.is_cuda", "True")),
}
# Checks of a device by its name, and what they return: the code after them is of no device.
CHECKS = (
    ("mamba_hook", "_platform_supports_mamba_cache_extra_buffer", True),
    ("speculative_hook", "_disable_overlap_schedule_for_cpu", None),
)


class MissingModule(types.ModuleType):
    """A module of compiled kernels: what is not set raises once it is called."""

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.__path__: list[str] = []
        self.__spec__ = importlib.machinery.ModuleSpec(name, None, is_package=True)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        full_name = f"{self.__name__}.{name}"

        def missing(*_: Any, **__: Any) -> Any:
            raise NotImplementedError(f"{full_name} has no stand-in")

        return missing


class NamedConstants:
    """Constants that quantized layers read at import: each is its own name."""

    def __getattr__(self, name: str) -> str:
        if name.startswith("__"):
            raise AttributeError(name)
        return name


def _stand_in_for_kernels() -> None:
    names = ("", ".mamba", ".kvcacheio", ".scalar_type", ".speculative")
    modules = {name: MissingModule(f"sgl_kernel{name}") for name in names}
    for name, module in modules.items():
        sys.modules[f"sgl_kernel{name}"] = module
        if name:
            setattr(modules[""], name[1:], module)
    mamba: Any = modules[".mamba"]
    mamba.causal_conv1d_fn_cpu = kernels.causal_conv1d_fn
    mamba.causal_conv1d_update_cpu = kernels.causal_conv1d_update
    mamba.chunk_gated_delta_rule_cpu = kernels.chunk_rule
    scalar_type: Any = modules[".scalar_type"]
    scalar_type.scalar_types = NamedConstants()
    operators: Any = torch.ops.sgl_kernel
    operators.fused_gdn_gating_cpu = kernels.gating
    operators.fused_sigmoid_gating_delta_rule_update_cpu = kernels.recurrent_rule


def _declare_vision() -> None:
    """Declare the operators of torchvision that a CPU build of torch lacks."""
    try:
        import torchvision  # noqa: F401  (whether it imports is the question)
    except RuntimeError:
        library = torch.library.Library("torchvision", "DEF")
        LIBRARIES.append(library)
        for name in ("nms", "qnms"):
            library.define(f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
        for name in [name for name in sys.modules if name.split(".")[0] == "torchvision"]:
            del sys.modules[name]


class EditingLoader(importlib.machinery.SourceFileLoader):
    """Compiles a module without its condition."""

    def get_code(self, fullname: str) -> Any:
        path = self.get_filename(fullname)
        old, new = CONDITIONS[fullname]
        source = self.get_data(path).decode()
        if old not in source:
            raise ValueError(f"{fullname} has no {old!r}: it is another SGLang than 0.5.23")
        return compile(source.replace(old, new), path, "exec")


class EditingFinder(importlib.abc.MetaPathFinder):
    """Finds the modules of `CONDITIONS`."""

    def find_spec(self, name: str, path: Any, target: Any = None) -> Any:
        if name not in CONDITIONS:
            return None
        spec = importlib.machinery.PathFinder.find_spec(name, path, target)
        assert spec is not None and spec.origin is not None
        spec.loader = EditingLoader(name, spec.origin)
        return spec


def prepare() -> None:
    """Make this process one in which SGLang can be imported, before it is."""
    os.environ |= {
        "SGLANG_USE_CPU_ENGINE": "1",
        "TRITON_INTERPRET": "1",
        "CUDA_VISIBLE_DEVICES": "",
        "SGLANG_EXTERNAL_MODEL_PACKAGE": NO_MODELS,
    }
    sys.modules[NO_MODELS] = MissingModule(NO_MODELS)
    _declare_vision()
    _stand_in_for_kernels()
    tensor: Any = torch.Tensor
    tensor.pin_memory = lambda self, *_: self  # without an accelerator torch raises
    sys.meta_path.insert(0, EditingFinder())


def finish() -> None:
    """Let SGLang run what it knows for other devices alone, once it is imported."""
    for name, attribute, value in CHECKS:
        module = import_module(f"sglang.srt.arg_groups.{name}")
        setattr(module, attribute, lambda *_, value=value: value)
    for name in INTERPRETED:
        flags = {"_is_cpu": False} | ({"_is_xpu": True} if name.startswith(SPECULATIVE) else {})
        vars(import_module(name)).update(flags)
