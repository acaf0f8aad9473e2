"""What `asv run` times: the same subjects, in history.

The data is made, checked and warmed when the module is imported: with asv_runner >= 0.3 a `setup` method would mean one
cold call per sample. asv's verdict on a shared machine is no evidence; `python -m bench` compares subjects in one run.
"""

from __future__ import annotations

import torch

from bench import kernel_blocks
from bench._timing import Subject, clock

torch.set_num_threads(1)  # A second thread makes the times of small tensors bimodal: 0.25 or 8 ms were seen.
_EXPANSION_CELLS = [(n, bpk) for n in (1, 16, 256, 4096) for bpk in (2, 34)]


def _checked(subjects: kernel_blocks.Subjects, where: object) -> dict[str, Subject]:
    kernel_blocks.verify(subjects, str(where))
    return {name: subject for name, (subject, _) in subjects.items()}


_expansions = {cell: _checked(kernel_blocks.expansion_subjects(*cell), cell) for cell in _EXPANSION_CELLS}
_steps = {name: _checked(kernel_blocks.step(name, 8).subjects, name) for name in kernel_blocks.QUICK_SCENARIOS}


class TimeExpansion:
    """One append to the staging buffer."""

    params = ([1, 16, 256, 4096], [2, 34], ["list", "numpy", "torch", kernel_blocks.ENGINE])
    param_names = ("num_blocks", "blocks_per_kv_block", "subject")
    timer = staticmethod(clock)

    def time_append(self, num_blocks: int, blocks_per_kv_block: int, subject: str) -> None:
        one = _expansions[num_blocks, blocks_per_kv_block][subject]
        one.reset()
        one.run()


class TimeStep:
    """A whole step's staging, 2 groups, 8 kernel blocks per block."""

    params = (
        list(kernel_blocks.QUICK_SCENARIOS),
        ["vllm 0.22 V1", "vllm 0.22 V2", "vllm 0.32 V2", kernel_blocks.ENGINE],
    )
    param_names = ("scenario", "subject")
    timer = staticmethod(clock)

    def time_stage(self, scenario: str, subject: str) -> None:
        one = _steps[scenario][subject]
        one.reset()
        one.run()
