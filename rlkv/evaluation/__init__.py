"""Measuring what a cache costs: accuracy, lengths and bytes of KV held, with intervals."""
