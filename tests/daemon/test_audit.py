"""--audit: each change asked for is one line, without secrets, whatever the disk does."""

from __future__ import annotations

import os
import stat
import subprocess
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from runnerd.core.fence import CHANGES
from runnerd.core.redaction import HIDDEN
from runnerd.daemon.options import EX_CONFIG
from tests import needs
from tests.daemon.looking import log_lines, planted, whole_lines
from tests.harness import REPOSITORY, RUNNERD, RunnerdProcess, wait_for
from tests.raw import RawClient, RawError

if TYPE_CHECKING:
    from collections.abc import Callable

    Start = Callable[..., RunnerdProcess]

SECRET = "Zq7-s3cr3t-Zq7"


def told(path: Path, count: int) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = wait_for(
        lambda: lines if path.exists() and len(lines := whole_lines(path)) >= count else None
    )
    return found


def test_each_change_is_one_line_and_no_read_is(start_daemon: Start, tmp_path: Path) -> None:
    path = tmp_path / "audit"
    daemon = start_daemon("--audit", str(path))
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    with RawClient(daemon.socket_path, hello=False) as client:
        client.call("hello", protocol=[1], client="the-owner", fence=5, token=SECRET)
        for method in ("ping", "exec.list", "daemon.info", "daemon.metrics"):
            client.call(method)
        client.call("exec.start", exec_id="e", argv=["cat"], stdin="pipe", env={"A_TOKEN": SECRET})
        client.call("exec.attach", exec_id="e")  # a nameless one is a read
        client.call("exec.attach", exec_id="e", subscriber="me")
        client.call("exec.write", exec_id="e", data=SECRET.encode())
        client.call("exec.inspect", exec_id="e")
        with pytest.raises(RawError):
            client.call("exec.signal", exec_id="none", signal="TERM")
        with pytest.raises(RawError):
            client.call("exec.start", argv=["/nonexistent"])
        with pytest.raises(RawError):
            client.call("exec.start", argv=[SECRET], nonsense=SECRET)
        client.call("exec.cancel", exec_id="e", grace_s=0)
        client.call("env.set", set={"API_KEY": SECRET})
        with RawClient(daemon.socket_path) as other, pytest.raises(RawError):
            other.call("daemon.drain")  # without the fence
        client.call("daemon.stop")
    daemon.process.wait(10)
    lines = whole_lines(path)
    assert [(line["method"], line["result"]) for line in lines] == [
        ("hello", "ok"), ("exec.start", "ok"), ("exec.attach", "ok"), ("exec.write", "ok"),
        ("exec.signal", "exec_unknown"), ("exec.start", "start_failed"),
        ("exec.start", "invalid_params"), ("exec.cancel", "ok"), ("env.set", "ok"),
        ("daemon.drain", "fenced"), ("daemon.stop", "ok"),
    ]  # fmt: skip
    start, write = lines[1], lines[3]
    assert (start["pid"], start["uid"], start["gid"]) == (os.getpid(), os.getuid(), os.getgid())
    assert (start["client"], start["fence"], start["exec_id"]) == ("the-owner", 5, "e")
    assert start["params"]["env"] == {"A_TOKEN": HIDDEN}
    assert abs(start["at"] - time.time()) < 60
    assert write["params"] == {"exec_id": "e", "data_bytes": len(SECRET)}
    assert lines[6]["params"] is None
    assert len({line["connection"] for line in lines}) == 2
    assert SECRET not in path.read_text()


def test_every_method_that_changes_something_is_one_of_the_table() -> None:
    """The audit asks the fence's table, which a test of its own holds complete."""
    assert {method for method, is_change in CHANGES.items() if is_change} >= {
        "exec.start", "exec.write", "exec.signal", "exec.cancel", "exec.forget", "env.set",
        "daemon.drain", "daemon.undrain", "daemon.stop",
    }  # fmt: skip


def test_a_change_whose_connection_ends_before_its_answer_is_told(
    start_daemon: Start, tmp_path: Path
) -> None:
    path = tmp_path / "audit"
    daemon = start_daemon("--audit", str(path))
    with RawClient(daemon.socket_path) as client:
        argv = ["sh", "-c", "trap '' TERM; echo up; sleep 900"]
        client.call("exec.start", exec_id="e", argv=argv, attach={})
        client.note("exec.output", "e")
        client.send("exec.cancel", exec_id="e", grace_s=900)
        client.call("ping")
    line = told(path, 2)[1]
    assert (line["method"], line["exec_id"], line["result"]) == ("exec.cancel", "e", "unanswered")
    with RawClient(daemon.socket_path) as client:
        client.call("exec.cancel", exec_id="e", grace_s=0)


def test_further_names_can_be_hidden(start_daemon: Start, tmp_path: Path) -> None:
    path = tmp_path / "audit"
    daemon = start_daemon(
        "--audit", str(path), "--audit-redact", "MINE_*", env={"RUNNERD_AUDIT_REDACT": "A1,A2"}
    )
    with RawClient(daemon.socket_path) as client:
        names = ("MINE_X", "A1", "A2")
        client.call("env.set", set={**dict.fromkeys(names, SECRET), "OTHER": "seen"})
    (line,) = told(path, 1)
    assert line["params"]["set"] == {**dict.fromkeys(names, HIDDEN), "OTHER": "seen"}


