"""A mixture of experts, in plain torch: which experts a token gets, and what they make of it."""

from hybrid_kv.kernels.moe.reference import apply_experts, route_sigmoid, route_softmax, route_topk_softmax

__all__ = ["apply_experts", "route_sigmoid", "route_softmax", "route_topk_softmax"]
