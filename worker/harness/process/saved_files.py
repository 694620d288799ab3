"""Tells the parent which checkpoints the script writes, and whether it has written any file.

A run that starts again finds the checkpoints. One that has written nothing may simply start over.
``torch.save`` opens its file in C++, so it is wrapped. Other libraries write through ``open`` and
rename files, which Python's audit events report (PEP 578).
"""

from __future__ import annotations

import functools
import os
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from autofit.worker.harness.parent.pipe import Reporter
from autofit.worker.harness.process import import_hooks
from autofit.worker.records.trials import Saved, Wrote

CHECKPOINTS = (".pt", ".pth", ".ckpt", ".bin", ".safetensors", ".tar", ".pkl", ".pickle", ".npz")
"""Suffixes of checkpoint files."""
WRITING = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_APPEND


class SavedFiles:
    """Notes files that are written, and reports them at the next optimizer step, when complete."""

    def __init__(self, reporter: Reporter) -> None:
        self._reporter = reporter
        self._written: dict[str, None] = {}
        """Checkpoints in the order in which they were last written."""
        self._wrote = False
        home = Path.home()
        self._aside = tuple(
            f"{folder}{os.sep}"
            for folder in ("/dev", "/proc", "/sys", tempfile.gettempdir(), home / ".cache")
        )
        """Folders of temporary files, caches and devices."""

    def attach(self, *, checkpoints: bool) -> None:
        """Start to watch; audit hooks stay until the process ends.

        ``checkpoints``: report the checkpoints too.
        """
        if not checkpoints:
            sys.addaudithook(lambda *given: None if self._wrote else self._heard(*given))
            import_hooks.after_import("torch", self._watch_torch_saves)
            return
        sys.addaudithook(self._heard)
        import_hooks.after_import("torch", self._watch_torch)
        import_hooks.after_import("safetensors.torch", self._watch_safetensors)

    def flush(self, *_: object) -> None:
        """Report the checkpoints that were written since the last step."""
        written, self._written = self._written, {}
        for path in written:
            self._reporter.send(Saved(path=path))

    def note(self, path: object) -> None:
        """Note a file that was written, and whether its name is that of a checkpoint."""
        if not isinstance(path, (str, bytes, os.PathLike)):
            return
        name = os.path.abspath(os.fsdecode(path))
        if not self._wrote and not name.startswith(self._aside) and "__pycache__" not in name:
            self._wrote = True
            self._reporter.send(Wrote(path=name))
        if name.endswith(CHECKPOINTS):
            self._written.pop(name, None)
            self._written[name] = None

    def _heard(self, event: str, args: tuple[Any, ...]) -> None:
        if event == "open" and (
            set(args[1]) & set("wxa+") if isinstance(args[1], str) else args[2] & WRITING
        ):
            self.note(args[0])
        elif event == "os.rename":
            self.note(args[1])

    def _watch_torch_saves(self) -> None:
        torch: Any = sys.modules["torch"]
        torch.save = self._after(torch.save)

    def _watch_torch(self) -> None:
        self._watch_torch_saves()
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
