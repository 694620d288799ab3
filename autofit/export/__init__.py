"""The best plan, taken elsewhere: one file per format, and one line below."""

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
"""Each format's name and what writes it: text that ends in a newline."""

SUFFIXES: Mapping[str, str] = {
    ".env": "env",
    ".json": "json",
    ".py": "python",
    ".sh": "torchrun",
    ".toml": "toml",
}
"""The format a file's suffix stands for."""

__all__ = ["FORMATS", "SUFFIXES", "load_plan"]
