r"""One spelling for answers: every word in them is a ``\text{word}``.

math-verify compares mathematics, and misreads or drops what is written out here: dress of LaTeX,
unicode, program notation, groups of digits, repeating decimals.  Takes time linear in the text.
"""

# ruff: noqa: RUF001 (this file tells signs from others that look like them)

from __future__ import annotations

import re
import unicodedata
from collections.abc import Callable


def word_set(words: str) -> frozenset[str]:
    """Return the words of a text."""
    return frozenset(words.split())


# --- unicode

# signs of one meaning, and what stands for them
_SIGNS = {
    "\u200b\u200c\u200d\u2060\ufeff": "",
    "\u2212\u2013\u2014\u2010\u2011\u2012": "-",  # minus sign, dashes, hyphens
    "\u2019\u2032": "'",
    "\u201c\u201d": '"',
    "\u0304": "\u0305",  # two lines above a digit
    "÷\u2044": "/",
    "⟨": "(",
    "⟩": ")",
    "°º˚": r"^{\circ}",
    "≤⩽": r"\le ",
    "≥⩾": r"\ge ",
    "·⋅∗∙": r"\cdot ",
}
_COMMANDS = (
    "×times ≠ne ≈approx ∞infty ±pm …ldots ∪cup ∩cap ∅emptyset ∈in ∖setminus ∠angle △triangle "
    "⌊lfloor ⌋rfloor ⌈lceil ⌉rceil"
)
_CURRENCIES = "¢cent €euro £gbp ¥yen ₹rupee"
_TABLE: dict[str, str] = {"√": r"\sqrt", "∛": r"\sqrt[3]"}
for _sign in "ℝℤℚℕ":
    _TABLE[_sign] = rf"\mathbb{{{unicodedata.normalize('NFKC', _sign)}}}"
for _letter in "αβγδεζηθικλμνξπρστυφχψω":
    _name = unicodedata.name(_letter).split()[-1].lower().replace("lamda", "lambda")
    _TABLE[_letter] = f"\\{_name} "
for _signs, _replacement in _SIGNS.items():
    _TABLE.update(dict.fromkeys(_signs, _replacement))
for _command in _COMMANDS.split():
    _TABLE[_command[0]] = f"\\{_command[1:]} "
for _currency in _CURRENCIES.split():
    _TABLE[_currency[0]] = rf"\text{{{_currency[1:]}}}"
_TRANSLATION = str.maketrans(_TABLE)
_RAISED = str.maketrans("⁰¹²³⁴⁵⁶⁷⁸⁹⁺⁻ⁿ", "0123456789+-n")
_LOWERED = str.maketrans("₀₁₂₃₄₅₆₇₈₉₊₋ₙ", "0123456789+-n")


def _ascii(text: str) -> str:
    """Return ``text`` with LaTeX for signs, and ASCII for digits and letters of all kinds."""
    text = re.sub("[⁰¹²³⁴⁵⁶⁷⁸⁹⁺⁻ⁿ]+", lambda m: f"^{{{m[0].translate(_RAISED)}}}", text)
    text = re.sub("[₀₁₂₃₄₅₆₇₈₉₊₋ₙ]+", lambda m: f"_{{{m[0].translate(_LOWERED)}}}", text)
    text = re.sub(r"([√∛])\s*(\d+)", r"\1{\2}", text)
    text = re.sub("[¼-¾⅐-⅞]", lambda m: _fraction_sign(m[0]), text)
    text = unicodedata.normalize("NFKC", text.translate(_TRANSLATION)).translate(_TRANSLATION)
    text = re.sub(r"[^\x00-\x7f]", lambda m: str(unicodedata.digit(m[0], m[0])), text)
    with_line = r"\overline{%s}"
    return re.sub("(?:\\d\u0305)+", lambda m: with_line % m[0].replace("\u0305", ""), text)


def _fraction_sign(sign: str) -> str:
    above, below = unicodedata.normalize("NFKC", sign).split("\u2044")
    return rf" \frac{{{above}}}{{{below}}}"


# --- substitutions, in their order


def _repeating(match: re.Match[str]) -> str:
    """Return the fraction of a decimal whose digits ``block`` repeat."""
    head = match["whole"] + match["fixed"]
    above = int(head + match["block"]) - int(head or 0)
    below = (10 ** len(match["block"]) - 1) * 10 ** len(match["fixed"])
    return rf"\frac{{{above}}}{{{below}}}"


