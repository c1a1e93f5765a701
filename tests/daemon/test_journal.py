"""What a daemon knew, the next one in the same place answers for; and what it does without that."""

from __future__ import annotations

import contextlib
import resource
import signal
import sqlite3
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import pytest

from tests.daemon.looking import last_words, log_lines, planted, seconds
from tests.harness import RunnerdProcess, is_alive, wait_for
from tests.raw import RawClient, RawError

if TYPE_CHECKING:
    from collections.abc import Callable

    Start = Callable[..., RunnerdProcess]

ARGV: Final = ["sh", "-c", 'exit "$0"', "3"]
SLOW: Final = """
import time
from runnerd.daemon.journal_file import JournalFile
write = JournalFile.write
def slow(file, rows, meta, *, anew):
    time.sleep({after_s} if rows or meta else 0)
    write(file, rows, meta, anew=anew)
JournalFile.write = slow
"""


@pytest.fixture
def place(tmp_path: Path) -> Path:
    """Where one daemon after the other lives."""
    place = tmp_path / "place"
    place.mkdir()
    return place


def kill(daemon: RunnerdProcess) -> None:
    """End it as the OOM killer does."""
    daemon.process.send_signal(signal.SIGKILL)
    daemon.process.wait(10)


def metric(client: RawClient, line: str) -> float:
    text = client.call("daemon.metrics")["text"]
    found = [each.rpartition(" ")[2] for each in text.splitlines() if each.startswith(line + " ")]
    return float(found[0]) if found else 0.0


def run(client: RawClient, exec_id: str, argv: list[str] | None = None) -> dict[str, Any]:
    """Run one command to its end; returns its exit."""
    client.call("exec.start", exec_id=exec_id, nonce="n", argv=argv or ARGV)
    return client.call("exec.wait", exec_id=exec_id, until="closed")


def wait_until_written(client: RawClient) -> None:
    """Wait until the journal has all that came before: an exit is told before it is written."""
    wait_for(lambda: client.call("exec.start", argv=["true"])["journaled"])


def refused(client: RawClient, method: str, **params: object) -> RawError:
    with pytest.raises(RawError) as caught:
        client.call(method, **params)
    return caught.value


# ---------------------------------------------------------------- what the next one knows


def test_after_a_stop_every_exec_is_answered_for(start_daemon: Start, place: Path) -> None:
    daemon = start_daemon(place=place)
    with RawClient(daemon.socket_path) as client:
        first = client.hello
        assert first["journal"]
        exits = {"done": run(client, "done"), "signalled": run(client, "signalled", KILLED)}
        started = client.call("exec.start", exec_id="stopped", argv=["sleep", "900"])
        assert started["journaled"]
        assert daemon.stop() == 0
    daemon = start_daemon(place=place)
    with RawClient(daemon.socket_path) as client:
        assert client.hello["incarnation"] != first["incarnation"]
        assert client.hello["starts"] == 3
        for exec_id, its_exit in exits.items():
            assert client.call("exec.wait", exec_id=exec_id) == its_exit
        stopped = client.call("exec.wait", exec_id="stopped", until="closed")
        assert (stopped["signal"], stopped["reason"]) == (signal.SIGTERM, "stopped")
        info = client.call("exec.inspect", exec_id="done")
        assert info["incarnation"] == first["incarnation"]
        assert info["transcript"] == "lost"
        assert info["argv"] == ARGV
        listed = client.call("exec.list")["execs"]
        assert [each["exec_id"] for each in listed] == ["done", "signalled", "stopped"]


KILLED: Final = ["sh", "-c", "kill -KILL $$"]


