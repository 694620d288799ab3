"""The search for chunk size and checkpointed blocks, on models of a device in place of one."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from autofit.worker.harness.measurement.sizes import MARGIN, PART, TIE, Ask, even, roomier, solve
from autofit.worker.records.trials import Measurement

pytestmark = pytest.mark.quick

BATCH, BLOCKS = 64, 24
Asked = list[tuple[Ask, Measurement | None]]


@dataclass(frozen=True)
class Device:
    """A model on a device: exact bytes and seconds of each chunk size and number of blocks."""

    batch: int = BATCH
    rest: float = 1000.0
    """Bytes that are no activations."""
    sample: float = 240.0
    """Bytes of a sample's activations if no block runs again."""
    block: float = 9.0
    """Bytes of a sample that a block frees if it runs again."""
    blocks: int | None = BLOCKS
    """Blocks that may run again; ``None`` if the plan does not checkpoint."""
    splits: bool = True
    launch: float = 0.0
    """Seconds that a chunk takes at least."""
    per_chunk: float = 0.01
    """Seconds of a chunk beside its samples' computation."""
    again: float = 0.3
    """What a step takes longer if all blocks run again, as a share."""
    floor: float = 0.0
    """Peak of the optimizer step."""
    gradients: int = 0
    """Bytes of the gradients, which a chunk finds and a whole batch does not."""
    noise: float = 0.0

    def peak(self, size: int, blocks: int = 0) -> int:
        wave = 1 + self.noise * ((size * 7 + blocks * 13) % 5 - 2) / 2
        held = self.gradients if size < self.batch else 0
        work = held + size * (self.sample - self.block * blocks)
        return int(max(self.floor, self.rest + work) * wave)

    def seconds(self, size: int, blocks: int = 0) -> float:
        chunks = math.ceil(self.batch / size)
        compute = 1 + self.again * blocks / (self.blocks or 1)
        wave = 1 + self.noise * ((size * 3 + blocks * 5) % 7 - 3) / 3
        return (max(compute, self.launch * chunks) + self.per_chunk * chunks) * wave

    def measure(self, ask: Ask) -> Measurement:
        """Return what a probe at these numbers shows."""
        peak = self.peak(ask.micro_batch, ask.blocks or 0)
        return Measurement(
            micro_batch=ask.micro_batch,
            effective_batch=self.batch,
            step_seconds=(self.seconds(ask.micro_batch, ask.blocks or 0),),
            peak_allocated=peak,
            peak_reserved=peak,
            peak_device=peak,
        )

    def points(self) -> list[tuple[int, int]]:
        """Return every size that a batch can be cut into, with every number of blocks."""
        sizes = {even(self.batch, most) for most in range(1, self.batch + 1)}
        sizes = sizes if self.splits else {self.batch}
        return [(size, number) for size in sizes for number in range((self.blocks or 0) + 1)]

    def within(self, budget: float) -> list[tuple[int, int]]:
        """Return the points that fit in a budget."""
        return [point for point in self.points() if self.peak(*point) <= budget]


def solved(device: Device, budget: float) -> tuple[Ask | None, Asked]:
    """Answer every question of a search as the device would; return the winner's numbers."""
    search = solve(
        device.batch,
        int(budget),
        blocks=device.blocks,
        splits=device.splits,
        gradients=device.gradients,
    )
    asked: Asked = []
    answer = None
    while len(asked) < 30:
        try:
            ask = search.send(answer)
        except StopIteration as end:
            found = end.value
            return next((ask for ask, each in asked if each and each is found), None), asked
        measured = device.measure(ask)
        answer = measured if measured.peak_device <= int(budget) else None
        asked.append((ask, answer))
    raise AssertionError(f"no end: {asked}")


def sizes(asked: Asked) -> list[int]:
    return [ask.micro_batch for ask, _ in asked]


def numbers(asked: Asked) -> list[tuple[int, int | None]]:
    return [(ask.micro_batch, ask.blocks) for ask, _ in asked]


def room(peak: float) -> float:
    """Return a budget in which a predicted peak is expected to fit."""
    return peak / (1 - MARGIN) + 1