def _mixed(match: re.Match[str]) -> str:
    whole, above, below = map(int, match.groups())
    return rf"\frac{{{whole * below + above}}}{{{below}}}"


def _matrix(match: re.Match[str]) -> str:
    """Return ``[[1, 2], [3, 4]]`` in LaTeX."""
    rows = [row.replace(",", " & ") for row in re.findall(r"\[([^\[\]]*)\]", match[1])]
    return r"\begin{pmatrix}" + r" \\ ".join(rows) + r"\end{pmatrix}"


Rule = tuple[str, str | Callable[[re.Match[str]], str]]
_END = r"(?![A-Za-z])"  # of a command
_LETTER = rf"\\(?:alpha|beta|gamma|theta|lambda|mu|phi|omega|sigma|pi){_END}"
_START = r"(?<![A-Za-z\\])"  # of a word that is not a command
_SWITCHES = (
    "tiny|small|normalsize|large|Large|LARGE|huge|Huge|bf|rm|it|displaystyle|textstyle|scriptstyle"
    "|boldmath"
)
_SIZES = (
    rf"{_SWITCHES}|limits|left|right|middle|mleft|mright|(?:big|Big|bigg|Bigg)[lrm]?|mathstrut"
    "|strut"
)
_FONTS = (
    "mathbf|mathit|mathsf|mathtt|mathnormal|mathcal|boldsymbol|bm|pmb|underline|underbar|uline"
    "|ensuremath|smash|mathord"
)
_WORDS = r"text(?:bf|it|rm|sf|tt|normal|up|sc)?|mbox|hbox|mathrm|emph|operatorname\*?"
_FUNCTIONS = (
    "sqrt|arcsin|arccos|arctan|sinh|cosh|tanh|sin|cos|tan|cot|csc|log|ln|exp|gcd|lcm|pi|theta|alpha"
)
_ORDINAL = r"(?:th|st|nd|rd)"
_ORDINAL_TEXT = rf"\\(?:text|textrm|mathrm|mbox)\s*\{{\s*{_ORDINAL}\s*\}}"
_DECIMAL = r"(?<![\d.])(?P<whole>\d{0,50})\.(?P<fixed>\d{0,50}?)"
_PAIR = r"(?=\s*[^\s,\[\]()][^\[\]()]*,)([^\[\]()]*)"
_COLOUR = r"\\(?:textcolor|color|colorbox)\s*(?:\[\w*\])?\s*\{[^{}]*\}"

