"""A step during which memory really runs out ends with the gradients it would have had.

``short_of_memory.py`` is the child: the shim's allocator fails in it, at one amount of memory
after another, and the same step with enough memory is the reference.
"""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

EXACT = 1e-12
"""Largest relative difference of a gradient, in float64."""
DROPOUT, PLAIN = "0.3", "0"
KEPT, AGAIN = "-1", "4"
"""Where the cap falls: before the kept chunk's backward, or as the next chunk runs again."""


@dataclass(frozen=True)
class Outcome:
    """What became of one step; ``met``: phase, samples, gradients that had arrived."""

    room: int
    died: bool
    met: tuple[tuple[str, int, int], ...] = ()
    left: int = 0
    worst: float = 0.0

    def rescued(self, phase: str, arrived: int = 0) -> bool:
        """Return whether it lived through a shortage in ``phase`` alone."""
        phases = {where for where, *_ in self.met}
        return phases == {phase} and any(count >= arrived for *_, count in self.met)


def outcomes(dropout: str, loss: str, micro_batch: int, call: str) -> list[Outcome]:
    child = Path(__file__).with_name("short_of_memory.py")
    capped = [sys.executable, "-m", "autofit.worker.cap", "64GiB", "--", sys.executable]
    done = subprocess.run(
        [*capped, str(child), dropout, loss, str(micro_batch), call],
        check=True,
        stdout=subprocess.PIPE,
        text=True,
    )
    return [Outcome(**each) for each in json.loads(done.stdout)]


@pytest.mark.quick
@pytest.mark.parametrize("dropout", [DROPOUT, pytest.param(PLAIN, marks=pytest.mark.full)])
@pytest.mark.parametrize("call", [KEPT, pytest.param(AGAIN, marks=pytest.mark.full)])
def test_in_backward(dropout: str, call: str) -> None:
    """With draws the chunk runs again with the same; without, in smaller pieces."""
    found = outcomes(dropout, "outside", 64, call)
    assert all(each.worst <= EXACT for each in found)
    saved = [each for each in found if each.rescued("backward")]
    assert len(saved) >= 2
    assert any(each.rescued("backward", arrived=1) for each in saved)
    assert all(each.left <= 32 for each in saved)
    if dropout == DROPOUT:
        assert all(each.left == 32 and len(each.met) == 1 for each in saved)


@pytest.mark.quick
@pytest.mark.parametrize("loss", ["inside", pytest.param("outside", marks=pytest.mark.full)])
def test_in_forward_under_dropout(loss: str) -> None:
    """Nothing was handed out: it starts over, and draws what smaller chunks draw from the start.

    With the loss inside, a shortage in a chunk's eager backward is one in forward.
    """
    eager = loss == "inside"
    found = outcomes(DROPOUT, loss, 64, "1" if eager else "3")
    assert all(each.worst <= EXACT for each in found)
    assert any(each.rescued("forward", arrived=1 if eager else 0) for each in found)
    if eager:
        assert sum(each.rescued("forward") for each in found) >= 4


@pytest.mark.full
@pytest.mark.parametrize("micro_batch", [40, 256])
@pytest.mark.parametrize(
    ("dropout", "loss", "call"),
    [
        *((rate, "inside", "0") for rate in (DROPOUT, PLAIN)),
        *((rate, "outside", call) for rate in (DROPOUT, PLAIN) for call in ("0", KEPT)),
        (PLAIN, "waiting", "0"),  # under dropout: which way a step went decides its draws
    ],
)
def test_wherever_it_is(dropout: str, micro_batch: int, loss: str, call: str) -> None:
    found = outcomes(dropout, loss, micro_batch, call)
    assert all(each.worst <= EXACT for each in found)
    assert found[0].died
    assert not found[-1].died
