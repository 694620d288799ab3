"""``autofit token``: the tokens with which users talk to a service, and what they did."""

from __future__ import annotations

from dataclasses import replace
from datetime import UTC, datetime, timedelta

import click

from autofit.cli import SuggestingGroup, types
from autofit.cli.out import say, write
from autofit.exceptions import UsageError
from autofit.text import printable

_storage = click.option(
    "--storage",
    metavar="URL",
    help="Store of the service, a file or a URL (default: ./autofit.db).",
)


@click.group("token", cls=SuggestingGroup)
def command() -> None:
    """Make tokens for the users of autofit serve."""


@command.command("create")
@click.argument("user")
@_storage
@click.option("--gpus", type=click.IntRange(min=1), help="GPUs that USER may hold at a time.")
@click.option("--priority", type=int, help="The highest priority of USER's searches (default: 0).")
@click.option(
    "--queued",
    type=click.IntRange(min=1),
    help="Searches of USER that may wait at a time (default: 200).",
)
@click.option(
    "--uploads",
    metavar="SIZE",
    callback=types.size,
    help="Size of all folders that USER may have in the store (default: 2GiB).",
)
@click.option(
    "--expires",
    metavar="DUR",
    callback=types.duration,
    help="Refuse the token after this time (default: never).",
)
def create(
    user: str,
    storage: str | None,
    gpus: int | None,
    priority: int | None,
    queued: int | None,
    uploads: int | None,
    expires: float | None,
) -> None:
    """Make a token for USER and show it once.

    If a limit is given, all limits of USER are set again, also for earlier tokens.
    """
    from autofit.service.users import create_token
    from autofit.storage import Limits, Store

    named = {"gpus": gpus, "priority": priority, "queued": queued, "upload_bytes": uploads}
    given = {name: value for name, value in named.items() if value is not None}
    limits = replace(Limits(), **given) if given else None
    try:
        end = None if expires is None else datetime.now(UTC) + timedelta(seconds=expires)
    except OverflowError:
        raise UsageError(
            "--expires: the date would be after the year 9999: give less, or leave it out"
        ) from None
    with Store(types.url_of(storage)) as store:
        token = create_token(store, user, limits, expires=end)
    write(token + "\n")
    say(f"it is shown only now: {user} sets AUTOFIT_TOKEN to it")


@command.command("list")
@_storage
def list_tokens(storage: str | None) -> None:
    """Show the tokens, each with its number, user, age and end."""
    from autofit.storage import Queue, Store

    with Store(types.url_of(storage), create=False) as store:
        found = Queue(store).tokens()
    now = datetime.now(UTC)
    for each in found:
        end = ""
        if each.expires is not None:
            word = "expires" if each.expires > now else "refused since"
            end = f"  {word} {each.expires:%Y-%m-%d %H:%M:%S} UTC"
        write(f"{each.id}  {each.user}  made {each.created:%Y-%m-%d %H:%M:%S} UTC{end}\n")


@command.command("revoke")
@click.argument("user")
@_storage
@click.option("--number", type=int, help="Only the token with this number in `token list`.")
def revoke(user: str, storage: str | None, number: int | None) -> None:
    """Refuse all tokens of USER from now on; running searches go on."""
    from autofit.service.users import revoke_tokens
    from autofit.storage import Store

    with Store(types.url_of(storage), create=False) as store:
        count = revoke_tokens(store, user, number)
    say(f"{count} token{'s' if count > 1 else ''} of {user} {'are' if count > 1 else 'is'} refused")


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
