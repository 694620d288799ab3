"""``autofit serve``: a service that searches for several users."""

from __future__ import annotations

import click

from autofit.cli import types
from autofit.cli.out import say, show


@click.command("serve")
@click.option("--storage", metavar="URL", help="Where everything is kept (default: ./autofit.db).")
@click.option(
    "--address", metavar="RAY", help="A running Ray cluster (default: a Ray on this machine)."
)
@click.option("--host", default="127.0.0.1", show_default=True, help="The address to listen on.")
@click.option(
    "--port", type=click.IntRange(0, 65535), default=8600, show_default=True, help="0: a free one."
)
@click.option(
    "--searches",
    type=click.IntRange(min=1),
    default=1,
    show_default=True,
    help="Searches at a time on a machine without GPUs.",
)
@click.option("--tls-certificate", metavar="FILE", help="PEM file of a certificate: use HTTPS.")
@click.option("--tls-key", metavar="FILE", help="PEM file of its private key.")
@click.option("--max-upload", metavar="SIZE", callback=types.size, help="Default: 100MiB.")
@click.option(
    "--max-requests",
    type=click.FloatRange(min=0, min_open=True),
    default=20.0,
    show_default=True,
    help="Requests a second of each user.",
)
@click.option(
    "--keep-uploads",
    metavar="DUR",
    callback=types.duration,
    help="Delete a folder so long after its last search (default: 168h).",
)
@click.option(
    "--log-format",
    type=types.Choice(["text", "json"]),
    default="text",
    show_default=True,
    help="json: a line for each event and request.",
)
@click.option(
    "--trusted-users", is_flag=True, help="Let several users in, who can read each other's files."
)
@click.option("--stop", is_flag=True, help="End the service here, and the Ray that it started.")
def command(
    storage: str | None,
    address: str | None,
    host: str,
    port: int,
    searches: int,
    tls_certificate: str | None,
    tls_key: str | None,
    max_upload: int | None,
    max_requests: float,
    keep_uploads: float | None,
    log_format: str,
    trusted_users: bool,
    stop: bool,
) -> None:
    """Run a service that searches for several users.

    Searches are sent with: autofit search --server URL train.py. They go on when the service ends,
    and the next service takes them up.
    """
    from autofit.client.archive import LIMIT
    from autofit.service import server

    url = types.url_of(storage)
    if stop:
        ran = server.stop(url)
        show(["stopped; queued and running searches stay in the store" if ran else "nothing runs"])
        return
    options = server.ServiceOptions(
        storage=url,
        address=address,
        host=host,
        port=port,
        searches=searches,
        trusted=trusted_users,
        limit=max_upload or LIMIT,
        rate=max_requests,
        keep=keep_uploads or server.KEEP,
        log=log_format,
        certificate=tls_certificate,
        key=tls_key,
    )
    server.serve(options, say)
