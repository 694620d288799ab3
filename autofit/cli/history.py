"""``autofit history``: the stored studies and their trials."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, TypeVar

import click

from autofit.cli import SuggestingGroup, types
from autofit.cli.out import render, say, show, write
from autofit.exceptions import UsageError

if TYPE_CHECKING:
    from autofit.storage import Store

F = TypeVar("F", bound=Callable[..., Any])


def _options(function: F) -> F:
    """Give a command the options that all commands of the history have."""
    store = click.option(
        "--storage", metavar="URL", help="Store, a file or a URL (default: ./autofit.db)."
    )
    as_json = click.option("--json", "as_json", is_flag=True, help="Write the result as JSON.")
    return store(as_json(function))


@click.group("history", cls=SuggestingGroup, invoke_without_command=True)
@_options
@click.pass_context
def command(context: click.Context, storage: str | None, as_json: bool) -> None:
    """List the stored studies, the newest first.

    A study is a stored search. STUDY is its identifier, or the beginning of it. A trial is written
    STUDY/NUMBER.
    """
    if context.invoked_subcommand is not None:
        if as_json or storage is not None:
            raise UsageError(f"give --json and --storage after {context.invoked_subcommand}")
        return
    from autofit.analysis.studies import stored_study
    from autofit.export.records import study_document
    from autofit.view.history import studies

    with _store(storage) as store:
        found = [stored_study(store, study) for study in store.studies()]
    if as_json:
        _write_json([study_document(each) for each in found])
    elif found:
        render(studies(found))
    else:
        show(["no study is stored: run `autofit search` first"])


@command.command("show")
@click.argument("study", required=False)
@_options
def show_study(study: str | None, storage: str | None, as_json: bool) -> None:
    """Show the trials of STUDY (default: the newest)."""
    from autofit.analysis.studies import stored_study, study_named
    from autofit.export.records import history_document
    from autofit.view import history, words

    with _store(storage) as store:
        found = stored_study(store, study_named(store, study))
    if as_json:
        _write_json(history_document(found))
        return
    show([*history.head(found), ""])
    render(history.trials(found))
    show(words.left_out(found.study.left_out))


@command.command("compare")
@click.argument("a")
@click.argument("b")
@_options
def compare(a: str, b: str, storage: str | None, as_json: bool) -> None:
    """Compare two trials, or the best plans of two studies.

    Each of A and B is a trial, written STUDY/NUMBER, or a study.
    """
    from autofit.analysis.studies import side_named
    from autofit.export.records import comparison_document
    from autofit.view.history import comparison, conclusion

    with _store(storage) as store:
        one, other = side_named(store, a), side_named(store, b)
    if as_json:
        _write_json(comparison_document(one, other))
        return
    render(comparison(one, other, (a, b)))
    show(["", conclusion(one, other, (a, b))])


@command.command("delete")
@click.argument("study")
@click.option("--yes", is_flag=True, help="Delete without asking.")
@_options
def delete(study: str, yes: bool, storage: str | None, as_json: bool) -> None:
    """Delete STUDY with its trials. The plans that were verified stay known."""
    from autofit.analysis.studies import stored_study, study_named
    from autofit.export.records import study_document
    from autofit.tuning.optuna_study import delete_study
    from autofit.view.words import many

    with _store(storage) as store:
        found = stored_study(store, study_named(store, study))
        what = f"study {found.study.id} ({found.study.script}; {many(len(found.trials), 'trial')})"
        if not yes and not sys.stdin.isatty():
            raise UsageError(
                f"{what} would be deleted: there is no terminal to ask you, so add --yes"
            )
        if not yes and not click.confirm(f"delete {what}?", err=True):
            show(["nothing was deleted"])
            return
        delete_study(store, found.study)
    if as_json:
        _write_json({"deleted": study_document(found)})
    else:
        show([f"deleted {what}"])


@contextmanager
def _store(storage: str | None) -> Iterator[Store]:
    from autofit.storage import Store

    with Store(types.url_of(storage), create=False) as store:
        store.say = say
        yield store


def _write_json(document: object) -> None:
    write(json.dumps(document, indent=2) + "\n")
