"""The benchmarks: where their problems come from, what the model reads, and what counts as a right
answer.
"""
