"""A daemon with hostile commands in it, in each of the settings that people run it in."""

from __future__ import annotations

import contextlib
import itertools
import os
import shutil
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Final

from tests import needs
from tests.daemon.looking import PLANTED, command_name, log_lines, shims
from tests.harness import REPOSITORY, RunnerdProcess, children, descendants, is_alive, wait_for
from tests.raw import RawClient

Start = Callable[..., RunnerdProcess]
PYTHON: Final = "/usr/bin/python3"  # a command's interpreter: every user can get at it
# Two for each sandbox alone: kill(-1) by one of these users must meet nobody else's process.
_UIDS: Final = itertools.count(20_000_000 + os.getpid() % 10_000 * 1000, 2)

_NUMBERS: Final = itertools.count(1)  # of execs: the next daemon remembers those of this one

SEPARATE: Final = "separate users"
"""The daemon as root, each exec as an unprivileged user of its own."""
OPEN: Final = "separate users, open socket"
"""The same, and the socket is open to the commands' user: the gates alone keep it out."""
ONE: Final = "one user"
"""Daemon and commands all as one unprivileged user."""
ONE_PID_1: Final = "one user, PID 1"
"""The same, with the daemon as PID 1 of a pid namespace."""
SETTINGS: Final = (SEPARATE, ONE, ONE_PID_1)

_BECOME: Final = """
import importlib, os, pkgutil
import argparse, encodings.idna, json, prometheus_client, psutil, shutil, traceback
import runnerd.core, runnerd.daemon, runnerd.protocol
for package in (runnerd.core, runnerd.daemon, runnerd.protocol):
    for each in pkgutil.iter_modules(package.__path__):
        importlib.import_module(f"{{package.__name__}}.{{each.name}}")
from runnerd.daemon import guard
from runnerd.daemon.linux import PR_SET_DUMPABLE, prctl
guard.NativeGuard.__init__.__defaults__ = (guard.Path("{place}/guard.so"),)
os.setgroups([])
os.setgid({uid})
os.setuid({uid})
prctl(PR_SET_DUMPABLE, 1)         # as after an execve, which a daemon's start by its user is
os.chdir("/")
"""
"""Become the user when all is imported: the interpreter may stand where that one cannot go."""

PRELUDE: Final = """
import array, ctypes, errno, json, os, signal, socket, sys, threading, time
libc = ctypes.CDLL(None, use_errno=True)

def stat(pid):
    return open(f'/proc/{pid}/stat').read().rpartition(') ')[2].split()

def children(pid):
    found = []
    for name in os.listdir('/proc'):
        try:
            if name.isdigit() and int(stat(name)[1]) == pid:
                found.append(int(name))
        except OSError:
            pass
    return found

SHIM = os.getppid()
DAEMON = int(stat(SHIM)[1])

def said(call, *words):
    'What became of a call: done, or the name of its error.'
    try:
        call(*words)
    except OSError as error:
        return errno.errorcode[error.errno]
    return 'done'

def system(number, *words):
    ctypes.set_errno(0)
    outcome = libc.syscall(ctypes.c_long(number), *(
        ctypes.c_long(word) if isinstance(word, int) else word for word in words))
    if outcome < 0:
        raise OSError(ctypes.get_errno(), 'refused')
    return outcome

def tell(*words):
    print(*words, flush=True)

HELLO = b'{"jsonrpc":"2.0","id":1,"method":"hello","params":{"protocol":[1]}}\\n'

def hello(sock):
    'In, or why not.'
    try:
        sock.settimeout(20)
        sock.sendall(HELLO)
        line = sock.makefile().readline()
    except OSError as error:
        return errno.errorcode.get(error.errno, 'timeout')
    if not line:
        return 'closed'
    answer = json.loads(line)
    return 'in' if 'result' in answer else answer['error']['data']['kind']

def connect(path):
    'Connect and say hello.'
    with socket.socket(socket.AF_UNIX) as sock:
        try:
            sock.connect(path)
        except OSError as error:
            return errno.errorcode[error.errno]
        return hello(sock)
"""
"""What every attack begins with: who is who, as a command finds out by itself."""


