"""Reads, compares and restores objects with state, for each kind of object.

A *content* restores an object: references for a container, a copy for numbers. A *value* is what
two readings of one object are compared by: numbers, lengths and types, but no identities.
"""

from __future__ import annotations

import operator
import random
import sys
import tempfile
from collections import OrderedDict, deque
from collections.abc import Callable, Iterator
from typing import IO, Any, NamedTuple

import torch
from torch.autograd.grad_mode import _unsafe_preserve_version_counter

PLAIN = (bool, int, float, complex, str, bytes, type(None))
"""Types of immutable values."""
SMALL = 1 << 20
"""Numbers of up to this many bytes are copied on their device. Larger copies go to host memory from
CUDA, otherwise to a file, so that a check does not need the memory of a model's buffers twice."""
PIECE = 1 << 20
"""Larger numbers are processed in pieces of this many bytes."""
ITEMS = 1024
"""The number of items of a container that are compared, from its end."""
LONGEST = 1 << 20
"""Containers with more items are ignored, because they contain data."""


class Large(NamedTuple):
    """The value of a tensor with more than ``SMALL`` bytes."""

    shape: tuple[int, ...]
    dtype: str
    checksum: int


def value_of(held: Any) -> Any:
    """Return the value of a reference: a plain value, or the type of any other object."""
    return held if isinstance(held, PLAIN) else type(held)


# --- numbers ----------------------------------------------------------------------------------


class Copied:
    """A copy of a strided tensor's entries."""

    __slots__ = ("_file", "_kept")

    def __init__(self, tensor: torch.Tensor) -> None:
        self._kept: torch.Tensor | None = None
        self._file: IO[bytes] | None = None
        small = _bytes(tensor) <= SMALL
        if small or tensor.device.type != "cpu" or not _flat(tensor) or "numpy" not in sys.modules:
            self._kept = tensor.clone() if small else tensor.to("cpu", copy=True)
            return
        self._file = tempfile.TemporaryFile()  # noqa: SIM115 - it is open as long as this lives
        for piece in _pieces(tensor):
            self._file.write(piece.numpy().tobytes())

    def numbers(self, like: torch.Tensor) -> torch.Tensor:
        """Return the copy on the device of ``like``, which has the same type and shape."""
        if self._kept is not None:
            return self._kept.to(like.device)
        assert self._file is not None, "it is one or the other"
        self._file.seek(0)
        kept = torch.frombuffer(bytearray(self._file.read()), dtype=torch.uint8)
        return kept.view(like.dtype).view(like.shape)

    def put(self, tensor: torch.Tensor) -> bool:
        """Write the copy into ``tensor`` if it differs; return whether it did."""
        if self._kept is not None:
            kept = self._kept if _bytes(tensor) <= SMALL else self._kept.to(tensor.device)
            if torch.equal(tensor, kept):
                return False
            tensor.copy_(kept)
            return True
        assert self._file is not None, "it is one or the other"
        self._file.seek(0)
        changed = False
        for piece in _pieces(tensor):
            kept = torch.frombuffer(bytearray(self._file.read(len(piece))), dtype=torch.uint8)
            if not torch.equal(piece, kept):
                piece.copy_(kept)
                changed = True
        return changed


def _bytes(tensor: torch.Tensor) -> int:
    return tensor.numel() * tensor.element_size()


def _flat(tensor: torch.Tensor) -> bool:
    """Return whether a tensor's bytes can be read in pieces."""
    return tensor.is_contiguous() and not tensor.is_conj() and not tensor.is_neg()


def _pieces(tensor: torch.Tensor) -> tuple[torch.Tensor, ...]:
    return torch.split(tensor.view(-1).view(torch.uint8), PIECE)


def checksum(tensor: torch.Tensor) -> int:
    """Return a checksum of a tensor's entries and their order."""
    tensor = tensor.resolve_conj().resolve_neg().contiguous()
    total = torch.zeros((), dtype=torch.int64, device=tensor.device)
    for index, piece in enumerate(_pieces(tensor)):
        words = piece.view(torch.int64) if len(piece) % 8 == 0 else piece.to(torch.int64)
        odd = torch.arange(2 * index + 1, 2 * (index + len(words)), 2, device=tensor.device)
        total = total * 31 + (words * odd).sum()  # it wraps around, as a checksum may
    return int(total)


class TensorContent(NamedTuple):
    """The content of a tensor."""

    alias: torch.Tensor
    """A tensor with the same storage, shape and strides."""
    copy: Copied | None
    version: _unsafe_preserve_version_counter | None
    requires_grad: bool


