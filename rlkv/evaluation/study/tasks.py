"""From options to tasks as a study decodes them."""

from __future__ import annotations

from collections.abc import Iterable

from transformers import PreTrainedTokenizerBase

from rlkv.cache import CacheSettings
from rlkv.evaluation.run.options import TaskOptions
from rlkv.evaluation.run.runner import RunSettings, render_problems
from rlkv.evaluation.study.measurements import StudyTask
from rlkv.gates.head_gates import HeadGates
from rlkv.rollout.base import SamplingParams


def study_tasks(
    config: TaskOptions, cache: CacheSettings, gates: Iterable[HeadGates], tokenizer: PreTrainedTokenizerBase
) -> list[StudyTask]:
    """The tasks of ``config``, rendered with its template or the one that all ``gates`` were trained with."""
    prepared = []
    for task, loaded in config.problems(config.chosen_template(gates)):
        sampling = SamplingParams(config.token_limit(task))
        settings = RunSettings(cache, sampling, batch_size=config.batch_size, rule=config.rule)
        problems = render_problems(task, loaded, tokenizer)
        prompts = tokenizer([problem.prompt for problem in problems], add_special_tokens=False).input_ids
        prepared.append(StudyTask(task.name, problems, [len(ids) for ids in prompts], settings))
    return prepared
