"""Triton kernels: one per file, with an fp32 reference in the tests.  Triton is loaded when one is
launched.

``decode``: one new token per row, all heads of a layer; ``step``: what it shares between layers,
and what it serves.
"""
