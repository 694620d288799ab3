"""Batches fetched ahead by worker processes: the same samples, the same draws, or none of it."""

from __future__ import annotations

import os
import random
import sqlite3
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset, IterableDataset, Sampler

from autofit.exceptions import Refused
from autofit.plan import Plan
from autofit.strategies import Facts, Hardware, get
from autofit.strategies.data_loading import workers
from tests.strategies.sessions import under

pytestmark = pytest.mark.quick

WORKERS = Plan.of({"data_loading": "workers"})
BATCH = 4


class Plain(Dataset[Any]):
    """Sixty-four samples."""

    def __init__(self) -> None:
        self.x = torch.randn(64, 3, generator=torch.Generator().manual_seed(0))

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, index: int) -> Any:
        return {"x": self.x[index], "index": index}


class Drawing(Plain):
    """Each of some samples is drawn."""

    def __init__(self, first: int) -> None:
        super().__init__()
        self.first = first

    def __getitem__(self, index: int) -> Any:
        noise = torch.randn(3) if index >= self.first else torch.zeros(3)
        return {"x": self.x[index] + noise, "index": index}


class Seen(list[Any]):
    """What a training has seen: batches, a draw of its own in each step, the weights."""


def train(dataset: Any, plan: Plan, *, strict: bool = False, epochs: int = 2, **how: Any) -> Seen:
    """Train as a simple script does, with dropout."""
    torch.manual_seed(1)
    random.seed(1)
    np.random.seed(1)
    model = nn.Sequential(nn.Linear(3, 4), nn.Dropout(0.5), nn.Linear(4, 1))
    seen = Seen()
    with under(plan, strict=strict):
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        loader = DataLoader(dataset, batch_size=BATCH, **how)
        for _ in range(epochs):
            for batch in loader:
                optimizer.zero_grad()
                model(batch["x"]).square().mean().backward()
                optimizer.step()
                seen.append((batch["index"].tolist(), batch["x"].clone(), random.random()))
    seen.append(torch.cat([p.detach().flatten() for p in model.parameters()]))
    return seen


def assert_same(found: Seen, expected: Seen) -> None:
    assert len(found) == len(expected)
    for one, other in zip(found[:-1], expected[:-1], strict=True):
        assert one[0] == other[0]
        assert torch.equal(one[1], other[1])
        assert one[2] == other[2]
    assert torch.equal(found[-1], expected[-1])


@pytest.fixture(autouse=True)
def none_is_left() -> Iterator[None]:
    """No worker outlives the training it was for."""
    yield
    deadline = time.monotonic() + 5
    while children() and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not children()


def children() -> list[str]:
    """Return the living processes that this one has forked for data."""
    import torch.multiprocessing as torchs

    return [child.name for child in torchs.active_children()]


@pytest.mark.parametrize(
    "how",
    [
        {},
        {"shuffle": True},
        {"shuffle": True, "drop_last": True, "collate_fn": lambda rows: _columns(rows)},
        {"shuffle": True, "generator": torch.Generator()},
    ],
    ids=["in order", "shuffled", "own collation", "own generator"],
)
def test_it_is_the_same_training(how: dict[str, Any]) -> None:
    if "generator" in how:
        how["generator"].manual_seed(7)
    expected = train(Plain(), Plan(), **how)
    if "generator" in how:
        how["generator"].manual_seed(7)
    assert_same(train(Plain(), WORKERS, strict=True, **how), expected)


def _columns(rows: list[Any]) -> dict[str, Any]:
    """Return a batch as a script's own collation makes it."""
    return {
        "x": torch.stack([row["x"] for row in rows]),
        "index": torch.tensor([row["index"] for row in rows]),
    }


def test_batches_come_from_other_processes() -> None:
    """The first ones, with which theirs are compared, come from this one."""

    class Marked(Plain):
        def __getitem__(self, index: int) -> Any:
            return {**super().__getitem__(index), "log": log(os.getpid())}

    reader, writer = os.pipe()

    def log(process: int) -> int:
        os.write(writer, process.to_bytes(4, "little"))
        return 0

    train(Marked(), WORKERS, strict=True)
    os.close(writer)
    with os.fdopen(reader, "rb") as pipe:
        data = pipe.read()
    found = [int.from_bytes(data[i : i + 4], "little") for i in range(0, len(data), 4)]
    here = found.count(os.getpid())
    assert here == (1 + workers.workers() + 1) * BATCH
    assert len(found) == 2 * 64 + (workers.workers() + 1) * BATCH


