r"""Reading an answer: a value, its unit, the name before it, or words; and what may not be lost.

A unit, a base, the minutes after the hours or the coefficient of an unsolved equation are never cut
off in silence: where the right answer and the candidate differ in one, :func:`pairs_to_compare`
decides.  The values are left to math-verify.
"""

from __future__ import annotations

import re
from fractions import Fraction
from typing import NamedTuple

from rlkv.verifier.normalize import normalize, word_set

_WORD = r"\\text\{([^{}]*)\}"
_LETTER = (
    r"(?:\\(?:alpha|beta|gamma|delta|theta|lambda|mu|phi|varphi|omega|sigma|rho|tau|ell|Delta)"
    r"(?![A-Za-z])|[A-Za-z])"
)
_INDEX = r"(?:_\{[^{}]*\}|_\w|')*"
_INEQUALITY = r"\\(?:le|ge|ne)(?![A-Za-z])|[<>]"

# --- numbers in words

_ONES = (
    "zero one two three four five six seven eight nine ten eleven twelve thirteen fourteen fifteen "
    "sixteen seventeen eighteen nineteen"
)
_TENS = "twenty thirty forty fifty sixty seventy eighty ninety"
_NUMBERS = {word: i for i, word in enumerate(_ONES.split())}
_NUMBERS |= {word: 10 * i for i, word in enumerate(_TENS.split(), start=2)}
_SCALES = {"dozen": 12, "hundred": 100}
_SCALES |= {"thousand": 10**3, "million": 10**6, "billion": 10**9, "trillion": 10**12}
_FRACTIONS = "half third fourth fifth sixth seventh eighth ninth tenth"
_PARTS = {word: i for i, word in enumerate(_FRACTIONS.split(), start=2)}
_PARTS |= {"quarter": 4, "hundredth": 100, "thousandth": 1000}
_POWERS = {"squared": "^{2}", "cubed": "^{3}"}


def _latex(number: Fraction) -> str:
    if number.denominator == 1:
        return str(number)
    return rf"\frac{{{number.numerator}}}{{{number.denominator}}}"


def _number(words: list[str]) -> tuple[Fraction | None, int]:
    """Return the number that ``words`` begin with, and how many of them say it."""
    total = Fraction(0)  # of the thousands and millions before
    current: Fraction | None = None
    for used, word in enumerate(words):
        following = [*words[used + 1 : used + 3], "", ""]
        if word in _NUMBERS:
            small = _NUMBERS[word]
            if current is not None and current % 100 and (current % 10 or small > 9):
                return total + current, used
            current = (current or 0) + Fraction(small)
        elif word in _SCALES and (current is not None or not used):
            current = (1 if current is None else current) * Fraction(_SCALES[word])
            if _SCALES[word] > 100:
                total += current
                current = Fraction(0)
        elif word in _PARTS and (current is not None or word == "half"):
            part = total + (1 if current is None else current) / Fraction(_PARTS[word])
            if following[0] == "an" and following[1] in _SCALES:  # half a million
                return part * _SCALES[following[1]], used + 3
            return part, used + 1
        elif word == "an" and current is None and following[0] in (*_SCALES, *_PARTS):
            current = Fraction(1)
        elif word != "and" or current is None:
            return (None if current is None else total + current), used
        elif following[0] in ("an", "one") and following[1] in _PARTS:  # and a half
            return total + current + Fraction(1, _PARTS[following[1]]), used + 3
        elif current % 100 or following[0] not in _NUMBERS:
            return total + current, used
    return (None if current is None else total + current), len(words)


def _with_digits(match: re.Match[str]) -> str:
    """Return a sequence of words, with digits for the numbers in it."""
    words = re.findall(_WORD, match[0])
    out = []
    if match.string[: match.start()].rstrip()[-1:] in tuple("0123456789}"):
        while words and words[0] in (*_SCALES, *_PARTS, *_POWERS):  # 4 million, 3 quarters
            word = words.pop(0)
            if word in _POWERS:
                out.append(_POWERS[word])
                continue
            out.append(rf"\cdot {_latex(Fraction(_SCALES.get(word, 1), _PARTS.get(word, 1)))}")
    while words:
        number, used = _number(words)
        if number is None:
            out.append(rf"\text{{{words.pop(0)}}}")
        else:
            out.append(_latex(number))
            del words[:used]
    return f" {' '.join(out)} "


# --- units