_BRACKET_NAMES = {"lt": "<", "gt": ">", "langle": "(", "rangle": ")"}
_DRESS: list[Rule] = [
    (r"^\s*(\*\*|\*|__|`|\")(.*)\1\s*$", r"\2"),
    (r"\\+\s*$", ""),
    (r"(?<!\\)\\[()\[\]]", " "),
    (r"(?:\bUSD?\s*)?\\\$", r" \\text{dollar} "),
    # groups of digits, then the spaces that are left
    (r"(?<=\d)(?:\{,\}|,\s*\\!)\s*(?=\d{3}(?!\d))|(?<=\d)(?:\\!|'|_)(?=\d{3}(?!\d))", ""),
    (r"(?<=\d)\{[.,]\}(?=\d)", "."),
    (r"(?<=\d)\{:\}(?=\d)", ":"),
    (r"\\(?:checkmark|blacksquare|square|qed)(?![A-Za-z])", " "),
    (r"(?<!\\)\\!", ""),
    (rf"(?<!\\)\\[,;:> \n]|~|\\(?:quad|qquad|thinspace|space|enspace){_END}", " "),
    (r"\\(?:tag|label|hspace|vspace|[hv]?phantom)\*?\s*\{[^{}]*\}", " "),
    (r"\\fcolorbox\s*\{[^{}]*\}", r"\\colorbox"),
    (rf"(?<![\\\w}}\]^_])\{{\s*(?:{_COLOUR}(?!\s*\{{)|\\(?:{_SWITCHES}){_END})", r"\\mathbf{"),
    (rf"{_COLOUR}\s*(?=\{{)", r"\\mathbf"),
    (_COLOUR, " "),
    (rf"(?<=\d)\s*\\(?:{_SIZES}){_END}\s*(?=\()", ""),  # 5\left(3\right) is a product
    (rf"\\(?:{_SIZES}){_END}\.?", " "),
    (r"[(\[]\s*(\\begin\{(?:small)?(?:matrix|array)\})", r"\1"),
    (r"(\\end\{(?:small)?(?:matrix|array)\})\s*[)\]]", r"\1"),
    (r"\\begin\{(?:[bpB]|small)?(?:matrix|array)\}(?:\{[lcr|\s]*\})?", r"\\begin{pmatrix}"),
    (r"\\end\{(?:[bpB]|small)?(?:matrix|array)\}", r"\\end{pmatrix}"),
    (r"\\overline\s*\{([A-Z]+)\}", r"\1"),
    (rf"\\[dtc](frac|binom){_END}", r"\\\1"),
    # \frac12, \frac1{2n}, \frac\pi2, \frac{a}b
    (rf"\\(frac|binom)\s*(\d|(?<=\s)[A-Za-z]|{_LETTER})", r"\\\1{\2}"),
    (
        rf"\\(frac|binom)\s*(\{{(?:[^{{}}]|\{{[^{{}}]*\}})*\}})\s*(\d|[A-Za-z]|{_LETTER})",
        r"\\\1\2{\3}",
    ),
    (rf"\\(sqrt|bar|overline)\s*(\[\d+\])?\s*([\dA-Za-z]){_END}", r"\\\1\2{\3}"),
    (r"\{([^{}]*)\\choose([^{}]*)\}", r"\\binom{\1}{\2}"),
]
_SYMBOLS: list[Rule] = [
    (rf"\\(?:leqslant|leqq|leq){_END}|<=|=<", r"\\le "),
    (rf"\\(?:geqslant|geqq|geq){_END}|>=", r"\\ge "),
    (rf"\\neq{_END}|\\not\s*=|(?<![\d)])!=", r"\\ne "),
    (rf"\\(lt|gt|langle|rangle){_END}", lambda m: _BRACKET_NAMES[m[1]]),
    (rf"\\[lr]?vert{_END}", "|"),
    (rf"\\varnothing{_END}|\\\{{\s*\\\}}|^\s*\{{\s*\}}$", r"\\emptyset "),
    (rf"\\(?:lor|vee){_END}", r" \\text{or} "),
    (rf"\\(?:Bbb|mathbb)\s*\{{?\s*([RZQNC])(?:\s*\}})?|\\([RZQN]){_END}", r"\\mathbb{\1\2}"),
    (rf"\\degrees?{_END}|\^\s*(?:\{{\s*\\circ\s*\}}|\\circ)", r"^{\\circ}"),
    (rf"\^\{{\\circ\}}\s*([FC]){_END}", r"^{\\circ}\\text{\1}"),
    (r"\\(?:ldots|dots|cdots|dotsc)|\.\.\.", r"\\ldots "),
    (rf"\]{_PAIR}\[", r"(\1)"),  # intervals as written in France
    (rf"\[{_PAIR}\[", r"[\1)"),
    (rf"^\s*\]{_PAIR}\]", r"(\1]"),
]
_PROGRAM: list[Rule] = [
    (rf"{_START}log(\d+)\s*(?=\()", r"\\log_{\1}"),
    (rf"{_START}floor\(([^()]*)\)", r"\\lfloor \1\\rfloor "),
    (rf"{_START}(?:binomial|binom|comb)\(([^(),]*),([^(),]*)\)", r"\\binom{\1}{\2}"),
    (rf"{_START}abs\(([^()]*)\)", r"|\1|"),
    (r"\\?(?:operatorname|text|mathrm)?\{?\bcis\b\s*\}?\s*(.*)$", r"e^{i(\1)}"),
    (rf"{_START}cbrt{_END}", r"\\sqrt[3]"),
    (rf"{_START}a(?=(?:sin|cos|tan){_END})", "arc"),
    (
        rf"{_START}((?:{_FUNCTIONS}){_END}|(?:sin|cos|tan|ln)(?=[xyt]{_END})|sec(?=\s*\())",
        r"\\\1 ",
    ),
    (rf"{_START}(?:inf|oo|[Ii]nfinity){_END}", r"\\infty "),
    (r"^\s*\[(\[[^\[\]]*\](?:\s*,\s*\[[^\[\]]*\])*)\]\s*$", _matrix),
    (r"\*\*", "^"),
    (r"(?<=\d)\s*[xX]\s*(?=10\s*\^)", r"\\times "),
    (r"(?<=\d)[eE]\+?(-?\d{1,6})(?![\d.])", r"\\cdot 10^{\1}"),
    (r"(?<=\d)j(?!\w)", "i"),
    (r"\*|\\ast|\\cdotp", r"\\cdot "),
    (r"\+/-|\+-(?=\d)", r"\\pm "),
]
_NUMBERS: list[Rule] = [
    (rf"(?<=\d)\s*\^?\s*(\{{\s*)?(?:{_ORDINAL_TEXT}|{_ORDINAL}{_END})(?(1)\s*\}})", ""),
    (r"\^\s*(-?\d+(?:\.\d+)?)", r"^{\1}"),
    (r"_\s*(\d+)", r"_{\1}"),
    (
        rf"{_DECIMAL}\\dot\s*\{{?(\d)\}}?(?:(\d*)\\dot\s*\{{?(\d)\}}?)?",
        r"\g<whole>.\g<fixed>(\3\4\5)",
    ),
    (rf"{_DECIMAL}\\(?:overline|bar)\s*\{{?\s*(?P<block>\d+)\s*\}}?", _repeating),
    (rf"{_DECIMAL}\((?P<block>\d+)\)", _repeating),
    (rf"{_DECIMAL}(?P<block>\d{{1,9}}?)(?P=block){{2,}}\s*\\ldots", _repeating),
    (r"(?<![\d.])\.(?=\d)", "0."),
    (
        r"(?<![\d.,/])\d{1,3}(?: +\d{3})+(?![\d/])(?! *\\frac| *\d+/)",
        lambda m: m[0].replace(" ", ""),
    ),
    (r"\.\d{3}(?: +\d{1,3})+(?![\d/.])", lambda m: m[0].replace(" ", "")),
    (r"(?<![\d.])\d{1,3}(?:\.\d{3}){2,}(?![\d.])", lambda m: m[0].replace(".", "")),
    (r"(?<![\d.^_{/])(\d+) +(\d+) */ *(\d+)(?![\d.])", r"\1\\frac{\2}{\3}"),
    (r"(?<![\d.])(\d+) *\\frac\{(\d+)\}\{(\d+)\}", _mixed),
]
_PROSE: list[Rule] = [
    (r"(?i)\b([ap])\.\s?m\b\.?", r"\1m"),
    (r"(?<=\d)\s*(?:\s|\\text\{)\s*to\s*[\s}]\s*(?=\d)", ":"),
    (r"(?i)\\%|\bper\s?cent\b", "%"),
]
_RULES = [
    (re.compile(pattern, re.DOTALL), replacement)
    for pattern, replacement in _DRESS + _SYMBOLS + _PROGRAM + _NUMBERS + _PROSE
]

