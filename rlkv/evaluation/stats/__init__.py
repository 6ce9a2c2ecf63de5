"""Metrics and their uncertainty."""