_CURRENCY = "dollar|gbp|euro|yen|rupee"
# dimensions, each with its units and their exact sizes
_SIZES = """
time: second 1, minute 60, hour 3600, day 86400, week 604800
months: month 1, year 12
length: m 1, dm 1/10, cm 1/100, mm 1/1000, km 1000
feet: foot 1, inch 1/12, yard 3, mile 5280
mass: g 1, kg 1000, mg 1/1000
pounds: pound 1, oz 1/16
volume: litre 1, ml 1/1000
money: dollar 1, cent 1/100
"""
_UNITS: dict[str, tuple[str, Fraction]] = {}
for _line in _SIZES.strip().splitlines():
    _dimension, _, _entries = _line.partition(": ")
    for _entry in _entries.split(", "):
        _unit, _, _size = _entry.partition(" ")
        _UNITS[_unit] = (_dimension, Fraction(_size))
for _unit in word_set("euro gbp yen rupee % degree F C radian gallon acre mile/hour km/hour"):
    _UNITS[_unit] = (_unit, Fraction(1))
_LETTER_UNITS = {"s": "second", "h": "hour", "l": "litre", "L": "litre"}
# parts of a value: the right answer's must be in the candidate
_KEPT = word_set(
    "am pm east west north south up down january february march april may june july august "
    "september october november december"
)
# a number with one of these words is another number, or none
_ANOTHER = word_set(
    "more less fewer least most over under than not or and to between about approximately nearly "
    "almost minus plus squared cubed factorial twice double if when from at per"
).union(_SCALES, _PARTS, _NUMBERS)
# behind a number it is the same number, but 5 more is not 5 less
_COMPARED = {"more": "up", "over": "up", "less": "down", "fewer": "down", "under": "down"}
_BEHIND = word_set("from to at")  # and nothing at all: 45 miles from home
_FILLING = word_set("a an the of in total unit there is are it answer exist exactly only just all")
_LEADING = word_set("option choice answer exactly only just a total of the or")
_TRIGONOMETRY = r"\\(?:arc)?(?:sin|cos|tan|cot|sec|csc)"
_LAST_UNIT = re.compile(rf"(?:{_WORD}(?:\s*\^\{{([23])\}})?|(\^\{{\\circ\}})|(%)|(/))\s*[.)]?\s*$")


class Reading(NamedTuple):
    """An answer, taken apart; its value is empty where it is words or an unsolved equation."""

    value: str
    units: tuple[str, ...] = ()
    name: str = ""
    equation: str = ""  # all of it, where it has an equals sign
    words: str = ""
    is_compound: bool = False  # several units: 12 hours 30 minutes
    direction: str = ""  # "up" or "down": 12 more, 3 under


def _split(text: str, separator: str) -> list[str]:
    """Return the parts of ``text`` between separators outside brackets."""
    parts = []
    depth = start = 0
    for match in re.finditer(rf"\\?[()\[\]{{}}]|\\\w+|{separator}", text):
        token = match[0]
        if token[-1] in "([{":
            depth += 1
        elif token[-1] in ")]}":
            depth -= 1
        elif depth <= 0 and re.fullmatch(separator, token):
            parts.append(text[start : match.start()].strip())
            start = match.end()
    return [*parts, text[start:].strip()]


def _without_unit(text: str) -> tuple[str, tuple[str, ...]]:
    """Return ``text`` without the units at its end (and a currency before it), and these."""
    found: list[str] = []
    currency = rf"(-?)\s*\\text\{{({_CURRENCY})\}}\s*\.?\s*(?=[-\d.\\])(?!\\text)"
    if sign := re.match(currency, text):
        found.append(sign[2])
        text = sign[1] + text[sign.end() :]
    words: list[str] = []
    while (match := _LAST_UNIT.search(text)) and match.start() > 0:
        word, power, degree, percent, _ = match.groups()
        if degree and re.search(_TRIGONOMETRY, text):
            break
        if word and power:
            word = f"{word}^{power}"
        words.insert(0, word or ("degree" if degree else percent or "/"))
        text = text[: match.start()].rstrip(" (")
    while words:
        word = words.pop(0)
        if word in ("square", "cubic") and words:
            words[0] += "^2" if word == "square" else "^3"
            continue
        unit = words.pop(0) if word in ("per", "/") and words else word
        name, hat, power = unit.partition("^")
        unit = _LETTER_UNITS.get(name, name) + hat + power
        if word in ("per", "/") and found:
            found[-1] += f"/{unit}"
        elif name not in _FILLING | _BEHIND:
            found.append(unit)
    return text, tuple(found)