def test_after_a_kill_what_had_exited_is_known_and_what_ran_is_lost(
    start_daemon: Start, place: Path
) -> None:
    daemon = start_daemon(place=place)
    with RawClient(daemon.socket_path) as client:
        done = run(client, "done")
        ran = client.call("exec.start", exec_id="ran", nonce="n", argv=["sleep", "900"])
        # What a command that is long in running has told of itself is written by now.
        run(client, "after")
        wait_until_written(client)
        incarnation = client.hello["incarnation"]
        kill(daemon)
    wait_for(lambda: not is_alive(ran["pid"]))
    daemon = start_daemon(place=place)
    with RawClient(daemon.socket_path) as client:
        assert client.call("exec.wait", exec_id="done") == done
        lost = refused(client, "exec.wait", exec_id="ran")
        assert lost.kind == "exec_lost"
        assert lost.data["incarnation"] == incarnation
        assert lost.data["pid"] == ran["pid"]
        again = refused(
            client, "exec.start", exec_id="ran", nonce="n", argv=["sleep", "900"], horizon=1
        )
        assert again.kind == "exec_lost"


def test_a_start_sent_again_to_the_next_daemon_runs_nothing(
    start_daemon: Start, place: Path
) -> None:
    marker = place / "marker"
    argv = ["sh", "-c", f"echo x >> {marker}"]
    daemon = start_daemon(place=place)
    with RawClient(daemon.socket_path) as client:
        first = client.call("exec.start", exec_id="e", nonce="n", argv=argv)
        client.call("exec.wait", exec_id="e", until="closed")
        wait_until_written(client)
        kill(daemon)
    daemon = start_daemon(place=place)
    with RawClient(daemon.socket_path) as client:
        again = client.call("exec.start", exec_id="e", nonce="n", argv=argv)
        assert (again["created"], again["pid"]) == (False, first["pid"])
        other = refused(client, "exec.start", exec_id="e", nonce="other", argv=argv)
        assert (other.kind, other.data["state"]) == ("exec_exists", "settled")
    assert marker.read_text() == "x\n"


def test_a_start_that_failed_leaves_nothing_for_the_next_one(
    start_daemon: Start, place: Path
) -> None:
    daemon = start_daemon(place=place)
    with RawClient(daemon.socket_path) as client:
        for argv, cwd in ((["/nowhere"], "/"), (["true"], "/nowhere")):
            error = refused(client, "exec.start", exec_id="e", nonce="n", argv=argv, cwd=cwd)
            assert error.kind == "start_failed"
        run(client, "after")  # written behind it
        kill(daemon)
    daemon = start_daemon(place=place)
    with RawClient(daemon.socket_path) as client:
        assert refused(client, "exec.inspect", exec_id="e").kind == "exec_unknown"
        assert client.hello["starts"] == 3
        assert run(client, "e")["code"] == 3


def test_a_failed_start_is_counted_though_nothing_else_is_left(
    start_daemon: Start, place: Path
) -> None:
    daemon = start_daemon(place=place)
    with RawClient(daemon.socket_path) as client:
        refused(client, "exec.start", argv=["/nowhere"])
    assert daemon.stop() == 0
    with RawClient(start_daemon(place=place).socket_path) as client:
        assert client.hello["starts"] == 1


def test_what_is_dropped_leaves_the_journal_too(start_daemon: Start, place: Path) -> None:
    options = ("--finished-execs-max", "2", "--settled-execs-max", "3")
    daemon = start_daemon(*options, place=place)
    with RawClient(daemon.socket_path) as client:
        for at in range(8):
            run(client, f"e{at}", ["true"])
    assert daemon.stop() == 0
    with contextlib.closing(sqlite3.connect(place / "state" / "journal.sqlite")) as journal:
        kept = journal.execute("SELECT number FROM execs").fetchall()
    assert [number for (number,) in kept] == [4, 5, 6, 7, 8]
    with RawClient(start_daemon(*options, place=place).socket_path) as client:
        assert refused(client, "exec.inspect", exec_id="e0").kind == "exec_unknown"
        assert client.call("exec.wait", exec_id="e7")["code"] == 0
        late = refused(client, "exec.start", exec_id="e0", nonce="n", argv=["true"], horizon=0)
        assert late.kind == "history_lost"


# ---------------------------------------------------------------- without a journal


