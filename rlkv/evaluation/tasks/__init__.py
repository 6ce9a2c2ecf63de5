"""Benchmarks: where problems come from, what the model reads, and which answers are right."""
