"""The blocking client against a real daemon."""

from __future__ import annotations

import hashlib
import time
from typing import TYPE_CHECKING, Any

import pytest

from runnerd.client.errors import ClientTimeout, RemoteError, StreamLost
from runnerd.protocol.answers import StartAnswer
from runnerd.protocol.framing import Encoding
from runnerd.protocol.notes import OutputNote
from runnerd.protocol.requests import ExecStart
from tests.harness import is_alive, wait_for

if TYPE_CHECKING:
    from collections.abc import Callable

    from tests.harness import RunnerdProcess


@pytest.mark.parametrize("encoding", list(Encoding))
def test_a_command_runs_and_both_streams_and_the_code_come_back(
    runnerd_daemon: RunnerdProcess, encoding: Encoding
) -> None:
    with runnerd_daemon.connect(encoding=encoding) as client:
        done = client.run(["sh", "-c", "printf 'a\\0\\377'; printf err >&2; exit 7"])
    assert (done.stdout, done.stderr) == (b"a\0\xff", b"err")
    assert (done.exit.code, done.exit.signal, done.exit.reason) == (7, None, "exited")


def test_a_large_input_goes_round_through_cat_byte_for_byte(
    runnerd_daemon: RunnerdProcess,
) -> None:
    data = bytes(range(256)) * 40_000
    with runnerd_daemon.connect() as client:
        done = client.run(["cat"], input=data, sha256=True)
    assert done.stdout == data
    assert done.exit.stdout.sha256 == hashlib.sha256(data).hexdigest()


def test_many_execs_share_one_connection(runnerd_daemon: RunnerdProcess) -> None:
    with runnerd_daemon.connect() as client:
        handles = [
            client.start(["sh", "-c", f"seq {at * 10000} {at * 10000 + 9999}"]) for at in range(8)
        ]
        for at, handle in reversed([*enumerate(handles)]):
            text = b"".join(note.data for note in handle.output() if isinstance(note, OutputNote))
            assert text.split() == [b"%d" % n for n in range(at * 10000, at * 10000 + 10000)]
            assert handle.exit is not None
            assert handle.exit.code == 0


def test_one_exec_whose_output_nobody_takes_holds_up_no_other(
    runnerd_daemon: RunnerdProcess,
) -> None:
    with runnerd_daemon.connect() as client:
        with client.start(["yes"]) as stuck:
            for _ in range(5):
                assert client.run(["echo", "x"]).stdout == b"x\n"
        assert stuck.exit is not None
        assert stuck.exit.reason == "cancelled"


@pytest.mark.parametrize("window_bytes", [1, 4096, 100_000, 1 << 20, 1 << 30, None])
def test_output_flows_whatever_the_window(
    runnerd_daemon: RunnerdProcess, window_bytes: int | None
) -> None:
    """A window above what the daemon keeps of one exec must not make both sides wait."""
    with runnerd_daemon.connect() as client:
        handle = client.start(["head", "-c", "2000000", "/dev/zero"], window_bytes=window_bytes)
        sizes = [len(note.data) for note in handle.output(20) if isinstance(note, OutputNote)]
    assert sum(sizes) == 2_000_000


def test_all_output_comes_though_a_wait_told_the_exit_first(
    runnerd_daemon: RunnerdProcess,
) -> None:
    """The answer overtakes what the window holds back."""
    with runnerd_daemon.connect() as client:
        handle = client.start(["head", "-c", "200000", "/dev/zero"], window_bytes=65536)
        assert handle.wait(30).code == 0
        sizes = [len(note.data) for note in handle.output(20) if isinstance(note, OutputNote)]
    assert sum(sizes) == 200_000


def test_a_request_larger_than_a_frame_is_an_error_and_costs_nothing_else(
    runnerd_daemon: RunnerdProcess,
) -> None:
    lost: list[StreamLost] = []
    with runnerd_daemon.connect(on_lost=lost.append) as client:
        with client.start(["sleep", "60"]) as other:
            with pytest.raises(RemoteError, match="the most is 4194304") as caught:
                client.run(["true"], env={"BIG": 5_000_000 * "x"}, timeout_s=20)
            assert caught.value.kind == "frame_too_large"
            assert caught.value.preserved == "nothing ran, nothing changed"
            assert other.inspect().state == "running"
    assert lost == []


def test_starts_can_be_pipelined_and_events_told_apart(runnerd_daemon: RunnerdProcess) -> None:
    with runnerd_daemon.connect() as client:
        waiting = {client.send("exec.start", ExecStart(argv=["true"])) for _ in range(50)}
        ids: list[str] = []
        while waiting:
            for event in client.receive_events(timeout_s=30):
                waiting.discard(event.request_id)  # type: ignore[union-attr]
                result = event.result  # type: ignore[union-attr]
                assert isinstance(result, StartAnswer)
                ids.append(result.exec_id)
        assert len(set(ids)) == 50
        assert all(client.wait(exec_id, timeout_s=30).code == 0 for exec_id in ids)


def test_stdin_is_written_step_by_step_and_closed(runnerd_daemon: RunnerdProcess) -> None:
    with runnerd_daemon.connect() as client, client.start(["cat"], stdin="pipe") as handle:
        output = handle.output(timeout_s=20)
        for word in (b"one", b"two"):
            handle.write(word)
            note = next(output)
            assert isinstance(note, OutputNote)
            assert note.data == word
        handle.close_stdin()
        assert list(output) == []
        with pytest.raises(RemoteError) as caught:
            handle.write(b"late")
        assert caught.value.kind in ("stdin_closed", "exec_ended")


