"""Reads a ``DataLoader`` without workers ahead, in forked processes; see ``data_loading``.

torch's own ``DataLoader`` does the work: a second one, whose samples are the script's batches. It
hands the script's indices out, in their order, to workers that fetch as the script's iterator does.
"""

from __future__ import annotations

import os
import pickle
import time
import warnings
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from itertools import chain, islice
from typing import Any

import torch
from torch.utils.data import DataLoader, Dataset, IterDataPipe, MapDataPipe
from torch.utils.data._utils import signal_handling
from torch.utils.data.dataloader import _DatasetKind, _SingleProcessDataLoaderIter

from autofit.exceptions import Refused
from autofit.strategies.base import Forward, Root
from autofit.strategies.data_loading.data_sets import (
    Draws,
    connection,
    marks,
    positions,
    same,
    too_much,
    was_read,
)

NAME = "data_loading"
MOST = 4
"""Worker processes, where there are as many cores."""
AHEAD = 2
"""Batches that each worker is given ahead; torch's own default."""
FEWEST = 2
"""Batches that must have been compared: one alone shows nothing of what comes after it."""
RESTARTS = 3
"""How often the script may change a data set between two of its batches."""
GLANCE = 1
"""Seconds between two looks whether the workers are alive."""
TIMED_OUT = "DataLoader timed out after"
"""How torch begins to say that no batch has come since."""
PATIENCE = 120.0
"""Seconds after which a worker's batch is fetched in the script's process."""

DRAWS = "the data set draws random numbers: in workers they would be others"
SAMPLER = "the sampler draws random numbers as it goes: read ahead they would be others"
SHARED = "the data set reads from an open file, whose position workers would share"
OTHER = "workers give other data: the data set keeps something from one sample to the next"
CHANGED = "the script changes the data set between its batches"
STREAM = "the data set is a stream: workers would divide it otherwise"
SAVED = "the sampler's state may be saved: read ahead it would be another"


def workers() -> int:
    """Return how many processes fetch: two at least, so that one meets what another has changed."""
    return max(2, min(MOST, len(os.sched_getaffinity(0))))


@dataclass
class Known:
    """What is known of a data set."""

    dataset: Any
    """Kept, so that no other takes its ``id``."""
    proven: bool = False
    """Workers have given what is fetched in the script's process."""
    reason: str | None = None
    """Why workers are not for it."""
    restarts: int = 0


class Reading:
    """The loaders of a script under the plan of one root."""

    def __init__(self, root: Root, *, pinned: bool) -> None:
        self._root = root
        self._pinned = pinned
        self._known: dict[int, Known] = {}
        self._ahead: weakref.WeakKeyDictionary[Any, Ahead] = weakref.WeakKeyDictionary()
        self._process = os.getpid()
        self._reason: str | None = None

    def watch(self, forward: Forward) -> Forward:
        """Refuse, where it is measured, what went on in the script's process."""

        def call(*args: Any, **kwargs: Any) -> Any:
            if self._reason is not None and self._root.strict:
                raise Refused(self._reason, NAME)
            return forward(*args, **kwargs)

        return call

    def next(self, iterator: Any, plain: Callable[[], Any]) -> Any:
        """Return the next batch of ``iterator``; ``plain`` fetches it in this process."""
        if type(iterator) is not _SingleProcessDataLoaderIter or os.getpid() != self._process:
            return plain()
        known = self._known.setdefault(id(iterator._dataset), Known(iterator._dataset))
        ahead = self._ahead.get(iterator)
        if ahead is None:
            self._note(known, known.reason or _why_not(iterator))
            if known.reason is not None:
                return plain()
            ahead = self._ahead[iterator] = Ahead(iterator, self._pinned)
            weakref.finalize(iterator, ahead.stop)  # the script may break a pass off
            if not known.proven:
                self._root.set_aside()
                self._note(known, ahead.prove(iterator, plain, known))
        batch, reason = ahead.next(iterator, plain, known)
        self._note(known, reason)
        return batch

    def close(self) -> None:
        """End the workers; the iterators go on in this process."""
        for iterator, ahead in list(self._ahead.items()):
            ahead.close(iterator)
        self._ahead.clear()

    def _note(self, known: Known, reason: str | None) -> None:
        """Fetch the data in this process from now on, if there is a reason to; say so once."""
        if reason is None or reason == known.reason:
            return
        known.reason = self._reason = reason
        if not self._root.strict:
            said = f"autofit: batches are loaded in the script's own process: {reason}"
            warnings.warn(said, stacklevel=2)