def check_serves_without(daemon: RunnerdProcess, why: str) -> None:
    """It runs commands, and says that nothing is written and why."""
    with RawClient(daemon.socket_path) as client:
        assert not client.hello["journal"]
        started = client.call("exec.start", exec_id="e", argv=ARGV)
        assert not started["journaled"]
        assert client.call("exec.wait", exec_id="e")["code"] == 3
        info = client.call("daemon.info")
        assert not info["journal"]
        assert why in info["journal_reason"]
        assert metric(client, 'runnerd_starts_unjournaled_total{reason="none"}') == 1
        assert metric(client, "runnerd_journal") == 0
    said = daemon.ctl("info").stdout.decode()
    assert why in said


def test_without_a_state_directory(start_daemon: Start) -> None:
    daemon = start_daemon("--state-dir", "/proc/1/nowhere")
    check_serves_without(daemon, "cannot make '/proc/1/nowhere'")
    with RawClient(daemon.socket_path) as client:
        assert client.call("daemon.info")["state_directory"] is None
    assert log_lines(daemon, "state_directory")


def test_with_a_directory_that_others_can_write(start_daemon: Start, place: Path) -> None:
    (place / "state").mkdir()
    (place / "state").chmod(0o777)
    check_serves_without(start_daemon(place=place), "can be written by others")
    assert not list((place / "state").iterdir())


def test_with_a_python_that_has_no_sqlite(start_daemon: Start, place: Path) -> None:
    daemon = start_daemon(place=place, **planted("import sys; sys.modules['sqlite3'] = None"))
    check_serves_without(daemon, "this Python has no sqlite3")
    assert last_words(place / "state")["ready_at"]


def test_a_second_daemon_in_the_same_place_leaves_it_to_the_first(
    start_daemon: Start, place: Path
) -> None:
    first = start_daemon(place=place)
    words = last_words(place / "state")
    second = start_daemon("--state-dir", str(place / "state"))
    check_serves_without(second, "another runnerd uses")
    assert second.stop() == 0
    assert last_words(place / "state") == words
    with RawClient(first.socket_path) as client:
        assert client.call("exec.start", argv=["true"])["journaled"]


def test_a_newer_journal_is_left_alone(start_daemon: Start, place: Path) -> None:
    assert start_daemon(place=place).stop() == 0
    path = place / "state" / "journal.sqlite"
    connection = sqlite3.connect(path)
    connection.execute("PRAGMA user_version=99")
    connection.close()
    before = path.read_bytes()
    daemon = start_daemon(place=place)
    check_serves_without(daemon, "has version 99 and this runnerd knows 1")
    assert daemon.stop() == 0
    assert path.read_bytes() == before


def test_a_damaged_journal_is_moved_aside_and_a_new_one_begun(
    start_daemon: Start, place: Path
) -> None:
    (place / "state").mkdir(0o700)
    (place / "state" / "journal.sqlite").write_bytes(b"nonsense" * 1000)
    daemon = start_daemon(place=place)
    (warning,) = [line["warning"] for line in log_lines(daemon, "boot_warning")
                  if "journal" in line["warning"]]  # fmt: skip
    assert "a new journal was begun" in warning
    assert len(list((place / "state").glob("journal.corrupt-*"))) == 1
    with RawClient(daemon.socket_path) as client:
        assert client.call("exec.start", argv=["true"])["journaled"]


# ---------------------------------------------------------------- a journal that fails, then works


def _few_bytes() -> None:
    # As on a full disk, for the daemon and its commands alone: a write past it is EFBIG. SQLite's
    # log passes it after a few starts, the daemon's own stays below.
    resource.setrlimit(resource.RLIMIT_FSIZE, (FEW_BYTES, resource.RLIM_INFINITY))


FEW_BYTES: Final = 64 * 1024


