"""Cases from the field: a start that fails says which step failed, and leaves nothing."""

from __future__ import annotations

import concurrent.futures
import json
import os
import shutil
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from runnerd.client.blocking import Client
from runnerd.client.errors import RemoteError
from runnerd.protocol.framing import Encoding, frame
from runnerd.protocol.requests import Pty
from tests import needs
from tests.cases.looking import metric, within
from tests.harness import REPOSITORY, RunnerdProcess, descendants, wait_for
from tests.raw import RawClient, RawError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator


@pytest.fixture
def open_folder() -> Iterator[Path]:
    """A directory that every user may enter, which pytest's own is not."""
    folder = Path(tempfile.mkdtemp(prefix="rd-"))
    folder.chmod(0o755)
    yield folder
    shutil.rmtree(folder)


def fault(client: Client, argv: list[str], **fields: Any) -> tuple[str, str | None, str | None]:
    """Return the kind, stage and errno name with which a start is refused."""
    with pytest.raises(RemoteError) as caught:
        client.start(argv, **fields)
    data = caught.value.data
    return data.kind, data.stage, data.errno_name


def field_at_fault(raw: RawClient, argv: list[str], **fields: Any) -> str:
    """Return the field for which the daemon, not the library, refuses a bad request."""
    with pytest.raises(RawError) as caught:
        raw.call("exec.start", argv=argv, **fields)
    assert caught.value.kind == "invalid_params"
    return str(caught.value.data["field"])


def failed(stage: str, errno_name: str) -> tuple[str, str, str]:
    return "start_failed", stage, errno_name


def test_c100_a_script_without_an_interpreter_line_is_no_program(
    runnerd_daemon: RunnerdProcess, tmp_path: Path
) -> None:
    """Argv means execve: no shell is tried, and the error names the path."""
    script = tmp_path / "ns.sh"
    script.write_text("echo hi")
    script.chmod(0o755)
    with RawClient(runnerd_daemon.socket_path) as raw, runnerd_daemon.connect() as client:
        with pytest.raises(RawError) as caught:
            raw.call("exec.start", exec_id="c100", argv=[str(script)], attach={})
        assert caught.value.data["errno_name"] == "ENOEXEC"
        assert caught.value.data["stage"] == "exec"
        assert str(script) in str(caught.value)
        raw.call("ping")
        assert raw.notes == []  # neither a start nor an exit was told
        assert client.list_execs() == []
        assert metric(client, "runnerd_execs_started_total") == 0
        done = client.run(["sh", "-c", str(script)])
        assert (done.stdout, done.exit.code) == (b"hi\n", 0)


def test_c102_each_error_names_its_stage(runnerd_daemon: RunnerdProcess, open_folder: Path) -> None:
    """A missing directory, a file in its place, a closed one and a missing program differ."""
    needs.root()
    closed = open_folder / "closed"
    closed.mkdir(mode=0o000)
    path = runnerd_daemon.socket_path
    with RawClient(path) as raw, runnerd_daemon.connect() as client:
        assert fault(client, ["pwd"], cwd="/nope") == failed("cwd", "ENOENT")
        assert fault(client, ["pwd"], cwd="/etc/passwd") == failed("cwd", "ENOTDIR")
        assert field_at_fault(raw, ["pwd"], cwd="") == "cwd"
        assert field_at_fault(raw, ["pwd"], cwd="relative") == "cwd"
        assert field_at_fault(raw, ["pwd"], cwd="/tmp\0") == "cwd"
        assert fault(client, ["nope"], cwd="/tmp") == failed("exec", "ENOENT")
        assert fault(client, ["pwd"], cwd=str(closed), user="nobody") == failed("cwd", "EACCES")
        assert client.run(["pwd"], cwd=str(open_folder)).stdout == f"{open_folder}\n".encode()