def test_a_file_that_was_rotated_is_begun_anew(start_daemon: Start, tmp_path: Path) -> None:
    path = tmp_path / "audit"
    daemon = start_daemon("--audit", str(path))
    with RawClient(daemon.socket_path) as client:
        client.call("daemon.drain")
        told(path, 1)
        path.rename(tmp_path / "audit.1")
        client.call("daemon.undrain")
        assert [line["method"] for line in told(path, 1)] == ["daemon.undrain"]
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
        os.truncate(path, 0)  # copytruncate: appended at the new end, without a hole
        client.call("daemon.drain")
        told(path, 1)
        client.call("daemon.undrain")
        assert [line["method"] for line in told(path, 2)] == ["daemon.drain", "daemon.undrain"]
    assert [line["method"] for line in whole_lines(tmp_path / "audit.1")] == ["daemon.drain"]


@pytest.mark.parametrize("what", ["link", "fifo", "directory", "open to others", "no folder"])
def test_a_file_that_is_not_safe_is_refused(tmp_path: Path, what: str) -> None:
    path = tmp_path / "audit"
    if what == "link":
        path.symlink_to(tmp_path / "elsewhere")
    elif what == "fifo":
        os.mkfifo(path)
    elif what == "directory":
        path.mkdir()
    elif what == "open to others":
        path.touch()
        path.chmod(0o666)
    else:
        path = tmp_path / "none" / "audit"
    done = subprocess.run(
        [*RUNNERD, "serve", "--socket", str(tmp_path / "s"), "--audit", str(path)],
        cwd=REPOSITORY, capture_output=True, text=True, timeout=20, check=False,
    )  # fmt: skip
    assert done.returncode == EX_CONFIG
    assert done.stderr.startswith("runnerd: --audit: cannot open")
    assert not (tmp_path / "elsewhere").exists()


def test_a_full_disk_loses_lines_that_are_counted_and_told(
    start_daemon: Start, tmp_path: Path
) -> None:
    """A real one: a tmpfs of two pages, one of which is freed again."""
    needs.root()
    place = tmp_path / "small"
    place.mkdir()
    filled = f"mount -t tmpfs -o size=8k none {place} && head -c 4096 /dev/zero >{place}/filler"
    mount = f'{filled} && exec "$@"'
    daemon = start_daemon(
        "--audit", str(place / "audit"), wrapper=("unshare", "-m", "sh", "-c", mount, "sh")
    )
    inside = Path(f"/proc/{daemon.pid}/root{place}")
    with RawClient(daemon.socket_path) as client:
        sent = 0
        while not any(
            "audit has failed" in each for each in client.call("daemon.info")["warnings"]
        ):
            client.call("env.set", set={"NUMBER": str(sent)})
            sent += 1
        (inside / "filler").unlink()
        client.call("daemon.drain")
        written = inside / "audit"
        wait_for(
            lambda: [each.get("method") for each in whole_lines(written)[-1:]] == ["daemon.drain"]
        )
        lines = whole_lines(written)  # each is whole: half a line was taken back
        # A short batch may find room where a longer one has not, so there may be several gaps.
        lost = sum(line["lost"] for line in lines if "lost" in line)
        assert lost > 0
        assert sum("method" in line for line in lines) + lost == sent + 1
        numbers = [int(line["params"]["set"]["NUMBER"]) for line in lines if line.get("params")]
        assert numbers == sorted(set(numbers))
        text = client.call("daemon.metrics")["text"]
        assert f"runnerd_audit_lines_lost_total {lost}.0" in text
        assert not any("audit" in each for each in client.call("daemon.info")["warnings"])
    failed, again = log_lines(daemon, "audit_failed"), log_lines(daemon, "audit_works_again")
    assert {line["reason"] for line in failed} == {"No space left on device"}
    assert len(again) == len(failed)
    assert sum(line["lost"] for line in again) == lost


def test_a_disk_that_hangs_holds_nobody_up_and_takes_no_memory(
    start_daemon: Start, tmp_path: Path
) -> None:
    path, gate = tmp_path / "audit", tmp_path / "gate"
    daemon = start_daemon(
        "--audit", str(path),
        **planted(f"""
            import os, time
            from runnerd.daemon import audit, audit_file, disk
            disk.DISK_HUNG_S = 0.2
            audit.WAITING_MAX = 50
            inner = audit_file.AuditFile.append
            def hangs(self, batch, lost):
                while not os.path.exists({str(gate)!r}):
                    time.sleep(0.01)
                inner(self, batch, lost)
            audit_file.AuditFile.append = hangs
        """),
    )  # fmt: skip
    with RawClient(daemon.socket_path) as client:
        for number in range(200):
            client.call("env.set", set={"NUMBER": str(number)})
        wait_for(lambda: log_lines(daemon, "audit_failed"))
        assert "runnerd_audit_lines_lost_total 149.0" in client.call("daemon.metrics")["text"]
        gate.touch()
        lines = told(path, 52)
        assert [line["lost"] for line in lines if "lost" in line] == [149]
        assert len(lines) == 52
    # The stop waits for it no longer than it may.
    gate.unlink()
    with RawClient(daemon.socket_path) as client:
        client.call("daemon.drain")
    began_s = time.monotonic()
    assert daemon.stop() == 0
    assert time.monotonic() - began_s < 5
