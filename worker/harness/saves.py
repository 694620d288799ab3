"""Tells the parent which checkpoints the script writes, so that a run started again finds them.

``torch.save`` and the zip writer behind it open files in C++, libraries write bytes of their own
through ``open`` and put files in place by renaming them: the first is seen at its seam, the others
through Python's audit events (PEP 578). Only a run that is to resume attaches this.
"""

from __future__ import annotations

import functools
import os
import sys
from collections.abc import Callable
from typing import Any

from autofit.worker.harness import imports
from autofit.worker.harness.reporter import Reporter
from autofit.worker.records import Saved

CHECKPOINTS = (".pt", ".pth", ".ckpt", ".bin", ".safetensors", ".tar", ".pkl", ".pickle", ".npz")
"""How the names of checkpoints end."""


class Saves:
    """Notices what is saved, and reports it at the next optimizer step: by then it is whole."""

    def __init__(self, reporter: Reporter) -> None:
        self._reporter = reporter
        self._written: dict[str, None] = {}
        """Paths in the order they were last written in."""

    def attach(self) -> None:
        """Watch from now on; audit hooks stay for the life of the process."""
        sys.addaudithook(self._heard)
        imports.after_import("torch", self._watch_torch)
        imports.after_import("safetensors.torch", self._watch_safetensors)

    def flush(self, *_: object) -> None:
        """Report what has been written since the last step."""
        written, self._written = self._written, {}
        for path in written:
            self._reporter.send(Saved(path=path))

    def note(self, path: object) -> None:
        """Take note of a file if its name is that of a checkpoint."""
        if not isinstance(path, (str, bytes, os.PathLike)):
            return
        name = os.path.abspath(os.fsdecode(path))
        if name.endswith(CHECKPOINTS):
            self._written.pop(name, None)
            self._written[name] = None

    def _heard(self, event: str, args: tuple[Any, ...]) -> None:
        if event == "open" and isinstance(args[1], str) and set(args[1]) & set("wxa+"):
            self.note(args[0])
        elif event == "os.rename":
            self.note(args[1])

    def _watch_torch(self) -> None:
        torch: Any = sys.modules["torch"]
        torch.save = self._after(torch.save)
        optimizer: Any = sys.modules["torch.optim.optimizer"]
        optimizer.register_optimizer_step_post_hook(self.flush)

    def _watch_safetensors(self) -> None:
        library: Any = sys.modules["safetensors.torch"]
        library.save_file = self._after(library.save_file)

    def _after(self, save: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(save)
        def saving(*args: Any, **kwargs: Any) -> Any:
            result = save(*args, **kwargs)
            for value in (*args[1:2], kwargs.get("f"), kwargs.get("filename")):
                self.note(value)
            return result

        return saving