# --- groups in braces

# what stands before a group decides what its braces are
_GROUP = re.compile(
    r"([\^_}\]\x02])?(\s*\\[A-Za-z]+\*?)?(\s*)(?<!\\)\{((?:[^{}\\]|\\.)*)\}", re.DOTALL
)
_CALL = re.compile(r"(\\sqrt(?:\[\w+\])?|\^)?(\s*)\(([^()]*)\)")
# control characters stand for brackets that are done with, until all are
_DONE = str.maketrans("{}", "\x01\x02")
_BRACKETS = str.maketrans("\x01\x02\x03\x04", "{}()")


def _open_groups(text: str) -> str:
    r"""Mark words, drop fonts and needless braces, and write ``\sqrt(3)`` with braces."""
    while match := _GROUP.search(text):
        text = text[: match.start()] + _opened(*match.groups("")) + text[match.end() :]
    while match := _CALL.search(text):
        call, space, content = match.groups("")
        group = f"{call}\x01{content}\x02" if call else f"{space}\x03{content}\x04"
        text = text[: match.start()] + group + text[match.end() :]
    return text.translate(_BRACKETS)


def _opened(sign: str, command: str, space: str, content: str) -> str:
    """Return the group in the form that ``sign`` and ``command`` before it ask for."""
    name = command.strip().removeprefix("\\")
    if re.fullmatch(_WORDS, name):
        if not content.startswith("\\"):
            content = f" {mark_words(content.translate(_BRACKETS), every=True)}"
        return sign + content.translate(_DONE)
    if re.fullmatch(_FONTS, name) and sign not in ("^", "_"):
        return sign + content
    if sign or command:
        command = "" if re.fullmatch(_FONTS, name) else command
        return f"{sign}{command}{space}\x01{content}\x02"
    if re.search("[,|:]", re.sub(r"[(\[][^()\[\]]*[)\]]", "", content)):
        content = rf"\{{{content}\}}"
    elif re.search("^[^=]+[-+][^=]*$", content):
        content = f"({content})"
    return space + content


