"""Sample for a training run on a GPU of its own: the layout in which one GPU trains and another one samples.

    CUDA_VISIBLE_DEVICES=1 python rollout/serve_vllm.py --model ./my-model --sink 128 --window 256 --max-positions 8192
    CUDA_VISIBLE_DEVICES=0 python train/grpo_gates.py --config configs/llama8b.yaml --rollout vllm-server

The trainer sends the gates (a few hundred numbers) before every step and gets completions with log-probabilities.
The server keeps nothing: kill it and start it again, and the training goes on where it waits.  It takes requests from
anyone who reaches its port: leave --host at this machine unless the network is yours.

GET /health says which model it serves and whether it is busy.
"""

from __future__ import annotations

from typing import Annotated

import typer

from rlkv.cli.errors import help_text, run_app

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False, rich_markup_mode=None)


@app.command(help=help_text(__doc__))
def main(
    model: Annotated[str, typer.Option(help="hub id, local folder, or tiny (built in)")] = "tiny",
    sink: Annotated[int, typer.Option(help="first tokens that the local branch sees, as in the training")] = 128,
    window: Annotated[int, typer.Option(help="last tokens that the local branch sees, as in the training")] = 256,
    engine: Annotated[str, typer.Option(help="vllm, or hf: plain transformers")] = "vllm",
    host: Annotated[str, typer.Option(help="address to listen on")] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="port to listen on, 0: a free one")] = 8700,
    dtype: Annotated[str, typer.Option(help="auto, float32, bfloat16 or float16")] = "auto",
    max_positions: Annotated[
        int | None, typer.Option(help="tokens of a prompt and its completion, default: what the model allows")
    ] = None,
    kv_gib: Annotated[float, typer.Option(help="memory of vLLM's KV cache in GiB")] = 4.0,
    max_rows: Annotated[int, typer.Option(min=1, help="completions decoded at once")] = 64,
    eager: Annotated[bool, typer.Option(help="neither compile the model nor capture graphs")] = False,
) -> None:
    from rlkv.attention.sizes import SinkWindow
    from rlkv.rollout.server import RolloutServer
    from rlkv.training.serve import load_gated_engine

    sizes = SinkWindow(sink, window)
    loaded, facts = load_gated_engine(engine, model, sizes, dtype, max_positions, kv_gib, max_rows, eager)
    with RolloutServer((host, port), loaded, facts) as server:
        print(f"serving {model} at http://{host}:{server.server_port} (sink {sink}, window {window})", flush=True)
        server.serve_forever()


if __name__ == "__main__":
    run_app(app)
