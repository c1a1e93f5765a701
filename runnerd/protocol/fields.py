"""What the fields of requests have in common: types with their ranges, and what no type can say.

Types and ranges are checked by msgspec while decoding; what a type cannot say (NUL bytes, pairs
of fields that exclude each other) is checked by the functions here, called in `__post_init__`,
which raise the RequestError that names the field.

Names carry their unit; an absent duration or limit means none.
"""

from __future__ import annotations

import math
from typing import Annotated, Final, Literal

import msgspec
from msgspec import Meta

from .errors import invalid

SECONDS_MAX: Final = 1e9  # about 31 years: far inside what any kernel timer takes
LABELS_MAX: Final = 32
LABEL_KEY_BYTES_MAX: Final = 63
LABEL_VALUE_BYTES_MAX: Final = 256
TERM_CHARS_MAX: Final = 128
TOKEN_CHARS_MAX: Final = 1024
USER_CHARS_MAX: Final = 520  # two names of LOGIN_NAME_MAX (256, sysconf(3)) and a colon
RLIM_INFINITY: Final = 2**64 - 1
PRIVATE_PREFIX: Final = "RUNNERD_"
OWNER_CHARS_MAX: Final = 256
REASON_CHARS_MAX: Final = 256  # of a pin

RLIMITS: Final[dict[str, int]] = {
    "cpu": 0,
    "fsize": 1,
    "data": 2,
    "stack": 3,
    "core": 4,
    "rss": 5,
    "nproc": 6,
    "nofile": 7,
    "memlock": 8,
    "as": 9,
    "locks": 10,
    "sigpending": 11,
    "msgqueue": 12,
    "nice": 13,
    "rtprio": 14,
    "rttime": 15,
}
"""Kernel numbers by name. Source: getrlimit(2); include/uapi/asm-generic/resource.h."""

_EXEC_ID: Final = r"^[A-Za-z0-9_.:-]{1,128}(?![\s\S])"  # \Z would be Python's alone
PATTERNS: Final = {_EXEC_ID: "has 1 to 128 characters, each of A-Z a-z 0-9 _ . : -"}
"""Every pattern a field must match, in words."""

ExecId = Annotated[str, Meta(pattern=_EXEC_ID)]
Nonce = Annotated[str, Meta(pattern=_EXEC_ID)]
SubscriberName = Annotated[str, Meta(pattern=_EXEC_ID)]
Seconds = Annotated[float, Meta(gt=0, le=SECONDS_MAX)]
GraceSeconds = Annotated[float, Meta(ge=0, le=SECONDS_MAX)]
Sequence = Annotated[int, Meta(ge=0, le=2**63 - 1)]
RlimitValue = Annotated[int, Meta(ge=0)] | Literal["unlimited"]
Stream = Literal["stdout", "stderr"]
Version = Annotated[int, Meta(ge=0, le=2**31 - 1)]
Generation = Annotated[int, Meta(ge=1, le=2**63 - 1)]
Fence = Annotated[int, Meta(ge=1, le=2**63 - 1)]
TerminalSide = Annotated[int, Meta(ge=1, le=65535)]
"""Rows or columns. Source: struct winsize, ioctl_tty(2), has 16 bits; 0 would mean unknown."""


def both_streams() -> list[Stream]:
    """Return both streams, the default where some can be chosen."""
    return ["stdout", "stderr"]


def check_seconds(field: str, value: float | None) -> None:
    """Refuse NaN, which no range excludes for certain."""
    # A NaN would arm a timer that never fires. Today's msgspec refuses it by its range checks;
    # that it does is documented nowhere.
    if value is not None and math.isnan(value):
        raise invalid(field, "NaN is no duration")


def check_text(field: str, value: str | None) -> None:
    """Refuse text that no system call would take whole."""
    if value is not None and "\0" in value:
        raise invalid(field, "contains a NUL byte")


def check_variable(field: str, name: str) -> None:
    """Refuse what cannot be the name of a variable, environ(7)."""
    if not name or "=" in name or "\0" in name:
        raise invalid(field, "a name is not empty and has no '=' and no NUL")


def check_subscriber(
    prefix: str, streams: list[Stream], subscriber: str | None, generation: int | None
) -> None:
    """Refuse streams named twice or not at all, and a generation of nobody."""
    if not streams or len(set(streams)) != len(streams):
        raise invalid(f"{prefix}streams", "name each stream once, and at least one")
    if generation is not None and subscriber is None:
        raise invalid(f"{prefix}generation", "needs a subscriber: a generation of nobody")


def check_condition(if_idle_for_s: float | None, *, leftovers_count: bool) -> None:
    """Refuse a condition that says nothing."""
    check_seconds("if_idle_for_s", if_idle_for_s)
    if leftovers_count and if_idle_for_s is None:
        raise invalid("leftovers_count", "goes with if_idle_for_s: without it nothing is counted")


def check_labels(labels: dict[str, str]) -> None:
    """Refuse labels over the limits, by the key they have."""
    if len(labels) > LABELS_MAX:
        raise invalid("labels", f"{len(labels)} pairs; the most is {LABELS_MAX}")
    for key, value in labels.items():
        where = f"labels[{key!r}]"
        if not 0 < _size_bytes(key) <= LABEL_KEY_BYTES_MAX or "\0" in key:
            raise invalid(where, f"a key has 1 to {LABEL_KEY_BYTES_MAX} bytes and no NUL")
        if _size_bytes(value) > LABEL_VALUE_BYTES_MAX or "\0" in value:
            raise invalid(where, f"a value has up to {LABEL_VALUE_BYTES_MAX} bytes and no NUL")


def _size_bytes(text: str) -> int:
    # A client's own text may hold what is no UTF-8; encoding the request refuses that.
    return len(text.encode("utf-8", "surrogatepass"))


class Params(msgspec.Struct, forbid_unknown_fields=True, kw_only=True, omit_defaults=True):
    """What every request's parameters share: unknown fields are refused."""


class NoParams(Params):
    """Parameters of a request that takes none."""


def rlimit_number(value: int | str) -> int:
    """Return a limit as the kernel takes it: "unlimited" is RLIM_INFINITY."""
    return RLIM_INFINITY if isinstance(value, str) else value
