"""The record of one training step, as it goes to the local log and to W&B."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

# our name: trl's, for what it measures anyway
RESPONSE_METRICS = {
    "response/length_mean": "completions/mean_length",
    "response/length_max": "completions/max_length",
    "response/truncated_share": "completions/clipped_ratio",
}
_MEASURED = (
    *("reward/mean", "reward/std", "reward/zero_spread_share", "penalty/beta_prime", "penalty/value"),
    *("policy/loss", "policy/clip_share"),
    *("rollout/logprob_diff_mean", "rollout/logprob_diff_max", "rollout/truncated_share"),
    *RESPONSE_METRICS,
)


def gate_shares(alpha_LH: Tensor) -> dict[str, float]:
    """Mean of the gates and the shares below 0.1, below 0.5, at 0 and at 1."""
    shares = {"below_0.1": alpha_LH < 0.1, "below_0.5": alpha_LH < 0.5, "at_0": alpha_LH == 0, "at_1": alpha_LH == 1}
    found = {f"gates/{name}": share.float().mean().item() for name, share in shares.items()}
    return {"gates/mean": alpha_LH.mean().item(), **found}


def step_record(
    values: Mapping[str, float], alpha_LH: Tensor, logs: Mapping[str, float], seconds: Mapping[str, float]
) -> dict[str, float]:
    """All that is logged of a step, sections before the slash.

    Args:
        values: what the trainer and trl measured, averaged over the step; of the rollout, that of the last one.
        alpha_LH: the gates after the step.
        logs: the trainer's own ``grad_norm`` and ``learning_rate``.
        seconds: ``rollout``, ``reward`` and the whole ``step``; the update is what remains.  ``cpu`` is the step's CPU
            time, all threads of this process together, without the verifier's processes.
    """
    update = max(0.0, seconds["step"] - seconds["rollout"] - seconds["reward"])
    return {
        **{name: values[name] for name in _MEASURED},
        **gate_shares(alpha_LH),
        "gates/grad_norm": logs["grad_norm"],
        "train/learning_rate": logs["learning_rate"],
        "time/rollout_s": seconds["rollout"],
        "time/reward_s": seconds["reward"],
        "time/update_s": update,
        "time/step_s": seconds["step"],
        "time/step_cpu_s": seconds["cpu"],
    }
