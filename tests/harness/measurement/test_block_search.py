"""The search for blocks to checkpoint, driven with models of a device in place of one."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import pytest

from autofit.strategies.checkpointing import level_of
from autofit.worker.harness.measurement.block_search import WINDOWS, solve
from autofit.worker.harness.measurement.size_search import Ask, enough
from autofit.worker.records.trials import Measurement

pytestmark = pytest.mark.quick

STEPS = 5


@dataclass(frozen=True)
class Machine:
    """A model on a device: exact figures of peak and time."""

    batch: int = 64
    held: float = 1000.0
    """Bytes that are no activations."""
    kept: tuple[float, ...] = (10.0,) * 24
    """Bytes of a sample in each block that does not run again."""
    inputs: float = 1.0
    """Bytes of a sample in the input of a block that runs again."""
    floor: float = 0.0
    """Peak of the optimizer step."""
    block_seconds: float = 0.01
    seconds: float = 1.0
    launch: float = 0.0
    """Seconds that a chunk takes at least."""
    reruns: bool = False
    """All chunks but one run forward twice."""
    noise: float = 0.0

    def peak(self, size: int, blocks: int) -> float:
        """Return the most bytes at any moment: the end of forward, or a block that runs again."""
        n = len(self.kept)
        ends = [
            sum(self.kept[blocks:]) + self.inputs * blocks,
            *(self.inputs * (i + 1) + self.kept[i] for i in range(blocks)),
        ]
        wave = 1 + self.noise * ((size * 7 + blocks * 13) % 5 - 2) / 2
        assert 0 <= blocks <= n
        return max(self.held + size * max(ends), self.floor) * wave

    def time(self, size: int, blocks: int) -> float:
        """Return the seconds of a step."""
        forward = len(self.kept) * self.block_seconds
        chunks = self.batch / size
        again = forward * (1 - 1 / chunks) if self.reruns else 0.0
        compute = self.seconds + self.block_seconds * blocks + again
        wave = 1 + self.noise * ((size * 3 + blocks * 5) % 7 - 3) / 3
        return max(compute, self.launch * chunks) * wave

    def best(self, budget: float, *, splits: bool) -> float:
        """Return the least seconds of all points that fit."""
        sizes = range(1, self.batch + 1) if splits else (self.batch,)
        points = [(s, k) for s in sizes for k in range(len(self.kept) + 1)]
        return min(self.time(*p) for p in points if self.peak(*p) <= budget)


Drive = Callable[..., tuple[Measurement | None, list[Ask]]]


@pytest.fixture
def drive(measurement: Callable[..., Measurement]) -> Drive:
    """Answer every ask of a search as the machine would under a budget."""

    def drive(
        machine: Machine,
        budget: float,
        *,
        splits: bool = False,
        whole_fits: bool = False,
        slower: float = 0.0,
    ) -> tuple[Measurement | None, list[Ask]]:
        count = len(machine.kept)
        search = solve(
            machine.batch,
            count,
            int(budget),
            STEPS,
            splits=splits,
            whole_fits=whole_fits,
            even=lambda: not machine.reruns,
            held=int(machine.held / 2),
        )
        asked: list[Ask] = []
        answer = None
        while len(asked) < 20:
            try:
                ask = search.send(answer)
            except StopIteration as end:
                winner: Measurement | None = end.value
                return winner, asked
            asked.append(ask)
            assert ask.blocks is not None
            peak = machine.peak(ask.micro_batch, ask.blocks)
            time = machine.time(ask.micro_batch, ask.blocks) * (1 + slower * len(asked))
            window = next(n for n in range(1, 99) if enough([time] * n, ask.steps))
            found = measurement(ask.micro_batch, time, int(peak), window)
            answer = replace(found, checkpointing=level_of(ask.blocks, count))
            answer = answer if peak <= budget else None
        raise AssertionError(f"no end: {asked}")

    return drive


def blocks_of(asked: list[Ask]) -> list[int | None]:
    return [ask.blocks for ask in asked]


def fewest(machine: Machine, budget: float) -> int:
    """Return the fewest blocks with which the whole batch fits."""
    count = len(machine.kept)
    return next(k for k in range(count + 1) if machine.peak(machine.batch, k) <= budget)


@pytest.mark.parametrize("share", [0.3, 0.5, 0.7, 0.9])
def test_as_many_blocks_as_the_budget_needs(drive: Drive, share: float) -> None:
    machine = Machine()
    budget = share * machine.peak(64, 0)
    winner, asked = drive(machine, budget)
    assert winner is not None
    assert winner.seconds <= 1.025 * machine.time(64, fewest(machine, budget))
    assert len(asked) <= 4
    assert all(machine.peak(a.micro_batch, a.blocks or 0) <= budget for a in asked), "no shortage"


def test_none_where_none_is_needed(drive: Drive) -> None:
    machine = Machine()
    winner, asked = drive(machine, 1.1 * machine.peak(64, 0))
    assert winner is not None
    assert (winner.checkpointing, len(winner.step_seconds)) == ("as_is", STEPS)
    winner, asked = drive(machine, 1.1 * machine.peak(64, 0), whole_fits=True)
    assert winner is not None
    assert (winner.checkpointing, blocks_of(asked)) == ("as_is", [0])


def test_a_script_that_fits_may_be_too_large_under_the_plan(drive: Drive) -> None:
    machine = Machine()
    winner, asked = drive(machine, 0.5 * machine.peak(64, 0), whole_fits=True)
    assert winner is not None
    assert asked[0].blocks == 0
    assert winner.checkpointing not in ("as_is", "all")


@pytest.mark.parametrize("splits", [False, True])
def test_nothing_fits(drive: Drive, splits: bool) -> None:
    winner, asked = drive(Machine(), 900, splits=splits)
    assert winner is None
    assert {*blocks_of(asked)} == {24}


def test_all_blocks_alone_fit(drive: Drive) -> None:
    machine = Machine()
    winner, _ = drive(machine, machine.peak(64, 24) + 1)
    assert winner is not None
    assert winner.checkpointing in ("all", "23")


@pytest.mark.parametrize("name", ["first", "last", "middle"])
def test_blocks_of_different_sizes(drive: Drive, name: str) -> None:
    """As in a U-Net. The line is wrong; windows after a shortage correct it."""
    large = {"first": (0, 6), "last": (18, 24), "middle": (9, 15)}[name]
    kept = tuple(40.0 if large[0] <= index < large[1] else 5.0 for index in range(24))
    machine = Machine(kept=kept)
    for share in (0.4, 0.6, 0.8):
        budget = share * machine.peak(64, 0)
        if machine.peak(64, 24) > budget:
            continue
        winner, asked = drive(machine, budget)
        assert winner is not None
        assert winner.peak_device <= budget
        assert winner.seconds <= 1.05 * machine.best(budget, splits=False)
        assert len(asked) <= 2 + WINDOWS


@pytest.mark.parametrize("share", [0.35, 0.6, 0.85])
def test_noise(drive: Drive, share: float) -> None:
    machine = Machine(noise=0.01)
    budget = share * machine.peak(64, 0)
    winner, _ = drive(machine, budget)
    assert winner is not None
    assert winner.seconds <= 1.05 * machine.best(budget, splits=False)


def test_a_peak_elsewhere_hides_what_a_block_needs(drive: Drive) -> None:
    """The optimizer's step needs as much as many blocks do: the line is flat at first."""
    machine = Machine(floor=7000.0)
    budget = 9000.0
    winner, _ = drive(machine, budget)
    assert winner is not None
    assert winner.seconds <= 1.05 * machine.best(budget, splits=False)


