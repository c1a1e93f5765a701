"""Other limits of a container: no process left, a full tmpfs."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import pytest

from runnerd.client.errors import RemoteError
from tests.containers.container import AS_ROOT, STATE_MIB
from tests.harness import wait_for

if TYPE_CHECKING:
    from collections.abc import Callable

    from tests.containers.container import Container

    Start = Callable[..., Container]

BOMB: Final = ["bash", "-c", "while :; do sleep 900 & done 2>/dev/null; wait"]


def test_at_the_pids_limit_the_socket_still_works(container: Start) -> None:
    """And so does a bridge that the engine starts then, which needs one process and no more."""
    sandbox = container(options=(*AS_ROOT["options"], "--pids-limit", "64"), serve=AS_ROOT["serve"])
    with sandbox.connect() as client:
        wait_for(lambda: client.info().parked_shims == 3)
        bomb = client.start(BOMB, attach=False, grace_s=0)
        wait_for(lambda: int((sandbox.group("pids") / "pids.current").read_text()) >= 64)
        # Those that are parked are processes too, but for the last one: it is for a rescue.
        taken = [client.start(["sleep", "900"], attach=False) for _ in range(2)]
        assert len(taken) == 2
        with pytest.raises(RemoteError) as caught:
            client.start(["sleep", "900"], attach=False)
        assert (caught.value.kind, caught.value.data.stage) == ("start_failed", "spawn")
        rescued = client.run(["echo", "here"], admission="skip")
        assert rescued.stdout == b"here\n"
        with sandbox.connect_bridge() as bridged:
            assert int((sandbox.group("pids") / "pids.current").read_text()) >= 60
            live = [each.exec_id for each in bridged.list_execs() if each.state == "running"]
            assert {bomb.exec_id} < set(live)
            for each in live:
                assert bridged.cancel(each, grace_s=0).outcome == "ended"
        wait_for(lambda: client.info().parked_shims == 3)
        assert client.run(["echo", "after"]).stdout == b"after\n"
        assert client.info().stray_failures == 0
    sandbox.stop()
    assert sandbox.state()["ExitCode"] == 0


def test_a_full_tmpfs_costs_what_is_kept_there_and_nothing_else(container: Start) -> None:
    """Where the journal is, filled by a command that is root there: starts go on without it."""
    sandbox = container(**AS_ROOT)
    with sandbox.connect() as client:
        assert client.start(["true"], attach=False).exec_id
        assert client.info().journal
        fill = f"head -c {STATE_MIB + 1}M /dev/zero > /var/lib/runnerd/full"
        filled = client.run(["sh", "-c", fill], user="root")
        assert filled.exit.code != 0
        assert b"No space left on device" in filled.stderr
        for number in range(200):
            done = client.run(["sh", "-c", f"echo {number}; exit 3"], labels={"n": "x" * 200})
            assert (done.exit.code, done.stdout) == (3, b"%d\n" % number)
        info = client.info()
        print("journal:", info.journal, info.journal_reason)
        assert client.run(["rm", "/var/lib/runnerd/full"], user="root").exit.code == 0
        assert client.info().stray_failures == 0
        full = client.run(["sh", "-c", "head -c 99M /dev/zero > /tmp/full"])
        assert full.exit.code != 0
    sandbox.stop()
    assert sandbox.state()["ExitCode"] == 0
