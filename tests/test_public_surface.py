"""What users rely on: a change of it is a decision, and ``public_surface.txt`` records it.

To accept a change::

    python -m tests.test_public_surface > tests/public_surface.txt
"""

from __future__ import annotations

import ast
import inspect
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click
import pytest

import autofit
from autofit.analysis.result import Result
from autofit.cli import cli
from autofit.export import FORMATS
from autofit.export.as_json import document
from autofit.facts import Hardware
from autofit.inspection.document import check_document, explanation_document, fit_document
from autofit.plan import Plan
from autofit.worker.records.phases import ORDER
from autofit.worker.records.trials import Measurement, Script, Verdict
from tests.inspection import by_hand

pytestmark = pytest.mark.quick

OPEN = ("plan", "versions", "environment", "kinds", "phases")
"""Keys of tables whose own keys are names of strategies, packages, variables, kinds or phases."""
RECORDED = Path(__file__).with_name("public_surface.txt")


def commands(group: click.Group, context: click.Context) -> Iterator[str]:
    """Yield a line for each command, and for each of its arguments and options."""
    for name in group.list_commands(context):
        command = group.get_command(context, name)
        assert command is not None
        own = click.Context(command, info_name=name, parent=context)
        yield own.command_path
        for parameter in command.params:
            names = "/".join(parameter.opts)
            many = " (repeatable)" if getattr(parameter, "multiple", False) else ""
            flag = " (flag)" if getattr(parameter, "is_flag", False) else ""
            yield f"{own.command_path} {names}{many}{flag}"
        if isinstance(command, click.Group):
            yield from commands(command, own)


def names() -> Iterator[str]:
    """Yield a line for each public name, each parameter, and each public member of a class."""
    for name in sorted(autofit.__all__):
        thing = getattr(autofit, name)
        yield f"autofit.{name}"
        if inspect.isfunction(thing):
            for each in inspect.signature(thing).parameters.values():
                yield f"autofit.{name} {each}"
        elif name == "resilient":
            for each in inspect.signature(type(thing).__call__).parameters.values():
                yield f"autofit.{name} {each}"
        elif inspect.isclass(thing):
            for member in sorted({*vars(thing), *thing.__annotations__}):
                if not member.startswith("_"):
                    yield f"autofit.{name}.{member}"


def callbacks() -> Iterator[str]:
    """Yield a line for each callback and its methods, without an import of its library."""
    folder = Path(autofit.__file__).parent / "integrations"
    for file in sorted(folder.glob("*.py")):
        for each in ast.parse(file.read_text(encoding="utf-8")).body:
            if isinstance(each, ast.ClassDef):
                name = f"autofit.integrations.{file.stem}.{each.name}"
                yield name
                methods = [part for part in each.body if isinstance(part, ast.FunctionDef)]
                yield from (f"{name}.{m.name}" for m in methods if not m.name.startswith("_"))


def formats() -> Iterator[str]:
    """Yield a line for each format of ``autofit best``."""
    yield from (f"format {form}" for form in FORMATS)


def keys(found: dict[str, Any], beginning: str) -> Iterator[str]:
    """Yield a line for each key of a JSON result, levels of plans and kinds of memory left out.

    ``beginning``: of the lines, such as ``"json "`` for ``autofit best``.
    """
    for key, value in found.items():
        yield f"{beginning}{key}"
        first = value[0] if isinstance(value, list) and value else value
        if isinstance(first, dict) and key not in OPEN:
            yield from keys(first, f"{beginning}{key}.")


def inspected() -> Iterator[str]:
    """Yield a line for each key of the JSON of ``autofit explain``, ``check`` and ``fit``."""
    yield from keys(explanation_document(by_hand.explanation()), "json explain ")
    yield from keys(check_document(by_hand.check(peak=None)), "json check ")
    yield from keys(fit_document(by_hand.fit()), "json fit ")


def result() -> Result:
    """Return a result in which every part of the document is present."""
    measured = Measurement(
        micro_batch=1,
        effective_batch=1,
        step_seconds=(1.0,),
        peak_allocated=1,
        peak_reserved=1,
        peak_device=1,
    )
    return Result(
        study="",
        script=Script(target="train.py", cwd="/"),
        hardware=Hardware(device="cpu", name="CPU", total_bytes=1),
        budget=1,
        plan=Plan(),
        measurement=measured,
        confirmed=True,
        fidelity="exact",
        baseline=measured,
        baseline_verdict=Verdict.MEASURED,
        variation=0.0,
        trials=1,
        launches=1,
        launches_out_of_memory=0,
        search_seconds=1.0,
        seconds_by_phase=tuple((phase, 1.0) for phase in ORDER),
        versions={},
    )


def surface() -> list[str]:
    """Return the lines that ``public_surface.txt`` holds."""
    context = click.Context(cli, info_name="autofit")
    return [
        *commands(cli, context),
        *names(),
        *callbacks(),
        *formats(),
        *keys(document(result()), "json "),
        *inspected(),
    ]


def test_the_public_surface_is_as_recorded() -> None:
    recorded, found = RECORDED.read_text(encoding="utf-8").splitlines(), surface()
    added, removed = sorted({*found} - {*recorded}), sorted({*recorded} - {*found})
    assert (added, removed) == ([], []), f"to accept it, see the first lines of {__file__}"
    assert found == recorded, "another order"


if __name__ == "__main__":
    sys.stdout.write("\n".join(surface()) + "\n")
