r"""A multi-passkey recall task in the tiny model's own words, for DuoAttention's way of finding heads.

The passkeys are given bindings (``k=3``), spread among definitions that nobody asks for, the haystack.  The tiny model
knows one way to be asked: the start of a worked step.  So the answer part restates definitions over two passkeys, and
the two bindings that follow are the passkeys to be recalled::

    a=7 . b=2 . c = a * b . k=3 . d = b - c . e = k + a . ... find e ?
    c = a * b , [a=7] , [b=2] , 7 * 2 = 4 , c=4 . e = k + a , [k=3] , [a=7] , ...

Only the tokens in brackets count.  Unlike a solution of the task, it recalls nothing but what the prompt gave: no
result that was derived on the way, and neither the restated definitions nor the arithmetic count.
"""

from __future__ import annotations

import random
from typing import Any

from rlkv.data.recall import MarkedText
from rlkv.models.prompts import render_prompt
from rlkv.tiny.task import NAMES, OPERATORS, apply_operator

MAX_PASSKEYS = 16


def knows_bindings(tokenizer: Any) -> bool:
    """Whether ``tokenizer`` is one of the tiny task: a binding is one token of its own."""
    return "b=3" in tokenizer.get_vocab()


def draw_recall(rng: random.Random, passkeys: int) -> tuple[str, list[tuple[str, bool]]]:
    """``(problem, words of the answer part)``; a word carries whether it is a passkey to be recalled.

    Of at most 26 names, ``passkeys`` are given values, half as many definitions are asked for, and up to all others
    are haystack.

    Raises:
        ValueError: if ``passkeys`` is not in [2, 16].
    """
    if not 2 <= passkeys <= MAX_PASSKEYS:
        raise ValueError(f"passkeys must lie in [2, {MAX_PASSKEYS}] for the tiny model's recall task, got {passkeys}")
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
            result = f", {values[left]} {operator} {values[right]} = {values[name]} , {name}={values[name]} ."
            answer += [(word, False) for word in f"{definition} ,".split()]
            answer += [(f"{left}={values[left]}", True), (",", False), (f"{right}={values[right]}", True)]
            answer += [(word, False) for word in result.split()]
    return " . ".join(statements) + f" . find {names[-1]} ?", answer


def recall_sample(tokenizer: Any, rng: random.Random, passkeys: int) -> MarkedText:
    """:func:`draw_recall` as token ids, in the chat form that the tiny model was trained on."""
    problem, answer = draw_recall(rng, passkeys)
    prompt = tokenizer(render_prompt(tokenizer, problem), add_special_tokens=False).input_ids
    ids = [*prompt, *tokenizer.convert_tokens_to_ids([word for word, _ in answer])]
    places = tuple(len(prompt) + i for i, (_, counts) in enumerate(answer) if counts)
    return MarkedText(tuple(ids), places)
