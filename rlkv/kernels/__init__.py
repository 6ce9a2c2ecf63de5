"""Room for Triton kernels (none yet): one per file, their fp32 references in the tests."""
