"""Signs that a training collapses, in words, from the records of its log: for the terminal, the page and W&B."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import fmean
from typing import Any, NamedTuple

SPAN = 5  # steps that a mean is taken over
FALLEN = 0.5  # of the best mean reward so far
LEARNABLE = 0.2  # best mean reward below which nothing has fallen
SPREADLESS = 0.95  # share of groups
TRUNCATED = 0.5  # share of completions, and at least twice that of the first steps


class Alert(NamedTuple):
    title: str
    text: str


def alerts(records: Sequence[dict[str, Any]]) -> list[Alert]:
    """What is wrong after the last of ``records``; figures that a finder does not log raise no alert."""
    if not records:
        return []
    found = [_reward(records), _no_signal(records), _truncation(records), _gates(records[-1]), _skipped(records[-1])]
    return [alert for alert in found if alert is not None]


def _mean(records: Sequence[dict[str, Any]], name: str) -> float | None:
    values = [record[name] for record in records if name in record]
    return fmean(values) if len(values) == SPAN else None


def _reward(records: Sequence[dict[str, Any]]) -> Alert | None:
    now = _mean(records[-SPAN:], "reward/mean")
    means = [_mean(records[end - SPAN : end], "reward/mean") for end in range(SPAN, len(records) - SPAN + 1)]
    known = [(mean, end) for end, mean in enumerate(means, start=SPAN) if mean is not None]
    if now is None or not known:
        return None
    best, end = max(known)
    if best < LEARNABLE or now >= FALLEN * best:
        return None
    steps = f"{records[end - SPAN]['step']} to {records[end - 1]['step']}"
    return Alert(
        "The reward has collapsed",
        f"The mean reward fell from {best:.2f} (steps {steps}) to {now:.2f} (the last {SPAN} steps), with "
        f"{records[-1]['gates/below_0.5']:.0%} of the gates below 0.5. The penalty takes heads that the model needs: "
        "lower l1_beta or raise tau. gates.jsonl has the gates of the steps before the fall.",
    )


def _no_signal(records: Sequence[dict[str, Any]]) -> Alert | None:
    spread, reward = (_mean(records[-SPAN:], name) for name in ("reward/zero_spread_share", "reward/mean"))
    if spread is None or reward is None or spread < SPREADLESS or reward >= 0.5:
        return None
    return Alert(
        "No group has a spread",
        f"In the last {SPAN} steps {spread:.0%} of the groups had samples of equal reward, with a mean reward of "
        f"{reward:.2f}: nothing tells the gates what to keep. Take easier problems, more samples per prompt or a lower "
        "l1_beta.",
    )


def _truncation(records: Sequence[dict[str, Any]]) -> Alert | None:
    name = "response/truncated_share"
    first, now = _mean(records[:SPAN], name), _mean(records[-SPAN:], name)
    if first is None or now is None or now < TRUNCATED or now < 2 * first:
        return None
    return Alert(
        "Completions no longer end",
        f"In the last {SPAN} steps {now:.0%} of the completions reached max_completion_length, {first:.0%} in the "
        f"first {SPAN}. Look whether the texts repeat themselves: a model does that after losing too many heads.",
    )


def _gates(last: dict[str, Any]) -> Alert | None:
    if last.get("gates/below_0.1", 0) < 1:
        return None
    return Alert(
        "All gates are below 0.1",
        f"Step {last['step']} leaves no head open: their order is that of noise and of the means over training. Lower "
        "the weight of the penalty, or take the gates of an earlier step from gates.jsonl.",
    )


def _skipped(last: dict[str, Any]) -> Alert | None:
    number = last.get("train/skipped_steps", 0)
    if not number:
        return None
    return Alert(
        "Steps were left out",
        f"The gradients of {number} of {last['step']} steps were not finite; nonfinite_step_*.pt has such batches.",
    )
