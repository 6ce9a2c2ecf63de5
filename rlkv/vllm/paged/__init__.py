"""Attention over a paged KV cache in plain torch."""
