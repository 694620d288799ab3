"""TF32 for float32 matrix products and convolutions, under torch's old and new settings.

torch has an old pair of settings, and new settings for each backend and operation. The old ones
cannot be read after a script has set the new ones. The new ones can always be read
(https://docs.pytorch.org/docs/stable/notes/cuda.html#tensorfloat-32-tf32-on-ampere-and-later-devices).
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from autofit.strategies.base import Undo

FULL = ("none", "ieee")
"""Values of the new settings that compute float32 in full precision."""


def products() -> bool:
    """Return whether float32 matrix products may use a lower precision on a GPU or CPU."""
    return any(each.fp32_precision not in FULL for each in _products())


def convolutions() -> bool:
    """Return whether cuDNN may use TF32. By default it may."""
    return any(each.fp32_precision not in FULL for each in _cudnn())


def switch(on: bool) -> Undo:
    """Enable or disable TF32 in products and convolutions. Return the undo."""
    try:
        matmul = torch.get_float32_matmul_precision()
        cudnn = torch.backends.cudnn.allow_tf32
    except RuntimeError:
        return _switch_newer(on)
    torch.set_float32_matmul_precision("high" if on else "highest")
    torch.backends.cudnn.allow_tf32 = on

    def undo() -> None:
        torch.set_float32_matmul_precision(matmul)
        torch.backends.cudnn.allow_tf32 = cudnn

    return undo


@contextmanager
def switched(on: bool) -> Iterator[None]:
    """Enable or disable TF32 within the context."""
    undo = switch(on)
    try:
        yield
    finally:
        undo()


def _switch_newer(on: bool) -> Undo:
    settings = (*_products(), *_cudnn())
    before = [each.fp32_precision for each in settings]
    for each in settings:
        each.fp32_precision = "tf32" if on else "ieee"

    def undo() -> None:
        for each, precision in zip(settings, before, strict=True):
            each.fp32_precision = precision

    return undo


def _products() -> tuple[Any, ...]:
    return torch.backends.cuda.matmul, torch.backends.mkldnn.matmul  # type: ignore[attr-defined]


def _cudnn() -> tuple[Any, ...]:
    return torch.backends.cudnn.conv, torch.backends.cudnn.rnn  # type: ignore[attr-defined]
