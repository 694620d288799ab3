"""Runs every script of this folder over several ranks and writes what became of each.

    python -m tests.scripts._on_ranks [--write] [SCRIPT ...]

``--write`` replaces the table in ``docs/reference/ranks.md``; without it, the rows are printed.
"""

from __future__ import annotations

import argparse
import re
import sys
import tempfile
from pathlib import Path

from tests.scripts._runner import Asked, Done, Runs, assert_same_state, assert_same_text
from tests.scripts._styles import STYLES, Style

PAGE = Path(__file__).resolve().parents[2] / "docs" / "reference" / "ranks.md"
LEVELS = {
    "2 ranks": {"ranks": "2"},
    "4 ranks": {"ranks": "4"},
    "zero1": {"ranks": "2", "sharding": "zero1"},
    "zero2": {"ranks": "2", "sharding": "zero2"},
    "full": {"ranks": "2", "sharding": "full"},
    "full_offload": {"sharding": "full_offload"},
}
"""Column of the table to plan."""
SAME = "same"
NOT_DIVIDED = "not divided"
REFUSED = re.compile(r"cannot be used here: (?:rank \d+: )?(?P<reason>[^;\n]*)")
"""The first part of a reason; what follows a semicolon differs or is advice."""
WHOLE = re.compile(r"every rank runs the whole batch: (?P<reason>[^;\n]*)")
SCRIPTS = {s.script: s for s in STYLES if s.ranks == 1 and not s.script.startswith("reports/")}


def outcome(style: Style, plain: Done, ranked: Done) -> tuple[str, str]:
    """Return ``same``, ``refused``, ``not divided``, ``fails`` or ``differs``, and why."""
    if plain.code:
        return "fails", f"plain Python ends with {plain.code}"
    if ranked.code:
        sys.stderr.write(ranked.errors)
        return "fails", (ranked.errors.strip() or "no line").splitlines()[-1]
    try:
        assert_same_text(ranked.output, plain.output, style.tolerance, style.clock)
        assert_same_state(ranked.state, plain.state, style.tolerance)
    except AssertionError as error:
        return "differs", str(error).partition("\n")[0]
    if refused := REFUSED.search(ranked.errors):
        return "refused", refused["reason"]
    if whole := WHOLE.search(ranked.errors):
        return NOT_DIVIDED, whole["reason"]
    return SAME, ""


def rows(names: list[str], runs: Runs) -> dict[str, dict[str, tuple[str, str]]]:
    """Return the outcome of each script under each plan."""
    asked = {name: Asked(script=name) for name in names}
    for plain in asked.values():
        runs.ahead([plain, *(plain.under(levels) for levels in LEVELS.values())])
    found = {}
    for name, plain in asked.items():
        style = SCRIPTS[name]
        found[name] = {
            column: outcome(style, runs.of(plain), runs.of(plain.under(levels)))
            for column, levels in LEVELS.items()
        }
        sys.stderr.write(f"{name}: {found[name]}\n")
    return found


def table(found: dict[str, dict[str, tuple[str, str]]]) -> str:
    """Return the table in Markdown, with the reasons as numbered notes."""
    reasons: dict[str, int] = {}
    lines = [f"| script | {' | '.join(LEVELS)} |", f"|---|{'---|' * len(LEVELS)}"]
    for name, row in sorted(found.items()):
        cells = [cell(*row[column], reasons) for column in LEVELS]
        lines.append(f"| `{name}` | {' | '.join(cells)} |")
    notes = [f"{number}. {reason}" for reason, number in reasons.items()]
    return "\n".join([*lines, "", *notes, ""])


def cell(word: str, reason: str, reasons: dict[str, int]) -> str:
    """Return a cell: the word, and the number of its reason."""
    return f"{word} ({reasons.setdefault(reason, len(reasons) + 1)})" if reason else word


def main() -> int:
    """Print or write the table; return 1 if a script differs or fails."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("scripts", nargs="*", help="all, if none is given")
    parser.add_argument("--write", action="store_true")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        runs = Runs(Path(folder))
        found = rows(given.scripts or [*SCRIPTS], runs)
        runs.close()
    text = table(found)
    if given.write:
        begin, _, _ = PAGE.read_text().partition("| script |")
        PAGE.write_text(begin + text)
    else:
        sys.stdout.write(text)
    bad = ("differs", "fails")
    return int(any(word in bad for row in found.values() for word, _ in row.values()))


if __name__ == "__main__":
    sys.exit(main())
