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


def where(options: argparse.Namespace) -> Where:
    """Return what --socket and --fence say; they may stand before and after the subcommand."""
    return {"path": getattr(options, "socket", None), "fence": getattr(options, "fence", None)}
