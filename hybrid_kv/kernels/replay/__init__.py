"""The verify step of a Mamba-2 layer in scheme `replay`."""

from hybrid_kv.kernels.replay.launch import (
    ReplayCursors,
    ReplayRing,
    ReplayStep,
    commit,
    commit_reference,
    default_ring_len,
    join_state,
    read_states,
    replay_flush,
    replay_flush_reference,
    replay_update,
    replay_update_reference,
    split_state,
    write_states,
)

__all__ = [
    "ReplayCursors",
    "ReplayRing",
    "ReplayStep",
    "commit",
    "commit_reference",
    "default_ring_len",
    "join_state",
    "read_states",
    "replay_flush",
    "replay_flush_reference",
    "replay_update",
    "replay_update_reference",
    "split_state",
    "write_states",
]
