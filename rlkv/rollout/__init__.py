"""Rollouts: prompts in, completions out, whichever engine decodes them."""
