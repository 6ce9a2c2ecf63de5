"""Build a curriculum of problems that the full-cache model solves; the paper's job without options.

    python data_prep/filter_deepscaler.py                           # DeepScaleR from the hub, on a GPU
    python data_prep/filter_deepscaler.py --config filter_tiny      # the built-in model, on a CPU

The same as the command rlkv-filter: see rlkv/cli/filter.py, and --help for the options.
"""

from rlkv.cli.filter import main

if __name__ == "__main__":
    main()