def test_a_plan_that_is_taken_back_loses_no_sample() -> None:
    model = nn.Linear(3, 1)
    found: list[int] = []
    with under(WORKERS) as session:
        for step, batch in enumerate(DataLoader(Plain(), batch_size=BATCH)):
            if step in (5, 11):
                session.plan = Plan() if step == 5 else WORKERS
            model(batch["x"])
            found += batch["index"].tolist()
    assert found == [*range(64)]


def test_a_pass_that_is_broken_off_ends_its_workers() -> None:
    model = nn.Linear(3, 1)
    with under(WORKERS):
        for _ in range(2):
            for step, batch in enumerate(DataLoader(Plain(), batch_size=BATCH)):
                model(batch["x"])
                if step == 8:
                    assert children()
                    break
            del batch


@pytest.mark.parametrize("first", [0, 8, 40])
def test_a_data_set_that_draws_is_left_to_the_script(first: int) -> None:
    """From the first sample on, while it is proven, or only later: the training is the same."""
    expected = train(Drawing(first), Plan())
    with pytest.warns(UserWarning, match="draws random numbers"):
        assert_same(train(Drawing(first), WORKERS), expected)
    with pytest.raises(Refused, match="draws random numbers"):
        train(Drawing(first), WORKERS, strict=True)


@pytest.mark.parametrize("draw", [random.random, np.random.rand], ids=["python", "numpy"])
def test_so_are_draws_of_other_libraries(draw: Any) -> None:
    class Other(Plain):
        def __getitem__(self, index: int) -> Any:
            return {"x": self.x[index] + draw(), "index": index}

    with pytest.raises(Refused, match="draws random numbers"):
        train(Other(), WORKERS, strict=True)


class Counting(Plain):
    """Keeps something from one sample to the next."""

    calls = 0

    def __getitem__(self, index: int) -> Any:
        self.calls += 1
        return {"x": self.x[index] + self.calls / 256, "index": index}


