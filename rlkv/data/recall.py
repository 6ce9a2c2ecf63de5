"""DuoAttention's recall task (arXiv 2410.10819): passkeys hidden in a haystack.

In text, word sequences in a file or in random common words of the tokenizer's vocabulary; for the
tiny model, bindings among definitions of its task.

As in the published code, passkeys lie at depths of 5 to 95% of the haystack, and all tokens after
the haystack count, questions and passkeys (in the paper's text the passkeys alone).  Different are
the wording and the words; the haystack, there always the beginning of BookSum; the lengths, there
50 values between the limits; and that the states compared are those that predict these tokens, one
position earlier.
"""

from __future__ import annotations

import random
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from rlkv.models.prompts import render_prompt
from rlkv.tiny import NAMES, OPERATORS, apply_operator

MAX_PASSKEYS = 16  # of the tiny model's task
# words of passkeys: any fixed list of distinct words will do
_WORDS = (
    "amber basil cedar delta ember fjord grove harbor island jungle kettle lemon maple needle "
    "orange pepper quartz river silver tunnel urban velvet window"
)
PASSKEY_WORDS = _WORDS.split()
_ORDINALS = (
    "first second third fourth fifth sixth seventh eighth ninth tenth eleventh twelfth thirteenth "
    "fourteenth fifteenth sixteenth"
)
ORDINALS = _ORDINALS.split()
INTRODUCTION = "The following text hides several passkeys. Read it and remember them.\n\n"
NEEDLE = "\n\nPlease remember: the {ordinal} passkey is:{words}.\n\n"
QUESTION = "\n\nWhat was the {ordinal} passkey in the text above? The {ordinal} passkey is:"
# passkeys lie at evenly spaced shares of the haystack, both ends included
DEPTHS = 1000
SHALLOWEST = 0.05
DEEPEST = 0.95
WORDS_PER_SENTENCE = 12
FEWEST_FILLER_WORDS = 200


@dataclass(frozen=True)
class MarkedText:
    """Token ids of a text, and the positions (above 0) of the tokens whose prediction counts."""

    ids: tuple[int, ...]
    answers: tuple[int, ...]


def encode(tokenizer: Any, text: str) -> list[int]:
    """Return the token ids of a piece of text, with no special tokens added."""
    return tokenizer(text, add_special_tokens=False).input_ids


def filler_words(tokenizer: Any) -> list[str]:
    """Return the lower-case words of 3 to 8 letters that are one token each, by id.

    Raises:
        ValueError: if there are too few.
    """
    special = set(tokenizer.all_special_ids)
    ids = [i for i in range(len(tokenizer)) if i not in special]
    texts = [tokenizer.decode([i]) for i in ids]
    words = list(dict.fromkeys(text[1:] for text in texts if re.fullmatch(r" [a-z]{3,8}", text)))
    if len(words) < FEWEST_FILLER_WORDS:
        raise ValueError(
            f"the tokenizer has only {len(words)} whole words to make a haystack of: pass "
            "--haystack FILE with any text"
        )
    return words


def read_haystack(path: str, tokenizer: Any) -> list[int]:
    """Read a text file as token ids; ``ValueError`` if it is absent, empty or not text."""
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
        haystack: token ids to cut pieces from (repeated where they are too short); None: words of
            the vocabulary.
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
        self.tokenizer = tokenizer
        self.haystack = haystack
        self.passkeys = passkeys
        self.passkey_words = passkey_words
        self.min_length = min_length
        self.max_length = max_length
        self.words = [] if haystack else filler_words(tokenizer)
        bos = tokenizer.bos_token_id
        self._head = [*([] if bos is None else [bos]), *encode(tokenizer, INTRODUCTION)]
        without = self._fixed_length(self._pieces(random.Random(0)))
        if without >= max_length:
            raise ValueError(
                f"{passkeys} passkeys of {passkey_words} words with their questions take about "
                f"{without} tokens, which "
                f"leaves nothing of max_length={max_length}: raise max_length, or lower passkeys "
                "or passkey_words"
            )

    def draw(self, rng: random.Random) -> MarkedText:
        """Draw a sample of min_length to max_length tokens, more if the passkeys need more."""
        pieces = self._pieces(rng)
        room = rng.randint(self.min_length, self.max_length) - self._fixed_length(pieces)
        text = self._filler(rng, max(0, room))
        cuts = []  # where the passkeys lie: ascending and all different
        for step in sorted(rng.sample(range(DEPTHS), self.passkeys)):
            depth = SHALLOWEST + (DEEPEST - SHALLOWEST) * step / (DEPTHS - 1)
            cuts.append(int(len(text) * depth))
        ids = list(self._head)
        for piece, begin, end in zip(pieces, [0, *cuts], cuts, strict=False):
            ids += text[begin:end] + piece.needle
        ids += text[cuts[-1] :]
        start = len(ids)
        for piece in pieces:
            ids += piece.question + piece.answer
        return MarkedText(tuple(ids), tuple(range(start, len(ids))))

    def _pieces(self, rng: random.Random) -> list[_Piece]:
        found = []
        for ordinal in ORDINALS[: self.passkeys]:
            words = "".join(f" {rng.choice(PASSKEY_WORDS)}" for _ in range(self.passkey_words))
            texts = (
                NEEDLE.format(ordinal=ordinal, words=words),
                QUESTION.format(ordinal=ordinal),
                words,
            )
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


