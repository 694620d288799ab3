"""Writes the pages of ``docs/reference`` that are made from the code.

::

    python .ci/reference.py            # write cli.md, strategies.md, storage.md and python.md
    python .ci/reference.py --check    # write nothing; exit with 1 where a page is out of date
"""

from __future__ import annotations

import argparse
import ast
import dataclasses
import inspect
import itertools
import re
import sys
import textwrap
from collections.abc import Callable, Iterable, Iterator
from enum import Enum
from pathlib import Path
from typing import Any

import click
import sqlalchemy

import autofit
from autofit import exceptions
from autofit.analysis.frontier import Point, frontier
from autofit.analysis.result import Result
from autofit.cli import cli
from autofit.cli.techniques import clashing, matrix
from autofit.inspection.cards import Card
from autofit.inspection.explanation import Explanation
from autofit.inspection.techniques import Technique
from autofit.resilience import ActivePlan, Retry
from autofit.space.pairs import pairs
from autofit.storage import Store
from autofit.storage.models import Base
from autofit.strategies import NAMES, REGISTRY, Level, Strategy
from autofit.worker.records.trials import Script

PAGES = Path(__file__).parents[1] / "docs" / "reference"
NOTICE = "<!-- Written by .ci/reference.py. Change the code, then run it again. -->"


def table(head: Iterable[str], rows: Iterable[Iterable[str]]) -> Iterator[str]:
    """Yield a Markdown table, line by line."""
    head = list(head)
    for row in (head, ["---"] * len(head), *rows):
        cells = [" ".join(cell.split()).replace("|", "\\|") for cell in row]
        yield f"| {' | '.join(cells)} |"


def prose(text: str) -> str:
    """Return a docstring as Markdown: one line a paragraph, examples as code blocks."""
    paragraphs = []
    for part in re.split(r"\n\s*\n", inspect.cleandoc(text)):
        title, _, entries = part.partition("\n")
        if all(line.startswith("    ") for line in part.splitlines()):
            paragraphs.append(f"```python\n{textwrap.dedent(part)}\n```")
        elif title in SECTIONS and entries:
            paragraphs += [SECTIONS[title], "\n".join(_entries(textwrap.dedent(entries)))]
        elif part.strip() != "::":
            paragraphs.append(re.sub(r"::$", ":", _sentence(part)))
    return "\n\n".join(paragraphs)


SECTIONS = {"Args:": "Parameters:", "Raises:": "Raises:", "Returns:": "Returns:"}
"""Sections of a docstring that hold a list, and their titles on a page."""


def _sentence(text: str) -> str:
    plain = re.sub(r":\w+:(?=`)", "", " ".join(text.split()))
    return re.sub(r"``(.+?)``", r"`\1`", plain)


def _entries(text: str) -> Iterator[str]:
    """Yield an item of a list for each ``name: text``; the text may go on, indented."""
    for entry in re.split(r"\n(?=\S)", text):
        name, colon, rest = entry.partition(": ")
        named = bool(colon) and name.isidentifier()
        yield f"- `{name}`: {_sentence(rest)}" if named else f"- {_sentence(entry)}"


def described(thing: object) -> str:
    """Return the docstring of a class or function as Markdown; it must have one."""
    text = inspect.getdoc(thing)
    assert text, f"{thing} has no docstring"
    return prose(text)


def fields(cls: type) -> dict[str, str]:
    """Return the docstring below each field of a class and of its bases, as one line."""
    found: dict[str, str] = {}
    for each in reversed(cls.__mro__):
        try:
            tree = ast.parse(textwrap.dedent(inspect.getsource(each)))
        except (OSError, TypeError):
            continue
        (body,) = (node.body for node in tree.body if isinstance(node, ast.ClassDef))
        for field, below in itertools.pairwise(body):
            if not (isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name)):
                continue
            if isinstance(below, ast.Expr) and isinstance(below.value, ast.Constant):
                found[field.target.id] = prose(str(below.value.value))
    return found


# --- the command line -------------------------------------------------------------------------


