"""Is this answer right? Library, worker pool and the worker's own process."""

from rlkv.verifier.verifier import is_correct

__all__ = ["is_correct"]
