"""Signs of GPUs and NPUs that need no library to be seen."""

from __future__ import annotations

from pathlib import Path

import pytest

from edgert.devices import accelerators


@pytest.mark.parametrize(
    ("files", "found"),
    [
        ([], set()),
        (["dev/nvidia0"], {"gpu"}),
        (["proc/driver/nvidia/version"], {"gpu"}),
        (["dev/dxg"], {"gpu"}),
        (["dev/accel/accel0"], {"npu"}),
        (["dev/nvidiactl", "dev/accel/accel1"], {"gpu", "npu"}),
    ],
)
def test_signs_of_accelerators(tmp_path: Path, files: list[str], found: set[str]) -> None:
    for name in files:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).touch()
    assert accelerators.present(tmp_path) == found
