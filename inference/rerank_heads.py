r"""Measure the order of the heads that the gates keep: for sparsities above those at which the gates are certain.

    python inference/rerank_heads.py --gates outputs/tiny/gates.pt --output outputs/tiny/reranked.pt \
        --curriculum results/curriculum/curriculum.parquet

Heads that are full at sparsity ``--low`` are made compressible one by one up to ``--high``, each time the one without
which the model still reproduces most recorded solutions under teacher forcing (ties: the highest mean
log-probability).  The gates' numbers are handed out in the new order, so the result is used as any gates file; below
``--low`` nothing changes.  It reads the curriculum that the gates were trained on, with the recorded outputs.

The cost is a pass over the traces per score: 50 scores for 24 heads from 0.5 to 0.7, printed before it starts.  The
number grows with the square of the heads: narrow the span for large models.  What it took is kept in the gates file, in
``training["reranked"]``: ``seconds`` on the clock, and ``cpu_seconds`` of all threads.
"""

from rlkv.cli.errors import run_app
from rlkv.cli.options import parse


def main() -> None:
    from rlkv.evaluation.elimination import RerankConfig, rerank_file

    rerank_file(parse(RerankConfig, __doc__))


if __name__ == "__main__":
    run_app(main)
