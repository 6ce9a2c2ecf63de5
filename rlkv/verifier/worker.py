"""The verifier's worker: a process that may hang, run out of memory or crash without harm.

Run by path, never imported.  It reads one JSON list of pairs ``[answer, candidate]`` a line from
stdin and writes ``1`` or ``0`` a line to stdout: whether one of the pairs is equal; the first line
that it writes is ``ready``, or ``error`` and why it cannot work.  It ends when stdin closes, that
is, with its parent.  Only math-verify's LaTeX grammar is used: its other extractors go through
``eval``.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import re
import resource
import signal
import sys
from functools import lru_cache
from typing import Any

MEMORY_LIMIT_BYTES = 4 << 30
# that numbers must share; math-verify's default of 15, after the point, makes e^-50 and e^-51 equal
DIGITS = 50
_PLUS_MINUS = re.compile(r"\\(?:pm|mp)(?![A-Za-z])")
MAX_ELEMENTS = 64  # of a list that is compared in any order


def _prepare(memory_limit: int) -> Any:
    """Keep stdout for verdicts alone, leave Ctrl-C to the parent, limit memory.

    Returns:
        The stream for verdicts.
    """
    verdicts = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    # the kernel's default action ends the process even inside one endless C call
    signal.signal(signal.SIGPROF, signal.SIG_DFL)
    with contextlib.suppress(ValueError, OSError):  # macOS has no limit on address space
        resource.setrlimit(resource.RLIMIT_AS, (memory_limit, memory_limit))
    logging.disable(logging.CRITICAL)
    return verdicts


class Comparison:
    """math-verify with the options that answers need, and what its options cannot do."""

    def __init__(self) -> None:
        import math_verify
        import sympy
        from latex2sympy2_extended import NormalizationConfig, latex2sympy
        from latex2sympy2_extended.latex2sympy2 import ConversionConfig

        self.sympy: Any = sympy
        self.verify: Any = math_verify.verify
        self.latex2sympy: Any = latex2sympy
        # its unit removal cuts everything from the first \text, its basic_latex drops \ldots and
        # quotes
        self.options = NormalizationConfig(
            basic_latex=False, units=False, malformed_operators=True, boxed="none"
        )
        self.conversion = ConversionConfig(lowercase_symbols=False)  # R - r is not 0
        self.parsed = lru_cache(maxsize=64)(self._parse)

    def _exact(self, found: Any, fold_case: bool = False) -> Any:
        sympy = self.sympy
        # latex2sympy's own kind of set keeps the order
        if isinstance(found, sympy.FiniteSet) and hasattr(found, "_unsorted_args"):
            return type(found)(*(self._exact(of, fold_case) for of in found._unsorted_args))
        new = {number: sympy.Rational(str(number)) for number in found.atoms(sympy.Float)}
        for symbol in found.free_symbols:
            name = symbol.name.lower() if fold_case else symbol.name
            new[symbol] = sympy.I if name == "i" else sympy.Symbol(name, real=True)
        return found.xreplace(new) if new else found

    def _value(self, text: str) -> Any:
        """Decimals are exact, ``i`` is imaginary, other letters are real."""
        head, *tail = _PLUS_MINUS.split(text)
        braces = re.sub(r"\\[{}]", "", head)  # without those of sets
        # the grammar reads it between terms, but not in a fraction
        if len(tail) == 1 and braces.count("{") > braces.count("}"):
            return self.sympy.FiniteSet(*(self._value(head + sign + tail[0]) for sign in "+-"))
        found = self.latex2sympy(
            text,
            is_real=True,
            normalization_config=self.options,
            conversion_config=self.conversion,
        )
        return self._exact(found)

    def _parse(self, text: str) -> Any:
        r"""Read a value, or conditions joined by ``\text{or}``, ``\text{and}`` or commas."""
        if not re.search(r"\\(?:le|ge|ne)(?![A-Za-z])|[<>]", text):
            return self._value(text)
        words = set(re.findall(r"\\text\{(and|or)\}", text))
        parts = re.split(r",?\s*\\text\{(?:and|or)\}\s*|,", text)
        if len(words) > 1 or (words and "," in text):
            raise ValueError("mixed conditions")
        if excluded := re.match(r"\s*[A-Za-z]\s*\\ne\b", text):  # x is neither 2 nor 3
            parts[1:] = [p if "\\ne" in p else f"{excluded[0]} {p}" for p in parts[1:]]
        sets = [self._solved(part) for part in parts]
        if len(parts) == 1:
            return sets[0]
        if not all(isinstance(found, self.sympy.Set) for found in sets):
            raise ValueError("unsolved conditions")
        both = self.sympy.Intersection(*sets)
        if "or" in words or (not words and both.is_empty):
            return self.sympy.Union(*sets)
        return both

    def _solved(self, text: str) -> Any:
        """Return the set of a condition like ``1 < x <= 2``, one that is not solved as it is."""
        sympy = self.sympy
        found = self._value(text)
        is_condition = isinstance(found, (sympy.And, sympy.core.relational.Relational))
        if not is_condition or len(found.free_symbols) != 1:
            return found
        (letter,) = found.free_symbols
        relations = found.args if isinstance(found, sympy.And) else (found,)
        for relation in relations:
            if {letter, abs(letter)}.isdisjoint(relation.args) or all(
                side.free_symbols for side in relation.args
            ):
                return found
        return found.as_set()

    def equal(self, answer: str, candidate: str) -> bool:
        """Return whether both texts mean the same.

        ``3R^2`` may be written as ``3r^2``, where neither text has both letters.
        """
        try:
            sides = [self.parsed(answer), self.parsed(candidate)]
            if not any(map(_has_both_cases, sides)):
                sides = [self._exact(side, fold_case=True) for side in sides]
            return self.same(*sides)
        except (Exception, MemoryError):
            return False

    def same(self, gold: Any, found: Any) -> bool:
        sympy = self.sympy
        relations = [isinstance(side, sympy.core.relational.Relational) for side in (gold, found)]
        if any(relations):
            return all(relations) and self._same_relation(gold, found)
        lists = [isinstance(side, (sympy.Tuple, sympy.FiniteSet)) for side in (gold, found)]
        if all(lists):
            # a set has no element twice, but the list that it was read from may
            own, other = (getattr(side, "_unsorted_args", side.args) for side in (gold, found))
            ordered = isinstance(gold, sympy.Tuple)
            if not ordered and len(own) != len(other):
                own, other = gold.args, found.args
            return self._same_elements(own, other, ordered)
        if all(isinstance(side, sympy.Expr) and not side.free_symbols for side in (gold, found)):
            return self._same_number(gold, found)
        limits = {"float_rounding": DIGITS, "numeric_precision": DIGITS, "timeout_seconds": None}
        return bool(self.verify(gold, found, allow_set_relation_comp=True, **limits))

    def _same_elements(self, gold: Any, found: Any, ordered: bool) -> bool:
        if len(gold) != len(found) or len(gold) > MAX_ELEMENTS:
            return False
        rest = list(found)
        for element in gold:
            for i, other in enumerate(rest[:1] if ordered else rest):
                if self.same(element, other):
                    del rest[i]
                    break
            else:
                return False
        return True

    def _same_number(self, gold: Any, found: Any) -> bool:
        sympy = self.sympy
        gold = gold.doit()
        found = found.doit()
        if gold == found:
            return gold not in (sympy.nan, sympy.zoo)
        if (gold.is_Rational and found.is_Rational) or gold.is_infinite or found.is_infinite:
            return False
        values = [side.evalf(2 * DIGITS) for side in (gold, found)]
        difference = abs(values[0] - values[1]).evalf(DIGITS)
        larger = max(abs(values[0]), abs(values[1]))
        if difference <= larger * sympy.Float(10) ** -DIGITS:
            return True
        may_be_zero = gold.is_zero is not False and found.is_zero is not False
        return may_be_zero and sympy.simplify(gold - found) == 0

    def _same_relation(self, gold: Any, found: Any) -> bool:
        """Return whether both are the same curve or half-plane: sides in constant proportion."""
        kinds = []
        differences = []
        for relation in (gold, found):
            is_greater = relation.rel_op[0] == ">"
            kinds.append(relation.rel_op.replace(">", "<"))
            difference = relation.lhs - relation.rhs
            differences.append(-difference if is_greater else difference)
        if kinds[0] != kinds[1] or differences[0].free_symbols != differences[1].free_symbols:
            return False
        ratio = self.sympy.simplify(differences[0] / differences[1])
        if not ratio.is_number or not ratio.is_finite:
            return False
        return bool(ratio.is_positive or (kinds[0] in ("==", "!=") and ratio != 0))


def _has_both_cases(found: Any) -> bool:
    names = {symbol.name for symbol in found.free_symbols}
    return any(name != name.lower() and name.lower() in names for name in names)


def main() -> None:
    """Serve until stdin closes; the only argument is the limit per pair, in seconds of CPU time."""
    timeout = float(sys.argv[1])
    verdicts = _prepare(MEMORY_LIMIT_BYTES)
    try:
        comparison = Comparison()
    except Exception as error:
        verdicts.write(f"error {type(error).__name__}: {error}\n".replace("\n", " ") + "\n")
        return
    comparison.equal("\\frac{1}{2}", "0.5")  # the first parse builds the grammar's tables
    verdicts.write("ready\n")
    for line in sys.stdin:
        signal.setitimer(signal.ITIMER_PROF, timeout)
        verdict = any(comparison.equal(answer, candidate) for answer, candidate in json.loads(line))
        signal.setitimer(signal.ITIMER_PROF, 0)
        verdicts.write("1\n" if verdict else "0\n")


if __name__ == "__main__":
    main()
