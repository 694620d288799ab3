"""The user of a request, by the header of a program or the cookie of a browser."""

from __future__ import annotations

from typing import Annotated

from fastapi import Cookie, Depends, Header, Request

from autofit.service.users import Users

COOKIE = "autofit_token"
"""The cookie that holds the token of a browser's user."""


def user_of(
    request: Request,
    authorization: Annotated[str | None, Header()] = None,
    autofit_token: Annotated[str | None, Cookie(include_in_schema=False)] = None,
) -> str:
    """Return the user; raise ``Unauthorized`` or ``OtherSite`` for a request that is refused."""
    users: Users = request.app.state.users
    users.check_site(request.headers.get("Host", ""), request.headers.get("Origin"))
    if authorization is None and autofit_token is not None:
        authorization = f"Bearer {autofit_token}"
    user = users.user_of(authorization, address_of(request))
    request.state.user = user  # for the log
    return user


def address_of(request: Request) -> str:
    """Return the network address of the client."""
    return "" if request.client is None else request.client.host


User = Annotated[str, Depends(user_of)]
"""The type of a parameter that gets the user's name."""
