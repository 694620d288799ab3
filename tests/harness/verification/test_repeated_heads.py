"""Grouped-query attention with repeated keys and values is the same function."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention
from torch.overrides import TorchFunctionMode
from torch.utils.checkpoint import checkpoint

from autofit.worker.harness.verification.gradient_digest import differences, digest
from autofit.worker.harness.verification.split_check import RepeatedHeads

pytestmark = pytest.mark.quick


class Seen(TorchFunctionMode):
    """Notes the heads of keys, and whether they are grouped."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[int, bool]] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is scaled_dot_product_attention:
            key = kwargs["key"] if "key" in kwargs else args[1]
            self.calls.append((key.shape[1], kwargs["enable_gqa"]))
        return func(*args, **(kwargs or {}))


def heads(count: int) -> torch.Tensor:
    return torch.randn(2, count, 16, 4, dtype=torch.float64, requires_grad=True)


@pytest.mark.parametrize("again", [False, True], ids=["once", "checkpointed"])
def test_the_gradients_are_the_same(again: bool) -> None:
    torch.manual_seed(0)
    query, key, value = heads(8), heads(2), heads(2)

    def attend(key: torch.Tensor) -> torch.Tensor:
        return scaled_dot_product_attention(
            query, key, value, attn_mask=None, is_causal=True, scale=0.4, enable_gqa=True
        )

    def gradients() -> list[torch.Tensor]:
        made = checkpoint(attend, key, use_reentrant=False) if again else attend(key)
        return digest([made], [torch.ones_like(made).cumsum(-1)], [query, key, value])

    expected = gradients()
    with Seen() as seen, RepeatedHeads():
        found = gradients()
    assert seen.calls == [(8, False)] * (2 if again else 1)
    assert max(differences([found], expected)) < 1e-12


def test_other_attention_is_left_as_it_is() -> None:
    with Seen() as seen, RepeatedHeads():
        scaled_dot_product_attention(heads(2), heads(2), heads(2), enable_gqa=False)
    assert seen.calls == [(2, False)]
