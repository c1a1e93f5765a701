"""Two ways in: the socket on a mounted folder, and a command of the engine."""

from __future__ import annotations

import contextlib
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import anyio
import pytest

from runnerd.client import asynchronous
from runnerd.client.errors import ConnectFailed, DaemonRestarted, RemoteError, StreamLost
from runnerd.protocol.notes import OutputNote
from tests import needs
from tests.bundles import built_bundle
from tests.containers.container import AS_AGENT, AS_ROOT
from tests.containers.images import CTL
from tests.harness import children, descendants, wait_for

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from tests.containers.container import Container
    from tests.containers.engine import Engine

    Start = Callable[..., Container]

STRANGER: Final = 4321
HELLO_LINE: Final = b'{"jsonrpc":"2.0","id":1,"method":"hello","params":{"protocol":[1]}}\n'
HELLO: Final = f"""
import socket, sys
sock = socket.socket(socket.AF_UNIX)
sock.connect(sys.argv[1])
sock.sendall({HELLO_LINE!r})
print(sock.makefile().readline())
"""


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("runnerd.client.repeating.BACKOFF_FIRST_S", 0.02)


def hello_as(path: str, *wrapper: str) -> dict[str, Any]:
    """Say hello as somebody else on this side, and return what came."""
    words = [*wrapper, "/usr/bin/python3", "-I", "-c", HELLO, path]
    done = subprocess.run(words, capture_output=True, timeout=30, check=False)
    answer: dict[str, Any] = json.loads(done.stdout or "{}")
    assert answer, done.stderr
    return answer


def as_stranger(*more: str) -> tuple[str, ...]:
    setpriv = needs.program("setpriv", "util-linux")
    return (setpriv, f"--reuid={STRANGER}", f"--regid={STRANGER}", "--clear-groups", *more)


# ------------------------------------------------------------------------- the socket on a mount


def test_a_peer_from_outside_is_nobodys_descendant(container: Start) -> None:
    """It shows as pid 0 there, and its user as who it is here."""
    sandbox = container(**{**AS_ROOT, "serve": ("--socket-mode", "0666")})
    for parent in (sandbox.folder, sandbox.folder.parent):
        parent.chmod(0o711)
    hello_as(sandbox.socket_path, *as_stranger())
    (line,) = sandbox.log_lines("peer_refused")
    assert (line["pid"], line["uid"]) == (0, STRANGER)
    with sandbox.connect() as client:  # root's uid is let in, from beyond the pid namespace too
        assert client.info().connections == 1


@pytest.mark.parametrize("how", [AS_ROOT, AS_AGENT], ids=["root", "agent"])
def test_another_user_of_the_host_has_to_be_allowed(container: Start, how: dict[str, Any]) -> None:
    serve = (*how.get("serve", ()), "--socket-mode", "0666")
    closed = container(**{**how, "serve": serve})
    path = Path(closed.socket_path)
    for parent in (path.parent, path.parent.parent):
        parent.chmod(0o711)
    refused = hello_as(closed.socket_path, *as_stranger())
    assert refused["error"]["data"]["kind"] == "unauthorized"
    assert f"uid {STRANGER} is not allowed" in refused["error"]["message"]
    allowed = container(**{**how, "serve": (*serve, "--allow-uid", str(STRANGER))})
    assert hello_as(allowed.socket_path, *as_stranger())["result"]["incarnation"]
    # Whoever is root in a user namespace of its own is still who it is outside.
    unshare = needs.program("unshare", "util-linux")
    as_its_root = as_stranger(unshare, "--user", "--map-root-user")
    assert hello_as(closed.socket_path, *as_its_root)["error"]["data"]["kind"] == "unauthorized"
    assert hello_as(allowed.socket_path, *as_its_root)["result"]["incarnation"]


@pytest.fixture
def open_folder() -> Iterator[Path]:
    """A folder that every user can reach, as pytest's own is not."""
    with tempfile.TemporaryDirectory(prefix="rd-") as folder:
        Path(folder).chmod(0o711)
        yield Path(folder)


def test_a_daemon_in_a_user_namespace_knows_only_its_own_users(
    open_folder: Path, tmp_path: Path
) -> None:
    """As with userns-remap: its root is uid 100000 here, and we are nobody it knows."""
    needs.root()
    folder = open_folder / "run"
    folder.mkdir()
    shutil.chown(folder, 100_000, 100_000)
    bundle = open_folder / "bundle"
    shutil.copytree(built_bundle(), bundle, symlinks=True)
    path = str(folder / "runnerd.sock")
    serve = f"{bundle}/bin/runnerd serve --socket {path} --socket-mode 0666 --state-dir /proc/none"
    script = f'read -r _; exec setpriv --reuid 0 --regid 0 --clear-groups sh -c "exec {serve}"'
    unshare = needs.program("unshare", "util-linux")
    apart = (unshare, "--user", "--keep-caps", "--pid", "--fork", "--mount-proc")
    with (tmp_path / "log").open("wb") as log:
        process = subprocess.Popen(
            [*apart, "sh", "-c", script],
            stdin=subprocess.PIPE,
            stdout=log,
            stderr=log,
        )
    assert process.stdin is not None
    try:
        here = Path("/proc/self/ns/user").readlink()
        wait_for(lambda: Path(f"/proc/{process.pid}/ns/user").readlink() != here)
        for name in ("uid_map", "gid_map"):
            Path(f"/proc/{process.pid}/{name}").write_text("0 100000 65536\n")
        process.stdin.write(b"go\n")
        process.stdin.close()
        wait_for(lambda: Path(path).exists() or process.poll() is not None)
        assert process.poll() is None, (tmp_path / "log").read_text()
        refused = hello_as(path)
        assert "uid 65534 is a user beyond our user namespace" in refused["error"]["message"]
        setpriv = needs.program("setpriv", "util-linux")
        its_root = (setpriv, "--reuid=100000", "--regid=100000", "--clear-groups")
        assert hello_as(path, *its_root)["result"]["incarnation"]
    finally:
        for pid in children(process.pid):
            os.kill(pid, signal.SIGTERM)
        assert process.wait(20) == 0