PLAIN = Device(blocks=None)


# --- chunks alone -----------------------------------------------------------------------------


def test_the_whole_batch_comes_first_if_the_line_says_that_it_fits() -> None:
    winner, asked = solved(PLAIN, room(PLAIN.peak(BATCH)))
    assert sizes(asked) == [8, 16, BATCH]
    assert winner == Ask(BATCH)


@pytest.mark.parametrize(("fitting", "expected"), [(20, 16), (30, 22), (40, 32), (63, 32)])
def test_a_line_leads_to_the_largest_even_chunk_that_fits(fitting: int, expected: int) -> None:
    """Thirty samples fit, and then three even chunks of 22 are as few."""
    winner, asked = solved(PLAIN, room(PLAIN.peak(fitting)))
    assert winner == Ask(expected)
    assert len(asked) <= 3


def test_a_plan_that_is_not_split_is_measured_whole() -> None:
    whole = replace(PLAIN, splits=False)
    assert solved(whole, whole.peak(BATCH))[0] == Ask(BATCH)
    winner, asked = solved(whole, whole.peak(BATCH) - 1)
    assert winner is None
    assert sizes(asked) == [BATCH]


def test_a_flat_line_leads_to_the_whole_batch() -> None:
    """The optimizer's step needs more than any chunk."""
    flat = replace(PLAIN, floor=30_000.0)
    assert solved(flat, room(30_000))[0] == Ask(BATCH)


def test_a_knee_above_the_line_is_found_out() -> None:
    """The prediction runs out of memory, so a smaller chunk is taken."""

    class Knee(Device):
        def peak(self, size: int, blocks: int = 0) -> int:
            return super().peak(size, blocks) + (6000 if size > 16 else 0)

    winner, asked = solved(Knee(blocks=None), 9000)
    assert sizes(asked)[:3] == [8, 16, 32]
    assert winner == Ask(16)


@pytest.mark.parametrize(("fitting", "expected"), [(3, 3), (7, 7), (15, 13)])
def test_the_largest_chunk_lies_between_one_that_fits_and_its_double(
    fitting: int, expected: int
) -> None:
    """Where launches take all the time, 4 samples instead of 7 take 16 chunks instead of 10."""
    assert even(BATCH, fitting) == expected
    winner, asked = solved(PLAIN, room(PLAIN.peak(fitting)))
    assert winner == Ask(expected)
    assert len(asked) <= 8


def test_only_single_samples_fit() -> None:
    winner, asked = solved(PLAIN, PLAIN.peak(1) + 1)
    assert winner == Ask(1)
    assert sizes(asked) == [8, 4, 2, 1]


@pytest.mark.parametrize("splits", [True, False])
@pytest.mark.parametrize("blocks", [None, BLOCKS])
def test_nothing_fits(blocks: int | None, splits: bool) -> None:
    winner, asked = solved(Device(blocks=blocks, splits=splits), 900)
    assert winner is None
    assert len(asked) <= 5
    assert asked[-1][0] == Ask(1 if splits else BATCH, blocks)


@pytest.mark.parametrize("batch", [1, 2, 3, 5, 7])
@pytest.mark.parametrize("fitting", [1, 2, 3, 7])
def test_small_batches(batch: int, fitting: int) -> None:
    device = replace(PLAIN, batch=batch)
    winner, asked = solved(device, room(device.peak(fitting)))
    assert winner == Ask(even(batch, fitting))
    assert all(1 <= size <= batch for size in sizes(asked))
    assert len({*sizes(asked)}) == len(asked)


def test_smaller_chunks_win_if_they_are_clearly_faster() -> None:
    """Such as those whose activations fit in a cache."""

    class Cached(Device):
        def seconds(self, size: int, blocks: int = 0) -> float:
            return 1.0 if size <= 16 else 1.2

    winner, _ = solved(Cached(blocks=None), room(PLAIN.peak(BATCH)))
    assert winner == Ask(16)