def _scale(units: tuple[str, ...]) -> tuple[str, Fraction] | None:
    """Return dimension and size of a single known unit."""
    name, _, power = units[0].partition("^")
    if len(units) > 1 or name not in _UNITS:
        return None
    dimension, size = _UNITS[name]
    return (f"{dimension}^{power}", size ** int(power)) if power else (dimension, size)


def _compound(text: str) -> Reading | None:
    """Read 12 hours 30 minutes as seconds."""
    part = rf"(-?[\d.]+|\\frac\{{\d+\}}\{{\d+\}})\s*{_WORD}\s*(?:,|\\text\{{and\}})?\s*"
    if not re.fullmatch(f"(?:{part}){{2,4}}", text):
        return None
    terms = []
    dimensions = []
    for number, unit in re.findall(part, text):
        scale = _scale((_LETTER_UNITS.get(unit, unit),))
        if scale is None:
            return None
        terms.append(rf"{number}\cdot {_latex(scale[1])}")
        dimensions.append(scale[0])
    if len(set(dimensions)) > 1:
        return None
    one = next(name for name, scale in _UNITS.items() if scale == (dimensions[0], 1))
    return Reading("+".join(terms), (one,), is_compound=True)


# --- names and equations

_APPLIED = (
    rf"(?:\\?[A-Za-z]+|\\mathbb\{{\w\}}|{_WORD})(?:_\{{[^{{}}]*\}}|\^\{{-1\}}|')*\s*\([^=]*\)"
)
_ORNAMENT = (
    r"_\{[^{}]*\}|_\w|'|[\[\]]|m(?=\s*\\angle)|"
    r"\\(?:angle|measuredangle|triangle|overline|overrightarrow|vec|hat|bar|widehat|sin|cos|tan)"
    rf"(?![A-Za-z])|{_WORD}"
)
_OPERATOR = r"\\(?:det|deg|dim|lim|int|sum|prod|max|min)(?![A-Za-z])|\|[A-Z]\|$|\\#"
_PRODUCT = rf"(?!\s*-)(?:{_LETTER}|\\frac|\\cdot|\\times|[-+/|(){{}},\s]|\^\{{[23]\}})+"
_ARITHMETIC = (
    r"\\(?:[lr]floor|[lr]ceil|frac|binom|sqrt|cdot|times|pi|sin|cos|tan|log|ln)(?![A-Za-z])"
)


def _is_name(text: str) -> bool:
    """Return whether ``text = 5`` names a value, rather than leave an equation to be solved."""
    if re.fullmatch(_APPLIED, text):
        return not re.match(r"\\(?:log|ln|sqrt|exp)", text)
    if re.match(_OPERATOR, text):
        return True
    bare = re.sub(_ORNAMENT, "", text)
    if not bare.strip(" {}") or re.fullmatch(rf"[ {{}}]*{_LETTER}[ {{}}]*", bare):
        return True
    letters = re.findall(_LETTER, re.sub(r"\\(?:frac|cdot|times)", "", bare))
    return len(letters) > 1 and re.fullmatch(_PRODUCT, bare) is not None


def _named(text: str) -> tuple[str, str] | None:
    """Return name and value of an assignment; the end of a chain of equal values counts."""
    parts = _split(text, "=")
    if len(parts) < 2:
        return None
    name = parts[0]
    value = parts[-1]
    if re.fullmatch(_LETTER, value) and not re.search("[A-Za-z]", name):
        name, value = value, name
    if not re.search("[A-Za-z]", re.sub(_ARITHMETIC, "", name)):
        return "", value  # 2 + 3 = 5
    if re.fullmatch(_LETTER, name):
        letter = rf"(?<![A-Za-z\\]){re.escape(name)}(?![A-Za-z])"
        return None if re.search(letter, value) else (name, value)
    return (name, value) if _is_name(name) else None


# --- an answer as a whole

