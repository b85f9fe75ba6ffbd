"""Generation with transformers models: decode steps that are recorded and replayed, and a cache for latent attention."""