def knows_bindings(tokenizer: Any) -> bool:
    """Return whether ``tokenizer`` is one of the tiny task: a binding is one token of its own."""
    return "b=3" in tokenizer.get_vocab()


def draw_recall(rng: random.Random, passkeys: int) -> tuple[str, list[tuple[str, bool]]]:
    r"""Return ``(problem, words of the answer part)`` in the tiny model's own words.

    A word carries whether it is a passkey.

    The passkeys are given bindings (``k=3``), spread among definitions that are not asked for, the
    haystack.  The answer part restates definitions over two passkeys, the one way of asking that
    the model knows; the two bindings that follow are the passkeys to be recalled (here in
    brackets)::

        a=7 . b=2 . c = a * b . k=3 . d = b - c . e = k + a . ... find e ?
        c = a * b , [a=7] , [b=2] , 7 * 2 = 4 , c=4 . e = k + a , [k=3] , [a=7] , ...

    Of at most 26 names, ``passkeys`` are given values, half as many definitions are asked for.
    """
    if not 2 <= passkeys <= MAX_PASSKEYS:
        raise ValueError(
            f"passkeys must lie in [2, {MAX_PASSKEYS}] for the tiny model's recall task, got "
            f"{passkeys}"
        )
    asked = passkeys // 2
    filler = rng.randint(0, len(NAMES) - passkeys - asked)
    kinds = ["given"] * (passkeys - 2) + ["asked"] * asked + ["filler"] * filler
    rng.shuffle(kinds)
    kinds = ["given", "given", *kinds]  # a definition needs two names before it
    names = rng.sample(NAMES, len(kinds))
    values: dict[str, int] = {}
    given: list[str] = []
    statements: list[str] = []
    answer: list[tuple[str, bool]] = []
    for name, kind in zip(names, kinds, strict=True):
        if kind == "given":
            values[name] = rng.randrange(10)
            given.append(name)
            statements.append(f"{name}={values[name]}")
            continue
        left, right = rng.sample(given if kind == "asked" else list(values), 2)
        operator = rng.choice(OPERATORS)
        values[name] = apply_operator(operator, values[left], values[right])
        definition = f"{name} = {left} {operator} {right}"
        statements.append(definition)
        if kind == "asked":
            recalled = (f"{left}={values[left]}", f"{right}={values[right]}")
            said = (
                f"{definition} , {recalled[0]} , {recalled[1]} , "
                f"{values[left]} {operator} {values[right]} = {values[name]} , "
                f"{name}={values[name]} ."
            )
            answer += [(word, word in recalled) for word in said.split()]
    return " . ".join(statements) + f" . find {names[-1]} ?", answer


def recall_sample(tokenizer: Any, rng: random.Random, passkeys: int) -> MarkedText:
    """Return :func:`draw_recall` as token ids, in the chat form of the tiny model's training."""
    problem, answer = draw_recall(rng, passkeys)
    prompt = tokenizer(render_prompt(tokenizer, problem), add_special_tokens=False).input_ids
    ids = [*prompt, *tokenizer.convert_tokens_to_ids([word for word, _ in answer])]
    places = tuple(len(prompt) + i for i, (_, counts) in enumerate(answer) if counts)
    return MarkedText(tuple(ids), places)