def command_line() -> str:
    """Return ``cli.md``: each command with its options, and the exit codes."""
    told = ["# Command line", NOTICE, ""]
    commands = list(_commands(click.Context(cli, info_name="autofit")))
    told += table(("command", "what it does"), map(_entry, commands))
    told += ["", OPTIONS_BEFORE, ""]
    for own in commands:
        command = own.command
        usage = command.get_usage(own).removeprefix("Usage: ")
        told += [f"## {own.command_path}", "", "```", " ".join(usage.split()), "```", ""]
        told += [prose(command.help or ""), ""]
        told += table(("option", "meaning"), filter(None, map(_option(own), command.params)))
        told += [""]
    told += ["## Exit codes", "", *table(("code", "meaning"), exit_codes()), "", RUN_CODE]
    return "\n".join(told) + "\n"


def _commands(context: click.Context) -> Iterator[click.Context]:
    """Yield the context of each command of a group, followed by those of its own commands."""
    group = context.command
    assert isinstance(group, click.Group)
    for name in group.list_commands(context):
        command = group.get_command(context, name)
        assert command is not None
        own = click.Context(command, info_name=name, parent=context)
        yield own
        if isinstance(command, click.Group):
            yield from _commands(own)


def _entry(own: click.Context) -> tuple[str, str]:
    path = own.command_path
    return f"[`{path}`](#{path.replace(' ', '-')})", own.command.get_short_help_str(200)


OPTIONS_BEFORE = """\
Options of autofit stand before `--`. Everything after the first `--` belongs to the script.
In place of `SCRIPT`, its launch line may follow `--`. A launch line starts with one of these:

- `torchrun` or `python -m torch.distributed.run`
- `accelerate launch` or `python -m accelerate.commands.launch`
- `python`"""
RUN_CODE = "`autofit run` ends with the exit code of the script."


def _option(context: click.Context) -> Callable[[click.Parameter], tuple[str, str] | None]:
    def row(parameter: click.Parameter) -> tuple[str, str] | None:
        record = parameter.get_help_record(context)
        is_option = isinstance(parameter, click.Option)
        return (f"`{record[0]}`", record[1]) if is_option and record else None

    return row


def exit_codes() -> Iterator[tuple[str, str]]:
    """Yield each exit code of the command line with its meaning."""
    yield "0", "The command succeeded."
    codes: dict[int, list[str]] = {}
    for error in vars(exceptions).values():
        of_ours = inspect.isclass(error) and error.__base__ is exceptions.AutofitError
        if of_ours and error is not exceptions.Refused:  # a verdict: it ends no command
            first = described(error).partition("\n\n")[0]
            codes.setdefault(error.exit_code, []).append(f"`{error.__name__}`: {first}")
    for code, meanings in sorted(codes.items()):
        yield str(code), " ".join(meanings)
    yield "130", "The command was interrupted. The same command continues the search."


# --- the strategies ---------------------------------------------------------------------------


def strategies() -> str:
    """Return ``strategies.md``: what each strategy says of itself, and which levels combine."""
    told = ["# Techniques", NOTICE, "", LEVELS, ""]
    told += table(
        ("technique", "lowers", "what it does"),
        ((f"[`{s.name}`](#{s.name})", _lowered(s), s.summary) for s in REGISTRY),
    )
    for strategy in REGISTRY:
        told += ["", f"## {strategy.name}", "", described(type(strategy)), ""]
        told += [f"Source: <{strategy.source}>", ""]
        told += table(
            ("level", "fidelity", "what it does", "in a search"),
            (
                (f"`{level.name}`", str(level.fidelity), level.summary, _searched(level))
                for level in strategy.levels[1:]
            ),
        )
    found = pairs()
    told += ["", "## Pairs", "", PAIRS, "", "```", *matrix(NAMES, found), *clashing(found), "```"]
    return "\n".join(told) + "\n"