def test_c102_a_daemon_that_may_not_switch_users_says_so(
    start_daemon: Callable[..., RunnerdProcess],
) -> None:
    """Without the right to become another user, such a start fails at stage user."""
    stranger, wrapper = "root", tuple[str, ...]()
    if os.geteuid() == 0:
        stranger = "nobody"
        wrapper = (
            needs.program("setpriv", "util-linux"),
            "--bounding-set",
            "-setuid,-setgid",
            "--",
        )
    with start_daemon(wrapper=wrapper).connect() as client:
        assert fault(client, ["pwd"], cwd="/tmp", user=stranger) == failed("user", "EPERM")
        with pytest.raises(RemoteError, match="may not become") as caught:
            client.start(["pwd"], user=stranger)
        assert "CAP_SETUID" in (caught.value.hint or "")
        assert client.run(["pwd"], cwd="/tmp", user=str(os.geteuid())).stdout == b"/tmp\n"


@pytest.mark.parametrize(
    ("mode", "text", "word"),
    [(0o644, "#!/bin/sh", "allowed"), (0o755, "no program", "#!")],
)
def test_the_hint_does_not_ask_for_what_is_there(
    runnerd_daemon: RunnerdProcess, tmp_path: Path, mode: int, text: str, word: str
) -> None:
    """A program that exists and cannot be run: the hint says more than that it must exist."""
    program = tmp_path / "program"
    program.write_text(text)
    program.chmod(mode)
    with runnerd_daemon.connect() as client, pytest.raises(RemoteError) as caught:
        client.start([str(program)])
    assert word in (caught.value.hint or "")


def test_c104_a_directory_that_went_away(
    start_daemon: Callable[..., RunnerdProcess], tmp_path: Path
) -> None:
    """A command in a removed directory runs on; starting there fails; the daemon sits in /."""
    gone = tmp_path / "gone"
    gone.mkdir()
    wrapper = ("sh", "-c", f'cd {gone} && rmdir {gone} && exec "$@"', "sh")
    daemon = start_daemon(wrapper=wrapper, env={"PYTHONPATH": str(REPOSITORY)})
    with daemon.connect() as client:
        script = f"mkdir {gone}; cd {gone}; rmdir {gone}; echo; exec sleep 5.104"
        with client.start(["sh", "-c", script]) as inside:
            next(inside.output(5))
            assert fault(client, ["pwd"], cwd=str(gone)) == failed("cwd", "ENOENT")
            done = client.run(["pwd"])
            assert (done.stdout, done.exit.code) == (b"/\n", 0)
            assert client.inspect(inside.exec_id).state == "running"


def test_c105_a_program_written_by_one_exec_can_be_run_by_the_next(
    runnerd_daemon: RunnerdProcess, tmp_path: Path
) -> None:
    """No write descriptor of one exec lives on in another's child: 500 of 500 run."""

    def write_and_run(worker: int) -> int:
        good = 0
        with runnerd_daemon.connect() as client:
            for number in range(25):
                path = tmp_path / f"p{worker}-{number}"
                script = b"#!/bin/sh\necho %d\n" % number
                written = client.run(
                    ["sh", "-c", f"cat > {path} && chmod 755 {path}"], input=script
                )
                assert written.exit.code == 0
                good += client.run([str(path)]).stdout == b"%d\n" % number
        return good

    with concurrent.futures.ThreadPoolExecutor(20) as pool:
        assert sum(pool.map(write_and_run, range(20))) == 500


def test_c105_a_program_held_open_for_writing_is_text_busy(
    runnerd_daemon: RunnerdProcess, tmp_path: Path
) -> None:
    """Held on purpose it is a start error that a retry may cure, and no hang."""
    path = tmp_path / "held"
    path.write_text("#!/bin/sh\necho ran\n")
    path.chmod(0o755)
    with runnerd_daemon.connect() as client:
        with path.open("a"), within(1.0), pytest.raises(RemoteError) as caught:
            client.start([str(path)])
        data = caught.value.data
        assert (data.stage, data.errno_name, data.retryable) == ("exec", "ETXTBSY", True)
        assert client.run([str(path)]).stdout == b"ran\n"