_BASE = re.compile(
    r"\(?([0-9][0-9A-Fa-f]*)\)?\s*(?:_\s*\{\s*(?:\\text\{base\}\s*)?(\d{1,2})\s*\}|"
    r"\(?\s*(?:\\text\{inch\}\s*)?\\text\{base\}\s*(?:-\s*)?(\d{1,2})\s*\)?)"
)
# math-verify adds numbers with a space between them, and ignores an index
# 15 (3x+2) is a product, 2 (1/3) may be a mixed number and (1,2) (3,4) are two points
_BESIDE = r"\d\)? +(?:\d|\(\d(?:[\d./]*|[^()]*,[^()]*)\)(?!\s*\^))"
_TWO_NUMBERS = re.compile(rf"\\frac\{{[^{{}}]*\}}\{{[^{{}}]*\}}\d|{_BESIDE}|\d\s*_\{{|'\s*\d")
_GROUPS = re.compile(r"(?<![\d,.])\d{1,3}(?:,\d{3})+(?!,?\d)")
_TUPLE = re.compile(r"\([^()]*,[^()]*\)")
_SET = re.compile(r"\\\{[^{}()]*,[^{}()]*\\\}")
_SET_BUILDER = re.compile(rf"\\\{{\s*{_LETTER}[^:|]*(?::|\||\\mid)(.*)\\\}}")


_LABEL = re.compile(r"\(([A-J])\) |([A-J])[).] ")  # A: may be a point
# (A) 5
_OPTION = re.compile(r"(?:\(([A-J])\)|([A-J])[).:](?: |$)) *((?!\\text\{(?:and|or)\})[\w\\$.-].*)?")


def _unlabelled(text: str, other: str) -> str:
    """Read ``text`` as ``other`` asks: option or content of ``(A) 5``, the metres of ``5 m``."""
    if option := _OPTION.fullmatch(text):
        return option[1] or option[2] if re.fullmatch(r"\(?[A-J]\)?", other) else option[3] or text
    if not re.search("[A-Za-z]", re.sub(_WORD, "", other)):
        space = " ?" if "text" in other else " "
        text = re.sub(rf"(?<=\d){space}([mgLshKNJWV])(?=$|/|\^| \d)", r" \\text{\1}", text)
        text = re.sub(r"(?<=\})/([smh])(?![A-Za-z])", r"/\\text{\1}", text)
    return text


def read(text: str) -> Reading:
    """Take a normalized answer apart."""
    text = re.sub(rf"{_WORD}(?:[\s-]*{_WORD})*", _with_digits, text)
    text = re.sub(r"\s+", " ", text).strip(" .")
    text = re.sub(
        r"^(?:\\text\{(?:the|final|correct)\} ?)*\\text\{answer\} ?(?::|=|\\text\{is\}) ?(?=.)",
        "",
        text,
    )
    if base := _BASE.fullmatch(text):
        if (base[2] or base[3]) != "10":
            return Reading("", words=f"{base[1].lstrip('0').lower()} base {base[2] or base[3]}")
        text = base[1]
    words = re.findall(_WORD, text)
    if words and not re.search(r"[A-Za-z\d]", re.sub(_WORD, "", text)):
        return _words(words)
    text = re.sub(rf"^((?:{_WORD} ?)+): ?", r"\1=", text)
    text = re.sub(r"\\text\{(?:is|are|be|equal|was)\}(?:\s*\\text\{to\})?", "=", text)
    text = text.removeprefix("=").strip()
    text = re.sub(r"\\text\{(?:negative|minus)\}\s*(?=[\d\\])", "-", text)
    if (first := re.match(_WORD, text)) and first[1] in _ANOTHER:  # not 5, more than 5
        return Reading("", words=text)
    excepted = rf"((?:{_WORD} ?)+)\\text\{{except\}}(?: \\text\{{for\}})? (?:[a-z] = )?(.*)"
    if match := re.fullmatch(excepted, text):
        whole = _words(re.findall(_WORD, match[1])).value
        return Reading(rf"{whole}\setminus\{{{match[3]}\}}") if whole else Reading("", words=text)
    if match := re.match(r"(.*?)\\approx(.*)$", text):
        exact = match[1].strip()
        text = match[2].strip() if not exact or _is_name(exact) else exact
    if match := _SET_BUILDER.fullmatch(text):
        text = match[1].strip()
    if len(_split(text, _INEQUALITY)) > 1:
        return Reading(text)
    if not re.search(r"[(\[]|\\\{", text):
        text = _GROUPS.sub(lambda m: m[0].replace(",", ""), text)
    return _compound(text) or _read_values(text)


