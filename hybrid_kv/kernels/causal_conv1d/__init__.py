"""The depthwise causal convolution of a Mamba-2 layer: its arithmetic, a verify step, a prefill."""

from hybrid_kv.kernels.causal_conv1d.prefill import causal_conv1d_prefill
from hybrid_kv.kernels.causal_conv1d.reference import (
    causal_conv1d,
    causal_conv1d_prefill_reference,
    causal_conv1d_update_reference,
    window_places,
    windows_at,
)
from hybrid_kv.kernels.causal_conv1d.update import causal_conv1d_update
