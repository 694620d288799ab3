"""Fetches the batches of a ``DataLoader`` ahead of time, in forked workers; see ``data_loading``.

A second ``DataLoader`` does the work. Its samples are the script's batches. It passes the script's
indices to the workers in their order, and the workers fetch as the script's iterator does.
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
    LoaderDraws,
    connection,
    marks,
    positions,
    same,
    too_much,
    was_read,
)

NAME = "data_loading"
MOST = 4
"""Maximum number of workers."""
AHEAD = 2
"""Batches that each worker fetches ahead; torch's default."""
FEWEST = 2
"""Minimum number of batches to compare. One batch would not show an effect on the next one."""
RESTARTS = 3
"""How often the workers restart because the script changed the data set between batches."""
GLANCE = 1
"""Seconds between two checks that the workers are alive."""
TIMED_OUT = "DataLoader timed out after"
"""The beginning of torch's message when no batch has arrived."""
PATIENCE = 120.0
"""Seconds after which the script's process fetches a worker's batch itself."""

DRAWS = "the data set draws random numbers, and workers would draw others"
SAMPLER = "the sampler draws random numbers for each batch: fetched ahead they would differ"
SHARED = "the data set reads from an open file, whose position workers would share"
OTHER = "workers return other data: the data set keeps state between samples"
CHANGED = "the script changes the data set between its batches"
STREAM = "the data set is a stream, which workers would divide differently"
SAVED = "the script may save the sampler's state, which fetching ahead would change"


def workers() -> int:
    """Return the number of workers: at least two, to detect state that they do not share."""
    return max(2, min(MOST, len(os.sched_getaffinity(0))))


@dataclass
class _Known:
    """What is known about a data set."""

    dataset: Any
    """Held so that its ``id`` is not reused."""
    proven: bool = False
    """Workers have returned the same batches as the script's process."""
    reason: str | None = None
    """Why workers cannot be used, or ``None``."""
    restarts: int = 0


class Reading:
    """Fetches ahead for all loaders of a script, under the plan of one root."""

    def __init__(self, root: Root, *, pinned: bool) -> None:
        self._root = root
        self._pinned = pinned
        self._known: dict[int, _Known] = {}
        self._ahead: weakref.WeakKeyDictionary[Any, _Ahead] = weakref.WeakKeyDictionary()
        self._process = os.getpid()
        self._reason: str | None = None

    def watch(self, forward: Forward) -> Forward:
        """Return ``forward``, which raises ``Refused`` in a trial that fell back to one process."""

        def call(*args: Any, **kwargs: Any) -> Any:
            if self._reason is not None and self._root.strict:
                raise Refused(self._reason, NAME)
            return forward(*args, **kwargs)

        return call

    def next(self, iterator: Any, plain: Callable[[], Any]) -> Any:
        """Return the next batch of ``iterator``. ``plain`` fetches it in this process."""
        if type(iterator) is not _SingleProcessDataLoaderIter or os.getpid() != self._process:
            return plain()
        known = self._known.setdefault(id(iterator._dataset), _Known(iterator._dataset))
        ahead = self._ahead.get(iterator)
        if ahead is None:
            self._note(known, known.reason or _why_not(iterator))
            if known.reason is not None:
                return plain()
            ahead = self._ahead[iterator] = _Ahead(iterator, self._pinned)
            weakref.finalize(iterator, ahead.stop)  # the script may end a pass early
            if not known.proven:
                self._root.set_aside()
                self._note(known, ahead.prove(iterator, plain, known))
        batch, reason = ahead.next(iterator, plain, known)
        self._note(known, reason)
        return batch

    def close(self) -> None:
        """Stop the workers. The iterators continue in this process."""
        for iterator, ahead in list(self._ahead.items()):
            ahead.close(iterator)
        self._ahead.clear()

    def _note(self, known: _Known, reason: str | None) -> None:
        """Record ``reason``, if any: from now on this process fetches the data. Warn once."""
        if reason is None or reason == known.reason:
            return
        known.reason = self._reason = reason
        if not self._root.strict:
            said = f"autofit: batches are loaded in the script's own process: {reason}"
            warnings.warn(said, stacklevel=2)


