"""A command at the daemon's files: the socket, the state directory, links in both."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Final

import pytest

from tests.harness import wait_for
from tests.hostile.sandbox import ONE, ONE_PID_1, Sandbox, leave_nobody

Make = Callable[..., Sandbox]

REMOVE: Final = "os.unlink(path)"
WAYS: Final = {
    "remove": REMOVE,
    "replace": f"{REMOVE}; socket.socket(socket.AF_UNIX).bind(path)",
    "link": f"{REMOVE}; os.symlink(sys.argv[2], path)",
    "rename its folder": "os.rename(os.path.dirname(path), os.path.dirname(path) + '.gone')",
    "open its folder": "os.chmod(os.path.dirname(path), 0o777)",
    "open it": "os.chmod(path, 0o666)",
}
"""What is done to the socket's file."""
AT_THE_SOCKET: Final = """
path = sys.argv[1]
def way():
    {}
tell(said(way))
"""


@pytest.mark.parametrize("way", WAYS)
def test_the_socket_of_another_user_is_left_as_it_is(separate: Sandbox, way: str) -> None:
    before = os.lstat(separate.socket_path)
    with separate.connect() as client:
        code = AT_THE_SOCKET.format(WAYS[way])
        outcome = separate.attack(client, code, separate.socket_path, "/etc/passwd")
        assert outcome[0] in {"EACCES", "EPERM"}
    after = os.lstat(separate.socket_path)
    assert (after.st_ino, after.st_mode) == (before.st_ino, before.st_mode)
    separate.check_well()


@pytest.mark.parametrize("way", ["replace", "link"])
def test_the_socket_of_the_same_user_can_be_taken_and_costs_the_old_clients_nothing(
    make_sandbox: Make, way: str
) -> None:
    """It cannot be prevented. Who is connected stays so; what was put there stays as it was."""
    sandbox = make_sandbox(ONE)
    precious = sandbox.place / "precious"
    precious.write_text("mine")
    os.chown(precious, sandbox.uid, sandbox.uid)
    with sandbox.connect() as client:
        victim, _ = sandbox.start_victim(client)
        code = AT_THE_SOCKET.format(WAYS[way])
        assert sandbox.attack(client, code, sandbox.socket_path, precious) == ["done"]
        put_there = os.lstat(sandbox.socket_path)
        sandbox.check_well(client)
        sandbox.check_unharmed(client, victim)
    assert sandbox.stop() == 0
    assert precious.read_text() == "mine"
    assert os.lstat(sandbox.socket_path).st_ino == put_there.st_ino


@pytest.mark.parametrize("setting", [ONE, ONE_PID_1])
def test_a_socket_that_the_same_user_removes_is_bound_again(
    make_sandbox: Make, setting: str
) -> None:
    """For new clients; nobody who is connected notices."""
    sandbox = make_sandbox(setting)
    with sandbox.connect() as client:
        code = AT_THE_SOCKET.format(REMOVE)
        assert sandbox.attack(client, code, sandbox.socket_path) == ["done"]
        wait_for(Path(sandbox.socket_path).exists, 20)
        sandbox.check_well()
        sandbox.check_well(client)


FAKE: Final = """
path = sys.argv[1]
os.unlink(path)
listening = socket.socket(socket.AF_UNIX)
listening.bind(path)
listening.listen()
os.chmod(path, 0o777)
tell('up')
sock, _ = listening.accept()
tell(sock.makefile().readline().strip())
"""


def test_a_fake_daemon_of_the_same_user_is_met_by_new_clients(make_sandbox: Make) -> None:
    """Nothing tells them apart by the path: what a token is worth there is said in Threats."""
    sandbox = make_sandbox(ONE)
    with sandbox.connect() as client:
        sandbox.start_attack(client, "fake", FAKE, sandbox.socket_path)
        client.note("exec.output", "fake")
        with socket.socket(socket.AF_UNIX) as sock:
            sock.connect(sandbox.socket_path)
            sock.sendall(b"a secret\n")
            client.note("exec.closed", "fake")
        assert client.output("fake").split(b"\n")[1] == b"a secret"
        sandbox.check_well(client)


