"""``autofit token``: the tokens with which users talk to a service."""

from __future__ import annotations

import click

from autofit.cli import types
from autofit.cli.lazy import Group
from autofit.cli.out import say, write

_storage = click.option(
    "--storage", metavar="URL", help="The store of the service (default: ./autofit.db)."
)


@click.group("token", cls=Group)
def command() -> None:
    """Make tokens for the users of autofit serve."""


@command.command("create")
@click.argument("user")
@_storage
@click.option("--gpus", type=click.IntRange(min=1), help="GPUs that USER may hold at a time.")
@click.option("--priority", type=int, help="The highest priority of USER's searches (default: 0).")
def create(user: str, storage: str | None, gpus: int | None, priority: int | None) -> None:
    """Make a token for USER and show it; the store keeps its digest alone.

    --gpus or --priority set both limits of USER anew, also for tokens that exist.
    """
    from autofit.service.users import create_token
    from autofit.storage import Limits, Store

    given = gpus is not None or priority is not None
    limits = Limits(gpus=gpus, priority=priority or 0) if given else None
    with Store(types.url_of(storage)) as store:
        token = create_token(store, user, limits)
    write(token + "\n")
    say(f"it is shown only now: {user} sets AUTOFIT_TOKEN to it")
