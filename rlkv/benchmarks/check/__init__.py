"""What breaks first on a new GPU: small checks of attention, cache, eviction, training, decoding
and kernels.
"""
