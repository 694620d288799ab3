"""Text from a store, a script or another machine, as a terminal or a comment may have it."""

from __future__ import annotations

import re

_COLOUR = re.compile(r"\x1b\[[0-9;]*m")
# Control characters of both sets, line and paragraph separators, marks that turn the direction of
# writing, and halves of surrogates, which no stream can encode.
_ACTS = re.compile("[\x00-\x1f\x7f-\x9f\u2028\u2029\u202a-\u202e\u2066-\u2069\ud800-\udfff]")


def printable(text: str, *, keep: str = "") -> str:
    r"""Return ``text`` with what acts on a terminal written out: ``"\x1b"`` becomes ``"\\x1b"``.

    Colours go without a trace. ``keep``: characters that stay, such as ``"\n"`` for several lines.
    """
    plain = _COLOUR.sub("", text)

    def written(found: re.Match[str]) -> str:
        character = found[0]
        return character if character in keep else character.encode("unicode_escape").decode()

    return _ACTS.sub(written, plain)
