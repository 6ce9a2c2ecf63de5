"""Speed and memory of the compressed cache: ``rlkv-bench`` from a checkout.

python inference/benchmark.py decode --quick
python inference/benchmark.py compaction
python inference/benchmark.py serving --sparsities 0.5 --rounds 2
"""

from rlkv.cli.bench import main

if __name__ == "__main__":
    main()