def is_readable(tensor: torch.Tensor) -> bool:
    """Return whether a tensor's entries can be read, copied and written."""
    return (
        type(tensor).__torch_dispatch__ is torch.Tensor.__torch_dispatch__
        and tensor.layout is torch.strided
        and tensor.device.type != "meta"
        and not tensor.is_quantized
    )


def read_tensor(tensor: torch.Tensor) -> TensorContent:
    """Return the content of a tensor."""
    alias = tensor.detach()
    inference = tensor.is_inference()
    return TensorContent(
        alias,
        Copied(alias) if is_readable(tensor) else None,
        None if inference else _unsafe_preserve_version_counter(tensor),
        tensor.requires_grad,
    )


def write_tensor(tensor: torch.Tensor, content: TensorContent) -> bool:
    """Restore a tensor; return ``False`` if that is not possible.

    The tensor's version is restored too, so that a graph of the script that has saved it remains
    valid.
    """
    if tensor.is_leaf and tensor.requires_grad != content.requires_grad:
        tensor.requires_grad_(content.requires_grad)
    alias, version = content.alias, content.version
    if content.copy is None:
        return version is None or tensor._version == version.prev_versions[0]
    with torch.inference_mode(tensor.is_inference()), torch.no_grad():
        if not _is_of(tensor, alias):
            tensor.data = alias
        content.copy.put(tensor if tensor.is_inference() else tensor.data)
    if version is not None and tensor._version != version.prev_versions[0]:
        version.__exit__()
    return True


def _is_of(tensor: torch.Tensor, alias: torch.Tensor) -> bool:
    same = tensor.shape == alias.shape and tensor.stride() == alias.stride()
    return same and tensor.dtype == alias.dtype and tensor.data_ptr() == alias.data_ptr()


def tensor_value(tensor: torch.Tensor, content: TensorContent | None = None) -> Any:
    """Return the value of a tensor."""
    if not is_readable(tensor):
        return tuple(tensor.shape), str(tensor.dtype)
    alias, wants = tensor.detach(), tensor.is_leaf and tensor.requires_grad
    if _bytes(alias) > SMALL:
        return Large(tuple(alias.shape), str(alias.dtype), checksum(alias)), wants
    copy = content.copy if content is not None else None
    return copy.numbers(alias) if copy is not None else alias.clone(), wants


def _as_tensor(array: Any) -> torch.Tensor:
    """Return the bytes of a contiguous NumPy array."""
    return torch.frombuffer(memoryview(array.reshape(-1).view("u1")), dtype=torch.uint8)


def read_array(array: Any) -> Any:
    """Return the content of a NumPy array."""
    if array.dtype.hasobject or array.nbytes <= SMALL or not array.flags.c_contiguous:
        return array.copy()
    return Copied(_as_tensor(array))


def write_array(array: Any, content: Any) -> bool:
    """Restore a NumPy array; return ``False`` if that is not possible."""
    if isinstance(content, Copied):
        content.put(_as_tensor(array))
    elif array.shape != content.shape or array.tobytes() != content.tobytes():
        if array.shape != content.shape or not array.flags.writeable:
            return False
        array[...] = content
    return True


def array_value(array: Any) -> Any:
    """Return the value of a NumPy array."""
    if array.dtype.hasobject:
        return tuple(array.shape), tuple(map(value_of, array.reshape(-1)[-ITEMS:].tolist()))
    if array.nbytes <= SMALL and array.dtype.kind in "biufc":
        return torch.from_numpy(array.copy())
    bytes_ = _as_tensor(array if array.flags.c_contiguous else array.copy())
    return Large(tuple(array.shape), str(array.dtype), checksum(bytes_))


# --- containers -------------------------------------------------------------------------------


def _put_dict(held: dict[Any, Any], items: tuple[tuple[Any, Any], ...]) -> bool:
    """Restore a dictionary's items in their order."""
    if len(held) == len(items) and all(
        one is key and other is value
        for (one, other), (key, value) in zip(held.items(), items, strict=True)
    ):
        return True
    kind: type[dict[Any, Any]] = OrderedDict if isinstance(held, OrderedDict) else dict
    kind.clear(held)
    for key, value in items:
        kind.__setitem__(held, key, value)
    return True


def _put_list(held: list[Any], items: tuple[Any, ...]) -> bool:
    if not _are(held, items):
        list.__setitem__(held, slice(None), items)
    return True


def _put_deque(held: deque[Any], items: tuple[Any, ...]) -> bool:
    if not _are(held, items):
        held.clear()
        held.extend(items)
    return True


def _put_set(held: set[Any], items: tuple[Any, ...]) -> bool:
    if len(held) != len(items) or any(item not in held for item in items):
        set.clear(held)
        set.update(held, items)
    return True


