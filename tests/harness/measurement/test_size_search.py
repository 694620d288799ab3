"""The ramp, driven with models of memory and time in place of a device."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest

from autofit.worker.harness.measurement.size_search import (
    FEWEST,
    LONG,
    MOST,
    RECOMPILE,
    Ask,
    enough,
    larger_size,
    ramp,
    round_ended,
    settled,
    size_to_compile,
)
from autofit.worker.records.trials import Measurement

pytestmark = pytest.mark.quick

BATCH, STEPS = 64, 5
Model = Callable[[int], float]
Drive = Callable[..., tuple[Measurement | None, list[Ask]]]


def line(base: float, slope: float) -> Model:
    """Bytes that grow with the chunk."""
    return lambda size: base + slope * size


@pytest.fixture
def drive(measurement: Callable[..., Measurement]) -> Drive:
    """Answer every ask of a ramp as a device of ``budget`` bytes would."""

    def drive(
        budget: int,
        memory: Model,
        seconds: Model = lambda size: 1.0,
        *,
        batch: int = BATCH,
        whole_fits: bool = False,
        even: bool = False,
        gradients: int = 0,
    ) -> tuple[Measurement | None, list[Ask]]:
        sizes = ramp(
            batch, budget, STEPS, whole_fits=whole_fits, even=lambda: even, gradients=gradients
        )
        asked: list[Ask] = []
        answer = None
        while len(asked) < 30:
            try:
                ask = sizes.send(answer)
            except StopIteration as end:
                winner: Measurement | None = end.value
                return winner, asked
            asked.append(ask)
            peak = int(memory(ask.micro_batch))
            time = seconds(ask.micro_batch)
            fits = peak <= budget
            window = next(n for n in range(1, 99) if enough([time] * n, ask.steps))
            answer = measurement(ask.micro_batch, time, peak, window) if fits else None
        raise AssertionError(f"no end: {asked}")

    return drive


def launches_cost(size: int) -> float:
    """Seconds of a step where every chunk costs something by itself."""
    return 1 + 0.1 * -(-BATCH // size)


def sizes(asked: list[Ask]) -> list[int]:
    return [ask.micro_batch for ask in asked]


@pytest.mark.parametrize(("even", "expected"), [(False, 30), (True, 22)])
def test_a_line_leads_to_the_largest_size_that_fits(
    drive: Drive, even: bool, expected: int
) -> None:
    """Thirty samples fit. Three even chunks are of 22; 30 are kept where the rest runs again."""
    winner, asked = drive(400, line(100, 10), launches_cost, even=even)
    assert sizes(asked) == [8, 16, expected]
    assert winner is not None
    assert (winner.micro_batch, len(winner.step_seconds)) == (expected, STEPS)


@pytest.mark.parametrize(("even", "expected"), [(False, 40), (True, 32)])
def test_above_half_the_batch(drive: Drive, even: bool, expected: int) -> None:
    winner, asked = drive(500, line(100, 10), launches_cost, even=even)
    assert sizes(asked) == [8, 16, expected]
    assert winner is not None
    assert winner.micro_batch == expected


def test_only_the_size_that_decides_gets_a_full_window(drive: Drive) -> None:
    _, asked = drive(400, line(100, 10), launches_cost)
    assert [ask.steps for ask in asked] == [2, 2, STEPS]


def test_a_window_of_long_steps_ends_early(drive: Drive) -> None:
    winner, _ = drive(400, line(100, 10), lambda size: 3 * launches_cost(size))
    assert winner is not None
    assert len(winner.step_seconds) == 3 < STEPS
    assert not enough([9.0] * 49, 50)  # asked for to see what happens by then


def test_one_slow_step_of_long_ones_does_not_decide() -> None:
    assert not enough([10.84, 0.57], STEPS)
    assert enough([10.84, 0.57, 0.58], STEPS)


def test_a_window_goes_on_until_its_median_is_known() -> None:
    steady, rough = [1.0, 1.01, 1.0, 1.01, 1.0], [1.0, 1.4, 0.9, 1.2, 1.1]
    assert settled(steady, STEPS)
    assert not settled(rough, STEPS)
    assert settled([each / 10 for each in rough] * (MOST // STEPS), STEPS)
    assert settled(rough * 2, STEPS)  # takes longer than LONG
    assert sum(rough * 2) > LONG > sum(rough)
    assert settled(rough, len(rough) + 1)  # of another length than usual: it was asked for


def test_rounds_end_after_as_many_steps_as_were_asked_for() -> None:
    ends = [count for count in range(1, 21) if round_ended([0.1] * count, STEPS)]
    assert ends == [5, 10, 15, 20]
    assert round_ended([4.0] * FEWEST, STEPS)
    assert not round_ended([4.0] * (FEWEST - 1), STEPS)


def test_a_knee_above_the_line_is_found_out(drive: Drive) -> None:
    """The prediction runs out: even sizes below it are tried, not one sample less each time."""

    def memory(size: int) -> float:
        return 100 + 10 * size + (200 if size > 16 else 0)

    winner, asked = drive(400, memory, launches_cost)
    assert sizes(asked)[:4] == [8, 16, 30, 22]
    assert winner is not None
    assert winner.micro_batch == 16
    assert len(winner.step_seconds) == STEPS


def test_a_flat_line_leads_to_the_whole_batch(drive: Drive) -> None:
    winner, asked = drive(400, line(100, 0), launches_cost)
    assert BATCH in sizes(asked)
    assert winner is not None
    assert winner.micro_batch == BATCH


def test_one_chunk_is_a_case_apart(drive: Drive) -> None:
    """Two chunks hold gradients during a forward; one does not, and may need less than the line."""

    def memory(size: int) -> float:
        return 10 * size + (0 if size == BATCH else 200)

    assert memory(BATCH) < 10 * BATCH + 200
    winner, asked = drive(800, memory, launches_cost)
    assert sizes(asked)[-1] == BATCH
    assert winner is not None
    assert winner.micro_batch == BATCH


@pytest.mark.parametrize(("gradients", "expected"), [(0, [8, 16, 32]), (300, [8, 16, BATCH])])
def test_what_one_chunk_alone_does_not_hold_is_taken_off(
    drive: Drive, gradients: int, expected: list[int]
) -> None:
    """By the line the whole needs 1.4 times what there is; without gradients meanwhile it fits."""

    def memory(size: int) -> float:
        return 10 * size + (0 if size == BATCH else 300)

    winner, asked = drive(660, memory, launches_cost, gradients=gradients, even=True)
    assert sizes(asked) == expected
    assert winner is not None
    assert winner.micro_batch == expected[-1]


def test_the_whole_comes_first_where_it_is_known_to_fit(drive: Drive) -> None:
    winner, asked = drive(1000, line(100, 10), launches_cost, whole_fits=True)
    assert sizes(asked) == [BATCH, 32]  # one look below: slower, so no further
    assert winner is not None
    assert winner.micro_batch == BATCH


def test_smaller_chunks_win_where_they_are_faster(drive: Drive) -> None:
    winner, asked = drive(1000, line(100, 10), lambda size: 1 + size / 100, whole_fits=True)
    assert sizes(asked)[:6] == [64, 32, 16, 8, 4, 2]  # the last gains less than 2 %
    assert winner is not None
    assert winner.micro_batch == 2


def test_times_that_tie_keep_the_leaner(drive: Drive) -> None:
    winner, _ = drive(1000, line(100, 10), lambda size: 1.0, whole_fits=True)
    assert winner is not None
    assert winner.micro_batch == 32


@pytest.mark.parametrize("whole_fits", [False, True])
def test_nothing_fits(drive: Drive, whole_fits: bool) -> None:
    """Halved to single samples before it is given up."""
    winner, asked = drive(50, line(100, 10), whole_fits=whole_fits)
    assert winner is None
    assert sizes(asked) == [*([BATCH] if whole_fits else []), 8, 4, 2, 1]


def test_only_single_samples_fit(drive: Drive) -> None:
    winner, _ = drive(115, line(100, 10))
    assert winner is not None
    assert (winner.micro_batch, len(winner.step_seconds)) == (1, STEPS)


@pytest.mark.parametrize("batch", [1, 2, 3, 5, 7])
@pytest.mark.parametrize("fitting", [1, 2, 3, 7])
@pytest.mark.parametrize("whole_fits", [False, True])
def test_small_batches(drive: Drive, batch: int, fitting: int, whole_fits: bool) -> None:
    """Whatever the batch, the largest size that fits is found, and nothing asked twice."""
    best = min(batch, fitting)
    winner, asked = drive(
        100 + 10 * fitting,
        line(100, 10),
        lambda size: 1 + 0.1 * -(-batch // size),
        batch=batch,
        whole_fits=whole_fits,
    )
    assert winner is not None
    assert winner.micro_batch == best
    assert len(winner.step_seconds) == STEPS
    assert all(1 <= size <= batch for size in sizes(asked))
    assert len({(ask.micro_batch, ask.steps) for ask in asked}) == len(asked)


@pytest.mark.parametrize("single", [330.0, 360.0])
def test_a_few_samples_are_tried_in_one_chunk_where_parts_do_not_fit(
    drive: Drive, single: float
) -> None:
    """Parts hold the gradients of those before them: with one sample in each, or with two."""

    def memory(size: int) -> float:
        return 300.0 if size == 4 else single - 20 + 20 * size

    winner, asked = drive(350, memory, batch=4, gradients=200)
    assert winner is not None
    assert winner.micro_batch == 4
    assert sizes(asked) == [1, 4] if single > 350 else [1, 2, 4]


def test_many_samples_are_not_tried_in_one_chunk_for_that(drive: Drive) -> None:
    winner, asked = drive(50, line(100, 10), gradients=200)
    assert winner is None
    assert sizes(asked) == [8, 4, 2, 1]


def test_a_plan_is_compiled_at_the_largest_size_that_is_nearly_as_fast(
    measurement: Callable[..., Measurement],
) -> None:
    sizes = {
        size: measurement(size, seconds)
        for size, seconds in ((8, 1.2), (16, 1.0), (32, 1.04), (64, 1.1))
    }
    assert size_to_compile(sizes, sizes[16]) == 32


@pytest.mark.parametrize(
    ("peak", "expected"),
    [
        (260, 64),  # 100 + 10 a sample: all 64 need 740
        (420, 32),  # 20 a sample: 32 need 740, 64 need 1380
        (740, None),  # 40 a sample, as without compiling
    ],
)
def test_fused_kernels_leave_room_for_a_larger_size(
    measurement: Callable[..., Measurement], peak: int, expected: int | None
) -> None:
    sizes = {size: measurement(size, peak=100 + 40 * size) for size in (4, 8, 16)}
    compiled = replace(measurement(16, peak=peak), compile_seconds=RECOMPILE)
    assert larger_size(sizes, compiled, BATCH, budget=800) == expected
    slow = replace(measurement(16, peak=peak), compile_seconds=RECOMPILE + 1)
    assert larger_size(sizes, slow, BATCH, budget=800) is None
    whole = replace(measurement(BATCH, peak=peak), compile_seconds=RECOMPILE)
    assert larger_size(sizes, whole, BATCH, budget=800) is None
