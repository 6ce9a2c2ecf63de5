"""Head reallocation in the stock engine."""
