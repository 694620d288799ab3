"""The order in which a check tries ways to run its samples."""

from __future__ import annotations

from functools import partial

import pytest
import torch

from autofit.worker.harness.verification.ways import Way, first_that_runs
from autofit.worker.oom.attempt import attempt_model

pytestmark = pytest.mark.quick

FOUR, TWO, ALL = Way(4), Way(2), Way(9)


def tried(ways: list[Way], errors: dict[Way, Exception]) -> tuple[list[Way], Way | None]:
    """Return the ways that ran, and the one that succeeded."""
    seen = []

    def run(way: Way) -> Way:
        seen.append(way)
        if way in errors:
            raise errors[way]
        return way

    return seen, first_that_runs(ways, lambda way: attempt_model(partial(run, way))).value


def test_a_model_that_fails_on_some_samples_is_not_run_on_fewer() -> None:
    fails: dict[Way, Exception] = {
        FOUR: ValueError("of four"),
        Way(4, wide=True): ValueError("of four"),
    }
    assert tried([FOUR, TWO, ALL], fails) == ([FOUR, ALL], ALL)
    wide = [Way(4, wide=True), Way(2, wide=True), TWO]
    assert tried(wide, fails) == ([wide[0], TWO], TWO)


def test_one_that_does_not_fit_is_not_run_on_more() -> None:
    short = torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 1.00 GiB")
    host = Way(2, on_host=True)
    assert tried([FOUR, TWO, host, ALL], {FOUR: short, TWO: short}) == ([FOUR, TWO, host], host)
    seen, found = tried([FOUR, TWO, ALL, TWO], {FOUR: short, TWO: short})
    assert (seen, found) == ([FOUR, TWO], None)


def test_one_that_fits_on_too_few_runs_on_all_with_less_memory() -> None:
    short = torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 1.00 GiB")
    few, every = Way(2, on_host=True), Way(9, on_host=True)
    errors = {FOUR: short, TWO: ValueError("of two")}
    assert tried([FOUR, TWO, few, ALL, every], errors) == ([FOUR, TWO, every], every)


def test_the_last_error_is_that_of_the_outcome() -> None:
    error = ValueError("of four")

    def run(way: Way) -> None:
        raise error

    found = first_that_runs([FOUR, TWO], lambda way: attempt_model(partial(run, way)))
    assert found.failure is error
