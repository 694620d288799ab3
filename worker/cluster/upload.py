"""What of a working directory travels to a Ray cluster: all but what ``.autofitignore`` names.

Ray packs the folder, uploads it once per contents and unpacks it where it is needed; its limit is
that of one message. Imports Ray only when called.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from autofit.exceptions import UsageError
from autofit.units import format_size

IGNORE = ".autofitignore"
"""In the working directory: a pattern a line, as ``.gitignore`` has them."""
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
"""What no run needs elsewhere; a line ``!name`` in ``IGNORE`` takes it along all the same."""
LIMIT = 500 << 20
"""Bytes Ray takes in one package; counted here before it packs anything."""


def excludes(folder: Path) -> list[str]:
    """Return the patterns of what stays here; raise ``UsageError`` if they cannot be read."""
    try:
        text = (folder / IGNORE).read_text()
    except FileNotFoundError:
        return list(ALWAYS)
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"{folder / IGNORE} cannot be read: {error}") from error
    return [*ALWAYS, *text.splitlines()]


def checked_excludes(folder: Path) -> list[str]:
    """Return ``excludes(folder)``; raise ``UsageError`` where too much is left for Ray to take."""
    patterns = excludes(folder)
    sizes: Counter[str] = Counter()
    for file in _travelling(folder, patterns):
        sizes[file.relative_to(folder).parts[0]] += file.stat().st_size
    if sizes.total() >= LIMIT:
        largest = ", ".join(f"{name} {format_size(size)}" for name, size in sizes.most_common(3))
        raise UsageError(
            f"the working directory {folder} has {format_size(sizes.total())}, Ray takes"
            f" {format_size(LIMIT)} to the cluster (largest: {largest}): name what the script does"
            f" not need there in {IGNORE}, or start from a smaller directory"
        )
    return patterns


def _travelling(folder: Path, patterns: list[str]) -> Iterator[Path]:
    """Yield the files that Ray would pack, as it decides it: its own ignore files count too."""
    stays = [_matcher(folder, patterns)]
    for name in (".gitignore", ".rayignore"):
        if (folder / name).is_file():
            lines = (folder / name).read_text(errors="replace").splitlines()
            stays.append(_matcher(folder, lines))

    for here, folders, files in os.walk(folder):
        at = Path(here)
        folders[:] = [name for name in folders if not any(match(at / name, "/") for match in stays)]
        for name in files:
            if not any(match(at / name, "") for match in stays) and (at / name).is_file():
                yield at / name


def _matcher(folder: Path, lines: list[str]) -> Callable[[Path, str], bool]:
    from ray._private.thirdparty import pathspec

    of: Any = pathspec  # it has no types
    spec = of.PathSpec.from_lines("gitwildmatch", lines)
    return lambda path, end: bool(spec.match_file(f"{path.relative_to(folder)}{end}"))
