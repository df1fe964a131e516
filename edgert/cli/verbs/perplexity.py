"""`edgert perplexity`: how well a model predicts a text, and how far it is from another one."""

from __future__ import annotations

import json
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from edgert.cli.flags import CONTEXT, backend_flags, backend_options, flag, json_flag, threads_flag
from edgert.cli.loading import model_path
from edgert.cli.progress import ProgressLine, compiling, notices
from edgert.cli.text import decoded
from edgert.cli.verb import verb

if TYPE_CHECKING:
    from edgert.quantize.divergence import Evaluation


@verb()
@flag("-m", "--model", metavar="MODEL", help="The model; without it, smollm2.")
@flag(
    "-f",
    "--file",
    "text_path",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    required=True,
    help="The text, UTF-8.",
)
@flag("-c", "--ctx-size", type=CONTEXT, default=512, show_default=True, help="Tokens of a chunk; 0: the model's.")
@flag("--chunks", type=click.IntRange(1), help="How many chunks at most; all of the text without it.")
@click.option(
    "--against",
    metavar="MODEL|llama",
    help="Compare with another file of the same vocabulary, or with llama.cpp on the same file.",
)
@threads_flag
@backend_flags
@json_flag
def command(
    model: str | None,
    text_path: Path,
    ctx_size: int,
    chunks: int | None,
    against: str | None,
    threads: int | None,
    as_json: bool,
    **flags: Any,
) -> None:
    """Measures the perplexity of MODEL on a text: lower is better.

    The text is cut into chunks of -c tokens and the second half of each is scored, as llama.cpp does it.
    With --against, also how far the predictions are from the other's: KL divergence and agreement.
    """
    from edgert import backends, context
    from edgert.backends import choice
    from edgert.evaluate import check_same_vocabulary, chunks_of, evaluate
    from edgert.quantize.gguf_file import GGUFFile
    from edgert.tokenizer import Tokenizer

    engines = backend_options(flags)
    if against == "llama":
        choice.check_installed(against)
    path = model_path(model)
    base_path = path if against in (None, "llama") else model_path(against)
    text = decoded(text_path.read_bytes(), str(text_path)).removesuffix("\n")  # as llama.cpp reads a prompt file
    line = ProgressLine()
    with notices(line), GGUFFile.open(path) as file:
        ctx_size = ctx_size or context.trained(file)
        context.warn_beyond(file, ctx_size)
        tokenizer = Tokenizer.from_gguf(file)
        if base_path != path:
            with GGUFFile.open(base_path) as base_file:
                check_same_vocabulary(tokenizer, Tokenizer.from_gguf(base_file))
    tokens = chunks_of(tokenizer, text, ctx_size, chunks)
    with ExitStack() as stack:
        stack.enter_context(line)
        stack.enter_context(notices(line))
        arguments: dict[str, Any] = {"n_ctx": ctx_size, "n_threads": threads, "progress": compiling(line)}
        if engines.get("backend") != "onnx":  # weights are judged, not a compact cache
            arguments |= {"cache_type_k": "f16", "cache_type_v": "f16"}
        engine = backends.load(path, **engines, **arguments)
        stack.callback(engine.close)
        base = None
        if against is not None:
            base = backends.load(base_path, **({"backend": "llama"} if against == "llama" else engines), **arguments)
            stack.callback(base.close)
        result = evaluate(
            engine,
            tokens,
            base,
            on_chunk=lambda done, value: line.stage("scoring", done, len(tokens), f"perplexity {value:.4f}"),
        )
        line.clear()
        names = {"model": str(path), "backend": engine.verdict.backend}
        if base is not None:
            names |= {"against_model": str(base_path), "against_backend": base.verdict.backend}
    if as_json:
        click.echo(json.dumps({**names, **result.as_dict()}, indent=1))
    else:
        click.echo(as_text(result, names))


def as_text(result: Evaluation, names: dict[str, str]) -> str:
    """The figures for reading."""
    lines = [
        ("model", f"{names['model']} ({names['backend']})"),
        ("scored", f"{result.n_tokens:,} tokens in {result.n_chunks} chunks of {result.n_ctx}"),
        ("perplexity", f"{result.perplexity:.4f} ± {result.perplexity_error:.4f}"),
    ]
    if other := result.against:
        lines += [
            ("against", f"{names['against_model']} ({names['against_backend']})"),
            ("", f"perplexity {other.perplexity_base:.4f}, ratio {other.ratio:.6f} ± {other.ratio_error:.6f}"),
            ("mean KLD", f"{other.kld_mean:.6f} ± {other.kld_error:.6f}"),
            ("median", f"{other.kld_median:.6f}"),
            ("99 %", f"{other.kld_99:.6f}"),
            ("99.9 %", f"{other.kld_999:.6f}"),
            ("maximum", f"{other.kld_max:.6f}"),
            ("same top", f"{100 * other.same_top:.3f} % ± {100 * other.same_top_error:.3f} %"),
        ]
    return "\n".join(f"{name:<12}{value}" for name, value in lines)
