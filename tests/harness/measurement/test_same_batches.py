"""Every plan of a trial meets the same batches, the largest among them."""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import DataLoader
from torch.utils.data.dataloader import _BaseDataLoaderIter

from autofit.worker.harness.measurement.same_batches import AHEAD, GLANCE, KEPT, SameBatches

pytestmark = pytest.mark.quick


@pytest.fixture(autouse=True)
def batches(monkeypatch: pytest.MonkeyPatch) -> SameBatches:
    plain, same = _BaseDataLoaderIter.__next__, SameBatches()
    monkeypatch.setattr(_BaseDataLoaderIter, "__next__", lambda self: same.next(plain, self))
    return same


def padded(rows: list[torch.Tensor]) -> dict[str, torch.Tensor]:
    return {"tokens": pad_sequence(rows, batch_first=True)}


LENGTHS = [3, 9, 4, 8, 2, 7, 12, 1, 5, 6]


@pytest.mark.parametrize("workers", [0, 2])
def test_every_plan_meets_the_same_and_the_largest_second(
    workers: int, batches: SameBatches
) -> None:
    rows: Any = [torch.full((length,), length) for length in LENGTHS]
    loader = DataLoader(rows, batch_size=2, collate_fn=padded, num_workers=workers)
    for _ in range(3):  # plans, each an epoch long
        batches.again()
        lengths = [batch["tokens"].shape[1] for batch in loader]
        assert lengths == [9, 12, 8, 7, 6]


def test_the_largest_comes_after_a_whole_step_of_accumulation(batches: SameBatches) -> None:
    rows: Any = [torch.full((length,), length) for length in LENGTHS]
    loader = DataLoader(rows, batch_size=2, collate_fn=padded)
    next(iter(loader))
    batches.again(calls_per_step=2)
    assert [batch["tokens"].shape[1] for batch in loader] == [9, 8, 12, 7, 6]


def test_a_batch_that_the_script_changes_is_whole_again(batches: SameBatches) -> None:
    rows: Any = [torch.full((length,), length) for length in LENGTHS]
    loader = DataLoader(rows, batch_size=2, collate_fn=padded)
    for batch in loader:
        batch.pop("tokens").zero_()
    batches.again()
    assert [int(batch["tokens"].max()) for batch in loader] == [9, 12, 8, 7, 6]


def test_batches_of_one_size_come_as_they_are(batches: SameBatches) -> None:
    rows: Any = [torch.tensor([number]) for number in range(9)]
    for _ in range(2):
        batches.again()
        assert [batch.tolist() for batch in DataLoader(rows, batch_size=2)] == [
            [[0], [1]], [[2], [3]], [[4], [5]], [[6], [7]], [[8]]
        ]  # fmt: skip


class Counted:
    """Counts how far it was read."""

    def __init__(self, rows: int) -> None:
        self.rows, self.read = rows, 0

    def __len__(self) -> int:
        return self.rows

    def __getitem__(self, index: int) -> torch.Tensor:
        self.read += 1
        return torch.zeros(1 + index % 2 if self.rows > 100 else 3)


def test_batches_of_one_size_are_hardly_read_ahead() -> None:
    data: Any = Counted(50)
    next(iter(DataLoader(data, batch_size=1)))
    assert data.read == GLANCE


def test_no_more_than_a_fixed_number_is_read_ahead() -> None:
    data: Any = Counted(500)
    loader: Iterator[torch.Tensor] = iter(DataLoader(data, batch_size=1))
    next(loader)
    assert data.read == AHEAD
    assert sum(1 for _ in loader) == 499


def test_what_is_read_ahead_and_not_given_is_not_kept() -> None:
    """On a CPU it is taken for the plan's: 32 batches of sound are more than a small model."""
    alive: weakref.WeakSet[torch.Tensor] = weakref.WeakSet()

    def collate(rows: list[torch.Tensor]) -> torch.Tensor:
        batch = torch.cat(rows)
        alive.add(batch)
        return batch

    data: Any = Counted(500)
    loader: Iterator[torch.Tensor] = iter(DataLoader(data, batch_size=1, collate_fn=collate))
    for _ in range(AHEAD + 4):
        next(loader)
        assert len(alive) <= KEPT + 1
