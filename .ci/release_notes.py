"""Prints what the changelog says of a version, as the notes of its release.

::

    python .ci/release_notes.py v0.1.0
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

CHANGELOG = Path(__file__).parents[1] / "CHANGELOG.md"


def section(changelog: str, version: str) -> str:
    """Return the text below the heading of ``version``; raise ``LookupError`` if it has none."""
    heading = rf"^## \[{re.escape(version)}\][^\n]*\n"
    found = re.search(rf"{heading}(.*?)(?=^## \[|\Z)", changelog, re.MULTILINE | re.DOTALL)
    if found is None or not found[1].strip():
        raise LookupError(f"CHANGELOG.md has no section [{version}], or an empty one")
    return found[1].strip() + "\n"


def main() -> None:
    """Print the section of the version or tag given on the command line."""
    if len(sys.argv) != 2:
        sys.exit("usage: release_notes.py VERSION")
    try:
        notes = section(CHANGELOG.read_text(), sys.argv[1].removeprefix("v"))
    except LookupError as error:
        sys.exit(str(error))
    sys.stdout.write(notes)


if __name__ == "__main__":
    main()
