"""Build a curriculum of problems that the full-cache model solves; the paper's job without options.

    python data_prep/filter_deepscaler.py                        # DeepScaleR from the hub, on a GPU
    python data_prep/filter_deepscaler.py --config filter_tiny   # the built-in model, on a CPU

The same as the command rlkv-filter: see rlkv/cli/jobs.py, and --help for the options.
"""

from rlkv.cli.jobs import filter_main as main

if __name__ == "__main__":
    main()
