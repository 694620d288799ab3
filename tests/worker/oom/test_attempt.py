"""Work that memory may be too small for."""

from __future__ import annotations

import weakref

import pytest

from autofit.exceptions import Refused
from autofit.worker.oom.attempt import attempt, attempt_model

pytestmark = pytest.mark.quick


class Held:
    """Stands for a tensor that a failed call holds."""


def test_a_shortage_is_returned_and_its_frames_hold_nothing() -> None:
    references = []

    def run() -> None:
        held = Held()
        references.append(weakref.ref(held))
        raise MemoryError

    outcome = attempt(run)
    assert not outcome.fits
    assert references[0]() is None
    with pytest.raises(MemoryError):
        outcome.result()


def test_another_error_is_raised() -> None:
    with pytest.raises(ValueError, match="no shortage"):
        attempt(lambda: int("no shortage"))


def test_a_suspect_counts_once_the_device_is_known_to_be_full() -> None:
    def run() -> None:
        raise MemoryError("the cache is full")

    with pytest.raises(MemoryError):
        attempt(run)
    assert not attempt(run, corroborated=lambda: True).fits


def test_a_models_own_error_is_returned_and_a_refusal_is_raised() -> None:
    def refuse() -> None:
        raise Refused("the model draws random numbers")

    outcome = attempt_model(lambda: int("no shortage"))
    assert outcome.fits
    assert isinstance(outcome.failure, ValueError)
    with pytest.raises(ValueError, match="no shortage"):
        outcome.result()
    with pytest.raises(Refused):
        attempt_model(refuse)


def test_a_models_shortage_is_no_failure() -> None:
    def run() -> None:
        raise MemoryError

    outcome = attempt_model(run)
    assert not outcome.fits
    assert outcome.failure is None
