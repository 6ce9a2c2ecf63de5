"""Kernels: plain fp32 references beside the fast paths that are tested against them."""