class Reads(Plain):
    """Reads from a file that it holds open."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        path.write_bytes(bytes(range(64)))
        self.file = path.open("rb", buffering=0)

    def __getitem__(self, index: int) -> Any:
        self.file.seek(index)
        return {"x": self.x[index] + self.file.read(1)[0] / 256, "index": index}


class Connected(Plain):
    def __init__(self) -> None:
        super().__init__()
        self.rows = {"store": sqlite3.connect(":memory:")}


class Unsendable(Plain):
    def __getitem__(self, index: int) -> Any:
        return {"x": self.x[index], "index": index, "f": lambda: index}


class Failing(Plain):
    """Fails in any process but the one that made it."""

    def __init__(self) -> None:
        super().__init__()
        self.process = os.getpid()

    def __getitem__(self, index: int) -> Any:
        if os.getpid() != self.process:
            raise ValueError("not here")
        return super().__getitem__(index)


def _keep(rows: list[Any]) -> dict[str, Any]:
    return _columns(rows) | {"f": [row.get("f") for row in rows]}


@pytest.mark.parametrize(
    ("make", "how", "reason"),
    [
        (lambda path: Counting(), {}, "keeps state"),
        (lambda path: Reads(path), {}, "reads from an open file"),
        (lambda path: Connected(), {}, "holds a sqlite3 Connection"),
        (lambda path: Unsendable(), {"collate_fn": _keep}, "cannot be sent"),
        (lambda path: Failing(), {}, "a worker failed: ValueError: not here"),
    ],
    ids=["state", "file", "connection", "objects", "failure"],
)
def test_what_is_refused(make: Any, how: dict[str, Any], reason: str, tmp_path: Path) -> None:
    expected = train(make(tmp_path / "data"), Plan(), **how)
    with pytest.warns(UserWarning, match=reason):
        assert_same(train(make(tmp_path / "data"), WORKERS, **how), expected)
    with pytest.raises(Refused, match=reason):
        train(make(tmp_path / "data"), WORKERS, strict=True, **how)


def test_streams_are_refused() -> None:
    class Stream(IterableDataset[Any]):
        def __iter__(self) -> Iterator[Any]:
            yield from map(Plain().__getitem__, range(64))

    with pytest.raises(Refused, match="is a stream"):
        train(Stream(), WORKERS, strict=True)


class Own(Sampler[int]):
    """A sampler that draws as it goes, or whose state is saved."""

    def __init__(self, draws: bool) -> None:
        self.draws = draws
        if not draws:
            self.state_dict = dict

    def __len__(self) -> int:
        return 64

    def __iter__(self) -> Iterator[int]:
        for index in range(64):
            yield random.randrange(64) if self.draws else index


@pytest.mark.parametrize(("draws", "reason"), [(True, "draws random"), (False, "may save")])
def test_samplers_that_are_refused(draws: bool, reason: str) -> None:
    with pytest.raises(Refused, match=reason):
        train(Plain(), WORKERS, strict=True, sampler=Own(draws))


def test_an_error_of_the_data_set_is_its_own() -> None:
    class Broken(Plain):
        def __getitem__(self, index: int) -> Any:
            if index == 50:
                raise KeyError("no such sample")
            return super().__getitem__(index)

    with pytest.raises(KeyError, match="no such sample") as caught:
        train(Broken(), WORKERS)
    assert "worker process" not in str(caught.value)


def test_a_worker_that_dies_is_made_good() -> None:
    class Deadly(Plain):
        def __init__(self) -> None:
            super().__init__()
            self.process = os.getpid()

        def __getitem__(self, index: int) -> Any:
            if index == 60 and os.getpid() != self.process:
                os._exit(1)
            return super().__getitem__(index)

    expected = train(Deadly(), Plan())
    with pytest.warns(UserWarning, match="a worker failed"):
        assert_same(train(Deadly(), WORKERS), expected)


def test_what_the_script_changes_between_passes_reaches_the_workers() -> None:
    def run(plan: Plan) -> list[torch.Tensor]:
        data, model = Plain(), nn.Linear(3, 1)
        found = []
        with under(plan, strict=True):
            for epoch in range(3):
                data.x = data.x + epoch
                for batch in DataLoader(data, batch_size=BATCH):
                    model(batch["x"])
                    found.append(batch["x"])
        return found

    assert all(map(torch.equal, run(WORKERS), run(Plan())))


def test_what_it_changes_between_two_batches_does_too() -> None:
    class Hard(Plain):
        level = 0

        def __getitem__(self, index: int) -> Any:
            return {"x": self.x[index] * self.level, "index": index}

    def run(plan: Plan, every: int) -> list[torch.Tensor]:
        data, model = Hard(), nn.Linear(3, 1)
        found = []
        with under(plan):
            for step, batch in enumerate(DataLoader(data, batch_size=BATCH)):
                model(batch["x"])
                found.append(batch["x"])
                if step % every == every - 1 and step > 6:
                    data.level = step
        return found

    assert all(map(torch.equal, run(WORKERS, 4), run(Plan(), 4)))
    with pytest.warns(UserWarning, match="changes the data set between its batches"):
        found = run(WORKERS, 1)
    assert all(map(torch.equal, found, run(Plan(), 1)))


def test_loaders_with_workers_stay_as_they_are() -> None:
    model = nn.Linear(3, 1)
    with under(WORKERS):
        batches = list(DataLoader(Plain(), batch_size=BATCH, num_workers=1))
        with pytest.raises(Refused, match="has 1 workers already"):
            model(batches[0]["x"])


def test_a_log_that_the_data_set_writes_is_no_file_that_it_reads(tmp_path: Path) -> None:
    class Logs(Plain):
        def __getitem__(self, index: int) -> Any:
            print(index, file=log, flush=True)
            return super().__getitem__(index)

    with (tmp_path / "log").open("w") as log:
        train(Logs(), WORKERS, strict=True)


def test_it_gains_what_the_data_takes() -> None:
    class Slow(Plain):
        def __getitem__(self, index: int) -> Any:
            time.sleep(0.008)
            return super().__getitem__(index)

    def seconds(plan: Plan) -> float:
        model = nn.Linear(3, 1)
        with under(plan):
            for step, batch in enumerate(DataLoader(Slow(), batch_size=BATCH)):
                if step == 6:
                    started = time.perf_counter()
                model(batch["x"])
                time.sleep(0.01)  # the step itself
        return time.perf_counter() - started

    plainly = seconds(Plan())
    gained = min(seconds(WORKERS) for _ in range(3))  # others may be at work on the machine
    assert gained < 0.75 * plainly


def test_where_it_is_available() -> None:
    strategy = get("data_loading")
    cpu = Hardware(device="cpu", name="CPU", total_bytes=1)
    assert strategy.unavailable("workers", cpu) is None
    assert "pinned memory" in str(strategy.unavailable("pinned", cpu))
    assert strategy.inapplicable("workers", Facts(workers=0)) is None
    assert "2 workers already" in str(strategy.inapplicable("workers", Facts(workers=2)))
