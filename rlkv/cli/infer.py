"""``rlkv-infer``: answer a prompt, a file of problems or a chat with a compressed KV cache."""

from __future__ import annotations

import sys
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from rlkv.cli.errors import run_app

if TYPE_CHECKING:
    from rlkv.cli.infer_setup import Setup

app = typer.Typer(add_completion=False, rich_markup_mode=None, pretty_exceptions_enable=False)


@app.command()
def infer(
    gates: Annotated[
        str | None, typer.Option(help="Gates file or folder (gates.pt, .safetensors, .tsv, PEFT).")
    ] = None,
    sparsity: Annotated[
        float | None, typer.Option(help="Share of KV heads to compress, 0 to 1; with --gates 0.5 if not given.")
    ] = None,
    eviction: Annotated[
        str | None,
        typer.Option(
            help="What compressible heads keep: rkv, rpc, snapkv, h2o, tova, random, sink_window; vllm: rkv, snapkv."
        ),
    ] = None,
    budget: Annotated[int | None, typer.Option(help="Entries per head that --eviction keeps.")] = None,
    ratio: Annotated[float | None, typer.Option(help="Instead of --budget: share of the text so far.")] = None,
    eviction_option: Annotated[
        list[str] | None, typer.Option(help="A field of the policy, as variant=published; may be repeated.")
    ] = None,
    show_kept: Annotated[
        Path | None, typer.Option(help="With --prompt: write a page that shows which tokens are still held.")
    ] = None,
    model: Annotated[
        str | None, typer.Option(help="Model folder, hub id or 'tiny'; default: the one that the gates name.")
    ] = None,
    prompt: Annotated[str | None, typer.Option(help="Answer this and stop.")] = None,
    input: Annotated[Path | None, typer.Option(help="JSONL with a field 'problem' (and 'answer') per line.")] = None,
    output: Annotated[Path | None, typer.Option(help="Where the answers to --input go; a rerun resumes.")] = None,
    template: Annotated[str, typer.Option(help="Prompt template: rlkv (as trained), boxed or plain.")] = "rlkv",
    sink: Annotated[
        int | None, typer.Option(help="First tokens that compressible heads keep; default: gates'.")
    ] = None,
    window: Annotated[int | None, typer.Option(help="Last tokens that they keep; default: gates'.")] = None,
    prefill: Annotated[
        str | None,
        typer.Option(help="Prompts are read 'full' or, as in training, 'local'; default: full, with vllm local."),
    ] = None,
    scope: Annotated[str, typer.Option(help="Heads compete in the whole model ('global') or per 'layer'.")] = "global",
    max_new_tokens: Annotated[int, typer.Option(help="Longest answer, in tokens.")] = 512,
    temperature: Annotated[float, typer.Option(help="0 is greedy.")] = 0.0,
    top_p: Annotated[float, typer.Option(help="Nucleus sampling.")] = 1.0,
    seed: Annotated[int, typer.Option(help="Seed of the sampling.")] = 0,
    dtype: Annotated[str, typer.Option(help="auto, float32, bfloat16 or float16.")] = "auto",
    device: Annotated[str, typer.Option(help="auto, cpu, cuda or cuda:N.")] = "auto",
    batch_size: Annotated[int, typer.Option(help="Problems of --input that are decoded together.")] = 8,
    compare_full: Annotated[bool, typer.Option("--compare-full", help="Decode with the full cache too.")] = False,
    backend: Annotated[
        str, typer.Option(help="hf (transformers) or vllm, for many texts at once (docs/SERVING.md).")
    ] = "hf",
) -> None:
    """Generate with the full KV cache in the heads that need it and a small one in all others.

    Which heads stay full is said by --gates, what the others keep by --eviction (without it: sinks and a window).

    \b
    One prompt, on the built-in model after `make demo`:
      rlkv-infer --gates results/demo/gates.pt --sparsity 0.5 --prompt "a=7 . b=2 . c = b + a . find c ?"
    A chat (end it with Ctrl-D, start over with /reset):
      rlkv-infer --gates results/demo/gates.pt --sparsity 0.5
    A file of problems, resumed where it stopped, with accuracy if they have answers:
      rlkv-infer --gates gates.pt --sparsity 0.5 --input problems.jsonl --output answers.jsonl
    The same against the full cache, side by side:
      rlkv-infer --gates gates.pt --sparsity 0.5 --input problems.jsonl --output both.jsonl --compare-full
    R-KV in the compressible heads, and in all heads (token eviction as published):
      rlkv-infer --gates gates.pt --sparsity 0.5 --eviction rkv --budget 256 --prompt "..."
      rlkv-infer --model tiny --eviction rkv --budget 64 --prompt "..." --show-kept kept.html
    Many problems at once through vLLM (pip install 'rlkv[vllm]'):
      rlkv-infer --backend vllm --gates gates.pt --batch-size 64 --input problems.jsonl --output answers.jsonl
    Another model, sampled:
      rlkv-infer --gates gates.pt --model ./Qwen3-4B --prompt "..." --temperature 0.6 --top-p 0.95
    """
    if prompt is not None and (input or output):
        raise ValueError("--prompt answers one text, --input and --output a file of them: pass one or the other")
    if (input is None) != (output is None):
        raise ValueError("--input and --output belong together: the problems, and where their answers go")
    if prompt is not None and not prompt.strip():
        raise ValueError("--prompt is empty: there is nothing to answer")
    if compare_full and prompt is None and input is None:
        raise ValueError("--compare-full needs --prompt or --input: a chat has one course only")
    if show_kept is not None and prompt is None:
        raise ValueError("--show-kept needs --prompt: its page shows one text")
    from rlkv.cli.infer_setup import build_policy, build_served, build_setup, check_backend
    from rlkv.inference.batch import read_problems
    from rlkv.rollout.base import SamplingParams

    chat = prompt is None and input is None
    check_backend(backend, chat, show_kept, compare_full, device)
    policy = build_policy(eviction, budget, ratio, eviction_option or [])
    # before the model is loaded
    problems = [prompt or ""] if input is None else [row["problem"] for row in read_problems(input)]
    sampling = SamplingParams(max_new_tokens, temperature=temperature, top_p=top_p, seed=seed)
    if backend == "vllm":
        request = {"scope": scope, "sink": sink, "window": window, "prefill": prefill}
        setup = build_served(gates, sparsity, policy, model, request, dtype, batch_size, sampling, template, problems)
        if prompt is not None:
            _answer_served(setup, prompt)
        elif input is not None and output is not None:
            _answer_file(setup, input, output, compare_full=False)
        return
    sizes = {"sink": sink, "window": window, "prefill": prefill or "full"}
    record = show_kept is not None
    setup = build_setup(
        gates, sparsity, scope, policy, model, sizes, dtype, device, batch_size, record, sampling, template
    )
    if prompt is not None:
        _answer(setup, prompt, compare_full, show_kept)
    elif input is not None and output is not None:
        _answer_file(setup, input, output, compare_full)
    else:
        _chat(setup)


