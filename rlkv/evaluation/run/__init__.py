"""Running evaluations, resumably."""
