"""Converts records to JSON and back without loss."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable
from typing import Any, TypeVar

import cattrs

from autofit.exceptions import StorageError, UsageError
from autofit.plan import Plan

T = TypeVar("T")

_SET_BY_LAUNCHERS = re.compile(
    "(ACCELERATE|FSDP|MEGATRON_LM|PARALLELISM_CONFIG|TORCHELASTIC)_[A-Z0-9_]+"
    "|((LOCAL_|ROLE_|GROUP_)?(RANK|WORLD_SIZE)|ROLE_NAME|MASTER_(ADDR|PORT))"
    "|OMP_NUM_THREADS|KMP_(AFFINITY|BLOCKTIME)|NCCL_(P2P|IB)_DISABLE"
    "|TORCH_NCCL_ASYNC_ERROR_HANDLING|XLA_(USE|DOWNCAST)_BF16"
    "|PYTHON(UNBUFFERED|DONTWRITEBYTECODE|OPTIMIZE|DEVMODE|FAULTHANDLER|UTF8)"
)
"""Names of the variables that ``torchrun``, ``accelerate launch`` and options of ``python`` set.

None of them makes a process load a file: see ``set_by_launchers``.
"""
_WARNINGS = "PYTHONWARNINGS"
"""Variable for ``python -W``. Python imports the module of a category with a dot in its name."""

_converter = cattrs.Converter()
# A loss may be NaN or infinite, and JSON has neither; float() reads the strings back.
_converter.register_unstructure_hook(float, lambda x: x if math.isfinite(x) else str(x))
_converter.register_unstructure_hook(Plan, lambda plan: dict(plan.changes))
_converter.register_structure_hook(Plan, lambda plain, _: Plan.of(plain))


def to_json(record: object) -> dict[str, Any]:
    """Return a frozen record as plain JSON.

    >>> to_json(Plan.of({"precision": "bf16"}))
    {'precision': 'bf16'}
    """
    plain: dict[str, Any] = _converter.unstructure(record)
    return plain


def from_json(plain: object, kind: type[T]) -> T:
    """Return the record that ``to_json`` was given; raise ``StorageError`` if it is not one."""
    try:
        return _converter.structure(plain, kind)
    except (
        cattrs.BaseValidationError,
        AttributeError,
        LookupError,
        TypeError,
        ValueError,
    ) as error:
        raise StorageError(f"it holds no {kind.__name__} of this version of autofit") from error
    except UsageError as error:
        raise StorageError(f"it holds no plan of this version of autofit ({error})") from error


def readable(text: str) -> str:
    """Return ``text`` without lone surrogates and NUL, which not every database can store."""
    return text.encode(errors="backslashreplace").decode().replace("\0", "\\0")


def readable_json(value: Any) -> Any:
    """Return JSON of which each text is ``readable``."""
    match value:
        case str():
            return readable(value)
        case dict():
            return {name: readable_json(each) for name, each in value.items()}
        case list() | tuple():
            return [readable_json(each) for each in value]
    return value


def set_by_launchers(found: Iterable[tuple[str, str]]) -> tuple[tuple[str, str], ...]:
    """Return the variables of a stored environment that a launcher may have set.

    All others are removed. Otherwise, a person who can write to the store could make a process load
    a library or a module with ``LD_PRELOAD``, ``PYTHONPATH`` or ``BASH_ENV``.

    >>> set_by_launchers([("WORLD_SIZE", "2"), ("LD_PRELOAD", "mine.so")])
    (('WORLD_SIZE', '2'),)
    """
    return tuple(
        (name, value)
        for name, value in found
        if _SET_BY_LAUNCHERS.fullmatch(name) or (name == _WARNINGS and "." not in value)
    )
