"""The output norm of a Mamba-2 layer: `weight * norm(x * silu(gate))`, group by group."""

from hybrid_kv.kernels.gated_norm.launch import gated_rms_norm, gated_rms_norm_reference