NAMES: Final = (
    "last-words.json",
    ".last-words.json.1",  # the daemon's pid, where it is PID 1
    f".last-words.json.{os.getpid()}",
    "journal.sqlite-wal",
    "journal.sqlite-shm",
    "journal.sqlite-journal",
    "journal.sqlite",
    "spool",
)
PLANT: Final = """
state, precious, kind, *names = sys.argv[1:]
def plant(name):
    path = f'{state}/{name}'
    if os.path.lexists(path):
        os.unlink(path)
    {'symlink': os.symlink, 'link': os.link}[kind](precious, path)
tell(*sorted({said(plant, name) for name in names}))
"""
FLOOD: Final = "for _ in range(64): os.write(1, b'x' * 65536)"


@pytest.mark.parametrize("kind", ["symlink", "link"])
@pytest.mark.parametrize("names", [NAMES, ("lock",)], ids=["all but the lock", "lock"])
def test_links_in_the_state_directory_reach_nothing(
    make_sandbox: Make, kind: str, names: tuple[str, ...]
) -> None:
    """Neither while the daemon runs, nor when the next one starts: nothing precious is written."""
    sandbox = make_sandbox(ONE)
    precious = sandbox.place / "precious"
    precious.write_text("mine")
    os.chown(precious, sandbox.uid, sandbox.uid)
    state = sandbox.place / "state"
    with sandbox.connect() as client:
        (state / "spool").rmdir()
        outcome = sandbox.attack(client, PLANT, state, precious, kind, *names)
        assert outcome == ["done"]
        sandbox.attack(client, FLOOD)
        sandbox.check_well(client)
    assert sandbox.stop() == 0
    assert precious.read_text() == "mine"
    again = make_sandbox(ONE, "--spool", "any", again=sandbox.place, uid=sandbox.uid)
    with again.connect() as client:
        again.attack(client, FLOOD)
        again.check_well(client)
    assert again.stop() == 0
    assert precious.read_text() == "mine"


def test_the_state_directory_of_another_user_is_closed(separate: Sandbox) -> None:
    precious = separate.place / "precious"
    precious.write_text("mine")
    precious.chmod(0o666)
    state = separate.place / "state"
    names = (*NAMES, "lock", "../runnerd.sock.lock")
    with separate.connect() as client:
        assert separate.attack(client, PLANT, state, precious, "symlink", *names) == ["EACCES"]
        assert separate.attack(client, "tell(said(os.listdir, sys.argv[1]))", state) == ["EACCES"]
    separate.check_well()


OUTLIVE: Final = """
import subprocess
if os.fork() == 0:
    os.setsid()
    os.kill(-1, signal.SIGKILL)                  # daemon and shims; nobody is left to end us
    result, path = sys.argv[1:]
    outcome = ''
    # What was killed may still take connections, and lets go of them as it ends.
    while outcome in ('', 'ENOENT', 'ECONNREFUSED', 'ECONNRESET', 'EPIPE', 'closed'):
        time.sleep(0.01)
        outcome = connect(path)
    with open(result + '.new', 'w') as file:
        file.write(outcome)
    os.rename(result + '.new', result)
    os._exit(0)
signal.pause()
"""


@pytest.mark.parametrize("token", [False, True])
def test_what_outlived_a_killed_daemon_is_no_descendant_of_the_next(
    make_sandbox: Make, token: bool
) -> None:
    """Of the same user, where no container ends with the daemon: a token alone keeps it out."""
    sandbox = make_sandbox(ONE)
    result = sandbox.place / "result"
    client = sandbox.connect()
    sandbox.start_attack(client, "e", OUTLIVE, result, sandbox.socket_path)
    sandbox.daemon.process.wait(10)
    client.sock.close()
    options: tuple[str, ...] = ()
    if token:
        secret = sandbox.place.parent / "token"  # in a folder of root's
        secret.write_text("t" * 32)
        secret.chmod(0o400)
        os.chown(secret, sandbox.uid, sandbox.uid)
        options = ("--token-file", str(secret))
    again = make_sandbox(ONE, *options, again=sandbox.place, uid=sandbox.uid, hello=not token)
    try:
        said = again.wait_for_file(result)
        assert said == ("unauthorized" if token else "in")
    finally:
        again.stop()
        leave_nobody(sandbox.uid)
