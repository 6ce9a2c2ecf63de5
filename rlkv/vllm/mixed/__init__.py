"""Mixed attention in vLLM, for rollouts."""