def _why_not(iterator: Any) -> str | None:
    """Return why workers cannot be used for ``iterator``, as far as its objects show."""
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


class _Ahead:
    """One iterator whose batches are fetched ahead."""

    def __init__(self, iterator: Any, pinned: bool) -> None:
        self._fetcher = iterator._dataset_fetcher
        self._source: Iterator[Any] = _watched(iterator._sampler_iter, iterator._num_yielded == 0)
        """Indices that nobody has fetched yet."""
        self._ready: deque[tuple[Any, Any]] = deque()
        """Indices and batches that this process fetched for the comparison."""
        self._given: deque[Any] = deque()
        """Indices that the workers have, in order."""
        self._batches: Any = None
        self._pinned = (pinned or iterator._pin_memory) and torch.accelerator.is_available()
        self._marks: list[Any] = []
        self._process = os.getpid()

    def prove(self, iterator: Any, plain: Callable[[], Any], known: _Known) -> str | None:
        """Fetch some batches here and in workers, and compare them.

        Returns why workers cannot be used, or ``None``. The script gets the batches fetched here.
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

    def next(
        self, iterator: Any, plain: Callable[[], Any], known: _Known
    ) -> tuple[Any, str | None]:
        """Return the next batch, and why this process fetches the following ones, or ``None``."""
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
        """Stop the workers, and let ``iterator`` continue at the script's position."""
        self.stop()
        self._source = chain([index for index, _ in self._ready], self._source)
        self._ready.clear()
        iterator._sampler_iter = self._source

    def _fetch(self, iterator: Any, plain: Callable[[], Any]) -> str | None:
        """Fetch a batch for each worker, and one more. Return why workers cannot be used."""
        for index in islice(self._source, workers() + 1):
            before, places = LoaderDraws.now(), positions()
            iterator._sampler_iter = iter((index,))
            batch = plain()
            if before != LoaderDraws.now():
                if not self._ready:
                    self._ready.append((index, batch))
                else:  # too early: it is fetched again in its turn
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
        """Start workers on ``indices``. Yield each batch, and whether it drew random numbers."""
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
        # If a worker dies, torch would raise anywhere in the script; ``_next`` notices it, too.
        signal_handling._remove_worker_pids(id(found))  # type: ignore[attr-defined]
        found._worker_pids_set = False
        return found

    def stop(self) -> None:
        """Stop the workers. Batches that the script has not received are fetched again."""
        if os.getpid() != self._process:  # a worker's copy of this
            return
        if self._batches is not None:
            self._batches._shutdown_workers()
            self._batches = None
        self._source = chain(list(self._given), self._source)
        self._given.clear()


def _next(batches: Any) -> tuple[Any, bool]:
    """Return the next batch from the workers, and whether fetching it drew random numbers."""
    deadline = time.monotonic() + PATIENCE
    while True:
        try:
            batch, drew = batches._next_data()
        except RuntimeError as error:  # the call may be repeated
            if not str(error).startswith(TIMED_OUT) or time.monotonic() > deadline:
                raise
        else:
            return batch, drew


def _watched(indices: Iterator[Any], first: bool) -> Iterator[Any]:
    """Yield a sampler's indices. Only the ``first`` index may draw random numbers."""
    while True:
        before = None if first else LoaderDraws.now()
        try:
            index = next(indices)
        except StopIteration:
            return
        if before is not None and before != LoaderDraws.now():
            raise Refused(SAMPLER, NAME)
        first = False
        yield index


class _Batches(Dataset[Any]):
    """The script's batches by their indices, fetched as its own iterator does."""

    def __init__(self, fetcher: Any) -> None:
        self._fetcher = fetcher

    def __getitem__(self, index: Any) -> tuple[Any, bool]:
        """Return a batch, and whether fetching it drew random numbers."""
        before = LoaderDraws.now()
        batch = self._fetcher.fetch(index)
        return batch, before != LoaderDraws.now()


def _as_it_is(batch: Any) -> Any:
    return batch


def _line(error: BaseException) -> str:
    """Return an error in one line. In a worker's error the traceback comes first."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()] or [""]
    name = type(error).__name__
    return lines[-1] if lines[-1].startswith(name) else f"{name}: {lines[-1]}".rstrip(": ")