def _say(text: str) -> None:
    """Facts go to stderr: stdout is the model's text alone."""
    print(text, file=sys.stderr, flush=True)


def _stream(text: str) -> None:
    print(text, end="", flush=True)


def _answer(setup: Setup, prompt: str, compare_full: bool, show_kept: Path | None) -> None:
    from rlkv.models.prompts import render_prompt

    engine = setup.engine
    ids = engine.encode(render_prompt(engine.tokenizer, prompt, setup.template))
    reply = engine.reply(ids, setup.sampling, _stream)
    print(flush=True)
    if show_kept is not None:
        from rlkv.inference.kept_page import write_kept_page

        write_kept_page(show_kept, engine.tokenizer, ids + reply.completion.token_ids, len(ids), reply.cache)
        _say(f"kept tokens: {show_kept}")
    if not compare_full:
        _say(f"{reply.usage.summary()}, {setup.heads()}")
        return
    _say("--- full cache:")
    full = engine.reply(ids, setup.sampling, _stream, full=True)
    print(flush=True)
    same = "the same tokens" if reply.completion == full.completion else "other tokens"
    _say(f"compressed  {reply.usage.summary()}, {setup.heads()}")
    _say(f"full cache  {full.usage.summary()}, {same}")


def _answer_served(setup: Setup, prompt: str) -> None:
    from rlkv.models.prompts import render_prompt

    (completion,), usage = setup.engine.batch(
        [render_prompt(setup.engine.tokenizer, prompt, setup.template)], setup.sampling
    )
    print(completion.text, flush=True)
    _say(f"{usage.summary()}, {setup.heads()}")


def _answer_file(setup: Setup, input_path: Path, output_path: Path, compare_full: bool) -> None:
    from rlkv.inference.batch import run_batches

    with _progress() as on_progress:
        report = run_batches(
            setup.engine,
            input_path,
            output_path,
            setup.sampling,
            setup.settings,
            template=setup.template,
            compare_full=compare_full,
            on_progress=on_progress,
        )
    earlier = f", {report.resumed} of them from an earlier run" if report.resumed else ""
    _say(f"{len(report.rows)} answers in {output_path}{earlier}")
    for name, usage, field in (("compressed", report.usage, ""), ("full cache", report.usage_full, "_full")):
        if usage.tokens:
            _say(f"{name}  {usage.summary()} (largest batch)" + ("" if field else f", {setup.heads()}"))
        accuracy = report.accuracy("correct" + field)
        if accuracy is not None:
            _say(f"{name}  accuracy {accuracy:.4f} over {len(report.rows)} problems")


@contextmanager
def _progress() -> Any:
    from rich.console import Console
    from rich.progress import (
        BarColumn,
        MofNCompleteColumn,
        Progress,
        TextColumn,
        TimeElapsedColumn,
        TimeRemainingColumn,
    )

    columns = (BarColumn(), MofNCompleteColumn(), TextColumn("problems"), TimeElapsedColumn(), TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True)) as bar:
        task = bar.add_task("decode", total=None)
        yield lambda done, total: bar.update(task, completed=done, total=total)


def _chat(setup: Setup) -> None:
    from rlkv.inference.engine import Chat

    chat = Chat(setup.engine, setup.sampling, setup.template)
    _say("Chat: /reset starts over, Ctrl-D ends.")
    while True:
        try:
            message = input("> " if sys.stdin.isatty() else "").strip()
        except EOFError:
            return
        if message == "/reset":
            chat.reset()
        elif message:
            _chat_turn(setup, chat, message)


def _chat_turn(setup: Setup, chat: Any, message: str) -> None:
    restarted = chat.restarted
    try:
        reply = chat.say(message, _stream)
    except ValueError as error:  # a text that became too long ends the turn, not the chat
        _say(f"error: {error}")
        return
    except KeyboardInterrupt:
        _say("\nstopped; this turn is forgotten")
        return
    print(flush=True)
    note = ", the template rewrote the past: read anew" if chat.restarted > restarted else ""
    _say(f"{reply.usage.summary()}, {setup.heads()}{note}")


def main() -> None:
    """Entry point of ``rlkv-infer``."""
    run_app(app)


if __name__ == "__main__":
    main()
