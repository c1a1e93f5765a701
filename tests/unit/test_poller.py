"""Turns of bulk work, without descriptors of execs."""

from __future__ import annotations

import time

import trio
import trio.testing

from runnerd.daemon.poller import Poller


class Owner:
    """Nothing of it may fail."""

    def stray(self, error: Exception) -> None:
        raise AssertionError from error


def test_one_goes_alone_in_a_turn_and_nobody_past_those_who_wait() -> None:
    poller = Poller()
    assert [poller.may_go_alone() for _ in range(3)] == [True, False, False]
    waiting = Poller()
    waiting.defer_bulk(Owner(), lambda: None)
    assert not waiting.may_go_alone()


def test_a_timer_armed_beside_bulk_work_does_not_put_it_off() -> None:
    """Both by other tasks, in one turn of trio, while the poller waits for its descriptors."""
    poller, owner = Poller(), Owner()
    began_s = time.monotonic()
    done_s: list[float] = []

    async def main() -> None:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(poller.run)
            await trio.testing.wait_all_tasks_blocked()
            done = trio.Event()
            poller.defer_bulk(owner, done.set)
            poller.call_at(time.monotonic() + 2.0, owner, lambda: None)
            with trio.fail_after(5):
                await done.wait()
            done_s.append(time.monotonic() - began_s)
            assert poller.may_go_alone()
            nursery.cancel_scope.cancel()

    trio.run(main)
    assert done_s[0] < 1.0
