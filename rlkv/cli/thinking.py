"""A reasoning model's text on a terminal as it is decoded: thinking is dim."""

from __future__ import annotations

import re
import sys

TAGS = re.compile("(<think>|</think>)")
DIM, NORMAL = "\033[2m", "\033[0m"


class ThinkingStream:
    """Prints each piece of text at once; on a terminal, from ``<think>`` to ``</think>`` in dim letters.

    transformers streams whole words, so a tag is never split.
    """

    def __init__(self, prompt: str) -> None:
        """``prompt``: the rendered one; the chat templates of some models open the thinking at its end."""
        self._style = sys.stdout.isatty()
        if prompt.rstrip().endswith("<think>"):
            self._dim()

    def __call__(self, text: str) -> None:
        for part in TAGS.split(text):
            if part == "<think>":
                self._dim()
            print(part, end="", flush=True)
            if part == "</think>":
                self.close()

    def _dim(self) -> None:
        print(DIM if self._style else "", end="", flush=True)

    def close(self) -> None:
        """Back to normal letters, wherever the text has ended."""
        print(NORMAL if self._style else "", end="", flush=True)
