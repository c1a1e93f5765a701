"""At a real memory limit a start is refused before it makes things worse, and a rescue is not."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Final

import pytest

from tests.containers.test_memory import LIMIT, MIB, eat, inside, memory_group
from tests.harness import RunnerdProcess, wait_for
from tests.raw import RawClient, RawError

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    Start = Callable[..., RunnerdProcess]
    MakeGroup = Callable[[str, dict[str, str]], Path]

HELD: Final = 250  # MiB; with the daemon's own it is about 280 of 300, and the default is 90 %


def test_a_start_waits_for_memory_and_its_retry_does_not(
    start_daemon: Start, make_group: MakeGroup
) -> None:
    daemon = start_daemon("--oom-score", "keep", prepare=inside(memory_group(make_group), 500))
    with RawClient(daemon.socket_path) as client:
        repeated = {"exec_id": "known", "nonce": "n", "argv": ["sleep", "1000"], "grace_s": 0}
        assert client.call("exec.start", **repeated)["created"] is True
        eat(client, "hog", most=HELD, grace_s=0)

        def is_full() -> bool:
            info = client.call("daemon.info")["memory_admission"]
            assert (info["percent_max"], info["limit_bytes"]) == (90, LIMIT)
            assert info["reason"] is None
            return bool(info["working_set_bytes"] > (HELD + 21) * MIB)

        wait_for(is_full, timeout_s=30)
        starts = {"exec_id": "late", "nonce": "m", "argv": ["echo", "hi"]}

        time.sleep(0.11)  # a start may go by what was read a tenth of a second ago
        with pytest.raises(RawError) as caught:
            client.call("exec.start", **starts)
        data = caught.value.error["data"]
        assert (data["kind"], data["layer"], data["retryable"]) == ("busy", "sandbox", True)
        assert (data["retry_after_s"], data["preserved"]) == (1.0, "nothing ran, nothing changed")
        assert client.call("exec.start", **repeated)["created"] is False
        rescue = client.call("exec.start", exec_id="rescue", argv=["true"], admission="skip")
        assert rescue["created"] is True
        client.call("exec.cancel", exec_id="hog")
        wait_for(lambda: not is_full())

        def starts_now() -> bool:
            try:
                return bool(client.call("exec.start", **starts)["created"])
            except RawError as error:
                if error.kind != "busy":
                    raise
                return False

        wait_for(starts_now)  # the same id and nonce: nothing was left of the refusal
        assert client.call("exec.wait", exec_id="late", timeout_s=30)["code"] == 0
    assert daemon.stop() == 0


def test_cache_does_not_keep_a_start_out(
    start_daemon: Start, make_group: MakeGroup, tmp_path: Path
) -> None:
    """A file of the limit's size has been read: all is charged, and nothing is short."""
    group = memory_group(make_group)
    daemon = start_daemon("--oom-score", "keep", prepare=inside(group, 500))
    with RawClient(daemon.socket_path) as client:
        (tmp_path / "big").write_bytes(bytes(LIMIT))
        # Written by us it is charged to us: dropped first, it is charged to who reads it.
        script = f"dd if={tmp_path}/big of=/dev/null iflag=nocache count=0; cat {tmp_path}/big"
        client.call("exec.start", exec_id="c", argv=["sh", "-c", f"{script} >/dev/null"])
        client.call("exec.wait", exec_id="c", timeout_s=60)
        charged = int((group / "memory.usage_in_bytes").read_text())
        info = client.call("daemon.info")["memory_admission"]
        print(f"charged {charged // MIB} MiB, working set {info['working_set_bytes'] // MIB} MiB")
        assert client.call("exec.start", argv=["true"])["created"] is True
        assert charged > info["working_set_bytes"] + 50 * MIB
    assert daemon.stop() == 0


def test_it_can_be_turned_off(start_daemon: Start, make_group: MakeGroup) -> None:
    daemon = start_daemon(
        "--admit-memory-percent", "0", prepare=inside(memory_group(make_group), 500)
    )
    with RawClient(daemon.socket_path) as client:
        assert client.call("daemon.info")["memory_admission"] == {
            "percent_max": 0,
            "working_set_bytes": None,
            "limit_bytes": None,
            "reason": "it is off: --admit-memory-percent 0",
        }
