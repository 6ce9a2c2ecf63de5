"""Which question each figure of the log answers: the sections of the page of a run and of W&B."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import NamedTuple


class Chart(NamedTuple):
    """Figures of the log on one pair of axes: labels by name, and whether all of them lie in [0, 1]."""

    title: str
    lines: Mapping[str, str]
    share: bool = False

    def drawn(self, names: Iterable[str]) -> dict[str, str]:
        """Labels of those of ``names`` that belong here; ``NAME_at_0.5`` is NAME at a sparsity of 0.5."""
        found = {}
        for name in names:
            base, _, sparsity = name.partition("_at_")
            if name in self.lines:
                found[name] = self.lines[name]
            elif base in self.lines and sparsity:
                found[name] = f"{self.lines[base]} at sparsity {sparsity}"
        return found


# question and charts by the name that the section has in W&B
SECTIONS: dict[str, tuple[str, tuple[Chart, ...]]] = {
    "collapse": (
        "Is it collapsing?",
        (
            Chart(
                "Reward against sparsity",
                {
                    "reward/mean": "mean reward",
                    "gates/below_0.5": "gates below 0.5",
                    "held_out/accuracy": "held-out accuracy",
                    "teacher/right": "teacher's accuracy",
                    "traces/kept": "exp(-loss): solutions that stay as they are",
                },
                share=True,
            ),
            Chart(
                "Groups and completions",
                {
                    "reward/zero_spread_share": "groups without spread",
                    "response/truncated_share": "truncated completions",
                    "held_out/truncated_share": "truncated held-out completions",
                },
                share=True,
            ),
            Chart(
                "Length of completions, tokens",
                {
                    "response/length_mean": "mean",
                    "response/length_max": "longest",
                    "held_out/length_mean": "held-out mean",
                },
            ),
            Chart("Steps left out", {"train/skipped_steps": "gradients not finite, so far"}),
        ),
    ),
    "convergence": (
        "Is it converging?",
        (
            Chart("Penalty", {"penalty/beta_prime": "beta'", "penalty/value": "beta' * mean gate"}),
            Chart("Loss", {"policy/loss": "policy", "loss/distill": "distillation", "loss": "loss of the solutions"}),
            Chart("Gradient of the gates", {"gates/grad_norm": "norm"}),
            Chart("Standard deviation of rewards", {"reward/std": "over the step"}),
            Chart(
                "Rollout against trainer, log-probabilities",
                {"rollout/logprob_diff_mean": "mean difference", "rollout/truncated_share": "weights above the cap"},
            ),
        ),
    ),
    "heads": (
        "Which heads are left?",
        (
            Chart(
                "Gates",
                {
                    "gates/mean": "mean",
                    "gates/below_0.1": "below 0.1",
                    "gates/at_0": "at 0",
                    "gates/at_1": "at 1",
                },
                share=True,
            ),
        ),
    ),
    "time": (
        "Where does the time go?",
        (
            Chart(
                "Seconds per step",
                {
                    "time/step_s": "step",
                    "time/rollout_s": "rollout",
                    "time/reward_s": "reward",
                    "time/update_s": "update",
                    "time/held_out_s": "held-out problems",
                },
            ),
            Chart("CPU seconds per step", {"time/step_cpu_s": "all threads"}),
        ),
    ),
}


def section_of(name: str) -> str:
    """The section of a figure; those of no chart are in ``other``."""
    for section, (_, charts) in SECTIONS.items():
        if any(chart.drawn([name]) for chart in charts):
            return section
    return "other"