class Sandbox:
    """One daemon, and what a test does to it and in it.

    Args:
        setting: One of the constants above.
        place: A directory of root's that every user can get to.
        start: Starts daemons, and checks at the end that nothing is left.
        options: Further options of the daemon.
        code: What is planted in the daemon: a gate taken off.
        state: Another state directory, or None for one in `place`.
        uid: The attacker's user: for a daemon after another one; None for one of its own.
        hello: Whether we say hello at once; a test with a token does it itself.
        prepare: Called as root in the process that becomes the daemon.

    Attributes:
        uid: As above.
        other_uid: The user of the other exec, which is the attacker's where there is one alone.
        daemon: The process started; in a pid namespace it is unshare(1).
        pid: The daemon's pid, as it is seen from here.
        incarnation: Of the daemon that was started.
    """

    def __init__(
        self,
        setting: str,
        place: Path,
        start: Start,
        *options: str,
        code: str = "",
        state: Path | None = None,
        uid: int | None = None,
        hello: bool = True,
        prepare: Callable[[], None] = lambda: None,
    ) -> None:

        self.setting = setting
        self.place = place
        self.is_one_user = setting in (ONE, ONE_PID_1)
        self.is_pid_1 = setting == ONE_PID_1
        self.uid = next(_UIDS) if uid is None else uid
        self.other_uid = self.uid if self.is_one_user else self.uid + 1
        words = list(options)
        if state is not None:
            words += ["--state-dir", str(state)]
        if setting == OPEN:
            words += ["--socket-mode", "0666", "--allow-uid", str(self.uid)]
        if self.is_one_user:
            for name in ("guard.so", "runnerd-shim"):
                if not (place / name).exists():
                    shutil.copy(REPOSITORY / "runnerd" / "_native" / name, place)
            os.chown(place, self.uid, self.uid)
            words += ["--shim", str(place / "runnerd-shim")]
            code = _BECOME.format(place=place, uid=self.uid) + code
        unshare = ["unshare", "--pid", "--fork", "--mount-proc", "--kill-child"]
        self.daemon = start(
            *words,
            place=place,
            program=PLANTED,
            env={"PLANTED": code},
            wrapper=unshare if self.is_pid_1 else (),
            prepare=prepare,
        )
        self.pid = self.daemon.pid
        if self.is_pid_1:
            (self.pid,) = children(self.daemon.pid)
        self.incarnation = ""
        if hello:
            with self.connect() as client:
                self.incarnation = client.hello["incarnation"]

    @property
    def socket_path(self) -> str:
        return self.daemon.socket_path

    def connect(self) -> RawClient:
        """Return a connection of the spawner's, from outside."""
        return RawClient(self.socket_path)

    def new_id(self, name: str) -> str:
        """Return an exec id that no other test has used."""
        return f"{name}-{next(_NUMBERS)}"

    def user(self, *, other: bool = False) -> dict[str, str]:
        """Return the field of a start that makes it the attacker's, or the other's."""
        if self.is_one_user:
            return {}
        return {"user": str(self.other_uid if other else self.uid)}

    def start_attack(
        self, client: RawClient, exec_id: str, code: str, *words: object, **fields: Any
    ) -> int:
        """Start an attack; returns its pid as the daemon sees it."""
        argv = [PYTHON, "-I", "-S", "-c", PRELUDE + code, *map(str, words)]
        fields = {"attach": {}, "stderr": "stdout", "cwd": "/", **self.user(), **fields}
        pid: int = client.call("exec.start", exec_id=exec_id, argv=argv, **fields)["pid"]
        return pid

    def attack(self, client: RawClient, code: str, *words: object) -> list[str]:
        """Run an attack to the end of all it left behind; returns the lines it printed."""
        exec_id = self.new_id("attack")
        self.start_attack(client, exec_id, code, *words)
        client.note("exec.closed", exec_id)
        return client.output(exec_id).decode().splitlines()

    def start_victim(self, client: RawClient) -> tuple[str, int]:
        """Start another exec, which does nothing; returns its id and its pid for the daemon."""
        exec_id = self.new_id("victim")
        argv = ["sleep", "900"]
        pid: int = client.call(
            "exec.start", exec_id=exec_id, argv=argv, cwd="/", **self.user(other=True)
        )["pid"]
        return exec_id, pid

    def check_unharmed(self, client: RawClient, exec_id: str) -> None:
        """The victim runs, and is then ended by us alone."""
        assert client.call("exec.inspect", exec_id=exec_id)["state"] == "running"
        assert client.call("exec.cancel", exec_id=exec_id, grace_s=0)["outcome"] == "ended"
        its_exit = client.call("exec.wait", exec_id=exec_id, until="closed")
        assert its_exit["reason"] == "cancelled"

    def check_well(self, client: RawClient | None = None) -> None:
        """The daemon is the one that was started, lets the spawner in, and starts commands."""
        with contextlib.ExitStack() as stack:
            if client is None:
                client = stack.enter_context(self.connect())
                assert client.hello["incarnation"] == self.incarnation
            info = client.call("daemon.info")
            assert info["incarnation"] == self.incarnation
            assert info["stray_failures"] == 0
            exec_id, argv = self.new_id("well"), ["sh", "-c", "exit 7"]
            client.call("exec.start", exec_id=exec_id, argv=argv, cwd="/", **self.user())
            assert client.call("exec.wait", exec_id=exec_id, until="closed")["code"] == 7

    def wait_for_file(self, path: Path) -> str:
        """Return what an attack has left in a file, once it is there."""
        wait_for(path.exists, 20)
        return path.read_text()

    def log(self, event: str) -> list[dict[str, Any]]:
        """Return the log's lines of one event."""
        return log_lines(self.daemon, event)

    def shims(self) -> set[int]:
        """Return the pids of all shims, parked ones too, as they are seen from here."""
        if not self.is_pid_1:
            return shims(self.daemon)
        return {pid for pid in children(self.pid) if command_name(pid) == "runnerd-shim"}

    def living(self) -> set[int]:
        """Return what lives below the daemon, as it is seen from here."""
        return {pid for pid in descendants(self.pid) if is_alive(pid)}

    def stop(self) -> int:
        """Stop it from outside; returns the exit code."""
        if self.daemon.process.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, signal.SIGCONT)
                os.kill(self.pid, signal.SIGTERM)
        return self.daemon.process.wait(20)


