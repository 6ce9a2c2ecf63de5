"""Benchmarks: a decode step, an eviction, and serving with vLLM; a check-up for GPUs."""