def test_of_equal_times_the_fewest_chunks_win() -> None:
    device = replace(PLAIN, per_chunk=0.0)
    assert solved(device, room(device.peak(BATCH)))[0] == Ask(BATCH)
    slightly = replace(PLAIN, noise=TIE / 3, per_chunk=0.0)
    assert solved(slightly, 1.1 * slightly.peak(BATCH))[0] == Ask(BATCH)


# --- blocks -----------------------------------------------------------------------------------


def fewest(device: Device, budget: float) -> int:
    """Return the fewest blocks with which the whole batch is expected to fit."""
    fitting = (1 - MARGIN) * budget
    return next(k for k in range(BLOCKS + 1) if device.peak(device.batch, k) <= fitting)


def test_no_block_runs_again_if_the_whole_batch_fits() -> None:
    device = Device()
    winner, asked = solved(device, room(device.peak(BATCH)))
    assert numbers(asked) == [(8, 0), (16, 0), (BATCH, 0)]
    assert winner == Ask(BATCH, 0)


@pytest.mark.parametrize("share", [0.3, 0.5, 0.7, 0.9])
def test_the_whole_batch_with_as_few_blocks_as_the_budget_needs(share: float) -> None:
    """Where a chunk takes long by itself."""
    device = Device(launch=0.7)
    budget = share * device.peak(BATCH)
    winner, asked = solved(device, budget)
    assert winner is not None
    assert winner.micro_batch == BATCH
    assert winner.blocks is not None
    assert 0 <= winner.blocks - fewest(device, budget) <= 1
    assert all(found is not None for _, found in asked), "no shortage"
    assert len(asked) <= 6


@pytest.mark.parametrize("share", [0.3, 0.5, 0.7, 0.9])
def test_a_plan_that_is_not_split_needs_as_few_blocks_too(share: float) -> None:
    device = Device(splits=False)
    budget = share * device.peak(BATCH)
    winner, asked = solved(device, budget)
    assert winner is not None
    assert winner.blocks is not None
    assert device.seconds(BATCH, winner.blocks) <= 1.025 * device.seconds(
        BATCH, fewest(device, budget)
    )
    assert len(asked) <= 8


def test_all_blocks_alone_fit() -> None:
    device = Device(launch=0.7)
    winner, _ = solved(device, room(device.peak(BATCH, BLOCKS)))
    assert winner == Ask(BATCH, BLOCKS)


def test_chunks_win_if_they_cost_less_than_blocks_that_run_again() -> None:
    device = Device()
    winner, _ = solved(device, room(device.peak(32)))
    assert winner == Ask(32, 0)


@pytest.mark.parametrize("share", [0.15, 0.3, 0.5, 0.8])
def test_a_device_bound_by_launches_is_not_split_while_anything_else_fits(share: float) -> None:
    device = Device(launch=1.3)
    budget = share * device.peak(BATCH)
    winner, _ = solved(device, budget)
    assert winner is not None
    assert (winner.micro_batch == BATCH) is (device.peak(BATCH, BLOCKS) <= (1 - MARGIN) * budget)


def test_if_the_whole_batch_never_fits_chunks_are_as_large_as_all_blocks_allow() -> None:
    device = Device(launch=1.3)
    winner, asked = solved(device, room(device.peak(32, BLOCKS)))
    assert winner == Ask(32, BLOCKS)
    assert len(asked) <= 8


def test_two_blocks() -> None:
    device = Device(batch=8, sample=240.0, block=110.0, blocks=2, launch=1.0)
    for number in (0, 1, 2):
        winner, _ = solved(device, room(device.peak(8, number)))
        assert winner == Ask(8, number)


@pytest.mark.parametrize("share", [0.35, 0.6, 0.85])
@pytest.mark.parametrize("launch", [0.0, 0.7])
def test_figures_that_vary(share: float, launch: float) -> None:
    device = Device(noise=0.01, launch=launch)
    budget = share * device.peak(BATCH)
    winner, asked = solved(device, budget)
    assert winner is not None
    assert device.peak(winner.micro_batch, winner.blocks or 0) <= budget
    best = min(device.seconds(*point) for point in device.within(budget))
    assert device.seconds(winner.micro_batch, winner.blocks or 0) <= 1.06 * best
    assert len(asked) <= 8


