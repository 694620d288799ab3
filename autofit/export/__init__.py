"""Exports the best plan: one module for each format, and one line in ``FORMATS``."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from autofit.analysis.result import Result
from autofit.export import (
    as_accelerate,
    as_env,
    as_json,
    as_python,
    as_toml,
    as_torchrun,
    as_trainer,
)
from autofit.export.load import load_plan

FORMATS: Mapping[str, Callable[[Result], str]] = {
    "accelerate": as_accelerate.render,
    "env": as_env.render,
    "json": as_json.render,
    "python": as_python.render,
    "toml": as_toml.render,
    "torchrun": as_torchrun.render,
    "trainer": as_trainer.render,
}
"""The function that writes each format, by name; its text ends in a newline."""

SUFFIXES: Mapping[str, str] = {
    ".env": "env",
    ".json": "json",
    ".py": "python",
    ".sh": "torchrun",
    ".toml": "toml",
}
"""The format for the suffix of a file's name."""

__all__ = ["FORMATS", "SUFFIXES", "load_plan"]
