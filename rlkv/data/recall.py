"""DuoAttention's recall task (arXiv 2410.10819): random word sequences hidden in a long text, asked for at its end.

The text that they are hidden in (the haystack) comes from a file, or is generated from the tokenizer's own vocabulary:
random common words, which is not prose, but needs neither a network nor a licence.
"""

from __future__ import annotations

import random
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

# words of passkeys: any fixed list of distinct words will do
PASSKEY_WORDS = (
    *("amber", "basil", "cedar", "delta", "ember", "fjord", "grove", "harbor", "island", "jungle", "kettle", "lemon"),
    *("maple", "needle", "orange", "pepper", "quartz", "river", "silver", "tunnel", "urban", "velvet", "window"),
)
ORDINALS = (
    *("first", "second", "third", "fourth", "fifth", "sixth", "seventh", "eighth", "ninth", "tenth"),
    *("eleventh", "twelfth", "thirteenth", "fourteenth", "fifteenth", "sixteenth"),
)
INTRODUCTION = "The following text hides several passkeys. Read it and remember them.\n\n"
NEEDLE = "\n\nPlease remember: the {ordinal} passkey is:{words}.\n\n"
QUESTION = "\n\nWhat was the {ordinal} passkey in the text above? The {ordinal} passkey is:"
WORDS_PER_SENTENCE = 12
FEWEST_FILLER_WORDS = 200


@dataclass(frozen=True)
class MarkedText:
    """Token ids of a text, and the positions (each above 0) of the tokens whose prediction counts."""

    ids: tuple[int, ...]
    answers: tuple[int, ...]


def encode(tokenizer: Any, text: str) -> list[int]:
    """Token ids of a piece of text, nothing added."""
    return tokenizer(text, add_special_tokens=False).input_ids


def filler_words(tokenizer: Any) -> list[str]:
    """Lower-case words of 3 to 8 letters that are one token each, in the order of their ids.

    Raises:
        ValueError: if the vocabulary has too few of them.
    """
    special = set(tokenizer.all_special_ids)
    ids = [i for i in range(len(tokenizer)) if i not in special]
    texts = [tokenizer.decode([i]) for i in ids]
    words = list(dict.fromkeys(text[1:] for text in texts if re.fullmatch(r" [a-z]{3,8}", text)))
    if len(words) < FEWEST_FILLER_WORDS:
        raise ValueError(
            f"the tokenizer has only {len(words)} whole words to make a haystack of: pass --haystack FILE with any text"
        )
    return words


def read_haystack(path: str, tokenizer: Any) -> list[int]:
    """Token ids of a text file.

    Raises:
        ValueError: if the file is absent, no text, or empty.
    """
    try:
        ids = encode(tokenizer, Path(path).read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"--haystack {path} cannot be read as a text file ({error})") from None
    if not ids:
        raise ValueError(f"--haystack {path} is empty: it needs text to hide passkeys in")
    return ids


class _Piece(NamedTuple):
    """Token ids around one passkey."""

    needle: list[int]
    question: list[int]
    answer: list[int]


class TextRecall:
    """Draws samples of the recall task in plain text.

    Args:
        haystack: token ids to cut pieces from (repeated where they are too short); None: words of the vocabulary.
        passkeys: sequences to remember, each of ``passkey_words`` words.
        min_length, max_length: tokens of a sample, drawn evenly between them.

    Raises:
        ValueError: for numbers that leave no room for a haystack.
    """

    def __init__(
        self,
        tokenizer: Any,
        haystack: Sequence[int] | None,
        passkeys: int = 10,
        passkey_words: int = 32,
        min_length: int = 1000,
        max_length: int = 32000,
    ) -> None:
        if not 1 <= passkeys <= len(ORDINALS):
            raise ValueError(f"passkeys must lie in [1, {len(ORDINALS)}], got {passkeys}")
        self.tokenizer, self.haystack = tokenizer, haystack
        self.passkeys, self.passkey_words = passkeys, passkey_words
        self.min_length, self.max_length = min_length, max_length
        self.words = [] if haystack else filler_words(tokenizer)
        bos = tokenizer.bos_token_id
        self._head = [*([] if bos is None else [bos]), *encode(tokenizer, INTRODUCTION)]
        without = self._fixed_length(self._pieces(random.Random(0)))
        if without >= max_length:
            raise ValueError(
                f"{passkeys} passkeys of {passkey_words} words with their questions take about {without} tokens, which "
                f"leaves nothing of max_length={max_length}: raise max_length, or lower passkeys or passkey_words"
            )

    def draw(self, rng: random.Random) -> MarkedText:
        """A sample of min_length to max_length tokens, or of what the passkeys alone take where that is more."""
        pieces = self._pieces(rng)
        room = rng.randint(self.min_length, self.max_length) - self._fixed_length(pieces)
        text = self._filler(rng, max(0, room))
        cuts = sorted(rng.randint(0, len(text)) for _ in pieces)
        ids = list(self._head)
        for piece, start, end in zip(pieces, [0, *cuts], cuts, strict=False):
            ids += text[start:end] + piece.needle
        ids += text[cuts[-1] :]
        answers: list[int] = []
        for piece in pieces:
            ids += piece.question
            answers += range(len(ids), len(ids) + len(piece.answer))
            ids += piece.answer
        return MarkedText(tuple(ids), tuple(answers))

    def _pieces(self, rng: random.Random) -> list[_Piece]:
        found = []
        for ordinal in ORDINALS[: self.passkeys]:
            words = "".join(f" {rng.choice(PASSKEY_WORDS)}" for _ in range(self.passkey_words))
            texts = (NEEDLE.format(ordinal=ordinal, words=words), QUESTION.format(ordinal=ordinal), words)
            found.append(_Piece(*(encode(self.tokenizer, text) for text in texts)))
        return found

    def _fixed_length(self, pieces: list[_Piece]) -> int:
        return len(self._head) + sum(len(ids) for piece in pieces for ids in piece)

    def _filler(self, rng: random.Random, tokens: int) -> list[int]:
        if self.haystack:
            start = rng.randrange(len(self.haystack))
            return [self.haystack[(start + i) % len(self.haystack)] for i in range(tokens)]
        sentences = [
            " ".join(rng.choice(self.words) for _ in range(WORDS_PER_SENTENCE)) + "."
            for _ in range(tokens // WORDS_PER_SENTENCE + 1)
        ]
        return encode(self.tokenizer, " " + " ".join(sentences))[:tokens]
