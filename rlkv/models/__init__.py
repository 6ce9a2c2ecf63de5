"""Models: loading, shape, prompts, the hub."""
