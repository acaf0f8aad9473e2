"""The verify step in scheme `recompute`: a state per request and the inputs of its last tokens.

The kernel here is that of a Mamba-2 layer; `kernels.gated_delta` has one for delta rules, with the
same checkpoints, rings, cursors and rules.

A request keeps a *checkpoint*, its state after `base_pos` tokens, and a *ring* with the inputs (x,
B, dt) of the tokens since. A step reads the checkpoint, lets its tokens see the `n_hist` tokens of
the ring as well, and appends their own inputs after them. Nothing is ever rolled back: the inputs
of rejected tokens are overwritten, because the next step counts only accepted ones. Now and then a
step *flushes*: it folds the oldest `n_flush` tokens of the ring into the checkpoint and writes it
to the block of the last one of them. So a step moves one state, not the 2 + K of scheme `slots`,
and most steps half a one (see `split_state`).

Per step `commit` runs once for a group, then `recompute_update` once for each of its layers. Both
are device-only. What a step reads and flushes is decided in `rule`.
"""

from hybrid_kv.kernels.common.integers import default_ring_len, shortest_ring_len
from hybrid_kv.kernels.recompute.launch import (
    check_history,
    commit,
    recompute_flush,
    recompute_update,
)
from hybrid_kv.kernels.recompute.reference import (
    recompute_flush_reference,
    recompute_update_reference,
)
from hybrid_kv.kernels.recompute.ring import (
    RecomputeCursors,
    RecomputeRing,
    RecomputeStep,
    join_state,
    read_states,
    split_state,
    write_states,
)
from hybrid_kv.kernels.recompute.rule import commit_reference
