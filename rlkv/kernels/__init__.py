"""The decode kernel in Triton, which is loaded when one is launched, and which calls it serves."""
