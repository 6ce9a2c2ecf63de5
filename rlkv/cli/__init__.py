"""Command lines of the console scripts."""
