"""``autofit token``: the tokens with which users talk to a service."""

from __future__ import annotations

import click

from autofit.cli import types
from autofit.cli.lazy import Group
from autofit.cli.out import say, write


@click.group("token", cls=Group)
def command() -> None:
    """Make tokens for the users of autofit serve."""


@command.command("create")
@click.argument("user")
@click.option("--storage", metavar="URL", help="The store of the service (default: ./autofit.db).")
def create(user: str, storage: str | None) -> None:
    """Make a token for USER and show it; the store keeps its digest alone."""
    from autofit.service.users import create_token
    from autofit.storage import Queue, Store

    with Store(types.url_of(storage)) as store:
        token = create_token(Queue(store), user)
    write(token + "\n")
    say(f"it is shown only now: {user} sets AUTOFIT_TOKEN to it")
