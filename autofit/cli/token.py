"""``autofit token``: the tokens with which users talk to a service, and what they did."""

from __future__ import annotations

import click

from autofit.cli import types
from autofit.cli.lazy import Group
from autofit.cli.out import say, write
from autofit.printable import printable

_storage = click.option(
    "--storage",
    metavar="URL",
    help="Store of the service, a file or a URL (default: ./autofit.db).",
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
    """Make a token for USER and show it once.

    If --gpus or --priority is given, both limits of USER are set again, also for earlier tokens.
    """
    from autofit.service.users import create_token
    from autofit.storage import Limits, Store

    given = gpus is not None or priority is not None
    limits = Limits(gpus=gpus, priority=priority or 0) if given else None
    with Store(types.url_of(storage)) as store:
        token = create_token(store, user, limits)
    write(token + "\n")
    say(f"it is shown only now: {user} sets AUTOFIT_TOKEN to it")


@command.command("audit")
@_storage
@click.option("--user", metavar="USER", help="Show only what this user did.")
@click.option(
    "--lines",
    type=click.IntRange(min=1),
    default=100,
    show_default=True,
    help="Show so many lines.",
)
def audit(storage: str | None, user: str | None, lines: int) -> None:
    """Show what users did in the service, the newest last."""
    from autofit.storage import Accounts, Store

    with Store(types.url_of(storage), create=False) as store:
        found = Accounts(store).trail(user, most=lines)
    for each in reversed(found):
        when = each.created.strftime("%Y-%m-%d %H:%M:%S")
        who = f"{each.user or 'unknown'}{f' from {each.address}' if each.address else ''}"
        write(f"{when} UTC  {printable(who)}  {each.action}  {printable(each.target)}\n")