def test_a_peak_elsewhere_hides_what_a_block_needs() -> None:
    """The optimizer's step needs as much as small chunks do, so the line is flat at first."""
    device = Device(floor=4000.0, launch=0.7)
    budget = 0.5 * device.peak(BATCH)
    winner, asked = solved(device, budget)
    assert winner is not None
    assert winner.micro_batch == BATCH
    best = min(device.seconds(*point) for point in device.within(budget))
    assert device.seconds(winner.micro_batch, winner.blocks or 0) <= 1.06 * best
    assert len(asked) <= 8


# --- any linear device ------------------------------------------------------------------------


ONE = Device(batch=1, rest=0.0, sample=20.0, block=10 / 11, blocks=11, per_chunk=0.0, again=0.5)
"""A batch of one sample, which cannot be cut."""


@st.composite
def devices(draw: st.DrawFn, *, splits: bool | None = None) -> tuple[Device, float]:
    """Return a device and a budget in which something may fit."""
    sample = draw(st.floats(20, 1e6))
    blocks = draw(st.none() | st.integers(1, 60))
    batch = draw(st.integers(1, 300))
    device = Device(
        batch=batch,
        rest=draw(st.floats(0, 1e8)),
        sample=sample,
        block=draw(st.floats(0.05, 0.95)) * sample / (blocks or 1),
        blocks=blocks,
        splits=draw(st.booleans()) if splits is None else splits,
        launch=draw(st.just(0.0) | st.floats(0.0, 2.0)),
        per_chunk=draw(st.floats(0.0, 0.5)),
        again=draw(st.floats(0.05, 0.6)),
    )
    least = device.peak(1, blocks or 0)
    return device, draw(st.floats(0.9, 1.2)) * (
        least + draw(st.floats(0, 1)) * (device.peak(batch) - least)
    )


@given(devices())
def test_the_winner_fits_and_is_soon_found(case: tuple[Device, float]) -> None:
    device, budget = case
    winner, asked = solved(device, budget)
    assert len({*numbers(asked)}) == len(asked), "nothing is asked twice"
    shortages = sum(found is None for _, found in asked)
    assert len(asked) <= 8 or len(asked) - shortages <= 8
    halvings = math.log2(device.batch * (1 + (device.blocks or 0))) + 2
    assert shortages <= halvings
    for ask, _ in asked:
        assert 1 <= ask.micro_batch <= device.batch
        assert (ask.blocks is None) is (device.blocks is None)
        assert ask.blocks is None or 0 <= ask.blocks <= (device.blocks or 0)
    if winner is not None:
        assert device.peak(winner.micro_batch, winner.blocks or 0) <= budget
        if not device.splits:
            assert winner.micro_batch == device.batch


@given(devices())
def test_something_is_found_if_anything_fits(case: tuple[Device, float]) -> None:
    device, budget = case
    winner, _ = solved(device, budget)
    assert (winner is not None) is bool(device.within(budget))


@given(devices(splits=True))
@example((ONE, 15.0))
def test_no_corner_of_the_plane_is_clearly_faster(case: tuple[Device, float]) -> None:
    """Neither the largest chunk without blocks nor the whole batch with as few as fit.

    If the whole batch does not fit, neither is the largest chunk with all blocks. Chunks below an
    eighth of the batch are not tried where blocks may run again.
    """
    device, budget = case
    winner, asked = solved(device, budget)
    safe = device.within((1 - MARGIN) * budget - 2)
    whole = [number for size, number in safe if size == device.batch]
    least = 1 if device.blocks is None else even(device.batch, math.ceil(device.batch / PART))
    corners = [(size, number) for size, number in safe if number == 0 and size >= least]
    if whole:
        corners.append((device.batch, min(min(whole) + 1, device.blocks or 0)))
    else:
        corners += [(size, number) for size, number in safe if number == device.blocks]
    for corner in corners:
        assert winner is not None
        found = device.seconds(winner.micro_batch, winner.blocks or 0)
        assert found <= 1.05 * device.seconds(*corner) + 1e-9, (numbers(asked), corner)


