"""Multi-head latent attention over a paged cache of one vector per token, in plain torch."""

from hybrid_kv.kernels.mla.reference import attend_latent, latent_attention, store_latent

__all__ = ["attend_latent", "latent_attention", "store_latent"]