def _are(held: Any, items: tuple[Any, ...]) -> bool:
    return len(held) == len(items) and all(map(operator.is_, held, items))


def _put_bytes(held: bytearray, content: bytes) -> bool:
    held[:] = content
    return True


def _items(content: tuple[Any, ...]) -> Any:
    return len(content), tuple(map(value_of, content[-ITEMS:]))


def _pairs(content: tuple[tuple[Any, Any], ...]) -> Any:
    return len(content), tuple((str(k), value_of(v)) for k, v in content[-ITEMS:])


class Kind(NamedTuple):
    """How one kind of object is read, written and compared."""

    read: Callable[[Any], Any]
    """Return the object's content."""
    write: Callable[[Any, Any], bool]
    """Restore a content; return ``False`` if that is not possible."""
    value: Callable[[Any, Any], Any]
    """Return the value of the object and its content."""
    inner: Callable[[Any], Iterator[tuple[str, Any, Any]]] = lambda content: iter(())
    """Yield the objects in a content, each with a label and its key in the container."""
    copies: bool = False
    """The content is a copy, which is not needed if the object is only compared."""


def _inside_sequence(content: tuple[Any, ...]) -> Iterator[tuple[str, Any, Any]]:
    first = max(0, len(content) - ITEMS)
    return ((f"[{i}]", i, item) for i, item in enumerate(content[first:], first))


def _inside_dict(content: tuple[tuple[Any, Any], ...]) -> Iterator[tuple[str, Any, Any]]:
    return ((f"[{key!r:.40}]", key, value) for key, value in content[-ITEMS:])


TENSOR = Kind(read_tensor, write_tensor, tensor_value, copies=True)
ARRAY = Kind(read_array, write_array, lambda array, _: array_value(array), copies=True)
DICT = Kind(lambda d: tuple(d.items()), _put_dict, lambda _, items: _pairs(items), _inside_dict)
LIST = Kind(tuple, _put_list, lambda _, items: _items(items), _inside_sequence)
DEQUE = Kind(tuple, _put_deque, lambda _, items: _items(items), _inside_sequence)
TUPLE = Kind(tuple, lambda *_: True, lambda _, items: _items(items), _inside_sequence)
SET = Kind(tuple, _put_set, lambda _, items: (len(items), _sorted(items)))
# The items of a set are not entered: hashable objects rarely change.
BYTES = Kind(bytes, _put_bytes, lambda _, content: content)
GENERATOR = Kind(
    lambda generator: generator.get_state(),
    lambda generator, state: generator.set_state(state) is not None,
    lambda _, state: state,
)
PYTHON_RANDOM = Kind(
    lambda generator: generator.getstate(),
    lambda generator, state: generator.setstate(state) is None,
    lambda _, state: repr(state),
)
NUMPY_RANDOM_STATE = Kind(
    lambda generator: generator.get_state(legacy=False),
    lambda generator, state: generator.set_state(state) is None,
    lambda _, state: _flat_state(state),
)


def _set_bit_generator(generator: Any, state: Any) -> bool:
    generator.bit_generator.state = state
    return True


NUMPY_GENERATOR = Kind(
    lambda generator: generator.bit_generator.state,
    _set_bit_generator,
    lambda _, state: _flat_state(state),
)


def _sorted(items: tuple[Any, ...]) -> Any:
    return tuple(sorted(str(value_of(item)) for item in items[:ITEMS]))


def _flat_state(state: Any) -> Any:
    """Return the state of a NumPy generator in a form that ``==`` compares."""
    if isinstance(state, dict):
        return tuple((key, _flat_state(value)) for key, value in sorted(state.items()))
    return state.tobytes() if hasattr(state, "tobytes") else state


def kind_of(thing: Any) -> Kind | None:
    """Return the kind of an object with state; ``None`` for any other object."""
    if isinstance(thing, torch.Tensor):
        return TENSOR
    for kinds, kind in _BY_TYPE:
        if isinstance(thing, kinds):
            short = not hasattr(thing, "__len__") or len(thing) <= LONGEST
            return kind if short else None
    numpy = sys.modules.get("numpy")
    if numpy is None:
        return None
    if isinstance(thing, numpy.ndarray):
        return ARRAY
    if isinstance(thing, numpy.random.RandomState):
        return NUMPY_RANDOM_STATE
    return NUMPY_GENERATOR if isinstance(thing, numpy.random.Generator) else None


_BY_TYPE: tuple[tuple[type, Kind], ...] = (
    (dict, DICT),
    (list, LIST),
    (tuple, TUPLE),
    (deque, DEQUE),
    (set, SET),
    (bytearray, BYTES),
    (torch.Generator, GENERATOR),
    (random.Random, PYTHON_RANDOM),
)
