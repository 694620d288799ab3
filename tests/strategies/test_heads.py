"""What the logits of a language model are of its activations."""

from __future__ import annotations

import pytest

from autofit import strategies
from autofit.analysis.cost_model import CostModel
from autofit.plan import Plan
from autofit.strategies import Facts, RootFacts
from autofit.strategies.inspection.heads import share_of_logits

pytestmark = pytest.mark.quick

GIB = 1 << 30


def facts(parameters: int, blocks: int, classes: int) -> Facts:
    root = RootFacts(
        name="GPT",
        parameters=parameters,
        parameter_bytes=4 * parameters,
        trainable=parameters,
        dtype="float32",
        batch=12,
        blocks=blocks,
        classes=classes,
    )
    return Facts(roots=(root,), optimizers=("AdamW",), stepped=True)


GPT2 = facts(124_400_000, 12, 50304)


def test_they_are_most_of_a_small_model_and_little_of_a_large_one() -> None:
    """Of GPT-2's 16 and 34 bytes: of 805 kB a token 314 kB are its blocks'."""
    assert share_of_logits(GPT2) == pytest.approx(805 / (805 + 314), abs=0.01)
    assert share_of_logits(facts(1_560_000_000, 48, 50257)) == pytest.approx(0.24, abs=0.01)
    assert share_of_logits(facts(6_700_000_000, 32, 32000)) == pytest.approx(0.10, abs=0.01)


@pytest.mark.parametrize("classes", [1000, 0])
def test_where_there_are_none(classes: int) -> None:
    assert share_of_logits(facts(124_400_000, 12, classes)) == 0.0


def test_of_a_model_without_blocks_it_is_not_known() -> None:
    recurrent, loss = facts(124_400_000, 0, 50304), strategies.get("loss")
    assert share_of_logits(recurrent) is None
    assert loss.expected_share("chunked", recurrent) == loss.level("chunked").keeps


def test_checkpointing_leaves_them_and_a_chunked_loss_nothing_else() -> None:
    checkpointing, loss = strategies.get("checkpointing"), strategies.get("loss")
    keeps = checkpointing.level("all").keeps
    assert checkpointing.expected_share("all", Facts()) == pytest.approx(keeps)
    assert checkpointing.expected_share("all", GPT2) > 0.7
    assert loss.expected_share("chunked", GPT2) < 0.4


def test_what_is_expected_of_a_plan_follows() -> None:
    """A batch as it is needs little more than one that is checkpointed."""
    lean = Plan.of({"checkpointing": "all"})
    grown = []
    for known in (GPT2, facts(124_400_000, 12, 0)):
        model = CostModel((), known, 10 * GIB, cuda=True)
        grown.append(model.predict(Plan(), 6)[1] / model.predict(lean, 6)[1])
    assert grown[0] < 1.4 < 2 < grown[1]
