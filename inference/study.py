"""Study rankings of KV heads: ``rlkv-study`` from a checkout; ``--help`` lists the options.

python inference/study.py --gates RLKV=gates.pt --tasks tiny --output-dir results/study
"""

from rlkv.cli.jobs import study_main as main

if __name__ == "__main__":
    main()
