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
are device-only.

Invariants. The checkpoint lies in the block of column `(base_pos - 1) // block_size` of the
request's block table (column 0 in mode `none`), and so does what a flush writes, for the new
`base_pos`: a block that no other request can have seen. A step that does not flush writes no block,
so a checkpoint may be a cached block that others read too.

Rule for `n_flush`, with `n_hist` the tokens in the ring at the start of the step, T those of the
step and T_max the most that a step can have:

1. The history reaches the next block boundary: all tokens up to it, and the rest, less than T_max,
   stays. One step passes at most one boundary, as `1 + K <= block_size`.
2. Otherwise, `n_hist + T + T_max > ring_len`: all. Were they kept and all T accepted, then the
   T_max of the next step would run into the history that it reads. (It could not flush first:
   programs of other heads may still read.)
3. Otherwise none.

A ring of `3 * T_max - 1` tokens holds what rule 1 leaves, the step and the one after it; `n_hist`
never exceeds `ring_len - T_max`.
"""

from hybrid_kv.kernels.common.integers import default_ring_len, shortest_ring_len
from hybrid_kv.kernels.recompute.launch import (
    check_history,
    commit,
    recompute_flush,
    recompute_update,
)
from hybrid_kv.kernels.recompute.reference import (
    commit_reference,
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