def test_a_journal_that_fails_costs_no_start_and_is_written_anew_later(
    start_daemon: Start, place: Path
) -> None:
    daemon = start_daemon(
        place=place,
        prepare=_few_bytes,
        **planted("from runnerd.daemon import journal; journal.RETRY_S = 0.1"),
    )
    with RawClient(daemon.socket_path) as client:

        def start_until_it_fails() -> bool:
            started = client.call("exec.start", argv=["true"])
            return not started["journaled"]

        wait_for(start_until_it_fails)
        assert run(client, "unjournaled")["code"] == 3
        info = client.call("daemon.info")
        assert not info["journal"]
        assert info["journal_reason"]
        assert any("the journal has failed" in each for each in info["warnings"])
        assert metric(client, 'runnerd_starts_unjournaled_total{reason="failed"}') >= 1
        assert metric(client, "runnerd_journal_failures_total") == 1
        assert len(log_lines(daemon, "journal_failed")) == 1
        resource.prlimit(
            daemon.pid, resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY)
        )
        wait_for(lambda: client.call("daemon.info")["journal"])
        assert len(log_lines(daemon, "journal_works_again")) == 1
        assert client.call("exec.start", argv=["true"])["journaled"]
        kill(daemon)
    with RawClient(start_daemon(place=place).socket_path) as client:
        assert client.call("exec.wait", exec_id="unjournaled")["code"] == 3


def test_a_slow_journal_costs_a_start_50_ms(start_daemon: Start, place: Path) -> None:
    daemon = start_daemon(place=place, **planted(SLOW.format(after_s=0.6)))
    with RawClient(daemon.socket_path) as client:
        took_s, started = seconds(lambda: client.call("exec.start", exec_id="e", argv=ARGV))
        assert not started["journaled"]
        assert 0.05 <= took_s < 0.5
        assert client.call("exec.wait", exec_id="e")["code"] == 3
        assert metric(client, 'runnerd_starts_unjournaled_total{reason="slow"}') == 1
        assert client.call("daemon.info")["journal"]
    assert daemon.stop() == 0
    with RawClient(start_daemon(place=place).socket_path) as client:  # late is not never
        assert client.call("exec.wait", exec_id="e")["code"] == 3


def test_a_start_cancelled_while_it_waits_for_the_journal_never_runs(
    start_daemon: Start, place: Path
) -> None:
    marker = place / "marker"
    long = "from runnerd.daemon import starting; starting.JOURNAL_WAIT_S = 30\n"
    daemon = start_daemon(place=place, **planted(long + SLOW.format(after_s=0.3)))
    with RawClient(daemon.socket_path) as client:
        start = client.send("exec.start", exec_id="e", nonce="n", argv=["touch", str(marker)])
        cancel = client.send("exec.cancel", exec_id="e")
        with pytest.raises(RawError) as caught:
            client.answer(start)
        assert caught.value.kind == "cancelled"
        client.answer(cancel)
        again = refused(client, "exec.start", exec_id="e", nonce="n", argv=["touch", str(marker)])
        assert again.kind == "cancelled"
    assert daemon.stop() == 0
    assert not marker.exists()


def test_a_journal_that_hangs_delays_neither_starts_for_ever_nor_the_stop(
    start_daemon: Start, place: Path
) -> None:
    quick = "from runnerd.daemon import journal; journal.HUNG_S = 0.2\n"
    daemon = start_daemon(place=place, **planted(quick + SLOW.format(after_s=900)))
    with RawClient(daemon.socket_path) as client:

        def failed() -> bool:
            assert not client.call("exec.start", argv=["true"])["journaled"]
            return not client.call("daemon.info")["journal"]

        wait_for(failed)
        assert "the disk hangs" in client.call("daemon.info")["journal_reason"]
        took_s, _ = seconds(lambda: client.call("exec.start", argv=["true"]))
        assert took_s < 0.05
    took_s, code = seconds(daemon.stop)
    assert code == 0
    assert took_s < 2.1
    assert log_lines(daemon, "journal_failed")[-1]["reason"] == "it was not written in time"


