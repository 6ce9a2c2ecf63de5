r"""Write problems with their answers to a JSONL file, unfiltered: a test set, or training data that
nothing selected.

    python data_prep/draw_problems.py --num-problems 200 --steps 3-12 --seed 2000003 --output problems.jsonl
    python data_prep/draw_problems.py --config filter_tiny \
        --as-many-as results/curriculum_tiny/curriculum.jsonl --output raw.jsonl

With ``--as-many-as`` it draws, with the seed, as many problems as that curriculum has from the pool
that the filter with this ``--config`` starts from: neither chosen by what the model solves nor
sampled by length.  This is the ablation without self-distilled data (arXiv 2510.08525, figure 8).
"""

from rlkv.cli.app import parse, run_app


def main() -> None:
    from rlkv.data.draw import DrawConfig, draw

    config = parse(DrawConfig, __doc__)
    print(f"{draw(config)} problems: {config.output}")


if __name__ == "__main__":
    run_app(main)