LEVELS = """\
A plan holds one level of every technique. Python and JSON call a technique a *strategy*. The level
`as_is` changes nothing and is left out below. The fidelity of a level says how much it may change
the training:

| fidelity | what may differ |
|---|---|
| `exact` | the order of sums |
| `redraw` | random draws, from the same distribution |
| `rounding` | the precision of the computation |
| `recipe` | the training itself |

A search tries no level above `--allow`, which is `rounding` by default.

Some levels change more in some scripts. In a model with dropout, `micro_batch` and `padding` are
`redraw`. In a script that computes in half precision, `compile`, `loss`, `memory_format` and fused
optimizers are `rounding`."""
PAIRS = """\
The matrix says which techniques combine in one plan. The lines below it say why others do not.
`autofit techniques --pairs` prints the same."""


def _lowered(strategy: Strategy) -> str:
    return ", ".join(sorted(map(str, strategy.lowers))) or "nothing by itself"


def _searched(level: Level) -> str:
    """Return how a search treats a level, in a few words."""
    tried = "tried beside the fastest plans" if level.refines else "tried in combinations"
    fresh = "needs a new process" if not level.undo else ""
    return ", ".join(filter(None, (tried, fresh)))


# --- the store --------------------------------------------------------------------------------


def storage() -> str:
    """Return ``storage.md``: the tables and their columns."""
    told = ["# Storage schema", NOTICE, "", TABLES]
    classes = {mapper.local_table: mapper.class_ for mapper in Base.registry.mappers}
    for rows in Base.metadata.sorted_tables:
        notes = fields(classes[rows])
        told += ["", f"## {rows.name}", "", described(classes[rows]), ""]
        told += table(
            ("column", "type", "may be null", "note"),
            (
                (f"`{c.name}`", _type(c), "yes" if c.nullable else "", _note(c, notes))
                for c in rows.columns
            ),
        )
    return "\n".join(told) + "\n"


TABLES = """\
The store holds the tables below and those of Optuna. The tables below are the record of every
search. Optuna's tables are a copy that is written afterwards; no foreign key connects the two.
The table `autofit_alembic_version` holds the version of this schema. [The how-to
guides](../how-to/index.md) say how to choose a store."""


def _type(column: sqlalchemy.Column[Any]) -> str:
    kind = column.type
    return str(getattr(kind, "impl", kind)).lower()


def _note(column: sqlalchemy.Column[Any], notes: dict[str, str]) -> str:
    key = "Primary key." if column.primary_key else ""
    refers = " ".join(f"Refers to `{each.target_fullname}`." for each in column.foreign_keys)
    return " ".join(filter(None, (key, refers, notes.get(column.name, ""))))


# --- the Python API ---------------------------------------------------------------------------


def python() -> str:
    """Return ``python.md``: the public functions, and the records that they take and return."""
    told = ["# Python API", NOTICE, "", PUBLIC]
    for name in ("search", "best", "run", "explain"):
        told += ["", *function(f"autofit.{name}", getattr(autofit, name))]
    told += ["", *function("autofit.analysis.frontier.frontier", frontier)]
    call = type(autofit.resilient).__call__
    told += ["", "## autofit.resilient", "", described(autofit.resilient), "", *_code(call)]
    told += ["", described(call)]
    for name in ("step", "active", "set_active", "set_hooks", "inject", "forget"):
        member = getattr(autofit.resilient, name)
        told += ["", *function(f"autofit.resilient.{name}", member, level=3)]
    for cls in (autofit.Study, autofit.Plan, ActivePlan, Store, Explanation):
        told += ["", *members(cls)]
    for record in (Result, Point, Script, Retry, Technique, Card):
        told += ["", *dataclass(record)]
    told += ["", "## Exceptions", "", "Module `autofit.exceptions`.", ""]
    told += table(
        ("exception", "meaning"),
        (
            (f"`{name}`", described(error).partition("\n\n")[0])
            for name, error in vars(exceptions).items()
            if inspect.isclass(error)
        ),
    )
    return "\n".join(told) + "\n"


PUBLIC = """\
`import autofit` imports no other library. Each name below is loaded when it is first used.

```python
import autofit

study = autofit.search("train.py", trials=2, quiet=True)
print(study)
print(study.best.plan.levels)
```

The parameters are the options of the command line, under the same names. Values may be written as
there: `memory="24GiB"`, `timeout="10m"`, `allow="rounding"`. Sizes may also be bytes, and durations
seconds. A value that is not allowed raises `UsageError`, which says what is."""


