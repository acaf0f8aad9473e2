"""A small engine: continuous batching, chunked prefill, preemption with recomputation."""
