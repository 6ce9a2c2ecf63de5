"""The vLLM plugin: what the stock engine needs to know of gates and allocations."""
