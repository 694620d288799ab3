"""One rank runs out of memory: all go on, on the same rung. Real processes, real collectives."""

from collections.abc import Callable
from typing import Any

import pytest

Launch = Callable[..., list[dict[str, Any]]]

CASES = [
    pytest.param(
        *(size, wrap, phase),
        marks=pytest.mark.quick
        if (size, wrap, phase) == (2, "fsdp", "forward")
        else pytest.mark.full,
    )
    for size in (2, 4)
    for wrap in ("ddp", "fsdp")
    for phase in ("forward", "backward", "step")
]


@pytest.mark.parametrize(("size", "wrap", "phase"), CASES)
def test_all_ranks_go_on_together(launch: Launch, size: int, wrap: str, phase: str) -> None:
    for rank in launch(size, "cpu", wrap, phase, "short"):
        assert rank["tried"] == [16, 8, 8], rank
        assert rank["seconds"] < 60
        assert rank["losses"] == rank["again"]  # as when nothing had failed


@pytest.mark.full
def test_a_bug_of_one_rank_is_no_reason_to_retry(launch: Launch) -> None:
    said = launch(2, "cpu", "ddp", "forward", "bug")
    assert said[1]["error"] == "ValueError: a bug of rank 1"
    assert "another rank" in said[0]["error"]
    assert [rank["tried"] for rank in said] == [[16], [16]]


@pytest.mark.full
@pytest.mark.parametrize("phase", ["forward", "backward"])
def test_a_step_that_is_reduced_is_smaller_from_the_next_start(launch: Launch, phase: str) -> None:
    first = launch(2, "cpu", "ddp", phase, program="step_ranks.py")
    assert "it then takes 8 samples at a time" in first[1]["refused"]
    assert "error" not in first[0]
    for rank in launch(2, "cpu", "ddp", phase, program="step_ranks.py"):
        assert rank["error"] < 1e-15, rank


@pytest.mark.full
def test_a_step_of_a_sharded_model_is_not_split(launch: Launch) -> None:
    said = launch(2, "cpu", "fsdp", "forward", program="step_ranks.py")
    assert "the ranks communicate in the model's forward" in said[1]["refused"]
    assert "error" not in said[0]


@pytest.mark.gpu
@pytest.mark.parametrize("wrap", ["ddp", "fsdp"])
@pytest.mark.parametrize("phase", ["first", "forward", "backward", "step"])
def test_on_two_gpus(launch: Launch, two_gpus: None, wrap: str, phase: str) -> None:
    """The word goes through the store while NCCL is stuck, and the communicators are aborted."""
    for rank in launch(2, "cuda", wrap, phase, "short", timeout=100):
        assert rank["tried"] == [16, 8, 8], rank
        assert rank["seconds"] < 60
        assert rank["losses"] == pytest.approx(rank["again"], rel=1e-5)
        assert rank["memory"] == pytest.approx([rank["start"]], rel=0.01)


@pytest.mark.gpu
def test_a_bug_on_two_gpus(launch: Launch, two_gpus: None) -> None:
    said = launch(2, "cuda", "ddp", "backward", "bug", timeout=150)
    assert said[1]["error"] == "ValueError: a bug of rank 1"
    assert "another rank" in said[0]["error"]
