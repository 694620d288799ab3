"""What held is where the next process starts; a store that fails ends no training."""

import logging
import sqlite3
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import autofit

pytestmark = pytest.mark.quick

Capped = Callable[..., Any]

PROGRAM = """
tried, steps = [], []

@autofit.resilient(batch_size=64)
def train(batch_size, data, accumulation=1):
    tried.append(batch_size)
    tensor(batch_size)
    return batch_size

@autofit.resilient
def planned(plan):
    tried.append(str(plan))
    model, _ = plan.apply(nn.Linear(4, 4))
    model(torch.randn(8, 4)).sum().backward()
    tensor(64 if plan.plan.neutral else 1)

@autofit.resilient.step
def step(batch):
    steps.append(len(batch))
    tensor(len(batch))
    return batch.sum()

train(torch.ones(2, 3))
planned()
step(torch.ones(64))
say(tried=tried, steps=steps)
"""


@pytest.mark.full
def test_the_next_process_starts_at_what_held(capped: Capped) -> None:
    first = capped(PROGRAM, mib=40)
    assert first["tried"] == [64, 32, "as it is", "micro 4"]
    assert first["steps"] == [64, 32, 32]
    second = capped(PROGRAM, mib=40)
    assert second["tried"] == [32, "micro 4"]
    assert second["steps"] == [32, 32]


@pytest.mark.full
def test_other_hardware_starts_afresh(capped: Capped) -> None:
    capped(PROGRAM, mib=40)
    assert capped(PROGRAM, mib=100)["tried"] == [64, "as it is"]


def small(storage: str | None = None) -> Callable[[], int]:
    @autofit.resilient(batch_size=8, storage=storage)
    def train(batch_size: int) -> int:
        if batch_size > 2:
            torch.empty(1 << 56)
        return batch_size

    return train


def test_nothing_is_written_unless_something_else_held(store: Path) -> None:
    @autofit.resilient(batch_size=8)
    def train(batch_size: int) -> int:
        return batch_size

    train()
    assert not store.exists()
    small()()
    assert store.exists()
    with sqlite3.connect(store) as connection:
        (count,) = connection.execute("SELECT count(*) FROM discovery").fetchone()
    assert count == 1


def test_it_is_kept_where_one_says(tmp_path: Path, store: Path) -> None:
    small(str(tmp_path / "other.db"))()
    assert (tmp_path / "other.db").exists()
    assert not store.exists()


@pytest.mark.parametrize("how", ["no database", "no directory", "no such driver"])
def test_a_store_that_fails_ends_no_training(
    tmp_path: Path, how: str, caplog: pytest.LogCaptureFixture
) -> None:
    storage = {
        "no database": str(tmp_path / "broken.db"),
        "no directory": str(tmp_path / "gone" / "x.db"),
        "no such driver": "nosuch://host/db",
    }[how]
    (tmp_path / "broken.db").write_text("not a database" * 100)
    train = small(storage)
    with caplog.at_level(logging.WARNING, "autofit.resilient"):
        assert train() == 2
        assert train() == 2
    complaints = [line for line in caplog.messages if "cannot remember" in line]
    assert len(complaints) == 1