@pytest.mark.parametrize("reruns", [False, True])
@pytest.mark.parametrize("launch", [0.0, 0.2])
@pytest.mark.parametrize("share", [0.15, 0.25, 0.5, 0.8])
def test_blocks_and_size_together(drive: Drive, share: float, launch: float, reruns: bool) -> None:
    machine = Machine(launch=launch, reruns=reruns)
    budget = share * machine.peak(64, 0)
    winner, asked = drive(machine, budget, splits=True)
    assert winner is not None
    assert winner.peak_device <= budget
    assert winner.seconds <= 1.06 * machine.best(budget, splits=True)
    assert len(asked) <= 9


def test_a_device_that_others_slow_down_meanwhile(drive: Drive) -> None:
    """The first windows look fastest, but blocks that run again never save time."""
    machine = Machine()
    budget = 0.5 * machine.peak(64, 0)
    winner, _ = drive(machine, budget, slower=0.2)
    assert winner is not None
    assert int(winner.checkpointing or 0) <= fewest(machine, budget) + 2


def test_two_blocks(drive: Drive) -> None:
    machine = Machine(kept=(100.0, 100.0), batch=8, block_seconds=0.1)
    for budget, level in ((2000, "1"), (3000, "as_is"), (1500, None)):
        winner, _ = drive(machine, budget)
        assert (winner and winner.checkpointing) == level


def test_short_windows_give_the_line_and_long_ones_decide(drive: Drive) -> None:
    machine = Machine()
    winner, asked = drive(machine, 0.5 * machine.peak(64, 0), splits=True)
    assert [ask.steps for ask in asked[:3]] == [2, 2, 2]
    assert {ask.steps for ask in asked[3:]} == {STEPS}
    assert winner is not None
    assert len(winner.step_seconds) == STEPS