def _why_not(iterator: Any) -> str | None:
    """Return why workers are not for what ``iterator`` reads, as far as can be seen."""
    dataset = iterator._dataset
    streams = isinstance(dataset, (IterDataPipe, MapDataPipe))
    if streams or iterator._dataset_kind != _DatasetKind.Map:
        return STREAM
    inner = getattr(iterator._index_sampler, "sampler", None)
    if any(hasattr(each, "state_dict") for each in (iterator._index_sampler, inner)):
        return SAVED
    if held := connection(dataset):
        return f"the data set holds {held}, which workers would share"
    return None


class Ahead:
    """One iterator, read ahead."""

    def __init__(self, iterator: Any, pinned: bool) -> None:
        self._fetcher = iterator._dataset_fetcher
        self._source: Iterator[Any] = _watched(iterator._sampler_iter, iterator._num_yielded == 0)
        """The indices that nobody has yet."""
        self._ready: deque[tuple[Any, Any]] = deque()
        """Indices and batches that were fetched in this process to be compared."""
        self._given: deque[Any] = deque()
        """The indices that workers have, in their order."""
        self._batches: Any = None
        self._pinned = (pinned or iterator._pin_memory) and torch.cuda.is_available()
        self._marks: list[Any] = []
        self._process = os.getpid()

    def prove(self, iterator: Any, plain: Callable[[], Any], known: Known) -> str | None:
        """Fetch some batches here, then by workers; return why these are not for them.

        Whatever comes of it, the script is given what was fetched here.
        """
        reason = self._fetch(iterator, plain)
        if reason is not None or len(self._ready) < FEWEST:
            return reason
        indices, batches = zip(*self._ready, strict=True)
        try:
            pickle.dumps(batches[0])
        except Exception as error:  # noqa: BLE001 - whatever a script's object says to it
            return f"a batch cannot be sent between processes: {_line(error)}"
        if reason := too_much(batches[0], AHEAD * workers()):
            return reason
        found = self._start(indices)
        try:
            for expected in batches:
                batch, drew = _next(found)
                if drew or not same(batch, expected):
                    return DRAWS if drew else OTHER
        except Exception as error:  # noqa: BLE001 - whatever a script's data set raises there
            return f"a worker failed: {_line(error)}"
        finally:
            found._shutdown_workers()
        known.proven = True
        return None

    def next(self, iterator: Any, plain: Callable[[], Any], known: Known) -> tuple[Any, str | None]:
        """Return the next batch, and why the following ones are fetched here if they are."""
        if self._ready:
            return self._ready.popleft()[1], None
        reason = known.reason
        if self._batches is not None and marks(known.dataset) != self._marks:
            self.stop()
            known.restarts += 1
            reason = reason or (CHANGED if known.restarts > RESTARTS else None)
        if reason is None and known.proven:
            if self._batches is None:
                self._batches = self._start(self._hand_out())
            try:
                batch, drew = _next(self._batches)
            except (StopIteration, Refused):
                self.stop()
                raise
            except Exception as error:  # noqa: BLE001 - fetched again here, where it is raised
                reason = f"a worker failed: {_line(error)}"
            else:
                reason = DRAWS if drew else None
            if reason is None:
                self._given.popleft()
                self._marks = marks(known.dataset)
                return batch, None
        self.close(iterator)
        batch = plain()
        self._source = iterator._sampler_iter
        return batch, reason

    def close(self, iterator: Any) -> None:
        """End the workers, and let ``iterator`` go on where the script is."""
        self.stop()
        self._source = chain([index for index, _ in self._ready], self._source)
        self._ready.clear()
        iterator._sampler_iter = self._source

    def _fetch(self, iterator: Any, plain: Callable[[], Any]) -> str | None:
        """Fetch a batch for each worker, and one more; return what speaks against workers."""
        for index in islice(self._source, workers() + 1):
            before, places = Draws.now(), positions()
            iterator._sampler_iter = iter((index,))
            batch = plain()
            if before != Draws.now():
                if not self._ready:
                    self._ready.append((index, batch))
                else:  # too early: it is fetched again at its time
                    before.restore()
                    self._source = chain((index,), self._source)
                return DRAWS
            self._ready.append((index, batch))
            if len(self._ready) > 1 and was_read(places, positions()):
                return SHARED
        return None

    def _hand_out(self) -> Iterator[Any]:
        for index in self._source:
            self._given.append(index)
            yield index

    def _start(self, indices: Iterable[Any]) -> Any:
        """Start workers on ``indices``; their iterator gives batches, and whether each drew."""
        loader: DataLoader[Any] = DataLoader(
            _Batches(self._fetcher),
            batch_size=None,
            sampler=indices,
            num_workers=workers(),
            collate_fn=_as_it_is,
            pin_memory=self._pinned,
            timeout=GLANCE,
            multiprocessing_context="fork",
            generator=torch.Generator(),
            prefetch_factor=AHEAD,
        )
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of more workers than cores, of threads at a fork
            found: Any = iter(loader)
        # Where a worker dies torch raises in whatever the script does; ``_next`` sees it as well.
        signal_handling._remove_worker_pids(id(found))  # type: ignore[attr-defined]
        found._worker_pids_set = False
        return found

    def stop(self) -> None:
        """End the workers; what they have and the script has not is to be fetched again."""
        if os.getpid() != self._process:  # a worker's copy of this
            return
        if self._batches is not None:
            self._batches._shutdown_workers()
            self._batches = None
        self._source = chain(list(self._given), self._source)
        self._given.clear()


