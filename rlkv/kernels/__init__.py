"""Triton kernels (none yet): one per file, with an fp32 reference in the tests."""
