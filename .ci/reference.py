"""Writes the pages of ``docs/reference`` that are made from the code: ``WRITERS`` lists them.

::

    python .ci/reference.py            # write the pages
    python .ci/reference.py --check    # write nothing; exit with 1 where a page is out of date
"""

from __future__ import annotations

import argparse
import ast
import dataclasses
import importlib
import inspect
import itertools
import re
import sys
import tempfile
import textwrap
from collections.abc import Callable, Iterable, Iterator, Mapping
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
from autofit.export import FORMATS, expressed
from autofit.facts import Facts, Hardware, RootFacts
from autofit.inspection.card_fits import CardFit, FittingPlan
from autofit.inspection.explanation import Explanation
from autofit.inspection.fitting import Fit
from autofit.inspection.techniques import Technique
from autofit.plan import Plan
from autofit.resilience import ActivePlan, Retry
from autofit.space.pairs import pairs
from autofit.storage import Store
from autofit.storage.models import Base
from autofit.strategies import NAMES, REGISTRY, Level, Strategy
from autofit.strategies.base import ScriptPart
from autofit.worker.records.trials import Measurement, Script, Verdict

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
        if part.startswith(">>>") or all(line.startswith("    ") for line in part.splitlines()):
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
        told += [f"## {own.command_path}", "", "```text", " ".join(usage.split()), "```", ""]
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
    told += ["", "## Pairs", "", PAIRS, "", "```text"]
    told += [*matrix(NAMES, found), *clashing(found), "```"]
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


# --- the exports ------------------------------------------------------------------------------


def exports() -> str:
    """Return ``exports.md``: which level each format carries, and how the others are set."""
    told = ["# What each export carries", NOTICE, "", CARRIED, ""]
    with tempfile.TemporaryDirectory() as folder:
        samples = {title: _sample(Path(folder), *each) for title, each in SAMPLES.items()}
        rows = [row for strategy in REGISTRY for row in _carried(strategy, samples)]
    told += table(("technique", "level", *samples, "by hand"), rows)
    told += ["", WHERE, ""]
    modules = {name: vars(importlib.import_module(f"autofit.export.as_{name}")) for name in FORMATS}
    told += table(
        ("format", *map(str, ScriptPart)),
        (
            (f"`{name}`", *(module["PARTS"].get(part, "") for part in ScriptPart))
            for name, module in modules.items()
            if "PARTS" in module
        ),
    )
    return "\n".join(told) + "\n"


CARRIED = """\
`json`, `toml`, `env` and `torchrun` carry every plan, because autofit applies it. The table shows
the other formats:

- *yes*: the exported file sets the level.
- *in part*: the file sets it and names a change that the script needs too.
- *by hand*: the file does not set it. The last column says what to set; `autofit best` adds where.
- *no*: it takes more than a few lines of code. `autofit run` applies it.

The script of the table trains with AdamW, and shows a place for each change. A patch of a script
with `TrainingArguments` sets what `trainer` sets. A patch of a script with an `Accelerator` sets
its mixed precision, and what a patch of a plain loop sets except `micro_batch`."""
WHERE = """\
A level that is set by hand belongs to a part of the script. These formats name the place of it:"""
LOOP = """\
import torch
from torch import nn
from torch.utils.data import DataLoader

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(4, 4) for _ in range(3))

model = Net()
optimizer = torch.optim.AdamW(model.parameters())
for x, y in DataLoader(data, batch_size=16):
    optimizer.zero_grad(set_to_none=False)
    loss = nn.functional.cross_entropy(model(x), y)
    loss.backward()
    optimizer.step()
"""
LIGHTNING = """\
import lightning
import torch
from torch import nn
from torch.utils.data import DataLoader

class Net(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(4, 4) for _ in range(3))

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters())

lightning.Trainer(max_epochs=2).fit(Net(), DataLoader(data, batch_size=16))
"""
SAMPLES = {
    "`python`": ("python", LOOP),
    "`patch`, plain loop": ("patch", LOOP),
    "`patch`, Lightning": ("patch", LIGHTNING),
    "`accelerate`": ("accelerate", LOOP),
    "`trainer`": ("trainer", LOOP),
    "`lightning`": ("lightning", LIGHTNING),
    "`deepspeed`": ("deepspeed", LOOP),
}
"""Columns of the table: a format, and a script for it."""
NUMBERS = {"auto": "8"}
"""A number for each level that a search replaces by one."""
Sample = Callable[[Strategy, str], str]


def _sample(folder: Path, form: str, text: str) -> Sample:
    """Return what says how the format carries a level, for a script with this text."""
    file = folder / f"{len(list(folder.iterdir()))}.py"
    file.write_text(text)
    root = RootFacts(name="Net", parameters=60, parameter_bytes=240, trainable=60, dtype="float32")
    facts = Facts(optimizers=("AdamW",), framework="transformers", roots=(root,))
    measurement = Measurement(
        micro_batch=8,
        effective_batch=16,
        step_seconds=(1.0,),
        peak_allocated=1,
        peak_reserved=1,
        peak_device=1,
    )

    def cell(strategy: Strategy, level: str) -> str:
        result = Result(
            study="",
            script=Script(target=file.name, cwd=str(folder)),
            hardware=Hardware(device="cuda", name="a GPU", total_bytes=1),
            budget=1,
            plan=Plan.of({strategy.name: level}),
            measurement=measurement,
            confirmed=True,
            fidelity="exact",
            baseline=None,
            baseline_verdict=Verdict.MEASURED,
            variation=0.0,
            trials=1,
            launches=1,
            launches_out_of_memory=0,
            search_seconds=1.0,
            versions={},
            facts=facts,
        )
        found = expressed(form, result)
        assert found is not None, f"{form} carries every plan"
        if found.carries(strategy, level):
            return "in part" if found.in_script else "yes"
        if strategy.name in found.by_hand:
            return found.told(strategy, level)
        return "no" if strategy.by_hand(level) is None else "by hand"

    return cell


def _carried(strategy: Strategy, samples: Mapping[str, Sample]) -> Iterator[list[str]]:
    """Yield a row for each level; one row for neighbours that the formats treat alike."""
    levels = [NUMBERS.get(level.name, level.name) for level in strategy.levels[1:]]

    def cells(level: str) -> list[str]:
        hand = strategy.by_hand(level)
        row = [sample(strategy, level) for sample in samples.values()]
        return [*row, hand.setting if hand else ""]

    for row, alike in itertools.groupby(levels, cells):
        yield [f"`{strategy.name}`", ", ".join(f"`{level}`" for level in alike), *row]


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
search. Optuna's tables are a copy that is written afterwards and never read.
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
    for name in ("search", "best", "run", "explain", "fit"):
        told += ["", *function(f"autofit.{name}", getattr(autofit, name))]
    told += ["", *function("autofit.analysis.frontier.frontier", frontier)]
    call = type(autofit.resilient).__call__
    told += ["", "## autofit.resilient", "", described(autofit.resilient), "", *_code(call)]
    told += ["", described(call)]
    for name in ("step", "active", "set_active", "set_hooks", "inject", "forget"):
        member = getattr(autofit.resilient, name)
        told += ["", *function(f"autofit.resilient.{name}", member, level=3)]
    for cls in (autofit.Study, autofit.Plan, ActivePlan, Store, Explanation, Fit):
        told += ["", *members(cls)]
    for record in (Result, Point, Script, Retry, Technique, CardFit, FittingPlan):
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
            told = described(thing).partition("\n\n```")[0]  # a cell holds no example
            rows.append((f"`{shown}`", told.replace("\n\n", " ")))
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
    "exports.md": exports,
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
