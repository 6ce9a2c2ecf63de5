r"""Measure which KV heads the built-in tiny model needs: the yardstick for every method that finds heads.

    python inference/tiny_ground_truth.py            # writes rlkv/tiny/model/ground_truth.json

Three measurements with sink 4 and window 16 over chains of 3 to 12 definitions (decoding with prefill full):
  1. the greedy accuracy with the full cache, with random halves of the heads compressible (10 draws), and with
     each single head compressible;
  2. a greedy backward elimination: heads are made compressible one by one, each time the one whose loss leaves
     the most correct solutions reproduced under teacher forcing (ties: the highest mean log-probability);
  3. the greedy accuracy, by decoding, after every step of that elimination.
"""

from __future__ import annotations

import json

from rlkv.cli.errors import run_app
from rlkv.cli.options import parse
from rlkv.utils.atomic import write_json


def main() -> None:
    from rlkv.evaluation.heads.ground_truth import GroundTruthConfig, measure_ground_truth
    from rlkv.utils.provenance import provenance

    config = parse(GroundTruthConfig, __doc__)
    result = measure_ground_truth(config)
    write_json(config.output, {**result, **provenance()})
    shown = ("full_accuracy", "random_half_mean", "heads_removable_before_0.95")
    print(json.dumps({name: result[name] for name in shown}, indent=2))


if __name__ == "__main__":
    run_app(main)
