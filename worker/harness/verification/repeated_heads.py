"""Runs grouped-query attention with a key and a value for each query head.

torch's fused kernel for float32 on a GPU has no groups. Attention with ``enable_gqa`` then has a
score for every pair of tokens and every head, in several copies: 2 GiB a sample for 32 heads and
2048 tokens. With repeated keys and values, the fused kernel needs none of them. The function is the
same, so whether a batch can be split does not depend on it.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.nn.functional import scaled_dot_product_attention
from torch.overrides import TorchFunctionMode

NAMES = ("query", "key", "value", "attn_mask", "dropout_p", "is_causal")


class RepeatedHeads(TorchFunctionMode):
    """Repeats keys and values before each call of ``scaled_dot_product_attention``."""

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Run a function of torch."""
        kwargs = kwargs or {}
        if func is scaled_dot_product_attention and kwargs.get("enable_gqa"):
            given = dict(zip(NAMES, args, strict=False)) | kwargs
            heads = given["query"].shape[-3]
            given |= {name: _repeated(given[name], heads) for name in ("key", "value")}
            return func(**{**given, "enable_gqa": False})
        return func(*args, **kwargs)


def _repeated(tensor: torch.Tensor, heads: int) -> torch.Tensor:
    return tensor.repeat_interleave(heads // tensor.shape[-3], dim=-3)
