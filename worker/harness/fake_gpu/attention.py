"""Attention as CUDA would compute it: on the CPU, torch chooses kernels of other memory."""

from __future__ import annotations

import torch

HALF = (torch.float16, torch.bfloat16)
WIDEST = 256
"""The largest head of the flash kernel."""
ALIGNED = 16
"""Bytes of which a row of the memory-efficient kernel's arguments is a multiple."""
aten = torch.ops.aten


def attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> torch.Tensor:
    """Return what ``scaled_dot_product_attention`` returns, by the kernel that CUDA chooses.

    The order is torch's own: flash, memory-efficient, math
    (``aten/src/ATen/native/transformers/cuda/sdp_utils.cpp``).
    """
    if _flash(query, value, attn_mask):
        found = aten._scaled_dot_product_flash_attention(
            query, key, value, dropout_p, is_causal, False, scale=scale
        )
        return found[0]  # type: ignore[no-any-return]
    if _efficient(query, key, value):
        if attn_mask is not None and attn_mask.dtype == torch.bool:
            attn_mask = torch.zeros_like(attn_mask, dtype=query.dtype)
        if attn_mask is not None:
            attn_mask = attn_mask.expand(*query.shape[:-1], key.shape[-2])
        inputs = (query, key, value, attn_mask)
        wants = torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in inputs)
        found = aten._scaled_dot_product_efficient_attention(
            *inputs, wants, dropout_p, is_causal, scale=scale
        )
        return found[0]  # type: ignore[no-any-return]
    found = aten._scaled_dot_product_attention_math(
        query, key, value, attn_mask, dropout_p, is_causal, None, scale=scale, enable_gqa=enable_gqa
    )
    return found[0]  # type: ignore[no-any-return]


def _flash(query: torch.Tensor, value: torch.Tensor, mask: torch.Tensor | None) -> bool:
    capable = torch.cuda.get_device_capability() >= (8, 0)
    width = query.shape[-1]
    fits = query.ndim == 4 and width == value.shape[-1] and width <= WIDEST
    return capable and fits and mask is None and query.dtype in HALF


def _efficient(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> bool:
    same = query.ndim == 4 and query.shape[1] == key.shape[1]
    aligned = all(t.shape[-1] * t.element_size() % ALIGNED == 0 for t in (query, value))
    return same and aligned and query.dtype in (*HALF, torch.float32)