@contextlib.contextmanager
def sandboxes(start: Start) -> Iterator[Callable[..., Sandbox]]:
    """Give a function that makes sandboxes: its arguments are Sandbox's, without the place."""
    needs.root()
    if not Path(PYTHON).exists():
        needs.skip_or_fail(f"no {PYTHON}")
    probe = ["unshare", "--pid", "--fork", "--mount-proc", "true"]
    if not shutil.which("unshare") or subprocess.run(probe, check=False).returncode:
        needs.skip_or_fail("no pid namespaces here")
    place = Path(f"/tmp/runnerd-test-{os.getpid()}-{time.monotonic_ns()}")
    place.mkdir(mode=0o755)
    made: list[Sandbox] = []

    def make(setting: str, *options: str, again: Path | None = None, **more: Any) -> Sandbox:
        folder = again or place / str(len(made))
        folder.mkdir(mode=0o755, exist_ok=True)
        made.append(Sandbox(setting, folder, start, *options, **more))
        return made[-1]

    try:
        yield make
    finally:
        for each in made:
            each.stop()
        shutil.rmtree(place)


def of_user(uid: int) -> set[int]:
    """Return the living processes of a user, wherever they went."""
    found = set()
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if folder.stat().st_uid == uid and is_alive(int(folder.name)):
                found.add(int(folder.name))
    return found


def leave_nobody(uid: int) -> None:
    """Kill what a user has left: for a test in which even the daemon could not."""
    for pid in of_user(uid):
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    wait_for(lambda: not of_user(uid))
