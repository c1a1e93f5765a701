"""What a daemon must still be after whatever was done to it."""

from __future__ import annotations

import collections
import json
import os
from pathlib import Path
from typing import Any, Final

from tests.harness import RunnerdProcess, children, descendants, wait_for
from tests.raw import RawClient, RawError

_SETTLE_S: Final = 20.0
_WAKEUP: Final = b"Exception ignored when trying to write to the signal wakeup fd:"
"""What Python itself says where the kernel has no buffer for that; a line of ours follows."""
_OUTCOMES: Final = ("stray_failure", "stray", "uncaught_error")


class Log:
    """The daemon's log, each line looked at once, however long it gets."""

    def __init__(self, path: Path) -> None:
        self._file = path.open("rb")
        self._rest = b""
        self.events: collections.Counter[str] = collections.Counter()

    def failures(self) -> list[dict[str, Any]]:
        """Return the failures logged since the last look: what is no refusal and no warning."""
        found: list[dict[str, Any]] = []
        lines = (self._rest + self._file.read()).split(b"\n")
        self._rest = lines.pop()
        for line in lines:
            if line == _WAKEUP:
                self.events["wakeup_failed"] += 1
                continue
            try:
                said = json.loads(line)
            except ValueError:
                raise AssertionError(f"no line of the log: {line!r}, then {lines}") from None
            self.events[said["event"]] += 1
            if said["level"] == "error" or said["event"] in _OUTCOMES:
                found.append(said)
        return found

    def close(self) -> None:
        """Let go of the file."""
        self._file.close()


class Resources:
    """What a daemon holds: taken once when it is idle, and compared with later.

    Args:
        daemon: Idle, with one connection of ours open.
        client: That connection.
    """

    def __init__(self, daemon: RunnerdProcess, client: RawClient) -> None:
        self._daemon = daemon
        self.client = client
        info = client.call("daemon.info")
        self.incarnation: str = info["incarnation"]
        self._parked = self.parked_shims()
        wait_for(self._is_parked)
        self._fds = self.descriptors()
        self._threads = self.threads()
        self.rss_bytes = self.rss()

    def parked_shims(self) -> int:
        """Return how many shims the daemon keeps."""
        return 3

    def _is_parked(self) -> bool:
        return (
            self.client.call("daemon.info")["parked_shims"] == self._parked
            and len(children(self._daemon.pid)) == self._parked
            and len(descendants(self._daemon.pid)) == 2 * self._parked
        )

    def descriptors(self) -> collections.Counter[str]:
        """Return the daemon's descriptors by what they are, as /proc/PID/fd names them."""
        found: collections.Counter[str] = collections.Counter()
        folder = Path(f"/proc/{self._daemon.pid}/fd")
        for each in folder.iterdir():
            try:
                target = str(each.readlink())
            except FileNotFoundError:
                continue
            kind, _, _ = target.partition(":")  # pipe:[7] and socket:[7] by what they are
            found[target if kind == "anon_inode" else kind] += 1
        return found

    def threads(self) -> int:
        """Return how many threads it has."""
        return len(list(Path(f"/proc/{self._daemon.pid}/task").iterdir()))

    def rss(self) -> int:
        """Return its resident memory, in bytes."""
        text = Path(f"/proc/{self._daemon.pid}/statm").read_text()
        return int(text.split()[1]) * os.sysconf("SC_PAGE_SIZE")

    def check(self) -> None:
        """The same daemon, idle again: no process, descriptor, thread or reader too many."""
        client = self.client
        assert self._daemon.process.poll() is None, "the daemon has ended"
        assert client.call("daemon.info")["incarnation"] == self.incarnation
        last: dict[str, Any] = {}

        def is_idle() -> bool:
            info = client.call("daemon.info")
            last.update({name: info[name] for name in ("live_execs", "subscriptions")})
            last["connections"] = info["connections"] - 1
            return not any(last.values())

        def settles(what: object, holds: Any) -> None:
            try:
                wait_for(holds, _SETTLE_S)
            except AssertionError:
                raise AssertionError(f"left behind: {what() if callable(what) else what}") from None

        settles(last, is_idle)
        settles(lambda: sorted(descendants(self._daemon.pid)), self._is_parked)
        settles(
            lambda: (self.descriptors() - self._fds, self._fds - self.descriptors()),
            lambda: self.descriptors() == self._fds,
        )
        settles(lambda: f"{self.threads()} threads", lambda: self.threads() == self._threads)


def end_everything(client: RawClient) -> None:
    """Cancel every exec that is live, and wait until nothing of it is left."""
    while True:
        page = client.call(
            "exec.list", state=["starting", "running", "draining", "lingering"], limit=200
        )
        if not page["execs"]:
            return
        asked = [
            client.send("exec.cancel", exec_id=each["exec_id"], grace_s=0) for each in page["execs"]
        ]
        for each in asked:
            try:
                client.answer(each)
            except RawError as error:
                if error.kind not in ("exec_unknown", "exec_settled"):
                    raise
