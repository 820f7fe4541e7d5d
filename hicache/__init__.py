"""HiCache: a tiered KV cache for hybrid-attention language models."""
