"""Which daemon a command line talks to, and as whom."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import argparse
    from typing import Literal, TypedDict

    class Where(TypedDict):
        """The arguments of connect() that every subcommand has options for."""

        path: str | None
        fence: int | Literal["current"] | None
        token_file: str | None


def where(options: argparse.Namespace) -> Where:
    """Return what --socket, --fence and --token-file say, before or after the subcommand."""
    return {
        "path": getattr(options, "socket", None),
        "fence": getattr(options, "fence", None),
        "token_file": getattr(options, "token_file", None),
    }