def _read_values(text: str) -> Reading:
    """Read one value, or a list of them, perhaps with names and units."""
    text = re.sub(r"\s*,?\s*\\text\{(?:and|or)\}\s*|\s*;\s*", ", ", text)
    element = re.match(rf"({_LETTER}|\({_LETTER}, ?{_LETTER}\))\s*\\in(?![A-Za-z])(.*)", text)
    if element:
        return Reading(element[2].strip(), name=element[1])
    elements = _split(text, ",")
    has_equation = len(_split(text, "=")) > 1
    if len(elements) > 1 and has_equation:
        return _named_list(text, elements)
    named = _named(text)
    if named is None and has_equation:
        return Reading("", equation=text)
    name, value = named or ("", text)
    lead = re.match(rf"((?:{_WORD} ?)+)(?=[^ ])", value)
    if lead and _LEADING.issuperset(re.findall(_WORD, lead[1])):
        value = value[lead.end() :]
    value, units = _without_unit(value)
    if len(elements) > 1:
        split = [_without_unit(element) for element in elements]
        units = split[-1][1]
        if any(found not in ((), units) for _, found in split):
            units = ()
        value = ", ".join(part for part, _ in split) if units else ", ".join(elements)
    direction = "".join(_COMPARED.get(unit, "") for unit in units)
    units = tuple(unit for unit in units if unit not in _COMPARED)
    if any(_ANOTHER.intersection(unit.split("/")) for unit in units):
        return Reading("", words=text)
    return _value(value, units, name, text if name else "")._replace(direction=direction)


def _value(value: str, units: tuple[str, ...], name: str, equation: str) -> Reading:
    """Return a value that math-verify reads right, else words, which equal themselves alone."""
    if _TWO_NUMBERS.search(value) or "%" in value:
        return Reading("", words=value)
    value = re.sub(r"(\d+(?:\.\d+)?)\s*\^\{\\circ\}", r"\\frac{\1\\pi}{180}", value)
    value = value.replace(r"^{\circ}", r"\cdot\frac{\pi}{180}")
    # math-verify reads 5(3) as 8
    value = re.sub(r"(?<=[\d)])\s*(?=\()(?<![_^]\d)|(?<=\))\s*(?=\d)", r"\\cdot ", value)
    return Reading(value.replace(r"\ldots", r"\text{dots}"), units, name, equation)


def _named_list(text: str, elements: list[str]) -> Reading:
    """Read ``x = 2, y = 3`` as a point, ``x = 2, x = 3`` and ``x = 2, 3`` as a list."""
    names = []
    values = []
    for element in elements:
        named = _named(element) if len(_split(element, "=")) > 1 else ("", element)
        if named is None:
            return Reading("", equation=text)
        names.append(re.sub(r"_\{[^{}]*\}", "", named[0]))
        values.append(_without_unit(named[1])[0])
    if all(names) and len(set(names)) == len(names):
        values = [value for _, value in sorted(zip(names, values, strict=True))]
        return _value(f"({', '.join(values)})", (), "", "")
    return _value(", ".join(values), (), names[0], "")


def _words(words: list[str]) -> Reading:
    """Read an answer without any number or letter of mathematics."""
    for verb in ("is", "are"):
        if verb in words[:-1]:
            words = words[len(words) - words[::-1].index(verb) :]
    if not {"and", "or"}.isdisjoint(words):  # Alice and Bob
        sides = re.split(r"(?: (?:and|or))+ ", " ".join(words))
        return Reading("", words=" and ".join(sorted(sides)))
    if words == ["dne"]:
        words = ["doe", "not"]  # does not exist, singular
    kept = " ".join(word for word in words if word not in _FILLING or len(words) == 1)
    if re.fullmatch("no (?:real )?(?:solution|root|value)|empty set", kept):
        return Reading(r"\emptyset")
    if "all" in words and re.fullmatch("real(?: number)?", kept):
        return Reading(r"\mathbb{R}")
    return Reading("", words=kept.removesuffix(" solution"))


# --- what must be equal

Pairs = list[tuple[str, str]]
_MODULUS = re.compile(r"\\(?:([pb]?)mod(?![A-Za-z])|text\{mod(?:ulo)?\}) *(\{[^{}]*\}|\d+)[ )]*$")
# what is not a product: throws of a coin, Roman numbers, quotients with remainders
_CODE = re.compile(r"[HT]{3}|IV|VI|IX|XI|XL|LX|XC|CX|\d+ ?R ?\d+")


