"""Parameters of the requests that are not about one exec: hello, env, sandbox, events, daemon."""

from __future__ import annotations

from typing import Annotated, Literal

from msgspec import Meta

from .errors import invalid
from .fields import (
    OWNER_CHARS_MAX,
    PRIVATE_PREFIX,
    REASON_CHARS_MAX,
    TOKEN_CHARS_MAX,
    Fence,
    GraceSeconds,
    Nonce,
    NoParams,
    Params,
    Seconds,
    Version,
    check_condition,
    check_seconds,
    check_text,
    check_variable,
)


class Ping(NoParams):
    """Ask whether the daemon is there; answered ahead of everything."""


class EventsSubscribe(NoParams):
    """Be told what happens from now on: execs, OOM kills, memory pressure, drain, stop, owner."""


class DaemonInfoRequest(NoParams):
    """Describe the daemon: what it is, what protects it, what it holds."""


class DaemonDrain(Params):
    """Refuse all new work from now on; what runs is untouched.

    Attributes:
        if_idle_for_s: Only if the sandbox has been idle for so many seconds, as sandbox.activity
            judges: looked at and drained in one step. 0 = idle now, however short. Else `busy`,
            with the reasons. Absent = in any case.
        leftovers_count: With if_idle_for_s: whether what a command left running keeps it from
            being idle.
    """

    if_idle_for_s: GraceSeconds | None = None
    leftovers_count: bool = False

    def __post_init__(self) -> None:
        check_condition(self.if_idle_for_s, leftovers_count=self.leftovers_count)


class DaemonUndrain(NoParams):
    """Take new work again."""


class DaemonStop(Params):
    """Stop the daemon as SIGTERM does.

    Attributes:
        if_idle_for_s: As in daemon.drain: looked at and stopped in one step.
        leftovers_count: As in daemon.drain.
    """

    if_idle_for_s: GraceSeconds | None = None
    leftovers_count: bool = False

    def __post_init__(self) -> None:
        check_condition(self.if_idle_for_s, leftovers_count=self.leftovers_count)


class Hello(Params):
    """Open a connection: agree on a version and learn the daemon's limits.

    Attributes:
        protocol: Versions the client speaks, best first.
        client: Who is calling, for the log.
        incarnation: The incarnation expected; another one is refused before any effect.
        fence: A number that grows with each new owner of the sandbox. Once one is set, only a
            connection that carries the highest may change anything; "current" takes whatever
            that is, an operator's override.
        token: The secret this daemon asks for, where it asks for one (--token-file). In no log, no
            error and no representation of this request.
    """

    protocol: Annotated[list[Version], Meta(max_length=64)]
    client: Annotated[str, Meta(max_length=256)] | None = None
    incarnation: Annotated[str, Meta(max_length=64)] | None = None
    fence: Fence | Literal["current"] | None = None
    token: Annotated[str, Meta(max_length=TOKEN_CHARS_MAX)] | None = None

    def __post_init__(self) -> None:
        check_text("client", self.client)
        check_text("incarnation", self.incarnation)

    def __repr__(self) -> str:
        shown = {name: getattr(self, name) for name in self.__struct_fields__ if name != "token"}
        words = [*(f"{name}={value!r}" for name, value in shown.items()), "token=..."]
        return f"Hello({', '.join(words)})"


class EnvSet(Params):
    """Set and unset variables of every exec started later in this incarnation.

    Attributes:
        set: Name to value. Names of the daemon's own, RUNNERD_*, are refused.
        unset: Names to take away, of the boot environment as well.
    """

    set: dict[str, str] = {}
    unset: list[str] = []

    def __post_init__(self) -> None:
        for name, value in self.set.items():
            self._check_name(f"set[{name!r}]", name)
            check_text(f"set[{name!r}]", value)
        for at, name in enumerate(self.unset):
            self._check_name(f"unset[{at}]", name)
            if name in self.set:
                raise invalid(f"unset[{at}]", f"'{name}' is set by the same request")

    def _check_name(self, field: str, name: str) -> None:
        check_variable(field, name)
        if name.startswith(PRIVATE_PREFIX):
            raise invalid(field, f"{PRIVATE_PREFIX}* is the daemon's own and reaches no command")


class SandboxClaim(Params):
    """Become the sandbox's owner, in one step with the look at who is; needs a fence in hello.

    Attributes:
        owner: Who claims it, for people and errors: 1 to 256 characters.
        expect: unclaimed = nobody has claimed it, for whoever creates it; claimed = somebody has,
            for whoever resumes it; any = whichever. Else nothing is changed.
        nonce: Makes the claim repeatable: while it stands, the same owner and nonce are answered
            again. 1-128 of A-Z a-z 0-9 _ . : -.
    """

    owner: Annotated[str, Meta(max_length=OWNER_CHARS_MAX)]
    expect: Literal["unclaimed", "claimed", "any"]
    nonce: Nonce | None = None

    def __post_init__(self) -> None:
        check_text("owner", self.owner)
        if not self.owner:
            raise invalid("owner", "is empty")


class SandboxPin(Params):
    """Keep the sandbox from counting as idle, or end that.

    Attributes:
        reason: Why, for people: 1 to 256 characters. A pin is known by it: one of the same reason
            takes the place of the one before.
        ttl_s: Seconds until it ends by itself; none if absent.
        unpin: End the pin of this reason instead.
    """

    reason: Annotated[str, Meta(max_length=REASON_CHARS_MAX)]
    ttl_s: Seconds | None = None
    unpin: bool = False

    def __post_init__(self) -> None:
        check_text("reason", self.reason)
        check_seconds("ttl_s", self.ttl_s)
        if not self.reason:
            raise invalid("reason", "is empty")
        if self.unpin and self.ttl_s is not None:
            raise invalid("ttl_s", "goes with a pin, not with its end")


class SandboxActivity(Params):
    """Say whether the sandbox is idle, since when, and why not. Asking is no activity.

    Attributes:
        if_idle_for_s: How many seconds without work make it idle; with 0, the default, it is once
            nothing runs, nobody is attached and nothing pins it.
        leftovers_count: Whether what a command left running keeps it from being idle.
    """

    if_idle_for_s: GraceSeconds = 0.0
    leftovers_count: bool = False

    def __post_init__(self) -> None:
        check_seconds("if_idle_for_s", self.if_idle_for_s)


class DaemonHealth(NoParams):
    """Ask whether the daemon is well; nothing that is asked of a disk or a command answers it."""


class DaemonMetrics(Params):
    """Read the daemon's metrics.

    Attributes:
        format: text = Prometheus text format 0.0.4; openmetrics = OpenMetrics 1.0.
    """

    format: Literal["text", "openmetrics"] = "text"
