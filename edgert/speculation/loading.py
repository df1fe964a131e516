"""Finds and loads what guesses for a model: its draft, if there is one, and the memory of n-grams."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from edgert.backends.base import Backend
from edgert.devices import probe
from edgert.errors import EdgertError, RequestError, UnsupportedFormatError
from edgert.options import integer, real
from edgert.speculation.draft_model import DraftModel
from edgert.speculation.economics import Costs
from edgert.speculation.speculator import SPEC_MAX, Speculator
from edgert.store.catalogue import CATALOGUE

if TYPE_CHECKING:
    from edgert.quantize.gguf_file import GGUFFile

logger = logging.getLogger(__name__)

KINDS = ("auto", "draft", "ngram", "off")
ASSETS = Path(__file__).resolve().parent.parent / "assets"
FEW_THREADS = 4  # with more, waiting for each other takes longer than a model so small (16: 1.8 times as long)
FREQUENT = "edgert.draft.frequent_tokens"  # metadata of a draft: int32, ids of tokens, the most frequent first
TOKENS = "tokenizer.ggml.tokens"
N_COMMON = 8192  # of these that it guesses
MOST = 62  # tokens guessed in a step; with more, the cpu backend would compute some of them in another form


@dataclass(frozen=True)
class Settings:
    """How a model is to speculate.

    kind:   "draft": with a small model; "ngram": with what was already said; "auto": both take turns; "off";
            None: "auto" where a draft is named, or one was made for the model and the cpu backend runs it; else "off"
    draft:  a path or name of the small model; None: the one made for this model, where there is one
    most:   tokens guessed in a step; least: tokens always guessed, paying or not
    p_min:  the draft's tokens below this probability are not guessed

    Raises: RequestError naming the argument of `load`.
    """

    kind: str | None = None
    draft: str | os.PathLike[str] | None = None
    most: int = SPEC_MAX
    least: int = 0
    p_min: float = 0.0

    def __post_init__(self) -> None:
        if self.kind is not None and self.kind not in KINDS:
            raise RequestError.wrong("spec", f"one of {', '.join(KINDS)}", self.kind)
        integer("spec_max", self.most, 1, MOST)
        integer("spec_min", self.least, 0, self.most)
        real("spec_p_min", self.p_min, 0, 1)


def speculator(
    file: GGUFFile,
    backend: Backend,
    settings: Settings,
    *,
    n_threads: int | None = None,
    n_parallel: int | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> Speculator | None:
    """What guesses for the model of `file`, which `backend` runs; None: nothing does.

    n_parallel:  requests that have a step together; None: as many as the backend has sequences

    Raises: EdgertError when a draft that was asked for cannot serve.
    """
    from edgert.quantize.gguf_file import GGUFFile

    known = None
    if settings.draft is None and settings.kind in (None, "auto", "draft"):
        known = find_made_for(file)
    usual = settings.draft is not None or (known is not None and backend.verdict.backend == "cpu")
    kind = settings.kind or ("auto" if usual else "off")  # guesses where they are known to pay
    if kind == "off":
        return None
    model, names = None, [] if kind == "draft" else ["what was said"]
    if kind != "ngram":
        asked = settings.draft is not None or kind == "draft"
        try:
            draft = known if settings.draft is None else find(settings.draft)
            if draft is not None:
                with GGUFFile.open(draft) as small:
                    check_vocabulary(file, small)
                    model = DraftModel(_load(small, backend, settings.most, n_threads, progress))
                names.insert(0, draft.stem)
            elif asked:
                raise EdgertError(
                    f"No draft is known for {file.path.name}: name a small model of the same vocabulary with -md, "
                    "or choose --spec-type ngram."
                )
        except EdgertError as error:
            if asked:
                raise
            logger.warning("Speculation goes without the model's draft: %s", error)
    n_most = min(settings.most + (n_parallel or backend.n_seq_max), backend.n_ctx)
    backend.prepare(n_most)
    costs = Costs.measure(backend, n_most)
    return Speculator(
        backend.n_ctx,
        backend.n_seq_max,
        costs,
        model,
        ngram=kind != "draft",
        target=backend,
        most=settings.most,
        least=settings.least,
        p_min=settings.p_min,
        name=" and ".join(names),
    )


def _load(
    draft: GGUFFile, target: Backend, most: int, n_threads: int | None, progress: Callable[[int, int], None] | None
) -> Backend:
    """The draft, with as many sequences as the target: on the processor, whose engine guesses in one call what other
    engines need a call a token for, beside a target on a GPU too."""
    from edgert import backends
    from edgert.backends.cpu.draft import CpuDraft

    n_ctx = min(target.n_ctx, draft.get(f"{draft.architecture}.context_length", int))
    if target.verdict.backend != "cpu":  # whose threads would be shared
        n_threads = min(probe.default_threads() if n_threads is None else n_threads, FEW_THREADS)
    try:
        return CpuDraft(
            draft,
            n_guesses=most,
            common=_common(draft),
            n_ctx=n_ctx,
            n_threads=n_threads,
            n_seq_max=target.n_seq_max,
            n_cached=n_ctx + 512,
            beside=target,
            progress=progress,
        )
    except UnsupportedFormatError:
        name = target.verdict.backend
        return backends.load(draft, backend=name, n_ctx=n_ctx, n_threads=n_threads, n_seq_max=target.n_seq_max)


def _common(file: GGUFFile) -> NDArray[np.int64] | None:
    """int64, ascending: the tokens that a draft guesses, where its file says which are frequent."""
    ids = file.metadata.get(FREQUENT)
    if ids is None:
        return None
    return np.unique(np.asarray(ids, np.int64)[:N_COMMON])


def find(draft: str | os.PathLike[str]) -> Path:
    """The file of a draft's path or name. Raises: EdgertError when there is none."""
    from edgert import store

    packed = ASSETS / f"{os.fspath(draft)}.gguf"
    if packed.parent == ASSETS and packed.is_file():
        return packed
    return store.resolve(draft)


def find_made_for(file: GGUFFile) -> Path | None:
    """The draft that the catalogue has for this model, beside its file or in the package; None: there is none."""
    name = file.metadata.get("general.name")
    entry = next((e for e in CATALOGUE.values() if isinstance(name, str) and e.draft and e.title_in_file == name), None)
    places = (file.path.parent, ASSETS) if entry else ()
    return next((p / entry.draft for p in places if entry and (p / entry.draft).is_file()), None)


def check_vocabulary(target: GGUFFile, draft: GGUFFile) -> None:
    """Raises: EdgertError unless both models have the same tokens under the same ids."""
    files = target, draft
    if all(TOKENS in file.metadata for file in files) and target.raw_value(TOKENS) == draft.raw_value(TOKENS):
        return
    ours, theirs = map(_tokens, files)
    if len(ours) != len(theirs):
        raise EdgertError(
            f"The draft {draft.path.name} has a vocabulary of {len(theirs)} tokens and {target.path.name} one of "
            f"{len(ours)}: a draft must share its model's vocabulary."
        )
    if ours != theirs:
        place = next(i for i, (x, y) in enumerate(zip(ours, theirs, strict=True)) if x != y)
        raise EdgertError(
            f"The draft {draft.path.name} and {target.path.name} have {len(ours)} tokens each, but not the same "
            f"(the first other one is {place}): a draft must share its model's vocabulary."
        )


def _tokens(file: GGUFFile) -> list[bytes]:
    return file.metadata.strings(TOKENS)
