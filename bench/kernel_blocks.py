"""Block ids to kernel blocks: from a Python list on the host to int32 ids that a kernel can read.

There are five ways. `list` (vllm!38831) and `numpy` (vLLM 0.22's V1 runner) expand on the host and
upload the result. `torch` (vLLM 0.32) and `triton` upload the ids and expand them in one launch.
`engine` stages the ids and uploads them with the rest of a step's block tables: its one launch also
appends to the tables and maps tokens to slots.

A way has two parts. `prepare` is the host's, from the list to what is uploaded; `send` uploads and
launches. A CPU times `prepare` (benchmark `expand`), a GPU `send` (`expand_device`), and `python -m
bench.gpu` both of them end to end. Uploads and launches are counted on the pretend device
(`expand_counts`), where every way's result is checked, too.

`step` is a whole step of several requests, see `hybrid_kv.measure.timing.block_ids`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from array import array
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from functools import cache, cached_property, partial
from importlib.util import find_spec
from itertools import product
from multiprocessing import get_context
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import torch

from bench._reference import equal
from bench.harness.cells import Case, Cell, Count, Counts, grid, promised, seed
from bench.harness.contest import Contest, Rival
from hybrid_kv.kernels.common.integers import cdiv
from hybrid_kv.kernels.common.interpreter import start_interpreter
from hybrid_kv.kernels.common.launch import check, jit
from hybrid_kv.measure.timing import block_ids
from hybrid_kv.measure.timing.case import ENGINE

if TYPE_CHECKING:
    import triton.language as tl

Int32s = npt.NDArray[np.int32]

BLOCK = 1024  # kernel blocks of a program
SUITE = "kernel_blocks"
NUM_IDS = (1, 2, 4, 8, 16, 32, 128, 1024, 65536)
COUNTED_IDS = (1, 1024)  # uploads grow in proportion
BLOCKS_PER_KV_BLOCK = (1, 2, 8, 34)
MAX_ID = 1 << 20  # of blocks in a large pool
QUICK_CELLS = ((32, 2), (32, 8), (1024, 8), (1024, 34))
COUNTED = {"uploads": "copies", "upload_bytes": "B", "launches": "launches"}


def expand_torch(ids: torch.Tensor, offsets: torch.Tensor) -> torch.Tensor:
    """Return a broadcast sum in torch; `offsets` is `arange(blocks_per_kv_block)`, int32."""
    return torch.add(offsets, ids.unsqueeze(-1), alpha=offsets.numel()).flatten(-2)


def _expand(
    block_ids: tl.tensor,
    out: tl.tensor,
    count: tl.tensor,
    BLOCKS_PER_KV_BLOCK: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    # Lanes run over the kernel blocks: they are what is stored, and a manager block's id comes from
    # memory once. A constant divisor costs three instructions, a loaded one twenty; in 32 bit,
    # counted from the program's first.
    start = tl.program_id(0).to(tl.int64) * BLOCK
    first = start // BLOCKS_PER_KV_BLOCK
    lane = tl.arange(0, BLOCK)
    inside = lane < count - start
    kernel_block = lane + (start - first * BLOCKS_PER_KV_BLOCK).to(tl.int32)
    column = kernel_block // BLOCKS_PER_KV_BLOCK
    block = tl.load(block_ids + first + column, mask=inside, other=0)
    expanded = block * BLOCKS_PER_KV_BLOCK + (kernel_block - column * BLOCKS_PER_KV_BLOCK)
    tl.store(out + start + lane, expanded, mask=inside)


def by_kernel(ids: torch.Tensor, offsets: torch.Tensor) -> torch.Tensor:
    """Compute `expand_torch` in one launch of a Triton kernel that does nothing else."""
    check("block_ids", ids, ids.shape, (torch.int32,), ids.device)
    out = ids.new_empty(*ids.shape[:-1], ids.shape[-1] * len(offsets))
    programs = (cdiv(out.numel(), BLOCK),)
    jit(_expand, ("count",))[programs](
        ids, out, out.numel(), BLOCKS_PER_KV_BLOCK=len(offsets), BLOCK=BLOCK
    )
    return out


# ---- the five ways ----


@dataclass(frozen=True)
class Task:
    """Ids in a list, and where their kernel blocks are wanted.

    Attributes:
        ids: of manager blocks, each below 2**31 / blocks_per_kv_block.
        device: `cpu` or `cuda`.
    """

    ids: list[int]
    blocks_per_kv_block: int
    device: str

    @property
    def num_kernel_blocks(self) -> int:
        return len(self.ids) * self.blocks_per_kv_block

    @cached_property
    def expected(self) -> Int32s:
        """Return the right kernel blocks, [num_kernel_blocks]."""
        ids = np.array(self.ids, dtype=np.int64)[:, None]
        return (
            (ids * self.blocks_per_kv_block + np.arange(self.blocks_per_kv_block))
            .reshape(-1)
            .astype(np.int32)
        )


class Way(ABC):
    """One way to do a task."""

    def __init__(self, task: Task) -> None:
        self.task = task

    @abstractmethod
    def prepare(self) -> None:
        """Do the host's part: from the list to what is uploaded."""

    @abstractmethod
    def send(self) -> torch.Tensor:
        """Upload what is prepared, launch, and return the kernel blocks; wait for nothing.

        They are [num_kernel_blocks] int32 on the device.
        """

    @abstractmethod
    def prepared(self) -> torch.Tensor:
        """Return the kernel blocks of what is prepared, made on the host without the timed code."""

    @abstractmethod
    def forget(self) -> None:
        """Overwrite what an earlier call has prepared."""