# --------------------------------------------------------------------- a command of the engine


@pytest.mark.parametrize("how", [AS_ROOT, AS_AGENT], ids=["root", "agent"])
def test_the_bridge_carries_both_ways(container: Start, how: dict[str, Any]) -> None:
    data = random.Random(2).randbytes(8 << 20)
    sandbox = container(**how)
    with sandbox.connect_bridge() as client:
        assert client.run(["cat"], input=data, timeout_s=60).stdout == data
        # What the engine started does not descend from runnerd: so it is let in.
        daemon = sandbox.daemon_pid()
        assert client.info().connections == 1
        bridges = sandbox.processes() - descendants(daemon) - {daemon, sandbox.pid()}
        assert len(bridges) == 1
        done = client.run([CTL, "bridge"], input=HELLO_LINE)
        if how is AS_AGENT:
            assert json.loads(done.stdout)["error"]["data"]["kind"] == "peer_refused"
        else:
            assert b"permission denied" in done.stderr
    wait_for(lambda: sandbox.processes() & bridges == set())


@pytest.mark.parametrize("backend", ["blocking", "asyncio"])
@pytest.mark.parametrize("victim", ["here", "there"])
def test_a_killed_bridge_is_resumed(container: Start, backend: str, victim: str) -> None:
    """The engine's command here, or the bridge there, in the middle of a stream."""
    sandbox = container(**AS_ROOT)
    lost: list[StreamLost] = []
    taken = bytearray()

    def kill() -> None:
        if victim == "here":
            found = [pid for pid in children() if b"\0exec\0-i\0" in _cmdline(pid)]
        else:
            daemon = sandbox.daemon_pid()
            found = list(sandbox.processes() - descendants(daemon) - {daemon, sandbox.pid()})
        for pid in found:
            os.kill(pid, signal.SIGKILL)

    def take(note: object) -> None:
        assert isinstance(note, OutputNote)
        is_first = not taken
        taken.extend(note.data)
        if is_first:
            kill()

    async def main() -> None:
        async with (
            asynchronous.connect_command(sandbox.bridge_words(), on_lost=lost.append) as client,
            await client.start(["seq", "600000"]) as handle,
        ):
            async for note in handle.output(60):
                take(note)

    if backend == "blocking":
        with sandbox.connect_bridge(on_lost=lost.append) as client:
            for note in client.start(["seq", "600000"]).output(60):
                take(note)
    else:
        anyio.run(main, backend=backend)
    assert taken == b"".join(b"%d\n" % n for n in range(1, 600_001))
    assert len(lost) == 1
    with sandbox.connect() as client:
        wait_for(lambda: client.info().connections == 1)


def _cmdline(pid: int) -> bytes:
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    return b""


def test_a_client_that_is_killed_leaves_no_bridge_behind(container: Start) -> None:
    sandbox = container(**AS_ROOT)
    script = (
        "import sys, time; sys.path.insert(0, sys.argv[1])\n"
        "from runnerd.client.blocking import connect_command\n"
        "client = connect_command(sys.argv[2:]); print('up', flush=True); time.sleep(900)\n"
    )
    repository = str(Path(__file__).parents[2])
    with subprocess.Popen(
        [sys.executable, "-c", script, repository, *sandbox.bridge_words()],
        stdout=subprocess.PIPE,
        env=sandbox.engine.environment,
    ) as client:
        assert client.stdout is not None
        assert client.stdout.readline() == b"up\n"
        daemon = sandbox.daemon_pid()
        bridges = sandbox.processes() - descendants(daemon) - {daemon, sandbox.pid()}
        assert len(bridges) == 1
        client.kill()
    wait_for(lambda: sandbox.processes() & bridges == set(), 20)


def test_what_is_said_where_there_is_no_container_or_daemon(
    container: Start, engine: Engine
) -> None:
    sandbox = container(**AS_ROOT)
    sandbox.stop()
    with pytest.raises(ConnectFailed, match="is not running"):
        sandbox.connect_bridge()
    sandbox.remove()
    with pytest.raises(ConnectFailed, match="No such container"):
        sandbox.connect_bridge()
    engine.docker("run", "-d", "--name", "rd-idle", "--entrypoint", "sleep", "rd-bare", "900")
    try:
        words = [engine.program, "exec", "-i", "rd-idle", CTL, "bridge"]
        done = subprocess.run(words, env=engine.environment, capture_output=True, check=False)
        assert done.returncode == 125
        assert done.stderr.startswith(b"runnerctl: no runnerd socket at '/run/runnerd/")
    finally:
        engine.docker("rm", "--force", "rd-idle")


def test_a_container_that_is_started_again_is_another_daemon(container: Start) -> None:
    sandbox = container(**AS_ROOT)
    with sandbox.connect_bridge() as client, sandbox.connect() as by_path:
        client.start(["sleep", "900"], attach=False)
        sandbox.engine.docker("restart", sandbox.name)
        sandbox.wait_ready()
        for each in (client, by_path):
            with pytest.raises((DaemonRestarted, StreamLost)):
                each.wait("x", timeout_s=30)


def test_an_unknown_user_of_the_containers_is_refused(container: Start) -> None:
    """`docker exec -u`: the bridge is that user, and the socket is not open to it."""
    sandbox = container(**AS_ROOT)
    with pytest.raises((ConnectFailed, RemoteError), match="permission denied"):
        sandbox.connect_bridge("-u", "agent")
