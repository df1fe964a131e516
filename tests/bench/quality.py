"""How far the engines are from a float32 evaluation of the dequantized weights, and from each other.

    python tests/bench/quality.py MODEL.gguf TEXT.txt [--engines cpu,llama] [--chunks 16] [--greedy 20]

Per engine: perplexity, KL divergence from the float32 evaluation, same-top rate; then greedy answers of the
first two engines to the same prompts, with every first difference and how near a tie it was in float32.
The float32 evaluation is tests/reference.py; its last hidden states are kept in the temporary folder.
"""

from __future__ import annotations

import hashlib
import json
import sys
import tempfile
import time
from collections.abc import Container
from pathlib import Path

import click
import numpy as np
from numpy.typing import NDArray

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from reference import HEAD_ROWS, Floats, Reference, rms_norm, softcap

from edgert.backends.base import Backend, Batch
from edgert.evaluate import STEP_LOGITS, chunks_of, scored
from edgert.quantize.divergence import Evaluation, Tally
from edgert.quantize.gguf_file import GGUFFile
from edgert.template import ChatTemplate
from edgert.tokenizer import Tokenizer

N_GREEDY = 48  # tokens of each greedy answer
PROMPTS = [
    "Hi",
    "What is the capital of France?",
    "Name three colours.",
    "Write a short poem about the sea.",
    "Explain in one sentence why the sky is blue.",
    "How do I boil an egg?",
    "Translate 'good morning' into Spanish.",
    "What is 17 plus 25?",
    "Give me a recipe for pancakes.",
    "Who wrote Romeo and Juliet?",
    "List the planets of the solar system.",
    "What does a compiler do?",
    "Write a Python function that adds two numbers.",
    "Tell me a story about a fox and a crow.",
    "Why do leaves change colour in autumn?",
    "What is the opposite of cold?",
    "Describe a rainy day in a city.",
    "How many days are in a leap year?",
    "Suggest a name for a small grey cat.",
    "What should I pack for a trip to the mountains?",
]


class FloatModel(Reference):
    """The float32 evaluation in two parts: all layers, then the output head for some places."""

    def hidden(self, tokens: NDArray[np.int32]) -> Floats:
        """Token ids (n,) -> what the output head reads, (n, n_embd)."""
        a = self.architecture
        x = self.weight("token_embd.weight", np.asarray(tokens)) * self.dtype(a.embedding_scale)
        for i, layer in enumerate(a.layers):
            x = self.layer(i, layer, x)
        return rms_norm(x, self.weight("output_norm.weight"), a.norm_eps)

    def head(self, hidden: Floats) -> Floats:
        """(n, n_embd) -> logits (n, n_vocab)."""
        a = self.architecture
        whole = self.weight("token_embd.weight" if a.tied_head else "output.weight")
        out = np.empty((len(hidden), a.n_vocab), np.float32)
        for start in range(0, a.n_vocab, HEAD_ROWS):
            np.matmul(hidden, whole[start : start + HEAD_ROWS].T, out=out[:, start : start + HEAD_ROWS])
        return softcap(out, a.final_logit_softcapping)


def hidden_states(model: FloatModel, path: Path, chunks: NDArray[np.int32]) -> Floats:
    """(n_chunks, n_ctx, n_embd), computed once for a file and these chunks."""
    facts = path.stat()
    key = hashlib.sha256(f"{path.resolve()} {facts.st_size} {facts.st_mtime_ns}".encode() + chunks.tobytes())
    kept = Path(tempfile.gettempdir()) / f"edgert-quality-{key.hexdigest()[:16]}.npy"
    if kept.is_file():
        return np.load(kept)
    rows = []
    for i, chunk in enumerate(chunks):
        click.echo(f"\rfloat32 evaluation: chunk {i + 1} of {len(chunks)}", err=True, nl=False)
        rows.append(model.hidden(chunk))
    click.echo(err=True)
    states = np.stack(rows).astype(np.float32)
    np.save(kept, states)
    return states


