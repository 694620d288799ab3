"""The state of ``torch.compile`` in this process, whoever has called it."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager

from torch import nn


class CompileClock:
    """Measures the seconds spent compiling. torch's own counter restarts at each of its resets."""

    def __init__(self) -> None:
        self._before = 0.0
        self._seen = 0.0

    def seconds(self) -> float:
        """Return the seconds; call it before and after anything that may reset torch's counter."""
        dynamo = sys.modules.get("torch._dynamo.utils")
        if dynamo is None:
            return 0.0
        now = float(dynamo.calculate_time_spent().get("total_wall_time", 0.0))
        if now < self._seen:
            self._before += self._seen
        self._seen = now
        return self._before + now


@contextmanager
def uncompiled() -> Iterator[None]:
    """Run compiled modules without their compiled code: other shapes do not recompile them."""
    if "torch._dynamo" not in sys.modules:
        yield
        return
    import torch

    with torch.compiler.set_stance("force_eager"):
        yield


def hides(root: nn.Module, modules: Iterable[nn.Module]) -> bool:
    """Return whether some of ``modules`` are inside a compiled module of ``root``.

    Their calls are a part of the compiled graph, so a wrapper around such a call does not run.
    """
    inside = {id(each) for each in modules}

    def holds(compiled: nn.Module) -> bool:
        return any(id(each) in inside for each in compiled.modules() if each is not compiled)

    return any(_compiled(each) and holds(each) for each in root.modules())


def _compiled(module: nn.Module) -> bool:
    wraps = module._modules.get("_orig_mod") is not None
    own = hasattr(vars(module).get("forward"), "_torchdynamo_orig_callable")
    return wraps or own or module._compiled_call_impl is not None


def is_compiled(module: nn.Module) -> bool:
    """Return whether a module or one of its submodules is compiled."""
    if "torch._dynamo" not in sys.modules:
        return False
    from accelerate.utils import has_compiled_regions

    return any(map(_compiled, module.modules())) or has_compiled_regions(module)
