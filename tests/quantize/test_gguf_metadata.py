"""Metadata changed after the fact: the tensors and all other keys stay bit for bit."""

from __future__ import annotations

from pathlib import Path

import gguf
import pytest
from test_gguf_writer import METADATA, TENSORS, check, fill, leftovers

from edgert.quantize.gguf_file import GGUFFile
from edgert.quantize.gguf_metadata import read_metadata, set_metadata
from edgert.quantize.gguf_value import Value
from edgert.quantize.gguf_writer import Writer

CHANGES: dict[str, Value | None] = {
    "edgert.report.kld": Value.f32(0.02),
    "a.text": Value.string("another, longer than before"),
    "a.i64": None,
    "not.there": None,
}
CHANGED = {key: value for key, value in METADATA.items() if key not in CHANGES} | {
    key: value for key, value in CHANGES.items() if value is not None
}


@pytest.mark.parametrize("split", [None, 500])
def test_keys_change_and_nothing_else(tmp_path: Path, split: int | None) -> None:
    with Writer(tmp_path / "m.gguf", METADATA, TENSORS, split_max_size=split) as writer:
        fill(writer)
    others = {path: path.read_bytes() for path in writer.paths[1:]}
    set_metadata(writer.paths[-1], CHANGES)
    check(writer.paths[0], metadata=CHANGED)
    assert {path: path.read_bytes() for path in writer.paths[1:]} == others
    assert gguf.GGUFReader(writer.paths[0]).fields["edgert.report.kld"].contents() == pytest.approx(0.02)
    assert leftovers(tmp_path) == []
    with GGUFFile.open(writer.paths[0]) as file:
        assert ("split.count" in read_metadata(file)) == (split is not None)


def test_an_interruption_leaves_the_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with Writer(tmp_path / "m.gguf", METADATA, TENSORS) as writer:
        fill(writer)
    monkeypatch.setattr(Writer, "finish", lambda self: (_ for _ in ()).throw(KeyboardInterrupt))
    with pytest.raises(KeyboardInterrupt):
        set_metadata(tmp_path / "m.gguf", CHANGES)
    check(tmp_path / "m.gguf")
