"""Describes a model that ran out of memory before its first call: it is too large for the device.

The model is found through the traceback. A model that was under construction is constructed again
on the meta device, which needs no memory. One that was being moved or loaded is complete. A model
that the script assembles outside any class cannot be constructed again.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from contextlib import redirect_stdout, suppress
from dataclasses import replace
from io import StringIO
from types import FrameType

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from autofit.facts import RootFacts
from autofit.worker.harness.session.script_facts import describe
from autofit.worker.harness.torch_state.frames import OURS


def facts_of(error: BaseException) -> RootFacts | None:
    """Return the facts of the largest model in the frames of ``error``.

    ``None`` if they hold no model with trainable parameters.
    """
    found = [
        replace(describe(module, (), {}), called=False)
        for module in _modules(error)
        if _is_described(module)
    ]
    return max(found, key=lambda each: each.parameter_bytes, default=None)


def _modules(error: BaseException) -> Iterator[nn.Module]:
    """Yield the modules in the traceback's frames, and the one under construction."""
    making = False
    seen: set[int] = set()
    for frame in _frames(error):
        itself, name = frame.f_locals.get("self"), frame.f_code.co_name
        if not making and name == "__init__" and isinstance(itself, nn.Module):
            making = True
            if (module := _made_again(frame)) is not None:
                yield module
        for value in list(frame.f_locals.values()):
            whole = isinstance(value, nn.Module) and "_parameters" in vars(value)
            if whole and id(value) not in seen:
                seen.add(id(value))
                yield value


def _is_described(module: nn.Module) -> bool:
    """Return whether all parameters have a size, and some are trained."""
    held = [*module.parameters(), *module.buffers()]
    return not any(is_lazy(each) for each in held) and any(each.requires_grad for each in held)


def _frames(error: BaseException) -> Iterator[FrameType]:
    traceback = error.__traceback__
    while traceback is not None:
        if not traceback.tb_frame.f_code.co_filename.startswith(OURS):
            yield traceback.tb_frame
        traceback = traceback.tb_next


def _made_again(frame: FrameType) -> nn.Module | None:
    """Construct the module that ``frame``, its ``__init__``, was making, on the meta device."""
    given, count = inspect.getargvalues(frame), frame.f_code.co_argcount
    args = [given.locals[name] for name in given.args[1:count]]
    args += given.locals[given.varargs] if given.varargs else ()
    kwargs = {name: given.locals[name] for name in given.args[count:]}
    kwargs |= given.locals[given.keywords] if given.keywords else {}
    made: nn.Module | None = None
    # The user's own code may fail.
    with suppress(Exception), redirect_stdout(StringIO()), torch.device("meta"):
        made = type(given.locals["self"])(*args, **kwargs)
    return made