def test_a_journal_that_hangs_is_said_to_though_no_start_comes(
    start_daemon: Start, place: Path
) -> None:
    """An exit waits for nothing, so only the next start noticed."""
    hang = place / "hang"
    daemon = start_daemon(
        place=place,
        **planted(f"""
            import os, time
            from runnerd.daemon import journal, pulse
            from runnerd.daemon.journal_file import JournalFile
            journal.HUNG_S, pulse.PULSE_S, pulse.IDLE_PULSE_S = 0.3, 0.1, 0.1
            write = JournalFile.write
            def held(file, rows, meta, *, anew):
                while os.path.exists({str(hang)!r}):
                    time.sleep(0.01)
                write(file, rows, meta, anew=anew)
            JournalFile.write = held
        """),
    )
    with RawClient(daemon.socket_path) as client:
        client.call("exec.start", exec_id="e", argv=["cat"], stdin="pipe")
        wait_until_written(client)
        hang.touch()
        client.call("exec.write", exec_id="e", eof=True)
        client.call("exec.wait", exec_id="e", until="closed")
        wait_for(lambda: not client.call("daemon.info")["journal"])
        assert "the disk hangs" in client.call("daemon.info")["journal_reason"]
        (trouble,) = client.call("daemon.health")["degraded"]
        assert trouble["kind"] == "journal_off"
        assert metric(client, "runnerd_journal_failures_total") == 1
        with RawClient(daemon.socket_path) as other:
            assert other.hello["journal"] is False
        hang.unlink()


def test_a_defect_of_the_writer_is_an_uncaught_error(start_daemon: Start, place: Path) -> None:
    daemon = start_daemon(
        place=place,
        **planted(
            """
            from runnerd.daemon.journal_file import JournalFile
            def write(*args, **named):
                raise AttributeError('planted')
            JournalFile.write = write
            """
        ),
    )
    with RawClient(daemon.socket_path) as client:
        client.send("exec.start", argv=["true"])
        assert daemon.process.wait(10) == 70
    assert "planted" in log_lines(daemon, "uncaught_error")[0]["error"]


def test_the_loop_does_not_wait_for_the_disk(start_daemon: Start, place: Path) -> None:
    daemon = start_daemon(place=place, **planted(SLOW.format(after_s=1.0)))
    with RawClient(daemon.socket_path) as client, RawClient(daemon.socket_path) as other:
        client.send("exec.start", argv=["true"])
        until_s = time.monotonic() + 0.5
        worst_s = 0.0
        while time.monotonic() < until_s:
            worst_s = max(worst_s, seconds(lambda: other.call("ping"))[0])
        assert worst_s < 0.4


def test_neither_file_nor_memory_grows_with_the_number_of_execs(
    start_daemon: Start, place: Path
) -> None:
    options = ("--finished-execs-max", "4", "--settled-execs-max", "8")
    daemon = start_daemon(*options, place=place)
    with RawClient(daemon.socket_path) as client:
        for _ in range(300):
            client.call("exec.start", argv=["true"], labels={"x": "y" * 200})
        wait_for(lambda: not client.call("daemon.info")["live_execs"])
    size = sum(path.stat().st_size for path in (place / "state").iterdir())
    assert size < 3 * 1024 * 1024
    assert daemon.stop() == 0
    assert (place / "state" / "journal.sqlite").stat().st_size < 100 * 1024


def test_a_state_directory_that_was_taken_away_is_no_journal(
    start_daemon: Start, place: Path
) -> None:
    """The next daemon would find nothing: to call a start journaled were a lie."""
    daemon = start_daemon(place=place)
    with RawClient(daemon.socket_path) as client:
        assert client.call("exec.start", exec_id="before", argv=["true"])["journaled"] is True
        (place / "state").rename(place / "moved")
        assert client.call("exec.start", exec_id="after", argv=["true"])["journaled"] is False
        (warning,) = client.call("daemon.info")["warnings"]
        assert "journal.sqlite" in warning
        assert client.call("daemon.info")["stray_failures"] == 0
