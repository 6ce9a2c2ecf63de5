"""IFEval (arXiv 2311.07911): instructions that a program can check, by the checkers of lm-eval."""

from __future__ import annotations

import functools
from importlib.metadata import version
from types import ModuleType
from typing import Any

from rlkv.data.deepscaler import text_field
from rlkv.evaluation.tasks.base import EvalProblem, EvalTask, HubData, ParsedRow
from rlkv.utils.extras import require
from rlkv.verifier.extraction import after_thinking

EXTRA = "ifeval"


def grade_ifeval(text: str, problem: EvalProblem) -> bool:
    """Whether what follows the thoughts obeys all instructions as it is: prompt-level strict accuracy."""
    return _follows(after_thinking(text).strip(), problem.meta)


def _follows(response: str, meta: Any) -> bool:
    utils = _checkers()
    given = utils.InputExample(0, meta["instructions"], meta["problem"], meta["arguments"])
    return bool(utils.test_instruction_following_strict(given, response).follow_all_instructions)


@functools.cache
def _checkers() -> ModuleType:
    """The module of lm-eval; a ``ValueError`` if it or the data that it needs is not installed."""
    nltk = require("nltk", EXTRA)
    try:
        nltk.data.find("tokenizers/punkt_tab")
    except LookupError:  # lm-eval would try to download it, and count no sentences without it
        raise ValueError(
            "IFEval counts sentences with NLTK's punkt_tab, which is not installed: python -m nltk.downloader punkt_tab"
        ) from None
    require("langdetect", EXTRA).DetectorFactory.seed = 0  # else its verdicts differ from run to run
    return require("lm_eval.tasks.ifeval.utils", EXTRA)


def parse_ifeval(row: dict[str, Any], where: str, number: int) -> ParsedRow:
    """A row with prompt, instruction_id_list and kwargs (one dict for each instruction), perhaps key."""
    prompt, names, arguments = text_field(row, "prompt", where), row.get("instruction_id_list"), row.get("kwargs")
    if not prompt.strip() or not names or not isinstance(arguments, list) or len(names) != len(arguments):
        raise ValueError(f"{where}: it needs a prompt, and as many kwargs as there are names in instruction_id_list")
    meta = {"problem": prompt, "instructions": names, "arguments": [dict(each or {}) for each in arguments]}
    utils = _checkers()
    try:
        _follows("", meta)
    except Exception as error:  # whatever a checker raises for arguments that are not its own
        raise ValueError(f"{where}: {', '.join(map(str, names))}: {type(error).__name__}: {error}") from None
    key = text_field(row, "key", where) if "key" in row else str(number)
    return ParsedRow(key, {"problem": prompt}, "", {**meta, "checkers": version(utils.__name__.partition(".")[0])})


IFEVAL = EvalTask(
    name="ifeval",
    kind="instructions",
    template="{problem}",
    max_new_tokens=32768,
    file="ifeval",
    fields="prompt, instruction_id_list and kwargs",
    hub=HubData("google/IFEval", split="train"),
    parse=parse_ifeval,
    grade=grade_ifeval,
)
