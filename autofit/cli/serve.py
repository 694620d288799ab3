"""``autofit serve``: a service that searches for several users."""

from __future__ import annotations

import click

from autofit.cli import types
from autofit.cli.out import say, show


@click.command("serve")
@click.option("--storage", metavar="URL", help="Store, a file or a URL (default: ./autofit.db).")
@click.option(
    "--address", metavar="RAY", help="Address of a running Ray cluster (default: start Ray here)."
)
@click.option("--host", default="127.0.0.1", show_default=True, help="The address to listen on.")
@click.option(
    "--port",
    type=click.IntRange(0, 65535),
    default=8600,
    show_default=True,
    help="The port; 0 takes a free one.",
)
@click.option(
    "--searches",
    type=click.IntRange(min=1),
    default=1,
    show_default=True,
    help="Searches that run at the same time, on a machine without GPUs.",
)
@click.option("--tls-certificate", metavar="FILE", help="Use HTTPS with this certificate (PEM).")
@click.option("--tls-key", metavar="FILE", help="Private key of the certificate (PEM).")
@click.option(
    "--max-upload",
    metavar="SIZE",
    callback=types.size,
    help="Largest folder that is accepted (default: 100MiB).",
)
@click.option(
    "--max-requests",
    type=click.FloatRange(min=0, min_open=True),
    default=20.0,
    show_default=True,
    help="Requests that a user may send per second.",
)
@click.option(
    "--max-connections",
    type=click.IntRange(min=2),
    default=500,
    show_default=True,
    help="Connections at a time; more end those that wait longest without a request.",
)
@click.option(
    "--trusted-proxy",
    "trusted_proxies",
    metavar="ADDRESS",
    multiple=True,
    help="Believe X-Forwarded-For of this address or network (may be given several times).",
)
@click.option(
    "--keep-uploads",
    metavar="DUR",
    callback=types.duration,
    help="Delete an uploaded folder this long after its last search (default: 168h).",
)
@click.option(
    "--log-format",
    type=types.Choice(["text", "json"]),
    default="text",
    show_default=True,
    help="json writes a line for each event and each request.",
)
@click.option(
    "--trusted-users",
    is_flag=True,
    help="Accept several users although they can read each other's files.",
)
@click.option(
    "--stop", is_flag=True, help="Stop the service with this store, and the Ray that it started."
)
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
    max_connections: int,
    trusted_proxies: tuple[str, ...],
    keep_uploads: float | None,
    log_format: str,
    trusted_users: bool,
    stop: bool,
) -> None:
    """Run a service that searches for several users.

    To send a search: autofit search --server URL train.py. Searches go on when the service ends,
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
        connections=max_connections,
        proxies=trusted_proxies,
        keep=keep_uploads or server.KEEP,
        log=log_format,
        certificate=tls_certificate,
        key=tls_key,
    )
    server.serve(options, say)