class BufferWay(Way):
    """Page-locked memory of the host is written, and uploaded as it is."""

    def __init__(self, task: Task, size: int) -> None:
        super().__init__(task)
        self.buffer = torch.zeros(size, dtype=torch.int32, pin_memory=task.device != "cpu")
        self.array: Int32s = self.buffer.numpy()
        self.view = memoryview(
            self.array
        )  # takes an `array` in a third of the time that numpy needs

    def send(self) -> torch.Tensor:
        return self.buffer.to(self.task.device, non_blocking=True)

    def prepared(self) -> torch.Tensor:
        return self.buffer

    def forget(self) -> None:
        self.buffer.fill_(-1)


class ListWay(BufferWay):
    """A list comprehension expands."""

    def __init__(self, task: Task) -> None:
        super().__init__(task, task.num_kernel_blocks)

    def prepare(self) -> None:
        bpk = self.task.blocks_per_kv_block
        self.view[:] = array(
            "i", [block_id * bpk + k for block_id in self.task.ids for k in range(bpk)]
        )


class NumpyWay(BufferWay):
    """A broadcast sum in numpy expands."""

    def __init__(self, task: Task) -> None:
        super().__init__(task, task.num_kernel_blocks)

    def prepare(self) -> None:
        bpk = self.task.blocks_per_kv_block
        column = np.asarray(self.task.ids, dtype=np.int32).reshape(-1, 1)
        self.array[:] = np.add(column * bpk, np.arange(bpk), dtype=np.int32).reshape(-1)


class TorchWay(BufferWay):
    """The device expands, in torch."""

    expand = staticmethod(expand_torch)

    def __init__(self, task: Task) -> None:
        super().__init__(task, len(task.ids))
        self.offsets = torch.arange(task.blocks_per_kv_block, dtype=torch.int32, device=task.device)

    def prepare(self) -> None:
        self.view[:] = array("i", self.task.ids)

    def send(self) -> torch.Tensor:
        return self.expand(super().send(), self.offsets)

    def prepared(self) -> torch.Tensor:
        bpk = self.task.blocks_per_kv_block
        within = torch.arange(bpk, dtype=torch.int32).repeat(len(self.task.ids))
        return self.buffer.repeat_interleave(bpk) * bpk + within


