"""TF32 for the products and convolutions of float32, whichever of torch's settings a script uses.

Torch has an older pair of settings and newer ones by backend and operation. The older cannot be
read once a script has set the newer; the newer always can
(https://docs.pytorch.org/docs/stable/notes/cuda.html#tensorfloat-32-tf32-on-ampere-and-later-devices).
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from autofit.strategies.base import Undo

FULL = ("none", "ieee")
"""Of the newer settings, those under which float32 is computed in full."""


def products() -> bool:
    """Return whether matrix products of float32 may be computed in less, on a GPU or a CPU."""
    return any(each.fp32_precision not in FULL for each in _products())


def convolutions() -> bool:
    """Return whether cuDNN may use TF32, in convolutions or recurrent nets; it may by default."""
    return any(each.fp32_precision not in FULL for each in _cudnn())


def switch(on: bool) -> Undo:
    """Let products and convolutions be computed in TF32, or in full; returns how to undo that."""
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
    """Let them be computed in TF32, or in full, within."""
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
