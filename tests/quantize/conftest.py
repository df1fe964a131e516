"""What many tests here need: compiled kernels."""

from __future__ import annotations

import os

import pytest


@pytest.fixture(scope="session", autouse=True)
def kernels(request: pytest.FixtureRequest) -> None:
    """Where most of these tests run, their kernels are compiled by all processors before, not one by one on use."""
    from filelock import FileLock

    from edgert.quantize.jit import cache_folder
    from edgert.quantize.kernels_ahead import compile_ahead
    from edgert.quantize.rounding import GRIDS

    if len({item.path for item in request.session.items if "quantize" in item.path.parts}) < 10:
        return
    run = ("Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "Q4_K", "Q5_K", "Q6_K", "IQ4_NL")  # what is chosen from
    searched = [name for name in run if name != "Q5_K"]  # whose search is left to the slow tests
    jobs = [(name, "plain") for name in GRIDS] + [(name, "search") for name in searched]
    jobs += [(name, "feedback") for name in run]
    cache_folder().mkdir(parents=True, exist_ok=True)
    with FileLock(cache_folder() / "tests.lock"):  # processes that run tests side by side want the same kernels
        compile_ahead(jobs, os.cpu_count() or 1)