def distances(
    engines: dict[str, Backend], model: FloatModel, states: Floats, chunks: NDArray[np.int32]
) -> dict[str, Evaluation]:
    """Each engine against the float32 evaluation."""
    n_vocab = model.architecture.n_vocab
    step = min(STEP_LOGITS // n_vocab, *(engine.n_batch for engine in engines.values()), chunks.shape[1])
    tallies = {name: Tally() for name in engines}
    for i, chunk in enumerate(chunks):
        for results in zip(*(scored(engine, chunk, step) for engine in engines.values()), strict=True):
            places = results[0][0]
            base = model.head(states[i, places])
            for tally, (_, logits) in zip(tallies.values(), results, strict=True):
                tally.add(logits, chunk[places.start + 1 : places.stop + 1], base)
        click.echo(f"\rengines: chunk {i + 1} of {len(chunks)}", err=True, nl=False)
    click.echo(err=True)
    return {name: tally.result(*chunks.shape) for name, tally in tallies.items()}


def greedy(engine: Backend, prompt: list[int], n: int, ends: Container[int]) -> list[tuple[int, Floats]]:
    """At most n likeliest tokens after a prompt, an end token the last, each with the logits it was chosen from."""
    engine.free(0)
    logits = engine.forward(Batch.of(prompt, 0))[0].copy()
    out = []
    for i in range(n):
        token = int(logits.argmax())
        out.append((token, logits))
        if token in ends:
            break
        logits = engine.forward(Batch.of([token], len(prompt) + i))[0].copy()
    return out


def parting(first: list[int], second: list[int]) -> int | None:
    """The place at which two texts part; None: nowhere, as far as the shorter one goes."""
    return next((i for i, (x, y) in enumerate(zip(first, second, strict=False)) if x != y), None)


def compare_greedy(
    engines: dict[str, Backend], model: FloatModel, tokenizer: Tokenizer, template: ChatTemplate, n_prompts: int
) -> None:
    """Prints where the greedy texts of two engines part, and the float32 margin there; how far each is float32's own.

    A difference is a near tie when float32's own margin between the two tokens is within three times the
    larger root-mean-square error of the engines' logits at that place. Where it is no tie, the one that
    chooses otherwise than float32 is at fault.
    """
    (one, first), (other, second) = list(engines.items())[:2]
    parted: dict[str, list[int | None]] = {"each other": [], one: [], other: []}
    ties, faults = 0, {one: 0, other: 0}
    for prompt in PROMPTS[:n_prompts]:
        pieces = template.render([{"role": "user", "content": prompt}], add_generation_prompt=True)
        ids = tokenizer.encode_pieces(pieces)
        a, b = (greedy(engine, ids, N_GREEDY, tokenizer.end_ids) for engine in (first, second))
        texts = {one: [token for token, _ in a], other: [token for token, _ in b]}
        exact = {
            name: model.head(model.hidden(np.array(ids + text[:-1], np.int32))[len(ids) - 1 :])
            for name, text in texts.items()
        }
        for name, text in texts.items():
            parted[name].append(parting(text, exact[name].argmax(axis=1).tolist()))
        place = parting(texts[one], texts[other])
        parted["each other"].append(place)
        if place is None:
            continue
        (x, x_logits), (y, y_logits) = a[place], b[place]
        reference = exact[one][place]
        errors = {name: float(np.std(logits - reference)) for name, logits in ((one, x_logits), (other, y_logits))}
        margin = float(reference[x] - reference[y])
        near = abs(margin) <= 3 * max(errors.values())
        wrong = one if margin < 0 else other
        ties += near
        faults[wrong] += not near
        click.echo(
            f"  {prompt!r} parts at token {place}: {one} {tokenizer.piece(x)!r} by {x_logits[x] - x_logits[y]:.4f}, "
            f"{other} {tokenizer.piece(y)!r} by {y_logits[y] - y_logits[x]:.4f}, float32 {margin:+.4f}; "
            f"logit errors {errors[one]:.4f}, {errors[other]:.4f}: {'near tie' if near else f'{wrong} is off'}"
        )
    same = {name: sum(place is None or place >= 32 for place in places) for name, places in parted.items()}
    click.echo(
        f"greedy, {n_prompts} prompts, at most {N_GREEDY} tokens: {same['each other']} equal for 32 or to the "
        f"end; {ties} part at a near tie, {faults[one]} where {one} and {faults[other]} where {other} is off; "
        f"equal to float32's for 32 tokens: {one} {same[one]}, {other} {same[other]}"
    )


@click.command(help=__doc__)
@click.argument("model", type=click.Path(exists=True, path_type=Path))
@click.argument("text", type=click.Path(exists=True, path_type=Path))
@click.option("--engines", default="cpu,llama", show_default=True)
@click.option("-c", "--ctx-size", default=512, show_default=True)
@click.option("--chunks", "n_chunks", default=16, show_default=True)
@click.option("--greedy", "n_prompts", default=20, show_default=True, help="Prompts; 0: none.")
@click.option("-t", "--threads", default=2, show_default=True)
@click.option("--json", "as_json", is_flag=True)
def main(
    model: Path, text: Path, engines: str, ctx_size: int, n_chunks: int, n_prompts: int, threads: int, as_json: bool
) -> None:
    with GGUFFile.open(model) as file:
        tokenizer, template = Tokenizer.from_gguf(file), ChatTemplate.from_gguf(file)
    content = text.read_bytes().decode("utf-8").removesuffix("\n")
    chunks = chunks_of(tokenizer, content, ctx_size, n_chunks)
    exact = FloatModel(model)
    states = hidden_states(exact, model, chunks)
    running = {name: load(model, name, max(ctx_size, 1024), threads) for name in engines.split(",")}
    started = time.perf_counter()
    results = distances(running, exact, states, chunks)
    click.echo(f"{time.perf_counter() - started:.1f} s", err=True)
    if as_json:
        click.echo(json.dumps({name: result.as_dict() for name, result in results.items()}, indent=1))
    else:
        for name, result in results.items():
            other = result.against
            assert other is not None
            click.echo(
                f"{name:<8} perplexity {result.perplexity:.4f} (float32 {other.perplexity_base:.4f}, "
                f"ratio {other.ratio:.6f})  KLD mean {other.kld_mean:.6f} ± {other.kld_error:.6f}, "
                f"99 % {other.kld_99:.5f}, 99.9 % {other.kld_999:.5f}, max {other.kld_max:.4f}, "
                f"same top {100 * other.same_top:.3f} %"
            )
    if n_prompts and len(running) > 1:
        compare_greedy(running, exact, tokenizer, template, n_prompts)
    for engine in running.values():
        engine.close()


def load(path: Path, name: str, n_ctx: int, n_threads: int) -> Backend:
    if name == "llama":
        from edgert.backends.llama.backend import LlamaBackend

        return LlamaBackend(path, n_ctx=n_ctx, n_threads=n_threads)
    from edgert import backends

    return backends.load(path, backend=name, n_ctx=n_ctx, n_threads=n_threads, cache_type_k="f16", cache_type_v="f16")


if __name__ == "__main__":
    main()