def function(name: str, thing: Callable[..., Any], level: int = 2) -> Iterator[str]:
    """Yield the section of a function."""
    yield from (f"{'#' * level} {name}", "", *_code(thing), "", described(thing))


def members(cls: type) -> Iterator[str]:
    """Yield the section of a class: its methods and properties."""
    yield from (f"## {cls.__name__}", "", f"`{cls.__module__}.{cls.__name__}`", "", described(cls))
    yield ""
    rows = []
    for name, member in vars(cls).items():
        thing = getattr(member, "__func__", member)
        if not name.startswith("_") and (isinstance(thing, property) or inspect.isfunction(thing)):
            shown = name if isinstance(thing, property) else f"{name}{_parameters(thing)}"
            rows.append((f"`{shown}`", described(thing).replace("\n\n", " ")))
    yield from table(("member", "meaning"), rows)


def dataclass(cls: type) -> Iterator[str]:
    """Yield the section of a record: its fields."""
    yield from (f"## {cls.__name__}", "", f"`{cls.__module__}.{cls.__name__}`", "", described(cls))
    yield ""
    notes = fields(cls)
    rows = []
    for field in dataclasses.fields(cls):
        given = field.default
        if "flag" in field.metadata and field.default_factory is not dataclasses.MISSING:
            given = field.default_factory()
        default = "" if given is dataclasses.MISSING else f"`{_default(given)}`"
        flag = field.metadata.get("flag")
        meaning = notes.get(field.name) or (flag.help if flag else "")
        rows.append((f"`{field.name}`", f"`{field.type}`", default, meaning))
    yield from table(("field", "type", "default", "meaning"), rows)


def _parameters(thing: Callable[..., Any]) -> str:
    given = [name for name in inspect.signature(thing).parameters if name not in ("self", "cls")]
    return f"({', '.join(given)})"


def _code(thing: Callable[..., Any]) -> Iterator[str]:
    """Yield the signature of a function as a code block, a parameter a line."""
    signature = inspect.signature(thing)
    name = "resilient" if thing.__name__ == "__call__" else thing.__name__
    given = [each for each in signature.parameters.values() if each.name != "self"]
    yield "```python"
    if given:
        yield f"{name}("
        kinds = [each.kind for each in given]
        for each, before in zip(given, [None, *kinds], strict=False):
            if each.kind is each.KEYWORD_ONLY and before not in (
                each.KEYWORD_ONLY,
                each.VAR_POSITIONAL,
            ):
                yield "    *,"
            mark = "*" if each.kind is each.VAR_POSITIONAL else ""
            default = "" if each.default is each.empty else f" = {_default(each.default)}"
            yield f"    {mark}{each.name}: {each.annotation}{default},"
        yield f") -> {signature.return_annotation}"
    else:
        yield f"{name}() -> {signature.return_annotation}"
    yield "```"


def _default(value: object) -> str:
    return "..." if callable(value) else str(value) if isinstance(value, Enum) else repr(value)


# --- all of them ------------------------------------------------------------------------------


WRITERS: dict[str, Callable[[], str]] = {
    "cli.md": command_line,
    "strategies.md": strategies,
    "storage.md": storage,
    "python.md": python,
}


def main() -> int:
    """Write the pages, or say which are out of date; return the exit code."""
    parser = argparse.ArgumentParser(description="Write the generated pages of docs/reference.")
    parser.add_argument("--check", action="store_true", help="write nothing; 1 if out of date")
    check = parser.parse_args().check
    stale = []
    for name, write in WRITERS.items():
        page = PAGES / name
        text = write()
        if not page.exists() or page.read_text() != text:
            stale.append(name)
            if not check:
                page.write_text(text)
    if check and stale:
        sys.stderr.write(f"out of date: {', '.join(stale)}; run: python .ci/reference.py\n")
    return int(check and bool(stale))


if __name__ == "__main__":
    sys.exit(main())
