"""Groups of commands of which one is the default."""

from __future__ import annotations

from typing import Any

import typer


class DefaultGroup(typer.core.TyperGroup):
    """A group whose first subcommand may be left out: ``bench gelu`` is ``bench run gelu``."""

    @property
    def default(self) -> str:
        """The name of that subcommand."""
        return next(iter(self.commands))

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Put the default subcommand before arguments that do not begin with one."""
        if not args or args[0] not in self.commands:
            args = [self.default, *args]
        return super().parse_args(ctx, args)
