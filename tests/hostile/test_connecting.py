"""A command that connects to the socket, whatever it does to look like somebody else."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import pytest

from tests.harness import daemons
from tests.hostile.sandbox import ONE, ONE_PID_1, OPEN, SEPARATE, Sandbox, sandboxes

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    Make = Callable[..., Sandbox]

_IN_A_CHILD: Final = """
    read_fd, write_fd = os.pipe()
    if os.fork() == 0:
        {prepare}
        os.write(write_fd, connect(PATH).encode())
        os._exit(0)
    os.wait()
    return os.read(read_fd, 100).decode()
"""
WAYS: Final[dict[str, str]] = {
    "itself": "    return connect(PATH)",
    "a child in its own session": _IN_A_CHILD.format(prepare="os.setsid()"),
    "an orphan": """
    read_fd, write_fd = os.pipe()
    if os.fork() == 0:
        if os.fork() == 0:
            os.setsid()
            while os.getppid() != SHIM:          # its parent ends, and it comes to the shim
                time.sleep(0.001)
            os.write(write_fd, connect(PATH).encode())
        os._exit(0)
    return os.read(read_fd, 100).decode()
""",
    "a sibling, by CLONE_PARENT": """
    read_fd, write_fd = os.pipe()
    CLONE_PARENT = 0x8000
    clone = {'x86_64': 56, 'aarch64': 220}[os.uname().machine]
    if system(clone, CLONE_PARENT | signal.SIGCHLD, 0, 0, 0, 0) == 0:
        assert os.getppid() == SHIM
        os.write(write_fd, connect(PATH).encode())
        os._exit(0)
    return os.read(read_fd, 100).decode()
""",
    "a thread whose process looks dead": """
    found = []
    def wait_and_connect():
        while stat(os.getpid())[0] != 'Z':
            time.sleep(0.001)
        tell(connect(PATH))
        os._exit(0)
    threading.Thread(target=wait_and_connect).start()
    libc.pthread_exit(None)                      # the first thread: a zombie until the last ends
""",
    "a child that is gone": """
    sock = socket.socket(socket.AF_UNIX)
    read_fd, write_fd = os.pipe()
    if os.fork() == 0:
        os.write(write_fd, said(sock.connect, PATH).encode())
        os._exit(0)
    os.wait()
    outcome = os.read(read_fd, 100).decode()
    return hello(sock) if outcome == 'done' else outcome
""",
    "root of its own user and pid namespace": _IN_A_CHILD.format(prepare="""
        CLONE_NEWUSER, CLONE_NEWPID = 0x10000000, 0x20000000
        if libc.unshare(CLONE_NEWUSER | CLONE_NEWPID) == 0 and os.fork() != 0:
            os.wait()
            os._exit(0)
"""),
}  # fmt: skip
"""Bodies of a function that connects and returns what became of it."""
CODE: Final = "PATH = sys.argv[1]\ndef way():{}\nprint(way(), flush=True)"

PASS_ON: Final = """
listening = socket.socket(socket.AF_UNIX)
listening.bind('\\0' + sys.argv[2])
listening.listen()
tell('up')
passed, _ = listening.accept()
_, (fd,), _, _ = socket.recv_fds(passed, 10, 1)
while passed.recv(1):
    pass                                         # until the one that connected is gone
tell(hello(socket.socket(fileno=fd)))
"""
HAND_OVER: Final = """
other = socket.socket(socket.AF_UNIX)
other.connect('\\0' + sys.argv[2])
sock = socket.socket(socket.AF_UNIX)
outcome = said(sock.connect, sys.argv[1])
socket.send_fds(other, [b'x'], [sock.fileno()])
tell(outcome)
"""

ORPHAN_OF_A_KILLED_SHIM: Final = """
if os.fork() == 0:
    os.setsid()
    if os.fork() == 0:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        while os.getppid() != SHIM:
            time.sleep(0.001)
        outcome = said(os.kill, SHIM, signal.SIGKILL)
        while outcome == 'done' and os.getppid() != DAEMON:
            time.sleep(0.001)
        tell(outcome, connect(sys.argv[1]))
    os._exit(0)
os.wait()
signal.pause()
"""


@pytest.fixture(scope="module", params=[SEPARATE, OPEN, ONE, ONE_PID_1])
def sandbox(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Sandbox]:
    """Also with a socket that is open to the command's user."""
    with daemons(tmp_path_factory.mktemp("shared")) as start, sandboxes(start) as make:
        yield make(request.param)


def expected(sandbox: Sandbox) -> set[str]:
    """The kernel keeps another user out, else the gate does."""
    return {"EACCES"} if sandbox.setting == SEPARATE else {"peer_refused", "peer_gone"}


@pytest.mark.parametrize("way", WAYS)
def test_a_command_does_not_get_in(sandbox: Sandbox, way: str) -> None:
    with sandbox.connect() as client:
        (said,) = sandbox.attack(client, CODE.format(WAYS[way]), sandbox.socket_path)
        assert said in expected(sandbox)
        sandbox.check_well(client)


def test_a_socket_passed_to_another_exec_does_not_get_it_in(sandbox: Sandbox) -> None:
    name = f"runnerd-test-{sandbox.pid}"
    with sandbox.connect() as client:
        sandbox.start_attack(client, "taker", PASS_ON, sandbox.socket_path, name)
        client.note("exec.output", "taker")
        (outcome,) = sandbox.attack(client, HAND_OVER, sandbox.socket_path, name)
        client.note("exec.closed", "taker")
        _, said = client.output("taker").decode().split()
    if sandbox.setting == SEPARATE:
        assert (outcome, said) == ("EACCES", "ENOTCONN")  # what it passed on is no connection
    else:
        assert outcome == "done"
        assert said in expected(sandbox)


def test_the_orphan_of_a_shim_that_it_killed_does_not_get_in(own_sandbox: Sandbox) -> None:
    with own_sandbox.connect() as client:
        own_sandbox.start_attack(
            client, "e", ORPHAN_OF_A_KILLED_SHIM, own_sandbox.socket_path, grace_s=5.0
        )
        client.note("exec.output", "e")
        said = client.output("e").decode().split()
        if own_sandbox.is_one_user:
            assert said == ["done", "peer_refused"]
        else:
            assert said == ["EPERM", "EACCES"]
        client.call("exec.cancel", exec_id="e", grace_s=0)
        client.note("exec.closed", "e")
        own_sandbox.check_well(client)


@pytest.mark.parametrize("way", WAYS)
def test_the_twin_without_gate_2_lets_every_way_in(ungated: Sandbox, way: str) -> None:
    with ungated.connect() as client:
        assert ungated.attack(client, CODE.format(WAYS[way]), ungated.socket_path) == ["in"]


@pytest.fixture(scope="module")
def ungated(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Sandbox]:
    code = "from runnerd.daemon import server\nserver.check_peer = lambda *args: None"
    with daemons(tmp_path_factory.mktemp("shared")) as start, sandboxes(start) as make:
        yield make(ONE, code=code)
