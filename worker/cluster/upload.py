"""Decides which files of a working directory are sent to a Ray cluster. Imports Ray when called.

All files are sent except those that ``.autofitignore`` names. Ray packs the folder, uploads equal
contents once and unpacks them on each node. Its size limit is that of one message.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from autofit.exceptions import UsageError
from autofit.units import format_size
from autofit.worker.records.trials import Script

IGNORE = ".autofitignore"
"""A file in the working directory with one pattern on each line, as in ``.gitignore``."""
ALWAYS = (
    ".git/",
    ".venv/",
    "venv/",
    "__pycache__/",
    ".mypy_cache/",
    ".pytest_cache/",
    ".ruff_cache/",
    "autofit.db*",
)
"""Files that are not sent by default; a line ``!name`` in ``IGNORE`` includes one."""
LIMIT = 500 << 20
"""Bytes that Ray accepts in one package; checked before Ray packs the folder."""


def excludes(folder: Path) -> list[str]:
    """Return the patterns of files that are not sent; raise ``UsageError`` if unreadable."""
    try:
        text = (folder / IGNORE).read_text()
    except FileNotFoundError:
        return list(ALWAYS)
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"{folder / IGNORE} cannot be read: {error}") from error
    return [*ALWAYS, *text.splitlines()]


def checked_excludes(folder: Path) -> list[str]:
    """Return ``excludes(folder)``; raise ``UsageError`` if the other files exceed ``LIMIT``."""
    patterns = excludes(folder)
    sizes: Counter[str] = Counter()
    for file in included(folder, patterns):
        sizes[file.relative_to(folder).parts[0]] += file.stat().st_size
    if sizes.total() >= LIMIT:
        largest = ", ".join(f"{name} {format_size(size)}" for name, size in sizes.most_common(3))
        raise UsageError(
            f"the working directory {folder} has {format_size(sizes.total())}, Ray takes"
            f" {format_size(LIMIT)} to the cluster (largest: {largest}): name what the script does"
            f" not need there in {IGNORE}, or start from a smaller directory"
        )
    return patterns


def check_inside(script: Script, folder: Path, option: str) -> None:
    """Raise ``UsageError``, which names ``option``, if a script is not below its folder."""
    target = Path(script.target)
    inside = (folder / target).resolve().is_relative_to(folder) and not target.is_absolute()
    if not script.module and not inside:
        raise UsageError(
            f"{option} uploads the working directory {folder}: name the script by its path below"
            f" it, not {script.target!r}"
        )


def included(folder: Path, patterns: list[str]) -> Iterator[Path]:
    """Yield the files that Ray would pack; Ray also obeys ``.gitignore`` and ``.rayignore``."""
    ignored = [_matcher(folder, patterns)]
    for name in (".gitignore", ".rayignore"):
        if (folder / name).is_file():
            lines = (folder / name).read_text(errors="replace").splitlines()
            ignored.append(_matcher(folder, lines))

    for here, folders, files in os.walk(folder):
        at = Path(here)
        folders[:] = [
            name for name in folders if not any(match(at / name, "/") for match in ignored)
        ]
        for name in files:
            if not any(match(at / name, "") for match in ignored) and (at / name).is_file():
                yield at / name


def _matcher(folder: Path, lines: list[str]) -> Callable[[Path, str], bool]:
    from ray._private.thirdparty import pathspec

    of: Any = pathspec  # it has no types
    spec = of.PathSpec.from_lines("gitwildmatch", lines)
    return lambda path, end: bool(spec.match_file(f"{path.relative_to(folder)}{end}"))
