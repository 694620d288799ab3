"""Which cards a search uses when others are on them. What the driver answers is made up here."""

from __future__ import annotations

import pytest

from autofit.exceptions import UsageError
from autofit.facts import Hardware
from autofit.tuning.cards import choose
from autofit.worker.meter import Card, CardHolder

pytestmark = pytest.mark.quick

GIB = 1 << 30


def card(index: int, held: int = 0, name: str = "NVIDIA H200") -> Card:
    """A card of 140 GiB of which one process holds some."""
    holder = CardHolder(pid=4711 + index, name="python", size=held * GIB)
    return Card(
        entry=str(index),
        uuid=f"GPU-{index}",
        hardware=Hardware(device="cuda", name=name, total_bytes=140 * GIB),
        free=(140 - held) * GIB,
        held=held * GIB,
        holders=(holder,) if held else (),
    )


def entries(cards: tuple[Card, ...]) -> str:
    return " ".join(each.entry for each in cards)


def test_a_single_card_is_used_however_busy_and_who_holds_it_is_said() -> None:
    cards, lines = choose([card(0, held=100)], 1, None)
    assert entries(cards) == "0"
    assert lines == ("GPU 0: 40.0 GiB of 140.0 GiB free: process 4711 (python) holds 100.0 GiB",)


def test_busy_cards_are_left_out_and_said() -> None:
    cards, lines = choose([card(0), card(1, held=100), card(2, held=1), card(3)], 4, None)
    assert entries(cards) == "0 2 3"
    assert lines[0] == (
        "GPU 1 is left out, 40.0 GiB of 140.0 GiB free: process 4712 (python) holds 100.0 GiB"
    )
    assert lines[1].startswith("GPU 2: 139.0 GiB of 140.0 GiB free")


def test_a_budget_decides_what_is_enough() -> None:
    cards = [card(0, held=120), card(1, held=100)]
    assert entries(choose(cards, 2, 24 * GIB)[0]) == "1"
    assert entries(choose(cards, 2, 16 * GIB)[0]) == "0 1"
    with pytest.raises(UsageError, match=r"no GPU has this much free memory; .* 4711 .* 4712 "):
        choose(cards, 1, 60 * GIB)
    assert entries(choose([card(0)], 1, 140 * GIB)[0]) == "0", "the driver keeps some"


def test_the_first_ones_are_taken_and_other_models_are_not_mixed_in() -> None:
    assert entries(choose([card(0), card(1), card(2)], 2, None)[0]) == "0 1"
    assert entries(choose([card(0, held=100), card(1)], 1, None)[0]) == "1"
    cards, lines = choose([card(0), card(1, name="NVIDIA A100"), card(2)], 3, None)
    assert entries(cards) == "0 2"
    assert lines == ("GPU 1 is left out: it is another model, NVIDIA A100",)


def test_more_than_there_are_is_refused() -> None:
    with pytest.raises(UsageError, match="--gpus 4: 2 are visible"):
        choose([card(0), card(1)], 4, None)
