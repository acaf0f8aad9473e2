"""hybrid-kv: see, test and time the cache of hybrid (attention + Mamba) language models."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from hybrid_kv.engine.llm import LLM, RequestOutput
    from hybrid_kv.sampling import SamplingParams

__version__ = "0.1.0"
__all__ = ["LLM", "RequestOutput", "SamplingParams", "__version__"]


def __getattr__(name: str) -> Any:
    # Lazy, so that `import hybrid_kv` costs nothing where only the tables or the planner are used.
    if name in ("LLM", "RequestOutput"):
        from hybrid_kv.engine import llm

        return getattr(llm, name)
    if name == "SamplingParams":
        from hybrid_kv.sampling import SamplingParams

        return SamplingParams
    raise AttributeError(name)
