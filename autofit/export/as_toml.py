"""Writes the same document as TOML, for people who edit it; unknown values are left out."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from typing import Any

from autofit.analysis.result import Result
from autofit.export.as_json import document

_BARE = re.compile(r"[A-Za-z0-9_-]+")


def render(result: Result) -> str:
    """Return the document of ``result`` as TOML."""
    return "\n".join(_table((), document(result))).lstrip("\n") + "\n"


def _table(path: tuple[str, ...], table: Mapping[str, Any]) -> Iterator[str]:
    if path:
        yield f"\n[{'.'.join(map(_key, path))}]"
    for key, value in table.items():
        if value is not None and not isinstance(value, Mapping):
            yield f"{_key(key)} = {_value(value)}"
    for key, value in table.items():
        if isinstance(value, Mapping):
            yield from _table((*path, key), value)


def _key(key: str) -> str:
    return key if _BARE.fullmatch(key) else _value(key)


def _value(value: str | bool | int | float | list[str]) -> str:
    # JSON and TOML write these values alike, except that TOML requires DEL to be escaped.
    return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
