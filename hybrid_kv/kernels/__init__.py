"""Operations on tensors. They know nothing of requests, blocks or models.

A folder is an operation, a file of it says how: `reference` is plain torch, the others are Triton
launches. Importers name the folder, `hybrid_kv.kernels.gated_norm`. `common` is what operations
share.
"""
