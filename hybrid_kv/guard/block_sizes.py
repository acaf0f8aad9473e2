"""Which block sizes attention backends take and prefer, as vLLM has them; `cache.backend` is not asked."""

from __future__ import annotations

MULTIPLES = {"TORCH": 1, "CPU_ATTN": 16, "FLASH_ATTN": 16}  # kernels that take any multiple of so many tokens
FIXED = (64, 32, 16)  # of FlashInfer, and of FlashAttention beside float32 states (flash-attention#1974)


def _takes_multiples(backend: str, float32_states: bool) -> bool:
    return backend in MULTIPLES and not (backend == "FLASH_ATTN" and float32_states)


def kernel_block(backend: str, float32_states: bool, block_size: int) -> int | None:
    """The largest kernel block that divides a block of so many tokens; None if none does."""
    if _takes_multiples(backend, float32_states):
        return None if block_size % MULTIPLES[backend] else block_size
    return next((size for size in FIXED if block_size % size == 0), None)


def allowed(backend: str, float32_states: bool) -> str:
    """How a refusal names what would be taken."""
    if _takes_multiples(backend, float32_states):
        return f"multiples of {MULTIPLES[backend]}"
    return ", ".join(map(str, sorted(FIXED)))


def preferred(backend: str, platform: str, default: int = 16) -> int:
    """The block size where the user gave none, and no backend would have another than `default`."""
    if backend == "CPU_ATTN":
        return max(128, default)
    if backend == "FLASH_ATTN" and platform == "xpu":
        return max(64, default)
    return default if kernel_block(backend, True, default) else 16
