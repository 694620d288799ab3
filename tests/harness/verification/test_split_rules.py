"""What compares outputs needs hardly more memory than the outputs have."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from autofit.worker.harness.verification import split_rules
from autofit.worker.harness.verification.gradient_digest import pattern
from autofit.worker.harness.verification.split_rules import Criterion, Mismatch, Undecided, close

pytestmark = pytest.mark.quick

LOGITS = torch.linspace(-1.0, 1.0, 4 * 16 * 100).view(4, 16, 100)


class Largest(TorchDispatchMode):
    """Notes the largest tensor that an operation makes, in bytes; views cost nothing."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.bytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run ``func``."""
        result = func(*args, **(kwargs or {}))
        there = {_place(leaf) for leaf in tree_leaves(args) if isinstance(leaf, torch.Tensor)}
        for leaf in tree_leaves(result):
            if isinstance(leaf, torch.Tensor) and _place(leaf) not in there:
                self.bytes = max(self.bytes, leaf.nbytes)
        return result


def _place(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def test_a_pattern_is_made_in_no_more_memory_than_it_has() -> None:
    with Largest() as seen:
        made = pattern(LOGITS, 0, 0)
    assert seen.bytes == LOGITS.nbytes
    assert torch.equal(torch.cat([pattern(LOGITS[:1], 0, 0), pattern(LOGITS[1:], 0, 1)]), made)


@pytest.mark.parametrize("dim", [0, 1, 2])
def test_no_two_rows_of_a_pattern_are_alike(dim: int) -> None:
    rows = pattern(LOGITS, dim, 3).movedim(dim, 0).flatten(1)
    assert torch.pdist(rows.double()).min() > 1e-3


def test_outputs_are_compared_a_piece_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(split_rules, "PIECE", 1000)
    other = LOGITS.clone()
    other[3, 15, 99] += 1e-3
    same = LOGITS.clone()
    with Largest() as seen:
        assert close(LOGITS, same, 0.0)
        assert not close(LOGITS, other, 1e-6)
    assert seen.bytes <= 8000


COEFFICIENTS = Criterion(0.05, None, 0.05)


@pytest.mark.parametrize(
    ("size", "factor", "expected"),
    [(1.0, 1.0, None), (1.0, 1.5, Mismatch), (1e-4, 1.5, Undecided), (1e-4, 400.0, Mismatch)],
)
def test_a_gradient_below_the_rounding_beside_it_decides_nothing(
    size: float, factor: float, expected: type[Exception] | None
) -> None:
    """``size`` is that of the first part, whose gradient the batch has ``factor`` times."""
    torch.manual_seed(0)
    parts = [[size * torch.randn(5000).double()], [torch.randn(5000).double()]]
    rounding = 1e-3 * torch.randn(5000).double()
    whole = [factor * parts[0][0] + parts[1][0] + rounding]
    with nullcontext() if expected is None else pytest.raises(expected):
        COEFFICIENTS.refuse(parts, whole, ["weight"])
