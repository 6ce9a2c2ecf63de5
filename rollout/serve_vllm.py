"""Sample for a training run on a GPU of its own: the layout in which some GPUs train and others
sample.

    CUDA_VISIBLE_DEVICES=1 python rollout/serve_vllm.py --model ./my-model --sink 128 --window 256
    --max-positions 8192 CUDA_VISIBLE_DEVICES=0 rlkv-train --config llama8b --rollout vllm-server

Several servers, on this machine (--port) or others (--host), are named with --rollout-servers
URL,URL. The trainer sends the gates (a few hundred numbers) before every step and gets completions
with log-probabilities. The server keeps nothing: kill it and start it again, and the training goes
on.  It takes requests from anyone who reaches its port: leave --host at this machine unless the
network is yours.

GET /health says which model it serves and whether it is busy.
"""

from rlkv.cli.app import parse, run_app


def main() -> None:
    from rlkv.training.serve import ServeConfig, serve

    serve(parse(ServeConfig, __doc__))


if __name__ == "__main__":
    run_app(main)
