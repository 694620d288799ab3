"""Keeps what a rank writes to itself where the system allows no overlay (``sandbox.py``).

Python's file functions are replaced: a file that is written lies in a private folder, under its
own path, and is read from there. A file that is deleted looks deleted to this process only.
Python libraries write through these functions. torch and safetensors open files in C++ and Rust,
so their functions are replaced too. Other compiled libraries and subprocesses write real files.
"""

from __future__ import annotations

import builtins
import errno
import functools
import io
import os
import shutil
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from autofit.worker.harness.process import import_hooks

Translate = Callable[[str], str]
"""Returns the path to use for a path of the script, both absolute."""

_CREATING = os.O_CREAT | os.O_TRUNC
_WRITING = os.O_WRONLY | os.O_RDWR | os.O_APPEND | _CREATING
_CACHES = ("TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR", "HF_HOME", "TORCH_HOME", "XDG_CACHE_HOME")
"""Variables with folders of caches, which all processes of a machine may share."""


class PrivatePaths:
    """Knows where the files of a script lie: in ``folder``, or where they were."""

    def __init__(self, folder: Path) -> None:
        self.folder = str(folder)
        self.gone: set[str] = set()
        """Real files that this process has deleted or renamed."""
        temporary = os.path.join(tempfile.gettempdir(), tempfile.gettempprefix())
        home = Path.home()
        named = [os.environ[name] for name in _CACHES if os.environ.get(name)]
        inductor = os.path.join(tempfile.gettempdir(), "torchinductor_")
        caches = (f"{home / '.cache'}/", f"{home / '.triton'}/", inductor, *named)
        self._shared = ("/dev/", "/proc/", "/sys/", "/run/", temporary, *caches)
        """Beginnings of paths that are used as they are: devices, temporary files, caches."""

    def origin(self, path: Any, folder: int | None = None) -> str | None:
        """Return the absolute path as the script sees it; ``None`` for a file that is shared."""
        if not isinstance(path, (str, bytes, os.PathLike)):
            return None
        text = os.fsdecode(path)
        if folder is not None:
            text = os.path.join(os.readlink(f"/proc/self/fd/{folder}"), text)
        text = self._without_folder(os.path.abspath(os.path.join(self.getcwd(), text)))
        inside = text.startswith(f"{self.getcwd()}/")
        return None if text.startswith(self._shared) and not inside else text

    def _without_folder(self, path: str) -> str:
        inside = path == self.folder or path.startswith(f"{self.folder}/")
        return path[len(self.folder) :] or "/" if inside else path

    def seen(self, origin: str) -> str:
        """Return the file that the script sees under a path."""
        own = self.folder + origin
        return own if os.path.lexists(own) or self._is_gone(origin) else origin

    def _is_gone(self, origin: str) -> bool:
        return any(str(each) in self.gone for each in (Path(origin), *Path(origin).parents))

    def own(self, origin: str) -> str:
        """Return the private place of a file, and make its folder."""
        own = self.folder + origin
        os.makedirs(os.path.dirname(own), exist_ok=True)
        return own

    def new(self, origin: str) -> str:
        """Return where to create a file; the real place if that must fail."""
        seen, parent = self.seen(origin), self.seen(os.path.dirname(origin))
        if os.path.lexists(seen) or not os.path.isdir(parent):
            return seen
        return self.own(origin)

    def new_file(self, origin: str) -> str:
        """Return where to write a file anew."""
        if os.path.isdir(self.seen(origin)) or not os.path.isfile(self.seen(origin)):
            return self.new(origin)
        return self.own(origin)

    def changed(self, origin: str) -> str:
        """Return where to change a file: in a copy of it."""
        seen, own = self.seen(origin), self.new_file(origin)
        if os.path.isdir(seen):
            os.makedirs(self.folder + origin, exist_ok=True)
            return self.folder + origin
        if seen != own and os.path.isfile(seen):
            shutil.copy2(seen, own)
        return own

    def whole(self, origin: str) -> str:
        """Return a private folder with all files of a folder that the script sees."""
        own = self.folder + origin
        os.makedirs(own, exist_ok=True)
        for name in self.names(origin):
            child = os.path.join(origin, name)
            if os.path.isdir(self.seen(child)):
                self.whole(child)
            elif self.seen(child) == child:
                shutil.copy2(child, self.folder + child, follow_symlinks=False)
        return own

    def names(self, origin: str) -> dict[str, str]:
        """Return the names in a folder that the script sees, and the folder of each."""
        found: dict[str, str] = {}
        if os.path.isdir(origin) and not self._is_gone(origin):
            real = os.listdir(origin)
            found = {n: origin for n in real if os.path.join(origin, n) not in self.gone}
        own = self.folder + origin
        return found | (dict.fromkeys(os.listdir(own), own) if os.path.isdir(own) else {})

    def getcwd(self, plain: Callable[[], str] = os.getcwd) -> str:
        """Return the script's working folder."""
        return self._without_folder(plain())


