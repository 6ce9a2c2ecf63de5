"""Benchmarks: decoding, serving, compaction."""
