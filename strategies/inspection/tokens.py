"""Finds the tokens of a padded batch that matter: those up to the last unmasked or labelled one."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

MASKS = ("attention_mask", "decoder_attention_mask")
"""Arguments of Hugging Face models that are zero for padding."""
LABELS = "labels"
IGNORED = -100
"""The label that losses ignore, in Hugging Face's models and PyTorch."""


def mask_of(kwargs: Mapping[str, Any]) -> torch.Tensor | None:
    """Return the mask, ``(samples, tokens)``, or ``None`` without an integer or bool mask."""
    mask = kwargs.get(MASKS[0])
    if not isinstance(mask, torch.Tensor) or mask.ndim != 2 or mask.is_floating_point():
        return None
    if mask.layout is not torch.strided or mask.is_nested:
        return None
    return mask if mask.numel() else None


def counted(kwargs: Mapping[str, Any]) -> torch.Tensor | None:
    """Return which tokens a mask or label uses, ``(samples, tokens)``; ``None`` without a mask."""
    mask = mask_of(kwargs)
    if mask is None:
        return None
    found = mask != 0
    for name in (*MASKS[1:], LABELS):
        other = kwargs.get(name)
        if isinstance(other, torch.Tensor) and other.shape == mask.shape:
            found = found | (other != (IGNORED if name == LABELS else 0))
    return found


def lengths(kwargs: Mapping[str, Any]) -> torch.Tensor | None:
    """Return the position after each sample's last used token; ``None`` without a mask."""
    found = counted(kwargs)
    if found is None:
        return None
    places = torch.arange(1, found.shape[1] + 1, device=found.device)
    return (found * places).amax(1)


def padded(kwargs: Mapping[str, Any]) -> float:
    """Return the share of tokens after each sample's last used token."""
    found = lengths(kwargs)
    mask = mask_of(kwargs)
    if found is None or mask is None:
        return 0.0
    return 1.0 - float(found.sum()) / mask.numel()


def longest(kwargs: Mapping[str, Any]) -> float:
    """Return the share of tokens up to the last used one of any sample; 1 without a mask."""
    found = lengths(kwargs)
    mask = mask_of(kwargs)
    if found is None or mask is None:
        return 1.0
    return float(found.max()) / mask.shape[1]