def _congruence(text: str) -> tuple[str, str]:
    r"""Return ``x = 7`` and ``12`` of ``x \equiv 7 \pmod{12}``; other texts as they are."""
    match = _MODULUS.search(text)
    if match is None:
        return text, ""
    before = text[: match.start()].rstrip()
    # 100 \bmod 7 is a number, namely 2
    is_congruence = match[1] == "p" or before.endswith("(") or r"\equiv" in before
    residue = before.rstrip(" (").replace(r"\equiv", "=")
    if not is_congruence or not residue or residue.count("(") != residue.count(")"):
        return text, ""
    return residue, re.sub(r"[^\w]", "", match[2]).lstrip("0")


def pairs_to_compare(answer: str, candidate: str) -> bool | Pairs:
    """Return the verdict where words decide it, else pairs of values of which one must be equal."""
    right, modulus = _congruence(normalize(answer))
    given, other_modulus = _congruence(normalize(candidate))
    if modulus and other_modulus and modulus != other_modulus:
        return False
    if _CODE.fullmatch(right) and _CODE.fullmatch(given):
        return right.replace(" ", "") == given.replace(" ", "")
    options = {match[1] or match[2] for match in map(_LABEL.match, (right, given)) if match}
    if len(options) == 2:
        return False
    gold = read(_unlabelled(right, given))
    found = read(_unlabelled(given, right))
    if gold.words or found.words:
        said = [side.words or side.value.lower() for side in (gold, found)]
        return said[0] == said[1] and (bool(gold.words and found.words) or said[0].isalpha())
    curves = [(gold.equation, found.equation)] if gold.equation and found.equation else False
    if not gold.value or not found.value:
        # x = 6 does not answer itself by 2x = 12, but y = 2x may be written as 2x - y = 0
        solved = gold.value + found.value
        is_number = solved and not re.search(_LETTER, solved)
        return False if is_number and re.fullmatch(_LETTER, gold.name + found.name) else curves
    names = [side.name.replace(" ", "").lower() for side in (gold, found)]
    if names[0] != names[1] and all(re.fullmatch(_LETTER + _INDEX, name) for name in names):
        have_letters = all(re.search("[A-Za-z]", side.value) for side in (gold, found))
        return curves if have_letters else False
    return _quantities(gold, found)


def _times(value: str, factor: str) -> str:
    return rf"({value})\cdot {factor}"


def _scaled(side: Reading) -> str:
    """Return the value without its sign of percent or degrees: a share, or radians."""
    factors = {("%",): r"\frac{1}{100}", ("degree",): r"\frac{\pi}{180}"}
    return _times(side.value, factors[side.units]) if side.units in factors else side.value


def _quantities(gold: Reading, found: Reading) -> bool | Pairs:
    """Compare two values with their units, as :func:`pairs_to_compare`."""
    if gold.direction and found.direction and gold.direction != found.direction:
        return False
    pair = (gold.value, found.value)
    for one, other in (pair, pair[::-1]):
        if _TUPLE.fullmatch(one) and _SET.fullmatch(other):
            return False
    are_times = all(re.fullmatch(r"\d{1,2}:\d\d", value) for value in pair)
    if are_times and pair[0].lstrip("0") != pair[1].lstrip("0"):
        return False  # 3:30 and 2:20 are not ratios
    if gold.units == found.units:
        return pair[0].replace(" ", "") == pair[1].replace(" ", "") or [pair]
    scaled = (_scaled(gold), _scaled(found))
    if {gold.units, found.units} == {("degree",), ("radian",)}:
        return [scaled]
    if not gold.units or not found.units:
        if gold.is_compound or found.is_compound or _KEPT.intersection(gold.units):
            return False
        return [pair] if scaled == pair else [pair, scaled]
    gold_scale = _scale(gold.units)
    found_scale = _scale(found.units)
    if gold_scale and found_scale:
        if gold_scale[0] != found_scale[0]:
            return False
        gold_value = _times(gold.value, _latex(gold_scale[1]))
        return [(gold_value, _times(found.value, _latex(found_scale[1])))]
    expected = set(gold.units)
    given = set(found.units)
    for unit in expected ^ given:
        if unit.split("^")[0] in _UNITS or "/" in unit:
            return False
    if _KEPT.intersection(expected - given):
        return False
    return [pair] if expected <= given or given <= expected else False
