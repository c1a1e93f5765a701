"""What commands inherit: the boot environment, and what env.set has laid over it. No I/O.

The layer lasts as long as the daemon: whoever owns the sandbox sets it anew where `hello` shows
another incarnation. It reaches every exec launched after it was answered, and none before.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from runnerd.protocol.daemon_requests import EnvSet
from runnerd.protocol.errors import invalid

_PER_NAME_BYTES: Final = 2  # the "=" and the NUL, as execve(2) counts


class Environment:
    """Variables of later commands.

    Args:
        boot: The daemon's boot environment, without what is the daemon's alone.
        bytes_max: The most that names and values may cost that were set.

    Attributes:
        variables: What a command inherits now.
        lines: The same as execve(2) takes it.
    """

    def __init__(self, boot: Mapping[bytes, bytes], bytes_max: int) -> None:
        self._boot = dict(boot)
        self._bytes_max = bytes_max
        self._changes: dict[bytes, bytes | None] = {}
        self.variables = self._boot
        self.lines = joined(self._boot)

    def change(self, request: EnvSet) -> None:
        """Set and unset variables, all or none.

        Raises:
            RequestError: invalid_params where it would be too much.
        """
        changes = self._changes | {
            name.encode(): value.encode() for name, value in request.set.items()
        }
        for each in request.unset:
            name = each.encode()
            changes.pop(name, None)
            if name in self._boot:
                changes[name] = None
        used = _cost_bytes(changes)
        if used > self._bytes_max:
            raise invalid(
                "set",
                f"{used} bytes with what is set already; the most is {self._bytes_max}",
            )
        self._changes = changes
        merged = self._boot | changes
        self.variables = {name: value for name, value in merged.items() if value is not None}
        self.lines = joined(self.variables)

    def changed(self, *, to_set: bool) -> list[str]:
        """Return the names that are set over the boot environment, or unset; sorted, no values."""
        return sorted(
            name.decode() for name, value in self._changes.items() if (value is not None) == to_set
        )

    @property
    def cost_bytes(self) -> int:
        """What is set and unset costs."""
        return _cost_bytes(self._changes)


def _cost_bytes(changes: Mapping[bytes, bytes | None]) -> int:
    return sum(len(name) + len(value or b"") + _PER_NAME_BYTES for name, value in changes.items())


def joined(environment: Mapping[bytes, bytes | None]) -> tuple[bytes, ...]:
    """Return NAME=VALUE for each that has a value."""
    return tuple(
        b"%s=%s" % (name, value) for name, value in environment.items() if value is not None
    )