def test_c106_arguments_are_limited_by_the_kernel_and_the_frame_alone(
    runnerd_daemon: RunnerdProcess,
) -> None:
    """Sizes just below execve's limits start, those just above are E2BIG, at stage exec.

    The limits are for a stack of 8 MiB, which is asked for: all of argv and env may take a
    quarter of it, and one string 128 KiB with its NUL (execve(2)).
    """
    stack: Any = {"rlimits": {"stack": (8 << 20, 8 << 20)}, "env_mode": "replace"}
    room = 131071 - len("NAME") - 1
    too_big = failed("exec", "E2BIG")
    with runnerd_daemon.connect() as client:
        path: dict[str, str | None] = {"PATH": "/usr/bin:/bin"}
        assert client.run(["true", "x" * 131071], env=path, **stack).exit.code == 0
        assert fault(client, ["true", "x" * 131072], env=path, **stack) == too_big
        assert client.run(["true", *["y" * 1000] * 2050], env=path, **stack).exit.code == 0
        assert fault(client, ["true", *["y" * 1000] * 2150], env=path, **stack) == too_big
        assert client.run(["true"], env=path | {"NAME": "v" * room}, **stack).exit.code == 0
        assert fault(client, ["true"], env=path | {"NAME": "v" * (room + 1)}, **stack) == too_big
        many: dict[str, str | None] = {f"N{number}": "v" * 5000 for number in range(40)}
        assert client.run(["true"], env=path | many, **stack).exit.code == 0
        assert client.run(["true"]).exit.code == 0
        assert metric(client, "runnerd_stray_failures_total") == 0


@pytest.mark.parametrize("encoding", [*Encoding])
def test_c106_a_frame_beyond_the_limit_is_refused(
    runnerd_daemon: RunnerdProcess, encoding: Encoding
) -> None:
    """A request of 32 MiB is told why it is refused, before the connection is closed."""
    with RawClient(runnerd_daemon.socket_path, encoding=encoding) as raw:
        with pytest.raises(OSError, match=r"Broken pipe|reset"):
            raw.send("exec.start", argv=["true", *["x" * 1024] * 32 * 1024])
        raw.read_to_end()
        assert [error["error"]["data"]["kind"] for error in raw.errors_without_id] == [
            "frame_too_large"
        ]
    with runnerd_daemon.connect() as client:
        assert client.run(["true"]).exit.code == 0


@pytest.mark.parametrize("encoding", [*Encoding])
@pytest.mark.parametrize(
    ("field", "params"),
    [
        ("argv[1]", {"argv": ["echo", "a\0b"]}),
        ("env['A']", {"argv": ["echo"], "env": {"A": "x\0y"}}),
        ("cwd", {"argv": ["echo"], "cwd": "/tmp\0"}),
        ("user", {"argv": ["echo"], "user": "no\0body"}),
    ],
)
def test_c107_a_nul_byte_is_refused_by_field(
    runnerd_daemon: RunnerdProcess, encoding: Encoding, field: str, params: dict[str, Any]
) -> None:
    """A request the kernel could not be asked is refused by the field's name; nothing is forked."""
    wait_for(lambda: len(descendants(runnerd_daemon.pid)) == 6)  # three parked pairs
    before = descendants(runnerd_daemon.pid)
    with RawClient(runnerd_daemon.socket_path, encoding=encoding) as raw:
        with pytest.raises(RawError) as caught:
            raw.call("exec.start", **params)
        assert (caught.value.kind, caught.value.data["field"]) == ("invalid_params", field)
        assert raw.call("ping") == {}
        assert raw.call("exec.list")["execs"] == []
    assert descendants(runnerd_daemon.pid) == before


