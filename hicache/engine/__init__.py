"""The reference engine: a scheduler and a small hybrid decoder that prove the cache."""