class TritonWay(TorchWay):
    """The device expands, in a kernel of its own."""

    expand = staticmethod(by_kernel)


class EngineWay(Way):
    """The engine's block tables on a GPU.

    Ids are staged, and expanded by the launch that a step needs anyway.

    The list becomes an int32 array first, the form in which the engine's own block pool holds ids.
    """

    def __init__(self, task: Task) -> None:
        from hybrid_kv.cache.block_table import LaunchedBlockTables
        from hybrid_kv.kernels.block_tables import TableLayout

        super().__init__(task)
        size, bpk, width = block_ids.KERNEL_BLOCK_SIZE, task.blocks_per_kv_block, len(task.ids)
        self.tables = LaunchedBlockTables(
            [size * bpk], [size], 1, 1, [width], torch.device(task.device)
        )
        self.layout = TableLayout(width, size * bpk, bpk, bpk)
        self.counts = array("i", [width])
        self.row = np.zeros(1, dtype=np.int64)
        self.one_token = np.ones(1, dtype=np.int64)
        self.position = torch.zeros(1, dtype=torch.int64)
        self.staged: Any = None

    def prepare(self) -> None:
        ids = np.frombuffer(array("i", self.task.ids), dtype=np.int32)
        self.tables.append_block_ids(0, ids, self.counts, overwrite=True)
        self.staged = self.tables.stage(self.row, self.one_token, self.position, 1, 1)

    def send(self) -> torch.Tensor:
        from hybrid_kv.kernels.common.upload import now

        now(self.tables.device, self.staged)
        return self.tables.input_tables[0].view(-1)

    def prepared(self) -> torch.Tensor:
        from hybrid_kv.kernels.block_tables import HostTables

        arrays, _ = self.staged
        host = HostTables([self.layout], 1, 1)
        host.append(*arrays[:4])
        host.place(self.row, 1)
        return host.input_tables[0].view(-1)

    def forget(self) -> None:
        self.staged = None


WAYS: dict[str, type[Any]] = {
    "list": ListWay,
    "numpy": NumpyWay,
    "torch": TorchWay,
    "triton": TritonWay,
    ENGINE: EngineWay,
}


def way(seed: int, num_ids: int, blocks_per_kv_block: int, subject: str, device: str) -> Way:
    """Return a way with a task whose ids are drawn."""
    drawn = np.random.default_rng(seed).integers(1, MAX_ID, num_ids)
    made: Way = WAYS[subject](Task(drawn.tolist(), blocks_per_kv_block, device))
    return made


# ---- what is timed and counted ----


def host_part(seed: int, num_ids: int, blocks_per_kv_block: int, subject: str) -> Case:
    """Build the host's part of a way."""
    subject_way = way(seed, num_ids, blocks_per_kv_block, subject, "cpu")

    def check() -> float:
        subject_way.forget()
        subject_way.prepare()
        return equal("kernel blocks", subject_way.prepared().numpy(), subject_way.task.expected)

    return Case(subject_way.prepare, check)


def device_part(
    seed: int, num_ids: int, blocks_per_kv_block: int, subject: str, device: str = "cuda"
) -> Case:
    """Upload and launch; the host's part is done before."""
    subject_way = way(seed, num_ids, blocks_per_kv_block, subject, device)
    subject_way.prepare()

    def check() -> float:
        subject_way.forget()
        subject_way.prepare()
        return equal("kernel blocks", subject_way.send().cpu().numpy(), subject_way.task.expected)

    return Case(subject_way.send, check, subject_way.prepare)


def counts(seed: int, num_ids: int, blocks_per_kv_block: int, subject: str) -> Counts:
    """Count what `send` uploads and launches."""
    return _counted()[num_ids, blocks_per_kv_block, subject]


