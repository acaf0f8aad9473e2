"""Records of what a wrapper would launch, called with tensors that need no memory.

Argument types, folded integers and alignment are as Triton sees them, warps and tiles as the
wrapper chooses them. So no argument of a kernel is written down a second time.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any
from unittest.mock import patch

import torch

Bytes = Callable[
    [Mapping[str, Any]], int
]  # that one program must move, by the values of its constants


@dataclass(frozen=True)
class AotCase:
    """One kernel, as one launch specialises it.

    Attributes:
        kernel: its name in the baseline, such as `recompute.commit`.
        shape: for the reader, such as "Nemotron-3-Nano, K=3".
        dtype: of the data that counts, for the reader.
        fn: the `triton.jit` function.
        signature: argument to type ("*fp32", "i32"); the names in `constexprs` may be left out.
        constexprs: argument to value, integers that equal 1 among them.
        options: of the launch: num_warps, num_stages and, where it has a limit, maxnreg.
        bytes_per_program: global bytes that one program must move, for instructions per byte; None
            if it depends on data.
        divisible: integer arguments that are multiples of 16 in such a launch. Pointers always are:
            torch aligns.
        state_access: it reads or writes recurrent states, so 128-bit accesses are required.
    """

    kernel: str
    shape: str
    dtype: str
    fn: Any
    signature: Mapping[str, str]
    constexprs: Mapping[str, Any]
    options: Mapping[str, int]
    bytes_per_program: int | None = None
    divisible: tuple[str, ...] = ()
    state_access: bool = False


@contextmanager
def recorded(lanes: int = 32) -> Iterator[list[AotCase]]:
    """Record what is launched inside on GPUs with warps of `lanes`.

    `shape` says which configuration of an autotuner it is.

    Package, dtype and bytes are left open. Wrappers find themselves on a GPU of compute capability
    9.0.
    """
    from triton.backends.compiler import GPUTarget
    from triton.compiler.compiler import make_backend
    from triton.runtime.autotuner import Autotuner
    from triton.runtime.jit import JITFunction, create_function_from_signature

    backend = make_backend(GPUTarget("cuda", 90, 32))
    found: list[AotCase] = []

    def record(
        self: Any, *args: Any, grid: Any, warmup: bool, note: str = "", **kwargs: Any
    ) -> None:
        bind = create_function_from_signature(self.signature, self.params, backend)
        values, kinds, options = bind(*args, **kwargs)
        arguments = list(zip(values.items(), kinds, strict=True))
        chosen = backend.parse_options(options)
        limit = {"maxnreg": chosen.maxnreg} if chosen.maxnreg else {}
        found.append(
            AotCase(
                kernel=self.__name__.strip("_"),
                shape=note,
                dtype="",
                fn=self,
                signature={name: kind[0] for (name, _), kind in arguments},
                constexprs={
                    name: value for (name, value), kind in arguments if kind[0] == "constexpr"
                },
                options={"num_warps": chosen.num_warps, "num_stages": chosen.num_stages, **limit},
                divisible=tuple(
                    name for (name, _), kind in arguments if kind[1] and "D" in str(kind[1])
                ),
            )
        )

    def take_the_first(self: Any, *args: Any, **kwargs: Any) -> None:
        note = f", config 1/{len(self.configs)}"
        self.fn.run(*args, **kwargs, **self.configs[0].all_kwargs(), note=note)

    with (
        patch.object(JITFunction, "run", record),
        patch.object(Autotuner, "run", take_the_first),
        patch.object(torch.version, "hip", "7" if lanes == 64 else None),
        patch.object(torch.cuda, "device", lambda _: nullcontext()),
        patch.object(torch.accelerator, "device_index", lambda _: nullcontext()),
        patch.object(torch.cuda, "get_device_capability", lambda *_: (9, 0)),
    ):
        yield found
