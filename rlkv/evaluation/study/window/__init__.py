"""``rlkv-study window``: how many sinks, how long a window, and whether to keep the prompt, in accuracy per byte."""
