"""Outputs beside the loss are gathered only if the script uses them, with their gradients."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from autofit.worker.harness.batch.late_output import LateOutput
from tests.harness.ranks.trainings import LANGUAGE, TAIL, assert_same

ENTRIES = torch.arange(6.0).reshape(3, 2)
KEEPS_NOTHING = """\
import sys

for name, each in list(sys.modules.items()):
    if name.endswith(".batch.late_rows"):
        each.LARGE = 0
"""
CALL = """\
        _, loss = model(x, labels)
        (loss / 2).backward()
"""
USED = """\
        logits, loss = model(x, labels)
        assert logits.shape == (7, 5, 17) and len(logits) == 7
        if step % 3 == 0:
            with torch.no_grad():
                print((logits.argmax(-1) == labels).double().mean().item())
        if step % 4 == 1:
            loss = loss + 1e-3 * (logits ** 2).mean() + torch.logsumexp(logits, -1).mean()
        (loss / 2).backward()
        if step % 5 == 2:
            print(f"{logits.detach().square().sum().item():.9f} {logits[0, 0, 1].item():.9f}")
"""


@pytest.fixture
def gathered() -> list[int]:
    """Return a list that gets an entry each time the output is gathered."""
    return []


@pytest.fixture
def output(gathered: list[int]) -> LateOutput:
    """Return a late output of ``ENTRIES``, with a graph behind it."""
    stand_in = torch.zeros((), requires_grad=True).expand(ENTRIES.shape)

    def gather() -> torch.Tensor:
        gathered.append(1)
        return ENTRIES.clone()

    return LateOutput.of(stand_in, ENTRIES.to("meta"), gather)


@pytest.mark.quick
def test_its_shape_and_its_graph_are_known_without_gathering(
    output: LateOutput, gathered: list[int]
) -> None:
    assert output.shape == (3, 2)
    assert (len(output), output.dtype, output.device.type) == (3, torch.float32, "cpu")
    assert (output.requires_grad, output.stride()) == (True, (2, 1))
    assert output.grad_fn is not None
    assert not gathered


@pytest.mark.quick
def test_it_is_gathered_once(output: LateOutput, gathered: list[int]) -> None:
    assert isinstance(output, torch.Tensor)
    assert output.sum().item() == ENTRIES.sum().item()
    assert output[1].tolist() == ENTRIES[1].tolist()
    assert gathered == [1]


@pytest.mark.quick
def test_a_first_use_without_gradients_keeps_the_graph(output: LateOutput) -> None:
    with torch.no_grad():
        assert not (output * 2).requires_grad
    with torch.inference_mode():
        assert output.max().item() == 5
    stand_in = output._stand_in
    (gradient,) = torch.autograd.grad((output**2).sum(), stand_in)
    assert gradient.tolist() == (2 * ENTRIES).tolist()


@pytest.mark.full
@pytest.mark.parametrize(
    "plan", [{"ranks": "2"}, {"ranks": "3"}, {"ranks": "2", "micro_batch": "2"}]
)
def test_a_script_that_uses_them_trains_the_same(tmp_path: Path, plan: dict[str, str]) -> None:
    assert CALL in LANGUAGE
    assert_same(tmp_path, LANGUAGE.replace(CALL, USED) + TAIL, plan)


@pytest.mark.full
@pytest.mark.parametrize(
    "plan",
    [
        {"ranks": "2", "micro_batch": "2"},
        {"micro_batch": "2"},
        {"sharding": "full_offload", "micro_batch": "2"},
    ],
    ids=["ranks", "alone", "sharded"],
)
def test_a_script_may_use_what_chunks_have_not_kept(tmp_path: Path, plan: dict[str, str]) -> None:
    assert_same(tmp_path, KEEPS_NOTHING + LANGUAGE.replace(CALL, USED) + TAIL, plan)