class PrivateFiles:
    """Redirects the writes of this process to ``folder``, which is empty."""

    def __init__(self, folder: Path) -> None:
        self._paths = PrivatePaths(folder)
        self._here = threading.local()

    def attach(self) -> None:
        """Replace the file functions of this process."""
        for owner in (builtins, io):
            self._replace(owner, "open", self._open_by_mode)
        self._replace(os, "open", self._open_by_flags)
        for name in ("stat", "lstat", "access", "readlink", "chdir", "listxattr", "getxattr"):
            self._replace(os, name, self._first(self._paths.seen))
        for name in ("truncate", "chmod", "chown", "utime", "setxattr"):
            self._replace(os, name, self._first(self._paths.changed))
        for name in ("mkdir", "mkfifo"):
            self._replace(os, name, self._first(self._paths.new))
        for name in ("remove", "unlink"):
            self._put(os, name, self._delete)
        self._put(os, "rmdir", self._delete_folder)
        for name in ("rename", "replace"):
            self._put(os, name, self._rename)
        self._replace(os, "symlink", self._second(self._paths.new))
        self._put(os, "link", self._link)
        self._put(os, "listdir", self._listdir)
        self._put(os, "scandir", self._scandir)
        self._put(os, "getcwd", self._paths.getcwd)
        vars(shutil)["_use_fd_functions"] = False  # it would delete real files by descriptor
        import_hooks.after_import("torch", self._attach_torch)
        import_hooks.after_import("safetensors", self._attach_safetensors)

    def _attach_torch(self) -> None:
        torch: Any = sys.modules["torch"]
        self._replace(torch, "save", self._second(self._paths.new_file, "f"))
        self._replace(torch, "load", self._first(self._paths.seen, "f"))

    def _attach_safetensors(self) -> None:
        library: Any = sys.modules["safetensors"]
        self._replace(library, "serialize_file", self._second(self._paths.new_file, "filename"))
        self._replace(library, "safe_open", self._first(self._paths.seen, "filename"))

    # --- functions -------------------------------------------------------------------------

    @contextmanager
    def _plainly(self) -> Iterator[None]:
        """Within this context, this thread's file functions are those of the system."""
        self._here.plain = True
        try:
            yield
        finally:
            self._here.plain = False

    def _put(self, owner: Any, name: str, make: Callable[..., Any]) -> None:
        """Replace ``owner.name`` by ``make(plain, ...)``, inside which all functions are plain."""
        plain = getattr(owner, name)

        @functools.wraps(plain)
        def replaced(*args: Any, **kwargs: Any) -> Any:
            if getattr(self._here, "plain", False):
                return plain(*args, **kwargs)
            with self._plainly():
                return make(plain, *args, **kwargs)

        setattr(owner, name, replaced)

    def _replace(
        self, owner: Any, name: str, change: Callable[[list[Any], dict[str, Any]], None]
    ) -> None:
        """Let ``change`` change the arguments of a function before it is called."""
        plain = getattr(owner, name)

        @functools.wraps(plain)
        def replaced(*args: Any, **kwargs: Any) -> Any:
            if getattr(self._here, "plain", False):
                return plain(*args, **kwargs)
            changed = list(args)
            with self._plainly():
                change(changed, kwargs)
            return plain(*changed, **kwargs)

        setattr(owner, name, replaced)

    def _first(self, to: Translate, name: str = "path") -> Callable[..., None]:
        return functools.partial(self._argument, to, 0, name)

    def _second(self, to: Translate, name: str = "dst") -> Callable[..., None]:
        return functools.partial(self._argument, to, 1, name)

    def _argument(
        self, to: Translate, index: int, name: str, args: list[Any], kwargs: dict[str, Any]
    ) -> None:
        """Translate the path at ``index``, or with ``name``."""
        where: Any = args if len(args) > index else kwargs
        key: Any = index if len(args) > index else name
        if len(args) <= index and name not in kwargs:
            return
        origin = self._paths.origin(where[key], kwargs.get("dir_fd"))
        if origin is not None:
            where[key] = to(origin)
            kwargs.pop("dir_fd", None)

    def _open_by_mode(self, args: list[Any], kwargs: dict[str, Any]) -> None:
        mode = args[1] if len(args) > 1 else kwargs.get("mode", "r")
        to: Translate = self._paths.seen
        if isinstance(mode, str):
            modes = {"x": self._paths.new, "w": self._paths.new_file, "a": self._paths.changed}
            plain = self._paths.changed if "+" in mode else self._paths.seen
            to = next((modes[letter] for letter in mode if letter in modes), plain)
        self._argument(to, 0, "file", args, kwargs)

    def _open_by_flags(self, args: list[Any], kwargs: dict[str, Any]) -> None:
        flags = args[1] if len(args) > 1 else kwargs.get("flags", 0)
        exclusive = flags & os.O_CREAT and flags & os.O_EXCL
        writes = self._paths.new if exclusive else self._paths.changed
        changes = flags & _WRITING and not flags & os.O_DIRECTORY
        self._argument(writes if changes else self._paths.seen, 0, "path", args, kwargs)

    def _delete(self, plain: Callable[..., Any], path: Any, *, dir_fd: int | None = None) -> None:
        origin = self._paths.origin(path, dir_fd)
        if origin is None:
            plain(path, dir_fd=dir_fd)
            return
        seen = self._paths.seen(origin)
        if seen != origin or not os.path.lexists(seen) or os.path.isdir(seen):
            plain(seen)
        self._paths.gone.add(origin)

    def _delete_folder(
        self, plain: Callable[..., Any], path: Any, *, dir_fd: int | None = None
    ) -> None:
        origin = self._paths.origin(path, dir_fd)
        if origin is None or not os.path.isdir(seen := self._paths.seen(origin)):
            plain(path, dir_fd=dir_fd)
            return
        if self._paths.names(origin):
            raise OSError(errno.ENOTEMPTY, os.strerror(errno.ENOTEMPTY), path)
        if seen != origin:
            shutil.rmtree(seen)
        self._paths.gone.add(origin)

    def _rename(
        self,
        plain: Callable[..., Any],
        src: Any,
        dst: Any,
        *,
        src_dir_fd: int | None = None,
        dst_dir_fd: int | None = None,
    ) -> None:
        old, new = self._paths.origin(src, src_dir_fd), self._paths.origin(dst, dst_dir_fd)
        if old is None and new is None:
            plain(src, dst, src_dir_fd=src_dir_fd, dst_dir_fd=dst_dir_fd)
            return
        seen = os.fsdecode(src) if old is None else self._paths.seen(old)
        target = os.fsdecode(dst) if new is None else self._paths.new_file(new)
        if old is None:
            shutil.move(seen, target)
            return
        if new is not None and target == new and os.path.isdir(target):
            if self._paths.names(new):
                raise OSError(errno.ENOTEMPTY, os.strerror(errno.ENOTEMPTY), dst)
            self._paths.gone.add(new)
            target = self._paths.own(new)
        whole = self._paths.whole(old) if os.path.isdir(seen) else seen
        if whole.startswith(f"{self._paths.folder}/") or not os.path.lexists(seen):
            shutil.move(whole, target) if new is None else plain(whole, target)
        else:
            shutil.copy2(whole, target, follow_symlinks=False)
        self._paths.gone.add(old)

    def _link(self, plain: Callable[..., Any], src: Any, dst: Any, **kwargs: Any) -> None:
        old, new = self._paths.origin(src), self._paths.origin(dst)
        seen = src if old is None else self._paths.seen(old)
        if new is None:
            plain(seen, dst, **kwargs)
        else:
            target = self._paths.new(new)
            if os.path.lexists(target):
                raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), dst)
            shutil.copy2(seen, target)

    # --- listings --------------------------------------------------------------------------

    def _listdir(self, plain: Callable[..., Any], path: Any = ".") -> Any:
        origin = self._paths.origin(path)
        if origin is None or not os.path.isdir(self._paths.seen(origin)):
            return plain(path if origin is None else self._paths.seen(origin))
        names = list(self._paths.names(origin))
        return [os.fsencode(each) for each in names] if isinstance(path, bytes) else names

    def _scandir(self, plain: Callable[..., Any], path: Any = ".") -> Any:
        origin = self._paths.origin(path)
        if origin is None or not os.path.isdir(self._paths.seen(origin)):
            return plain(path if origin is None else self._paths.seen(origin))
        names, found = self._paths.names(origin), []
        for folder in dict.fromkeys(names.values()):
            with plain(os.fsencode(folder) if isinstance(path, bytes) else folder) as entries:
                found += [e for e in entries if names.get(os.fsdecode(e.name)) == folder]
        return _Entries(iter(found))


class _Entries:
    """The entries of a folder, as ``os.scandir`` returns them."""

    def __init__(self, entries: Iterator[Any]) -> None:
        self._entries = entries

    def __iter__(self) -> Iterator[Any]:
        return self._entries

    def __next__(self) -> Any:
        return next(self._entries)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    def close(self) -> None:
        """Do nothing: all entries have been read."""
