"""Completions of any model for the problems of a file, judged where answers are known; resumable."""

from __future__ import annotations

from collections import Counter
from contextlib import closing
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from rlkv.data.deepscaler import load_problems
from rlkv.data.filter_config import BUILT_IN, DecodeOptions
from rlkv.data.filter_job import problems_digest, sized_and_announced
from rlkv.inference.options import SamplingOptions, check_positive
from rlkv.models.builtin import TINY
from rlkv.models.loading import load_tokenizer
from rlkv.models.prompts import choose_template, render_prompt
from rlkv.utils.progress import progress_bar
from rlkv.utils.provenance import commit
from rlkv.utils.store import open_store
from rlkv.verifier.verifier import Verifier

FREE = {"output", "batch_size", "kv_gib", "device"}  # what may differ between a run and its continuation
VERDICTS = {None: "unknown", True: "correct", False: "wrong"}


@dataclass(frozen=True, kw_only=True)
class SampleConfig(SamplingOptions, DecodeOptions):
    """What to sample."""

    output: Path
    """JSONL file to write, or to continue"""
    num_problems: int = 20
    """how many problems --input tiny and smol draw"""
    samples: int = 1
    """completions per problem"""

    def check(self) -> None:
        super().check()
        check_positive(self, "samples")
        if self.samples > 1 and self.temperature == 0:
            raise ValueError(
                f"--samples {self.samples} at temperature 0 would give equal completions: set --temperature above 0"
            )
        self.sampling_params(1)

    def resolved(self) -> SampleConfig:
        """With a built-in model's problems, limit and template, else those of ``tiny``, where none were given."""
        preset = BUILT_IN.get(self.model, BUILT_IN[TINY])
        chosen = {name: preset[name] for name in ("input", "max_new_tokens") if getattr(self, name) is None}
        resolved = replace(self, template=choose_template(self.template, model=self.model), **chosen)
        return resolved.with_engine(resolved.max_new_tokens or 0)


def sample(config: SampleConfig) -> None:
    """Write one row per completion as it ends.

    A row: ``index`` of the problem, ``sample``, problem, answer, output, output_tokens, finish_reason, correct (null
    where the problem has no answer).

    Raises:
        ValueError: for problems or a model that cannot be loaded, or if the file holds rows of other settings.
    """
    config = config.resolved()
    assert config.input is not None
    assert config.max_new_tokens is not None
    assert config.template is not None
    problems = load_problems(config.input, config.num_problems, config.seed, config.limit)
    settings = {name: value for name, value in asdict(config).items() if name not in FREE}
    settings["input"] = f"{len(problems)} problems with hash {problems_digest(problems)}"
    key = ("index", "sample")
    with open_store(config.output, settings, key, recorded={"commit": commit()}) as store:
        wanted = [(i, s) for i in range(len(problems)) for s in range(config.samples) if (i, s) not in store.done]
        if not wanted:
            return
        tokenizer = load_tokenizer(config.model)
        prompts = [render_prompt(tokenizer, problems[i].problem, config.template) for i, _ in wanted]
        longest = max(map(len, tokenizer(prompts, add_special_tokens=False).input_ids))
        positions = longest + config.max_new_tokens
        engine = sized_and_announced(config, len(wanted), positions, "completion").load_engine(positions)
        sampling = config.sampling_params(config.max_new_tokens)
        numbers = [i * config.samples + s for i, s in wanted]
        bar = progress_bar("sample", "completions", len(problems) * config.samples)
        with bar as progress, closing(Verifier()) as verifier:
            progress.resume(Counter(VERDICTS[row["correct"]] for row in store.rows))
            for place, completion in engine.stream(prompts, sampling, numbers):
                index, number = wanted[place]
                problem = problems[index]
                correct = verifier.is_correct(completion.text, problem.answer) if problem.answer else None
                row = {
                    "index": index,
                    "sample": number,
                    "problem": problem.problem,
                    "answer": problem.answer,
                    "output": completion.text,
                    "output_tokens": len(completion.token_ids),
                    "finish_reason": completion.finish_reason,
                    "correct": correct,
                }
                store.append(row)
                progress.advance({VERDICTS[correct]: 1})
