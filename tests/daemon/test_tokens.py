"""Gate 3: a daemon that asks for a token lets nobody in without it, and tells it to nobody."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import pytest

from runnerd.client import asynchronous, blocking
from runnerd.client.errors import RemoteError, TokenUnreadable
from runnerd.daemon.options import EX_CONFIG, ConfigError
from runnerd.daemon.tokens import TOKEN_BYTES_MAX, Token, read_token_file
from runnerd.protocol.daemon_requests import Hello
from runnerd.protocol.framing import Encoding
from tests import needs
from tests.daemon.looking import last_words, log_lines, planted, shim_of, shims
from tests.harness import REPOSITORY, RUNNERD, RunnerdProcess, descendants
from tests.proxy import Proxy
from tests.raw import ClosedError, RawClient, RawError

if TYPE_CHECKING:
    from collections.abc import Callable

    Start = Callable[..., RunnerdProcess]

TOKEN: Final = "tok-5f0c2e9b7a814d6395e0c1f2a3b4"
WRONG: Final = "tik-5f0c2e9b7a814d6395e0c1f2a3b4"


@pytest.fixture
def token_file(tmp_path: Path) -> Path:
    path = tmp_path / "token"
    path.write_text(TOKEN + "\n")
    path.chmod(0o400)
    return path


@pytest.fixture
def guarded(start_daemon: Start, token_file: Path) -> RunnerdProcess:
    return start_daemon("--token-file", str(token_file), "--log-level", "debug")


def hello(client: RawClient, **params: Any) -> dict[str, Any]:
    return client.call("hello", **({"protocol": [1]} | params))


def refused_kind(client: RawClient, **params: Any) -> str:
    with pytest.raises(RawError) as failure:
        hello(client, **params)
    return failure.value.kind


@pytest.mark.parametrize("encoding", list(Encoding))
def test_only_a_hello_with_the_token_opens_a_connection(
    guarded: RunnerdProcess, encoding: Encoding
) -> None:
    with RawClient(guarded.socket_path, encoding=encoding, hello=False) as client:
        for method in ("ping", "daemon.info", "exec.start", "no.such.method"):
            with pytest.raises(RawError) as failure:
                client.call(method)
            assert failure.value.kind == "hello_required"
        assert refused_kind(client) == "unauthorized"
        assert refused_kind(client, token=WRONG) == "unauthorized"
        with pytest.raises(RawError):
            client.call("ping")  # it is not open
        assert hello(client, token=TOKEN)["protocol"] == 1
        assert client.call("ping") == {}


def test_the_twin_whose_token_matches_anything_lets_everybody_in(
    start_daemon: Start, token_file: Path
) -> None:
    """The negative control: what is refused above gets in where nothing compares."""
    daemon = start_daemon(
        "--token-file", str(token_file),
        **planted("from runnerd.daemon import tokens\ntokens.Token.matches = lambda *_: True"),
    )  # fmt: skip
    with RawClient(daemon.socket_path, hello=False) as client:
        assert hello(client, token=WRONG)["protocol"] == 1
    with RawClient(daemon.socket_path, hello=False) as client:
        assert hello(client)["protocol"] == 1


def test_nothing_is_told_before_the_token(guarded: RunnerdProcess) -> None:
    """Neither versions, nor the incarnation, nor the fence; and a fence has no effect."""
    others: list[dict[str, Any]] = [
        {"protocol": [99]}, {"incarnation": "0" * 16}, {"fence": 2**40}, {"fence": "current"},
    ]  # fmt: skip
    for number, more in enumerate(others):
        with RawClient(guarded.socket_path, hello=False) as client:
            with pytest.raises(RawError) as failure:
                hello(client, token=WRONG, **more)
            data = failure.value.data
            assert data["kind"] == "unauthorized", number
            assert data.keys() == {"kind", "layer", "preserved", "hint", "retryable"}
    with RawClient(guarded.socket_path, hello=False) as client:
        assert hello(client, token=TOKEN)["fence"] is None


def test_a_few_wrong_ones_cost_the_connection_and_are_counted(guarded: RunnerdProcess) -> None:
    with RawClient(guarded.socket_path, hello=False) as client:
        for _ in range(3):
            assert refused_kind(client, token=WRONG) == "unauthorized"
        with pytest.raises((ClosedError, OSError)):
            hello(client, token=TOKEN)
    # Pipelined, nothing behind the third is looked at: not even the right one.
    with RawClient(guarded.socket_path, hello=False) as client:
        sent = [client.send("hello", protocol=[1], token=WRONG) for _ in range(3)]
        client.send("hello", protocol=[1], token=TOKEN)
        for each in sent:
            with pytest.raises(RawError):
                client.answer(each)
        with pytest.raises(ClosedError):
            client.receive()
    with RawClient(guarded.socket_path, hello=False) as client:
        hello(client, token=TOKEN)
        text = client.call("daemon.metrics")["text"]
    assert 'runnerd_tokens_refused_total{what="wrong"} 6.0' in text
    assert 'runnerd_refusals_total{kind="unauthorized"} 6.0' in text
    lines = log_lines(guarded, "token_refused")
    assert [line["what"] for line in lines] == ["wrong"] * 6
    assert lines[-1]["total"] == 6
    assert lines[0]["pid"] == os.getpid()


def test_the_clients_and_runnerctl_take_a_token_and_keep_it_over_connections(
    guarded: RunnerdProcess, token_file: Path, tmp_path: Path
) -> None:
    with (
        Proxy(tmp_path / "proxy.sock", guarded.socket_path) as proxy,
        blocking.connect(tmp_path / "proxy.sock", token=TOKEN) as client,
    ):
        assert client.run(["true"]).exit.code == 0
        proxy.cut()
        assert client.run(["true"]).exit.code == 0
    with blocking.connect(guarded.socket_path, token_file=token_file) as client:
        assert client.info().pid == guarded.pid
    with pytest.raises(RemoteError) as failure:
        blocking.connect(guarded.socket_path, token=WRONG)
    assert failure.value.kind == "unauthorized"
    for words in (("--token-file", str(token_file), "ps"), ("ps", "--token-file", str(token_file))):
        assert guarded.ctl(*words).returncode == 0
    named = {**os.environ, "RUNNERD_TOKEN_FILE": str(token_file)}
    assert guarded.ctl("ps", env=named).returncode == 0
    done = guarded.ctl("ps")
    assert done.returncode == 125
    assert b"asks for a token" in done.stderr
    assert b"--token-file" in done.stderr
    done = guarded.ctl("--token-file", "/nonexistent", "ps")
    assert done.returncode == 125
    assert b"cannot read the token" in done.stderr


async def test_the_async_client_takes_one_too(guarded: RunnerdProcess, token_file: Path) -> None:
    async with asynchronous.connect(guarded.socket_path, token_file=token_file) as client:
        assert (await client.info()).pid == guarded.pid
    with pytest.raises(RemoteError):
        async with asynchronous.connect(guarded.socket_path):
            pass


def test_a_file_without_a_token_is_no_token(tmp_path: Path) -> None:
    for held in (b"", b"\n", b"\xff\xfe", b"x" * (TOKEN_BYTES_MAX + 1)):
        (tmp_path / "t").write_bytes(held)
        with pytest.raises(TokenUnreadable):
            blocking.connect("/nonexistent", token_file=tmp_path / "t")


# ------------------------------------------------------------------ where it comes from


def leaves_with(*words: str, env: dict[str, str] | None = None, **options: Any) -> str:
    """Run a daemon that must refuse its configuration; returns what it said."""
    done = subprocess.run(
        [*RUNNERD, "serve", "--socket", "/nonexistent/s", *words], cwd=REPOSITORY,
        capture_output=True, text=True, timeout=30, check=False,
        env={**os.environ, **(env or {})}, **options,
    )  # fmt: skip
    assert done.returncode == EX_CONFIG, done.stderr
    assert TOKEN not in done.stderr + done.stdout
    assert len(done.stderr.splitlines()) == 1
    said: str = done.stderr
    return said


def test_a_token_in_argv_or_environment_is_refused() -> None:
    for words in (("--token", TOKEN), (f"--token={TOKEN}",), ("--token",)):
        assert "command line can be read by others" in leaves_with(*words)
    assert "environment can be read" in leaves_with(env={"RUNNERD_TOKEN": TOKEN})


def test_a_file_that_others_can_use_is_refused(token_file: Path, tmp_path: Path) -> None:
    for mode in (0o440, 0o404, 0o420, 0o601, 0o644):
        token_file.chmod(mode)
        with pytest.raises(ConfigError, match="can be used by others"):
            read_token_file(str(token_file))
    token_file.chmod(0o400)
    if os.geteuid() == 0:
        os.chown(token_file, 4242, 4242)
        with pytest.raises(ConfigError, match="belongs to uid 4242"):
            read_token_file(str(token_file))
        os.chown(token_file, 0, 0)
    os.mkfifo(tmp_path / "fifo", 0o600)
    for path in (tmp_path / "fifo", tmp_path, Path("/dev/null")):
        with pytest.raises(ConfigError, match="no regular file"):
            read_token_file(str(path))
    with pytest.raises(ConfigError, match="No such file"):
        read_token_file(str(tmp_path / "none"))
    # What a secret is mounted as, and a link's own mode says nothing.
    (tmp_path / "link").symlink_to(token_file)
    assert read_token_file(str(tmp_path / "link")).matches(TOKEN)
    assert "can be used by others" in leaves_with("--token-file", str(_open(tmp_path)))


def _open(folder: Path) -> Path:
    path = folder / "open"
    path.write_text(TOKEN)
    path.chmod(0o644)
    return path


@pytest.mark.parametrize(
    ("held", "said"),
    [
        (b"", "it is empty"),
        (b"\n", "it is empty"),
        (b"\r\n\n", "it is empty"),
        (b"x" * (TOKEN_BYTES_MAX + 1), "more than 1024 bytes"),
        (b"x" * 10_000_000, "more than 1024 bytes"),
        (b"two\nlines", "visible ASCII"),
        (b"two words", "visible ASCII"),
        (b"nul\0", "visible ASCII"),
        (b"caf\xc3\xa9", "visible ASCII"),
    ],
)
def test_what_is_no_token_is_refused(tmp_path: Path, held: bytes, said: str) -> None:
    path = tmp_path / "t"
    path.write_bytes(held)
    path.chmod(0o600)
    with pytest.raises(ConfigError, match=said):
        read_token_file(str(path))


@pytest.mark.parametrize("end", [b"", b"\n", b"\r\n"])
@pytest.mark.parametrize("size", [1, 16, TOKEN_BYTES_MAX])
def test_the_end_of_its_line_is_no_part_of_it(tmp_path: Path, end: bytes, size: int) -> None:
    path = tmp_path / "t"
    path.write_bytes(b"x" * size + end)
    path.chmod(0o600)
    token = read_token_file(str(path))
    assert token.matches("x" * size)
    assert token.is_short == (size < 16)
    for other in (None, "", "x" * (size - 1), "x" * (size + 1), "X" * size, "\ud800"):
        assert not token.matches(other)


def test_a_token_is_wiped_where_it_was_read_and_has_no_representation(tmp_path: Path) -> None:
    secret = bytearray(TOKEN.encode())
    token = Token(secret)
    assert secret == bytes(len(secret))
    assert TOKEN not in repr(token)
    assert TOKEN not in repr(Hello(protocol=[1], token=TOKEN))
    assert "fence=None" in repr(Hello(protocol=[1], token=TOKEN))


def held_paths(pid: int) -> list[str]:
    found = []
    for each in Path(f"/proc/{pid}/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):  # closed meanwhile
            found.append(str(each.readlink()))
    assert found
    return found


def test_a_descriptor_brings_one_and_is_closed(start_daemon: Start, tmp_path: Path) -> None:
    path = tmp_path / "t"
    path.write_text(TOKEN)
    daemon = start_daemon(
        "--token-fd", "7", wrapper=("sh", "-c", f'exec 7<{path}; exec "$@"', "sh")
    )
    with RawClient(daemon.socket_path, hello=False) as client:
        assert refused_kind(client, token=WRONG) == "unauthorized"
        hello(client, token=TOKEN)
    assert str(path) not in held_paths(daemon.pid)


def test_a_descriptor_that_brings_none_is_refused(tmp_path: Path) -> None:
    assert "descriptor 47 is not open here" in leaves_with("--token-fd", "47")
    assert "descriptor 3 is not open here" in leaves_with("--token-fd", "3")
    assert "is not open here" in leaves_with("--token-fd", "-1")
    assert "is empty" in leaves_with("--token-fd", "0", stdin=subprocess.DEVNULL)
    assert "visible ASCII" in leaves_with("--token-fd", "0", input="two words")
    assert "where output goes" in leaves_with("--token-fd", "2", stdin=subprocess.DEVNULL)
    assert "give one" in leaves_with("--token-fd", "0", "--token-file", "x")
    reader, writer = os.pipe()
    try:
        assert "cannot be read" in leaves_with("--token-fd", str(writer), pass_fds=(writer,))
        same = ("--token-fd", str(reader), "--ready-fd", str(reader))
        assert "both are" in leaves_with(*same, pass_fds=(reader,))
    finally:
        os.close(reader)
        os.close(writer)


def test_a_descriptor_that_never_ends_is_not_waited_for(tmp_path: Path) -> None:
    code = "from runnerd.daemon import tokens\ntokens._FD_S = 0.2"
    with pytest.raises(AssertionError, match="did not end within"):
        RunnerdProcess(
            tmp_path, "--token-fd", "0", **planted(code),
            wrapper=("sh", "-c", 'mkfifo "$0"; exec "$@" 0<>"$0"', str(tmp_path / "fifo")),
        )  # fmt: skip


# ------------------------------------------------------------------ where it must not be


def files_below(folder: Path) -> list[Path]:
    return [each for each in folder.rglob("*") if each.is_file()]


def test_the_token_is_in_no_log_error_argv_environment_or_file(
    guarded: RunnerdProcess, token_file: Path, tmp_path: Path
) -> None:
    """Everything that could hold it is searched, after it was used in every way."""
    named = {**os.environ, "RUNNERD_TOKEN_FILE": str(token_file)}
    told: list[str] = []
    with RawClient(guarded.socket_path, hello=False) as client:
        # Wrong in every other way, so that errors speak of the request it stands in.
        for params in (
            {"token": TOKEN, "nonsense": 1},
            {"token": [TOKEN]},
            {"token": {"token": TOKEN}},
            {"token": TOKEN, "protocol": "x"},
            {"token": TOKEN, "protocol": [99]},
            {"token": TOKEN, "incarnation": "other"},
            {"token": TOKEN + "\0"},
            {"token": TOKEN * 100},
        ):
            with pytest.raises(RawError) as failure:
                hello(client, **params)
            told.append(json.dumps(failure.value.error))
        client.sock.sendall(b'{"jsonrpc":"2.0","id":1,"method":"hello","params":{"token":"%s"\n'
                            % TOKEN.encode())  # fmt: skip
        while not client.errors_without_id:
            client.receive()
        told += map(json.dumps, client.errors_without_id)
        hello(client, token=TOKEN, fence=7)
        pid = client.call("exec.start", exec_id="e", argv=["sleep", "900"])["pid"]
        started = client.call("exec.start", exec_id="env", argv=["env"], attach={})
        assert started["subscription"]
        client.note("exec.closed", "env")
        told.append(client.output("env").decode())
        told.append(json.dumps(client.call("daemon.info")))
        told.append(client.call("daemon.metrics")["text"])
        told.append(json.dumps(client.call("exec.inspect", exec_id="e", tree=True)))
        assert guarded.ctl("ps", env=named).returncode == 0
        below = descendants(guarded.pid)
        assert {pid, shim_of(guarded, pid)} | shims(guarded) <= below
        for each in below | {guarded.pid}:
            for what in ("environ", "cmdline", "comm"):
                with contextlib.suppress(OSError):
                    told.append(Path(f"/proc/{each}/{what}").read_bytes().decode("latin-1"))
        seen = subprocess.run(["ps", "axeww"], capture_output=True, check=False)
        told.append(seen.stdout.decode("latin-1"))
    guarded.stop()
    for text in told:
        assert TOKEN not in text
    held = files_below(tmp_path)
    assert {"runnerd.log", "journal.sqlite", "last-words.json"} <= {each.name for each in held}
    for path in held:
        if path != token_file:
            assert TOKEN.encode() not in path.read_bytes(), path
    assert last_words(Path(guarded.socket_path).parent / "state")["code"] == 0


def test_a_core_file_of_a_command_or_of_the_daemon_does_not_hold_it(
    guarded: RunnerdProcess,
) -> None:
    """Its own memory, read as the kernel writes a core: what is there is a digest."""
    needs.root()
    with RawClient(guarded.socket_path, hello=False) as client:
        hello(client, token=TOKEN)
        pid = client.call("exec.start", exec_id="e", argv=["sleep", "900"])["pid"]
        for each in (pid, shim_of(guarded, pid), *shims(guarded)):
            assert not in_memory(each, TOKEN.encode())
        info = client.call("daemon.info")
    # The kernel writes no core of the daemon at all: it is not dumpable.
    assert info["dumpable"] is False


def in_memory(pid: int, secret: bytes) -> bool:
    """Whether a process holds these bytes anywhere."""
    with Path(f"/proc/{pid}/mem").open("rb", buffering=0) as memory:
        for line in Path(f"/proc/{pid}/maps").read_text().splitlines():
            first, last = (int(each, 16) for each in line.split()[0].split("-"))
            if "r" not in line.split()[1]:
                continue
            with contextlib.suppress(OSError, ValueError, OverflowError):
                memory.seek(first)
                if secret in memory.read(last - first):
                    return True
    return False


def test_what_the_daemon_keeps_of_its_own_token_is_a_digest(guarded: RunnerdProcess) -> None:
    """Before the first hello its memory has the token nowhere; the twin that keeps it has it."""
    needs.root()
    assert not in_memory(guarded.pid, TOKEN.encode())


def test_the_twin_that_keeps_the_token_has_it_in_memory(
    start_daemon: Start, token_file: Path
) -> None:
    needs.root()
    daemon = start_daemon(
        "--token-file", str(token_file),
        **planted("""
            from runnerd.daemon import tokens
            inner = tokens.Token.__init__
            kept = []
            def keeps(self, secret):
                kept.append(bytes(secret))
                inner(self, secret)
            tokens.Token.__init__ = keeps
        """),
    )  # fmt: skip
    assert in_memory(daemon.pid, TOKEN.encode())


def test_the_comparison_takes_no_longer_for_a_longer_common_beginning() -> None:
    """By hmac.compare_digest over digests; measured as a pair, medians, and only a coarse bound."""
    token = Token(bytearray(b"x" * 1024))

    def median_s(given: str) -> float:
        taken = []
        for _ in range(301):
            began = time.perf_counter()
            token.matches(given)
            taken.append(time.perf_counter() - began)
        return sorted(taken)[150]

    early, late = median_s("y" + "x" * 1023), median_s("x" * 1023 + "y")
    assert 0.5 < late / early < 2
