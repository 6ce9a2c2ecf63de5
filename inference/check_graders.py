"""Check the graders of the tasks on reference answers: are they accepted, and those of other problems refused?

    python inference/check_graders.py --data ../shared/data --output-dir results/graders

Maths: the reference in the prompt's form, and the reference solution in its own words where it has a box, each against
its own answer and against the next problem's (where that is another text).  Code: the reference program, an empty one,
a wrong one (functions of the right names that return nothing useful) and the next problem's.  Writes graders.json with
every wrong verdict, and graders.md, into --output-dir.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from rlkv.cli.errors import run_app
from rlkv.cli.options import parse
from rlkv.evaluation.report.checks import check_code, grader_page, math_checks, write_checks
from rlkv.evaluation.tasks.registry import load_task
from rlkv.inference.options import check_positive


@dataclass(frozen=True, kw_only=True)
class GraderConfig:
    data: Path
    """folder with the tasks' files, such as gsm8k_test.jsonl"""
    output_dir: Path
    """where graders.json and graders.md go"""
    timeout: float = 5.0
    """CPU seconds that one comparison of answers may take"""
    workers: int = 2
    """processes that compare answers"""
    code: bool = True
    """check MBPP too, in the sandbox"""
    code_limit: int | None = None
    """use only the first N problems of MBPP"""

    def check(self) -> None:
        check_positive(self, "workers", "code_limit")


def main() -> None:
    config = parse(GraderConfig, __doc__)
    rows = math_checks(config.data, config.timeout, config.workers)
    programs = check_code(load_task("mbpp", config.data, config.code_limit)) if config.code else None
    content = {"math": rows, "code": programs, "timeout": config.timeout}
    write_checks(config.output_dir, "graders", content, grader_page(rows, programs))


if __name__ == "__main__":
    run_app(main)
