"""The best plan, taken elsewhere: one file per format, and one line below."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from autofit.export import as_env, as_json, as_python, as_toml
from autofit.export.load import load_plan
from autofit.progress import Result

FORMATS: Mapping[str, Callable[[Result], str]] = {
    "env": as_env.render,
    "json": as_json.render,
    "python": as_python.render,
    "toml": as_toml.render,
}
"""Each format's name and what writes it: text that ends in a newline."""

SUFFIXES: Mapping[str, str] = {".env": "env", ".json": "json", ".py": "python", ".toml": "toml"}
"""The format a file's suffix stands for."""

__all__ = ["FORMATS", "SUFFIXES", "load_plan"]
