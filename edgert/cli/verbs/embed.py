"""`edgert embed`: texts as vectors."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import click

from edgert.cli.flags import CONTEXT, backend_flags, backend_options, flag, json_flag, threads_flag
from edgert.cli.loading import model_path
from edgert.cli.progress import ProgressLine, compiling, notices
from edgert.cli.text import TEXT, decoded
from edgert.cli.verb import verb


@verb()
@flag("-m", "--model", metavar="MODEL", help="The model, best one made for embeddings; without it, smollm2.")
@click.option("-p", "--prompt", "prompts", multiple=True, type=TEXT, help="A text; may be given several times.")
@flag(
    "-f",
    "--file",
    "text_path",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    help="A file with a text in each line; without it and -p, standard input is one.",
)
@flag("-c", "--ctx-size", type=CONTEXT, help="Tokens that a text may have; without it: 4096, or the model's.")
@flag("--pooling", type=click.Choice(["mean", "cls", "last"]), help="Whose states count; without it, as the file says.")
@click.option("--no-normalize", is_flag=True, help="Leave vectors as long as they are, in place of length 1.")
@threads_flag
@backend_flags
@json_flag
def command(
    model: str | None,
    prompts: tuple[str, ...],
    text_path: Path | None,
    ctx_size: int | None,
    pooling: Any,
    no_normalize: bool,
    threads: int | None,
    as_json: bool,
    **flags: Any,
) -> None:
    """Prints a vector for each text, one line each; with --json in OpenAI's shape.

    The text is read as the model's makers meant it, with the tokens that their tokenizer puts around it.
    """
    from edgert.loading import load

    engines = backend_options(flags)
    texts = list(prompts)
    if text_path or not texts:
        data = text_path.read_bytes() if text_path else sys.stdin.buffer.read()
        lines = decoded(data, str(text_path or "Standard input")).splitlines()
        texts += [line for line in lines if line]
    if not texts:
        raise click.UsageError("There is no text: give -p, -f, or lines on standard input.")
    path = model_path(model)
    line = ProgressLine()
    with line, notices(line):
        loaded = load(path, n_ctx=ctx_size, n_threads=threads, spec="off", progress=compiling(line), **engines)
    with loaded:
        ids = [loaded.tokenizer.encode_whole(text) for text in texts]
        vectors = loaded.embed(ids, pooling, normalize=not no_normalize)
    if not as_json:
        for vector in vectors:
            click.echo(" ".join(f"{value:.8g}" for value in vector.tolist()))
        return
    count = sum(map(len, ids))
    entries = [{"object": "embedding", "index": i, "embedding": v.tolist()} for i, v in enumerate(vectors)]
    usage = {"prompt_tokens": count, "total_tokens": count}
    click.echo(json.dumps({"object": "list", "model": str(model or path.name), "data": entries, "usage": usage}))