# --- words

# a word, and other spellings of it in the singular
_SPELLINGS = """
cm: centimeter centimetre, mm: millimeter millimetre, km: kilometer kilometre, m: meter metre,
inch: inche in, foot: feet ft, mile: mi, yard: yd, g: gram, kg: kilogram, mg: milligram, pound: lb,
oz: ounce, litre: liter, ml: milliliter, second: sec, minute: min, hour: hr, year: yr,
mile/hour: mph, km/hour: kmh, square: sq, cubic: cu, degree: deg, F: fahrenheit, C: celsius,
%: pct percent percentage, dollar: usd, euro: eur, rupee: rs, half: halve, man: men, woman: women,
child: children, person: people
"""
_SINGULARS: dict[str, str] = {}
for _line in _SPELLINGS.replace("\n", " ").split(","):
    _name, _, _others = _line.strip().partition(": ")
    _SINGULARS.update(dict.fromkeys(_others.split(), _name))
# runs of up to three letters that are words, not products of variables
_SHORT_WORDS = word_set(
    "no on or is are and the yes odd all any one two six ten per day way man men dne usd eur of to "
    "may was saw"
)
_SHORT_UNITS = word_set(
    "mm cm dm km mg kg ml ft in mi yd lb lbs oz hr hrs min sec am pm mph kmh sq cu deg pct"
)
_BEFORE_UNIT = re.compile(r"(?:[\d})/]|\\[a-z]+|\b(?:sq|cu|square|cubic|per)\.?)\s*$")


def _singular(word: str) -> str:
    if len(word) > 2 and word.endswith("s") and not word.endswith(("ss", "is", "us", "yes", "was")):
        word = word[:-1]
    return _SINGULARS.get(word, word)


def mark_words(text: str, every: bool) -> str:
    r"""Return ``text`` with words as ``\text{word}``, in lower case and singular.

    Args:
        every: all runs of letters are words, not only those that are not a product of variables.
    """

    def mark(match: re.Match[str]) -> str:
        run = match[0]
        if not run[0].isalpha():
            return run
        low = run.lower()
        if low in ("a", "an") and re.match(r"\s+(?!and\b)[a-z]{3}", text[match.end() :]):
            return r"\text{an}"
        # no variable is called o, and e is a number
        is_word = len(run) > 3 or low in _SHORT_WORDS
        is_word |= (len(run) > 1 and "o" in low) or (len(run) == 3 and "e" in low)
        before = text[max(0, match.start() - 12) : match.start()]
        if _BEFORE_UNIT.search(before):
            is_word |= low in _SHORT_UNITS or (len(run) > 2 and before[-1] == " ")
        if not every and not is_word:
            return run
        return rf"\text{{{run if len(run) == 1 else _singular(low)}}}"

    runs = r"\\text\{[^{}]*\}|\\(?:begin|end|mathbb)\{\w+\}|\\[A-Za-z]+\*?|[A-Za-z]+"
    return re.sub(runs, mark, text)


def normalize(text: str) -> str:
    r"""Return ``text`` in one spelling; every word in it is a ``\text{word}``."""
    text = _ascii(text.strip())
    dollars = len(re.findall(r"(?<!\\)\$", text))
    text = re.sub(r"(?<!\\)\$", "" if dollars % 2 == 0 else r"\\$", text)
    if "matrix" not in text and "array" not in text:
        text = re.sub(r"\\\\(?=[A-Za-z])", r"\\", text)
    for pattern, replacement in _RULES:
        text = pattern.sub(replacement, text)
    text = mark_words(_open_groups(text), every=False)
    # a letter that is set as text is that letter, unless it may be a unit
    text = re.sub(r"(?<![\d})\s/])\s*\\text\{([A-Za-z])\}", r"\1", text)
    text = re.sub(r"\\text\{([^mgshlLFC%])\}", r"\1", text)
    return re.sub(r"\s+", " ", text).strip(" .,;:")