# --- a plan that needs less than another ------------------------------------------------------


def more(device: Device, share: float, ask: Ask, budget: float) -> tuple[list[Ask], Device]:
    """Return what is asked after a plan that keeps a share of the activations ran at ``ask``."""
    _, asked = solved(device, budget)
    known = [(each, found) for each, found in asked if found is not None]
    leaner = replace(device, sample=share * device.sample, block=share * device.block)
    found = roomier(
        known,
        (ask, leaner.measure(ask)),
        device.batch,
        int(budget),
        blocks=device.blocks or 0,
        splits=device.splits,
        gradients=device.gradients,
    )
    return [*found], leaner


def test_room_is_used_for_larger_chunks() -> None:
    budget = room(PLAIN.peak(16))
    for share, expected in ((0.5, [Ask(32)]), (0.2, [Ask(BATCH)]), (0.9, [])):
        assert more(PLAIN, share, Ask(16), budget)[0] == expected


def test_room_is_used_for_fewer_blocks() -> None:
    device = Device(launch=0.7)
    budget = room(device.peak(BATCH, 12))
    for share, expected in ((0.5, [Ask(BATCH, 0)]), (0.8, [Ask(BATCH, 9)]), (1.0, [])):
        found, leaner = more(device, share, Ask(BATCH, 12), budget)
        assert found == expected
        for ask in found:
            assert leaner.peak(BATCH, ask.blocks or 0) <= budget


def test_a_whole_batch_finds_no_gradients() -> None:
    """Chunks of a third of the batch may need more than the whole batch does."""
    plain = Device(blocks=None, gradients=8000)
    winner, _ = solved(plain, room(plain.peak(BATCH)))
    assert winner == Ask(BATCH)
    device = Device(gradients=1500, launch=0.7)
    budget = room(device.peak(BATCH, 20))
    winner, asked = solved(device, budget)
    assert winner == Ask(BATCH, 20), numbers(asked)
    found, _ = more(device, 0.8, winner, budget)
    assert found == [Ask(BATCH, fewest(replace(device, sample=192, block=7.2), budget))]


def test_a_split_batch_is_whole_again_with_some_blocks() -> None:
    device = Device()
    budget = room(device.peak(32))
    found, leaner = more(device, 0.7, Ask(32, 0), budget)
    assert found == [Ask(BATCH, fewest(leaner, budget)), Ask(BATCH, BLOCKS)]


def test_nothing_is_asked_of_a_plan_that_needs_no_less() -> None:
    assert more(PLAIN, 1.3, Ask(16), room(PLAIN.peak(16)))[0] == []
    assert more(PLAIN, 0.5, Ask(BATCH), room(PLAIN.peak(BATCH)))[0] == []
    device = Device()
    assert more(device, 0.5, Ask(BATCH, 0), room(device.peak(BATCH)))[0] == []


@given(devices(splits=True), st.floats(0.2, 1.0))
def test_what_is_asked_fits_and_is_faster(case: tuple[Device, float], share: float) -> None:
    device, budget = case
    winner, asked = solved(device, budget)
    if winner is None or len([found for _, found in asked if found is not None]) < 2:
        return
    found, leaner = more(device, share, winner, budget)
    for ask in found:
        assert leaner.peak(ask.micro_batch, ask.blocks or 0) <= budget
        assert ask != winner
        chunks = [math.ceil(device.batch / each.micro_batch) for each in (ask, winner)]
        assert chunks[0] < chunks[1] or (ask.blocks or 0) < (winner.blocks or 0)


def test_a_plan_that_was_measured_with_all_blocks_only() -> None:
    """What fewer blocks need is unknown then, so their number stays."""
    device = Device(rest=1000, block=9.9, launch=1.3)
    budget = room(device.peak(32, BLOCKS))
    assert device.peak(8) > budget
    winner, _ = solved(device, budget)
    assert winner == Ask(32, BLOCKS)
    found, leaner = more(device, 0.5, winner, budget)
    assert found == [Ask(BATCH, BLOCKS)]
    assert leaner.peak(BATCH, BLOCKS) <= budget
