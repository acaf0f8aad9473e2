"""Operations on tensors: a plain-torch reference each, vectorised. They know nothing of requests, blocks or models."""
