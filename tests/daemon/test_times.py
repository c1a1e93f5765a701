"""The times an exit carries, for people and for programs, agree with each other."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tests.harness import RunnerdProcess


def test_a_command_never_starts_after_its_end(runnerd_daemon: RunnerdProcess) -> None:
    """Its start can be heard of only after its end; the clock must not be read that late."""
    with runnerd_daemon.connect() as client:
        exits = [client.run(["true"]).exit for _ in range(30)]
    for each in exits:
        assert each.started_at is not None
        assert each.wall_s is not None
        # Both are taken back to the kernel's moment by two readings of two clocks each.
        assert abs(each.ended_at - each.started_at - each.wall_s) < 0.001
