"""Benchmarks: decoding with transformers, and serving with vLLM."""