@pytest.mark.parametrize("encoding", [*Encoding])
def test_c107_half_a_surrogate_pair_is_refused_by_field(
    runnerd_daemon: RunnerdProcess, encoding: Encoding
) -> None:
    """Text that is no UTF-8 is refused with the field named; the connection stays usable."""
    with RawClient(runnerd_daemon.socket_path, encoding=encoding) as raw:
        if encoding is Encoding.JSON:
            request = {
                "jsonrpc": "2.0",
                "id": 77,
                "method": "exec.start",
                "params": {"argv": ["echo", "\ud800x"]},
            }
            raw.sock.sendall(frame(json.dumps(request).encode(), encoding))
        else:
            framed = raw.encode("exec.start", {"argv": ["echo", "???x"]}, 77)
            raw.sock.sendall(framed.replace(b"???x", b"\xed\xa0\x80x"))
        error = raw.receive()["error"]
        assert "argv[1]" in error["message"]
        assert error["data"]["kind"] in ("invalid_params", "parse_error")
        assert raw.call("ping") == {}
        assert raw.call("exec.list")["execs"] == []


def test_c110_a_missing_program_is_not_found_and_leaves_nothing(
    runnerd_daemon: RunnerdProcess,
) -> None:
    """200 times each, at once, with pipes and in a terminal: no exec, no descriptor is left."""
    with runnerd_daemon.connect() as client:
        client.run(["true"])
        # The parked shims and what the scrape itself opens belong to the picture.
        wait_for(lambda: client.info().parked_shims == 3)
        metric(client, "process_open_fds")
        before = metric(client, "process_open_fds")
        kinds: list[dict[str, object]] = [{}, {"stdin": "pipe"}, {"pty": Pty()}]
        for program in ("nope-cmd", "/no/dir/x"):
            for more in kinds:
                for _ in range(200):
                    with within(0.2, "the refusal"):
                        assert fault(client, [program], **more) == failed("exec", "ENOENT")
        for _ in range(200):
            done = client.run(["sh", "-c", "nope-cmd"], pty=Pty())
            assert (done.exit.code, done.stderr) == (127, b"")
            assert b"nope-cmd: not found\r\n" in done.stdout
        for stdin in ("null", "pipe"):
            for _ in range(200):
                done = client.run(["sh", "-c", "nope-cmd"], stdin=stdin)
                assert (done.exit.code, done.stdout) == (127, b"")
                assert b"nope-cmd: not found" in done.stderr
        # An exit is told before its exec is closed, the last one's maybe only just.
        wait_for(lambda: all(each.state == "closed" for each in client.list_execs()))
        assert client.info().live_execs == 0
        wait_for(lambda: client.info().parked_shims == 3)
        wait_for(lambda: metric(client, "process_open_fds") == before)


def test_c111_odd_argument_vectors(runnerd_daemon: RunnerdProcess) -> None:
    """Nothing is guessed and nothing expanded: argv goes to execve as it is."""
    path = runnerd_daemon.socket_path
    with RawClient(path) as raw, runnerd_daemon.connect() as client:
        assert field_at_fault(raw, []) == "argv"
        assert field_at_fault(raw, [""]) == "argv"
        assert fault(client, ["/etc"]) == failed("exec", "EACCES")
        assert fault(client, ["."]) == failed("exec", "EACCES")
        assert fault(client, [" "]) == failed("exec", "ENOENT")
        assert fault(client, ["-"]) == failed("exec", "ENOENT")
        assert client.run(["sh", "-c", ""]).exit.code == 0
        done = client.run(["printf", "%s|", "", "a b", "*", "$HOME", "\n"])
        assert done.stdout == b"|a b|*|$HOME|\n|"
        assert fault(client, ["n" * 5000]) == failed("exec", "ENAMETOOLONG")
        assert fault(client, ["/" + "n" * 5000]) == failed("exec", "ENAMETOOLONG")
        assert client.run(["true", *[""] * 100_000]).exit.code == 0


def test_c112_a_here_document_reaches_the_shell_as_written(
    runnerd_daemon: RunnerdProcess, tmp_path: Path
) -> None:
    """No text of ours is around a command, and no shell is shared between two."""
    path = tmp_path / "h"
    text = "line one\nline $two `x`\n"
    with runnerd_daemon.connect() as client:
        done = client.run(
            ["sh", "-c", f"cat > {path} <<'EOF'\n{text}EOF\ncat {path}; set -e; false"]
        )
        assert (done.stdout, done.stderr, done.exit.code) == (text.encode(), b"", 1)
        assert client.run(["true"]).exit.code == 0
