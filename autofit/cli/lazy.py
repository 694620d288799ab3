"""A Click group that imports a command when it is used."""

from __future__ import annotations

from importlib import import_module

import click

from autofit.text import did_you_mean


class SuggestingGroup(click.Group):
    """A group that suggests a command for a misspelt one."""

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """Return the command that ``args`` begin with; raise ``UsageError`` with a suggestion."""
        try:
            return super().resolve_command(ctx, args)
        except click.UsageError:
            hint = did_you_mean(args[0], self.list_commands(ctx))
            if not hint:
                raise
            raise click.UsageError(f"No such command {args[0]!r}; {hint}", ctx) from None


class LazyGroup(SuggestingGroup):
    """A group that knows the name and the module of each command.

    ``name`` is the object ``command`` of ``<package>.<name>``.
    """

    def __init__(
        self, *args: object, package: str, lazy: tuple[str, ...], **kwargs: object
    ) -> None:
        super().__init__(*args, **kwargs)  # type: ignore[arg-type]
        self.package = package
        self.lazy = lazy

    def list_commands(self, ctx: click.Context) -> list[str]:
        """Return the names in the order of ``lazy``, which is the order of use."""
        return [*self.lazy, *super().list_commands(ctx)]

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """Import and return the command; ``None`` if there is no such command."""
        if cmd_name not in self.lazy:
            return super().get_command(ctx, cmd_name)
        command = import_module(f"{self.package}.{cmd_name}").command
        assert isinstance(command, click.Command)
        return command
