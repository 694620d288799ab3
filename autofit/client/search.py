"""Runs a search through a service: sends the script, follows the search, stores a copy here."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import time
import uuid
from collections.abc import Mapping
from enum import Enum
from pathlib import Path
from typing import Any

from autofit.analysis.ranking import result_of
from autofit.analysis.result import Result
from autofit.client import archive, messages
from autofit.client.http import Service
from autofit.exceptions import AutofitError, UsageError, WorkerError
from autofit.storage import Outcome, Store, StudyKey, StudyRecord
from autofit.storage.convert import from_json
from autofit.tuning.notices import Line, Listener, StudyStarted
from autofit.tuning.options import SearchOptions, flags
from autofit.worker.cluster.upload import check_inside
from autofit.worker.records.trials import Script

OF_THE_SERVICE = ("storage", "address")
"""Options that are the service's own; ``storage`` is where the copy is kept."""
TAKEN_UP = "The service has taken the search up again."
CANCEL_SECONDS = 30.0
"""Seconds that a cancelled search has to end."""


def request_of(options: SearchOptions, given: Mapping[str, Any]) -> dict[str, Any]:
    """Return the request for a search, without the folder of the script.

    ``given``: the values of the options by name, as for ``api.scripts.search_options``.
    """
    script = options.script
    words = [*script.launcher, script.target] if script.launcher else [script.target]
    return {
        "script": words,
        "args": list(script.args),
        "module": script.module and not script.launcher,
        "options": {
            each.name: _plain(given[each.name])
            for each, _ in flags()
            if given.get(each.name) is not None and each.name not in OF_THE_SERVICE
        },
    }


def search(
    server: str,
    options: SearchOptions,
    given: Mapping[str, Any],
    listener: Listener,
    *,
    shared: bool = False,
    priority: int = 0,
    deadline: str | None = None,
) -> Result:
    """Search through the service at the URL ``server``, and store the study in ``options.storage``.

    ``shared``: the service reads the working directory itself; it is not uploaded. ``deadline``:
    the time in which the search has to end, such as ``"2h"``. Ctrl-C cancels the search. Raises the
    errors of a local search, and those of ``Service``.
    """
    if options.address is not None:
        raise UsageError("--server and --address: a service has its own cluster; drop --address")
    service = Service(server, say=lambda line: listener(Line(text=line)))
    folder = Path(options.script.cwd).resolve()
    request = {**request_of(options, given), "priority": priority, "deadline": deadline}
    request["key"] = uuid.uuid4().hex  # the request may be sent again
    if shared:
        request["folder"] = str(folder)
    else:
        check_inside(options.script, folder, "--server")
        request["upload"] = service.post("/api/uploads", archive.pack(folder))["upload"]
    number = service.post("/api/searches", request)["id"]
    try:
        return _Following(service, number, options, listener).run()
    except KeyboardInterrupt:
        _cancel(service, number)
        raise


class _Following:
    """One search that is followed to its end."""

    def __init__(
        self, service: Service, number: int, options: SearchOptions, listener: Listener
    ) -> None:
        self._service = service
        self._path = f"/api/searches/{number}"
        self._number = number
        self._options = options
        self._tell = listener
        self._study: StudyRecord | None = None
        self._key: StudyKey | None = None
        self._there = options.script.cwd
        """The working directory of the script on the machine of the service."""

    def run(self) -> Result:
        """Show the search until it ends; return its result or raise its error."""
        with Store(self._options.storage) as store:
            for event in self._service.events(f"{self._path}/events"):
                if event.kind == "state":
                    self._say_waiting(event.content)
                elif event.kind == "end":
                    return self._end(store, self._with_own_paths(event.content))
                else:
                    content = self._with_own_paths(event.content)
                    self._show(store, messages.notice_from_json(event.kind, content))
        raise AssertionError("the stream ends with the event `end`")

    def _show(self, store: Store, notice: Any) -> None:
        if isinstance(notice, StudyStarted):
            if self._study is not None:
                self._tell(Line(text=TAKEN_UP))
            notice = self._with_copy(store, notice)
        if notice is not None:
            self._tell(notice)

    def _with_copy(self, store: Store, notice: StudyStarted) -> StudyStarted:
        """Open the copy of the study here, and return the notice with its name."""
        script = self._own_script()
        self._there = notice.script.cwd
        self._key = StudyKey.of(
            script,
            gpu=notice.hardware.name,
            gpus=self._options.gpus_per_trial or 1,
            memory=self._options.memory,
            allow=str(self._options.allow),
        )
        if self._study is None:
            self._study = messages.open_copy(
                store,
                self._key,
                script,
                notice.hardware,
                notice.budget,
                fresh=self._options.fresh,
            )
        return dataclasses.replace(notice, study=self._study.id, script=script)

    def _with_own_paths(self, content: Any) -> Any:
        """Return JSON in which the user's folder takes the place of its copy at the service."""
        there, here = (json.dumps(path)[1:-1] for path in (self._there, self._options.script.cwd))
        return json.loads(json.dumps(content).replace(there, here))

    def _own_script(self) -> Script:
        return self._options.script

    def _end(self, store: Store, found: Mapping[str, Any]) -> Result:
        self._copy(store, found)
        if found["state"] == "failed":
            raise messages.error_of(from_json(found["error"], Outcome))
        if found["state"] == "cancelled":
            raise UsageError(
                f"search {self._number} was cancelled: the same command continues from its"
                " finished trials"
            )
        assert self._study is not None, "a finished search has a study"
        result = result_of(store, store.study(self._study.id), self._options.horizon)
        if result is None:
            raise WorkerError(f"the service sent no plan for search {self._number}")
        return result

    def _copy(self, store: Store, found: Mapping[str, Any]) -> None:
        """Store the service's study here."""
        if found["study"] is None or self._study is None or self._key is None:
            return
        found = self._with_own_paths(self._service.get(f"{self._path}/study"))
        copy = from_json(found, messages.StudyCopy)
        messages.write_copy(store, self._key, self._own_script(), self._study, copy)

    def _say_waiting(self, found: Mapping[str, Any]) -> None:
        if found["waits_for"]:
            self._tell(Line(text=f"search {self._number} waits for {found['waits_for']}"))


def _cancel(service: Service, number: int) -> None:
    """Cancel a search and wait until it has ended; it may have ended before."""
    with contextlib.suppress(AutofitError):
        service.post(f"/api/searches/{number}/cancel")
        deadline = time.monotonic() + CANCEL_SECONDS
        while time.monotonic() < deadline:
            if service.get(f"/api/searches/{number}")["ended"] is not None:
                return
            time.sleep(0.2)


def _plain(value: Any) -> Any:
    if isinstance(value, frozenset):
        return sorted(value)
    return str(value) if isinstance(value, Enum) else value