def test_a_write_nobody_reads_times_out_and_says_how_much_is_left(
    runnerd_daemon: RunnerdProcess,
) -> None:
    with runnerd_daemon.connect() as client, client.start(["sleep", "60"], stdin="pipe") as handle:
        with pytest.raises(ClientTimeout, match="found no room"):
            handle.write(bytes(4 << 20), timeout_s=0.3)
        assert handle.exit is None


def test_a_wait_that_times_out_changes_nothing(runnerd_daemon: RunnerdProcess) -> None:
    with runnerd_daemon.connect() as client, client.start(["sleep", "60"]) as handle:
        began_s = time.monotonic()
        with pytest.raises(ClientTimeout):
            handle.wait(timeout_s=0.1)
        assert time.monotonic() - began_s < 2
        assert client.inspect(handle.exec_id).state == "running"
        handle.signal("TERM")
        assert handle.wait(timeout_s=20).signal == 15


def test_leaving_the_block_ends_the_whole_tree_of_what_it_created(
    runnerd_daemon: RunnerdProcess,
) -> None:
    with runnerd_daemon.connect() as client:
        with client.start(["sh", "-c", "sleep 60 & echo $!; wait"]) as handle:
            note = next(handle.output(20))
            assert isinstance(note, OutputNote)
            sleeper = int(note.data)
            assert is_alive(sleeper)
        assert not is_alive(sleeper)
        assert handle.exit is not None
        assert handle.exit.reason == "cancelled"


def test_leaving_the_block_of_an_attached_exec_leaves_it_alone(
    runnerd_daemon: RunnerdProcess,
) -> None:
    with runnerd_daemon.connect() as client, client.start(["sleep", "60"], attach=False) as made:
        with runnerd_daemon.connect() as other, other.attach(made.exec_id) as handle:
            assert handle.pid == made.pid
        assert client.inspect(made.exec_id).state == "running"


def test_an_exec_outlives_its_connection_and_is_replayed_to_the_next(
    runnerd_daemon: RunnerdProcess,
) -> None:
    with runnerd_daemon.connect() as client:
        made = client.start(["sh", "-c", "echo before; read x; echo after"], stdin="pipe")
        next(made.output(20))
    with runnerd_daemon.connect() as client:
        handle = client.attach(made.exec_id)
        assert handle.write(b"go\n") == 3
        text = b"".join(note.data for note in handle.output(20) if isinstance(note, OutputNote))
        assert text == b"before\nafter\n"


def test_a_missing_program_is_told_with_its_stage_and_errno(
    runnerd_daemon: RunnerdProcess,
) -> None:
    with runnerd_daemon.connect() as client, pytest.raises(RemoteError) as caught:
        client.start(["/nonexistent/program"])
    data = caught.value.data
    assert (data.kind, data.stage, data.errno_name) == ("start_failed", "exec", "ENOENT")


def test_a_killed_daemon_is_a_lost_stream_and_no_exit(runnerd_daemon: RunnerdProcess) -> None:
    with runnerd_daemon.connect() as client:
        handle = client.start(["sleep", "60"])
        runnerd_daemon.kill()
        with pytest.raises(StreamLost):
            list(handle.output())
        assert handle.exit is None
        assert handle.pid is not None
        wait_for(lambda: not is_alive(handle.pid))  # type: ignore[arg-type]


def test_a_stopped_daemon_tells_the_exit_first(runnerd_daemon: RunnerdProcess) -> None:
    with runnerd_daemon.connect() as client:
        handle = client.start(["sleep", "60"])
        client.stop()
        assert list(handle.output(20)) == []
        assert handle.exit is not None
        assert (handle.exit.reason, handle.exit.signal) == ("stopped", 15)
    assert runnerd_daemon.process.wait(5) == 0


def test_a_string_as_input_is_refused_before_anything_runs(runnerd_daemon: RunnerdProcess) -> None:
    text: Any = "b\na\n"
    with runnerd_daemon.connect() as client:
        with pytest.raises(AssertionError, match="input is bytes"):
            client.run(["cat"], input=text)
        assert client.list_execs() == []


def test_a_start_repeated_when_its_output_is_gone_says_so_with_the_exit(
    start_daemon: Callable[..., RunnerdProcess],
) -> None:
    again: dict[str, Any] = {"exec_id": "deploy", "nonce": "n-1"}
    argv = ["sh", "-c", "echo done; exit 3"]
    with start_daemon("--finished-execs-max", "1").connect() as client:
        first = client.start(argv, **again)
        assert b"".join(note.data for note in first.output(30) if hasattr(note, "data"))
        # While it is kept, its output comes again; then only how it ended.
        assert client.run(argv, timeout_s=30, **again).stdout == b"done\n"
        first.wait_closed(30)
        client.start(["true"]).wait_closed(30)
        handle = client.start(argv, **again)
        with pytest.raises(RemoteError) as caught:
            list(handle.output(30))
        assert caught.value.kind == "exec_evicted"
        assert caught.value.data.exit is not None
        assert caught.value.data.exit.code == handle.wait(30).code == 3
        with pytest.raises(RemoteError, match="deploy"):
            client.run(argv, timeout_s=30, **again)
