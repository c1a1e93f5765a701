"""Whether there is memory for one more command. No I/O.

What counts is the working set, as kubelet's evictions count it: what is charged to a cgroup
without the file cache that has not been used lately, which the kernel takes back before it kills
anybody. Of several cgroups, one above the other, the one nearest its limit decides.
"""

from __future__ import annotations

from typing import Final, NamedTuple

from runnerd.protocol.errors import RequestError

RETRY_S: Final = 1.0


class MemoryUse(NamedTuple):
    """What one cgroup uses of its limit, in bytes."""

    working_set_bytes: int
    limit_bytes: int


def check_memory(use: MemoryUse | None, percent_max: int, exec_id: str) -> None:
    """Refuse a start where more than a share of the limit is in use already.

    Args:
        use: Of the cgroup nearest its limit; None = no limit is known, nothing is checked.
        percent_max: The share, 1-100; 0 = nothing is checked.
        exec_id: Whose start it is, for the message.

    Raises:
        RequestError: busy, layer sandbox.
    """
    if use is None or not percent_max:
        return
    if use.working_set_bytes * 100 <= percent_max * use.limit_bytes:
        return
    raise RequestError(
        "busy",
        f"{use.working_set_bytes} of {use.limit_bytes} bytes of memory are in use, more than "
        f"{percent_max} %; '{exec_id}' was not started",
        layer="sandbox",
        hint="wait for data.retry_after_s, end something, or start a rescue with admission 'skip'",
        retry_after_s=RETRY_S,
    )