def _next(batches: Any) -> tuple[Any, bool]:
    """Return the next batch that workers have fetched, and whether it drew random numbers."""
    deadline = time.monotonic() + PATIENCE
    while True:
        try:
            batch, drew = batches._next_data()
        except RuntimeError as error:  # the same call may be made again
            if not str(error).startswith(TIMED_OUT) or time.monotonic() > deadline:
                raise
        else:
            return batch, drew


def _watched(indices: Iterator[Any], first: bool) -> Iterator[Any]:
    """Yield a sampler's indices; only the ``first`` of all may draw, when it is asked for."""
    while True:
        before = None if first else Draws.now()
        try:
            index = next(indices)
        except StopIteration:
            return
        if before is not None and before != Draws.now():
            raise Refused(SAMPLER, NAME)
        first = False
        yield index


class _Batches(Dataset[Any]):
    """The script's batches by their indices, as its own iterator fetches them."""

    def __init__(self, fetcher: Any) -> None:
        self._fetcher = fetcher

    def __getitem__(self, index: Any) -> tuple[Any, bool]:
        """Return a batch, and whether it drew random numbers."""
        before = Draws.now()
        batch = self._fetcher.fetch(index)
        return batch, before != Draws.now()


def _as_it_is(batch: Any) -> Any:
    return batch


def _line(error: BaseException) -> str:
    """Return an error in a line; torch puts a worker's traceback before what it says."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()] or [""]
    name = type(error).__name__
    return lines[-1] if lines[-1].startswith(name) else f"{name}: {lines[-1]}".rstrip(": ")
