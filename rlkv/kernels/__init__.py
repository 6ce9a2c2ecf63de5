"""Triton kernels, one per file; their fp32 references are in the tests."""
