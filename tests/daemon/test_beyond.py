"""Peers from beyond the daemon's user and pid namespaces: by --allow-uid overflow, with a token."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import pytest

from runnerd.daemon.access import Allowed, Peer, _check_uid
from runnerd.daemon.options import EX_CONFIG
from runnerd.protocol.errors import RequestError
from tests import needs
from tests.daemon.looking import planted
from tests.harness import REPOSITORY, RUNNERD, RunnerdProcess, children, is_alive, wait_for

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

TOKEN: Final = "tok-5f0c2e9b7a814d6395e0c1f2a3b4"
STRANGER: Final = 4242  # a user of ours without a uid in the daemon's namespace
OVERFLOW: Final = 65534
ASK: Final = """
import json, os, socket, sys
os.setgroups([]); os.setgid({uid}); os.setuid({uid})
sock = socket.socket(socket.AF_UNIX)
sock.connect(sys.argv[1])
params = {{"protocol": [1]}} | json.loads(sys.argv[2])
sock.sendall(json.dumps({{"jsonrpc": "2.0", "id": 1, "method": "hello", "params": params}}).encode()
             + b"\\n")
print(sock.makefile().readline(), end="", flush=True)
"""


class Beyond:
    """A daemon as root of a user namespace of its own, and as PID 1 if it has a pid namespace."""

    def __init__(self, place: Path, *options: str, own_pids: bool, **more: Any) -> None:
        # Only root of ours has a uid in it: everybody else is shown as the overflow uid.
        wrapper = ["unshare", "--user", "--map-root-user"]
        if own_pids:
            wrapper += ["--pid", "--fork", "--mount-proc", "--kill-child"]
        self.place = place
        self.daemon = RunnerdProcess(
            place, "--socket-mode", "0666", *options, wrapper=wrapper, **more
        )
        (self.pid,) = children(self.daemon.pid) if own_pids else (self.daemon.pid,)

    def ask(self, **params: str) -> str:
        """Say hello as a user from beyond; returns the line that is answered."""
        done = subprocess.run(
            [sys.executable, "-I", "-c", ASK.format(uid=STRANGER), self.daemon.socket_path,
             json.dumps(params)],
            capture_output=True, text=True, timeout=20, check=True,
        )  # fmt: skip
        return done.stdout

    def stop(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.pid, signal.SIGTERM)
        wait_for(lambda: not is_alive(self.pid))
        assert self.daemon.process.wait(10) == 0


@pytest.fixture
def start_beyond(tmp_path: Path) -> Iterator[Callable[..., Beyond]]:
    needs.root()
    probe = ["unshare", "--user", "--map-root-user", "--pid", "--fork", "--mount-proc", "true"]
    if not shutil.which("unshare") or subprocess.run(probe, check=False).returncode:
        needs.skip_or_fail("no user namespaces here")
    place = Path(f"/tmp/runnerd-test-{os.getpid()}-{time.monotonic_ns()}")
    place.mkdir(mode=0o755)
    secret = place / "token"
    secret.write_text(TOKEN)
    secret.chmod(0o400)
    started: list[Beyond] = []

    def start(*options: str, own_pids: bool = True, **more: Any) -> Beyond:
        words = [str(secret) if each == "TOKEN" else each for each in options]
        started.append(Beyond(place, *words, own_pids=own_pids, **more))
        return started[-1]

    try:
        yield start
    finally:
        for each in started:
            each.stop()
        shutil.rmtree(place)


def test_who_has_no_uid_here_is_let_in_by_the_option_with_the_token(
    start_beyond: Callable[..., Beyond],
) -> None:
    daemon = start_beyond("--allow-uid", "overflow", "--token-file", "TOKEN")
    assert '"result"' in daemon.ask(token=TOKEN)
    assert '"kind":"unauthorized"' in daemon.ask()
    assert '"kind":"unauthorized"' in daemon.ask(token=TOKEN[:-1])


@pytest.mark.parametrize("options", [(), ("--allow-uid", str(OVERFLOW))], ids=["none", "number"])
def test_neither_a_token_nor_the_overflow_uids_number_lets_one_in(
    start_beyond: Callable[..., Beyond], options: tuple[str, ...]
) -> None:
    daemon = start_beyond(*options, "--token-file", "TOKEN")
    said = daemon.ask(token=TOKEN)
    assert '"kind":"unauthorized"' in said
    assert "beyond our user namespace" in said


def test_within_our_pid_namespace_the_option_lets_nobody_in(
    start_beyond: Callable[..., Beyond],
) -> None:
    """There a peer has a pid, so the option, which is for those without, is not for it."""
    daemon = start_beyond("--allow-uid", "overflow", "--token-file", "TOKEN", own_pids=False)
    assert '"kind":"unauthorized"' in daemon.ask(token=TOKEN)


def test_the_twin_without_gate_1_lets_a_stranger_in(start_beyond: Callable[..., Beyond]) -> None:
    daemon = start_beyond(
        **planted("from runnerd.daemon import access\naccess._check_uid = lambda *args: None")
    )
    assert '"result"' in daemon.ask()


def test_the_option_needs_a_token() -> None:
    done = subprocess.run(
        [*RUNNERD, "serve", "--socket", "/nonexistent/s", "--allow-uid", "overflow"],
        cwd=REPOSITORY, capture_output=True, text=True, timeout=20, check=False,
    )  # fmt: skip
    assert done.returncode == EX_CONFIG
    assert "needs a token" in done.stderr


NUMBERED: Final = frozenset({OVERFLOW, 7})


@pytest.mark.parametrize(
    ("pid", "uid", "allowed", "is_let_in"),
    [
        (0, OVERFLOW, Allowed(NUMBERED, overflow=False, overflow_uid=OVERFLOW), False),
        (0, OVERFLOW, Allowed(NUMBERED, overflow=True, overflow_uid=OVERFLOW), True),
        (0, OVERFLOW, Allowed(frozenset(), overflow=True, overflow_uid=OVERFLOW), True),
        # One with a pid is of our own pid namespace, where 65534 may well be a user's own.
        (9, OVERFLOW, Allowed(NUMBERED, overflow=False, overflow_uid=OVERFLOW), True),
        (9, OVERFLOW, Allowed(frozenset(), overflow=True, overflow_uid=OVERFLOW), False),
        # In the first user namespace nobody is beyond: 65534 is nobody, and the option is idle.
        (0, OVERFLOW, Allowed(NUMBERED, overflow=False, overflow_uid=None), True),
        (0, OVERFLOW, Allowed(frozenset(), overflow=True, overflow_uid=None), False),
        # Who has a uid here needs to be named, wherever it comes from.
        (0, 8, Allowed(NUMBERED, overflow=True, overflow_uid=OVERFLOW), False),
        (0, 7, Allowed(NUMBERED, overflow=True, overflow_uid=OVERFLOW), True),
        (0, 0, Allowed(overflow_uid=OVERFLOW), True),
    ],
)
def test_gate_1_is_decided_by_uid_pid_and_option(
    pid: int,
    uid: int,
    allowed: Allowed,
    is_let_in: bool,
) -> None:
    with contextlib.nullcontext() if is_let_in else pytest.raises(RequestError, match=str(uid)):
        _check_uid(Peer(pid, uid, uid), allowed)


def test_a_daemon_that_is_itself_shown_as_the_overflow_uid_does_not_take_it_for_its_own(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: OVERFLOW)
    _check_uid(Peer(9, OVERFLOW, OVERFLOW), Allowed(overflow_uid=OVERFLOW))
    with pytest.raises(RequestError, match="beyond"):
        _check_uid(Peer(0, OVERFLOW, OVERFLOW), Allowed(overflow_uid=OVERFLOW))