@cache
def _counted() -> dict[tuple[int, int, str], Counts]:
    """Count every cell's, in one process that interprets Triton's kernels."""
    with ProcessPoolExecutor(1, get_context("spawn"), start_interpreter) as pool:
        return pool.submit(_count_all).result()


def _count_all() -> dict[tuple[int, int, str], Counts]:
    return {key: count(*key) for key in product(COUNTED_IDS, BLOCKS_PER_KV_BLOCK, WAYS)}


def count(num_ids: int, blocks_per_kv_block: int, subject: str) -> Counts:
    """Count uploads and launches of a way on the pretend device.

    The process interprets Triton's kernels.

    Raises:
        WrongResultError: the device's kernel blocks are not those of the ids.
    """
    from hybrid_kv.measure.device import pretend_gpu

    with pretend_gpu() as gpu:
        case = device_part(0, num_ids, blocks_per_kv_block, subject)
        case.check()
        case.reset()
        since = len(gpu.events)
        case.run()
        found = gpu.counts(since)
    kinds = {"uploads": "upload", "upload_bytes": "upload_bytes", "launches": "launch"}
    return {name: Count(found[kind], COUNTED[name]) for name, kind in kinds.items()}


def contest(device: str, num_ids: int, blocks_per_kv_block: int) -> Contest:
    """Return the contest of all ways, end to end."""
    params = {"num_ids": num_ids, "blocks_per_kv_block": blocks_per_kv_block}
    build = partial(device_part, seed(SUITE, params), **params, device=device)
    # Their bytes cross two kinds of memory, and a copy on the device is no measure of that.
    rivals = {
        name: Rival(partial(build, subject=name), num_bytes=0, graph=False)
        for name in (ENGINE, *WAYS)
    }
    return Contest(SUITE, params, rivals, end_to_end=True)


def gpu_contests(quick: bool, device: str) -> Iterator[Contest]:
    """Yield contests by the number of ids and the kernel blocks of a block."""
    for num_ids, bpk in [(1024, 8)] if quick else product(NUM_IDS, BLOCKS_PER_KV_BLOCK):
        yield contest(device, num_ids, bpk)


# ---- the cells ----


def _step_promise(**params: Any) -> float | None:
    """Return the promise of a rival in a whole step."""
    if params["subject"] == ENGINE:
        return None
    return block_ids.required_ratio(params["scenario"], params["subject"])


def _expand_promise(**params: Any) -> float | None:
    """Return the promise of a rival: none.

    What the engine does in its part is a whole step's, and more than the rival does.
    """
    return None if params["subject"] == ENGINE else 0.0


def cells() -> list[Cell]:
    """Return the cells of the ways, on the host, on a GPU, and in counts; and of whole steps.

    The steps are the engine's and its rivals'.
    """
    expansions = {
        "num_ids": NUM_IDS,
        "blocks_per_kv_block": BLOCKS_PER_KV_BLOCK,
        "subject": tuple(WAYS),
    }
    steps = {
        "scenario": tuple(block_ids.SCENARIOS),
        "blocks_per_kv_block": (8, 34),
        "subject": block_ids.STAGINGS,
    }
    quick_steps = [(name, 8) for name in block_ids.REQUIRED]
    found = [
        *promised(
            _expand_promise, grid(SUITE, "expand", "cpu", host_part, expansions, QUICK_CELLS)
        ),
        *promised(_step_promise, grid(SUITE, "step", "cpu", block_ids.step, steps, quick_steps)),
        *promised(
            _expand_promise,
            grid(SUITE, "expand_device", "gpu", device_part, expansions, [(1024, 8)]),
        ),
    ]
    # There is no pretend device with a real one.
    if find_spec("triton") is not None and torch.version.cuda is None:
        counted = {**expansions, "num_ids": COUNTED_IDS}
        found += grid(SUITE, "expand_counts", "count", counts, counted, units=COUNTED)
    return found
