"""Parameters are replaced wherever the script keeps them."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from autofit.exceptions import Refused
from autofit.worker.harness.ranks.references import replace_parameters

pytestmark = pytest.mark.quick


class Holder:
    """Holds a parameter in a slot, where it cannot be replaced."""

    __slots__ = ("other", "parameter")

    def __init__(self, parameter: nn.Parameter) -> None:
        self.parameter = parameter
        self.other = self


def test_what_nothing_refers_to_holds_no_parameter() -> None:
    old, new = nn.Parameter(torch.zeros(2)), nn.Parameter(torch.ones(2))
    kept = [old]
    Holder(old)  # a cycle, which only the garbage collector frees
    replace_parameters({old: new})
    assert kept[0] is new


def test_a_slot_that_is_used_is_refused() -> None:
    old, new = nn.Parameter(torch.zeros(2)), nn.Parameter(torch.ones(2))
    holder = Holder(old)
    with pytest.raises(Refused, match="a Holder of the script holds a parameter"):
        replace_parameters({old: new})
    assert holder.parameter is old
