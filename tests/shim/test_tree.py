"""Signals and the ladder: who gets what, who is left, and what is said about it."""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
import signal
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from runnerd.protocol.job import pack_job
from runnerd.protocol.shimwire import (
    Empty,
    Ending,
    Exited,
    Failed,
    Killed,
    Killing,
    Signalled,
    SignalledProcess,
    Started,
    Survivor,
    Survivors,
    Termed,
)
from tests.shim import seccomp
from tests.shim.conftest import SOURCE
from tests.shim.harness import Shim, is_alive, job, proc_field, wait_until
from tests.shim.needs import need, need_root

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from tests.shim.conftest import Mutant, Start

# The leader, one child in its group, and one that has left the session.
FAMILY = "sleep 1001 & setsid sleep 1002 & exec sleep 1003"


def children(pid: int) -> list[int]:
    with contextlib.suppress(OSError):
        return [int(word) for word in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    return []


def family(shim: Shim) -> tuple[int, int, int]:
    """Start FAMILY: the pids of leader, group member and session leaver, all in place."""
    leader = shim.start(job("sh", "-c", FAMILY)).pid
    wait_until(lambda: proc_field(leader, "Name") == "sleep")
    wait_until(lambda: [proc_field(pid, "Name") for pid in children(leader)] == ["sleep"] * 2)
    member, leaver = children(leader)
    wait_until(lambda: os.getsid(leaver) == leaver)
    return leader, member, leaver


def settle(*pids: int) -> None:
    wait_until(lambda: not any(is_alive(pid) for pid in pids), f"the end of {pids}")


# ----------------------------------------------------------------------------------- signal


@pytest.mark.parametrize(
    ("scope", "count", "dead"),
    [("command", 1, (0,)), ("group", 2, (0, 1)), ("tree", 3, (0, 1, 2))],
)
def test_a_signal_reaches_its_scope(
    shim: Shim, scope: str, count: int, dead: tuple[int, ...]
) -> None:
    pids = family(shim)
    shim.signal(signal.SIGUSR1, scope)  # type: ignore[arg-type]
    assert shim.wait_for(Signalled) == Signalled(signal.SIGUSR1, count, 0)
    exited = shim.wait_for(Exited)
    assert (exited.kind, exited.value) == ("kill", signal.SIGUSR1)
    settle(*[pids[i] for i in dead])
    assert [is_alive(pid) for pid in pids] == [i not in dead for i in range(3)]


def test_after_the_leaders_reap_the_group_is_still_reached(shim: Shim) -> None:
    leader, member, leaver = family(shim)
    shim.signal(signal.SIGKILL, "command")
    assert shim.wait_for(Signalled) == Signalled(signal.SIGKILL, 1, 0)
    shim.wait_for(Exited)
    wait_until(lambda: proc_field(leader, "State") is None, "the reap")
    shim.signal(signal.SIGKILL, "command")
    assert shim.wait_for(Signalled) == Signalled(signal.SIGKILL, 0, errno.ESRCH)
    assert is_alive(member)
    shim.signal(signal.SIGKILL, "group")
    assert shim.wait_for(Signalled) == Signalled(signal.SIGKILL, 1, 0)
    settle(member)
    assert is_alive(leaver)
    shim.signal(signal.SIGKILL, "group")
    assert shim.wait_for(Signalled) == Signalled(signal.SIGKILL, 0, errno.ESRCH)


def test_no_signal_before_the_job(shim: Shim) -> None:
    shim.signal(signal.SIGKILL, "tree")
    assert shim.wait_for(Signalled) == Signalled(signal.SIGKILL, 0, errno.ESRCH)
    shim.start(job("true"))


@pytest.mark.parametrize(
    "text", [b"signal 0 tree", b"signal 65 tree", b"signal 9 all", b"signal x"]
)
def test_a_signal_that_cannot_be_is_refused(shim: Shim, text: bytes) -> None:
    shim.start(job("sleep", "99"))
    shim.send(text)
    assert shim.wait_for(Signalled).errno == errno.EINVAL


def test_what_is_no_message_is_ignored(shim: Shim) -> None:
    for text in [
        b"x",
        b"end",
        b"end x",
        b"end 1x",
        b"end -1",
        b"\xff" * 400,
        b"jo",
        b"end " + b"9" * 99,
    ]:
        shim.send(text)
    shim.start(job("sleep", "99"))
    shim.send(b"job")  # a second one
    shim.signal(signal.SIGUSR2, "command")
    assert shim.wait_for(Exited).value == signal.SIGUSR2


def test_another_users_process_is_said_to_be_refused(start: Start) -> None:
    """The shim without any right over root's process: EPERM, by pidfd and by kill alike."""
    shim = start(prepare=lambda: seccomp.refuse(errno.EPERM, seccomp.KILL))
    shim.start(job("sleep", "99"))
    shim.signal(signal.SIGUSR1, "command")
    assert shim.wait_for(Signalled) == Signalled(signal.SIGUSR1, 0, errno.EPERM)
    os.kill(shim.heard(Started)[0].pid, signal.SIGKILL)


# -------------------------------------------------------------------------------------- end


def test_term_reaches_everyone_once_and_the_receipt_says_who(shim: Shim) -> None:
    leader, member, leaver = family(shim)
    shim.end(60_000)
    ending, termed = shim.next(), shim.next()
    assert ending == Ending(60_000, "default")
    assert termed == Termed(
        3,
        0,
        (
            SignalledProcess(leader, "g", "c"),
            SignalledProcess(member, "g", "c"),
            SignalledProcess(leaver, "x", "c"),
        ),
    )
    shim.wait_for(Empty)
    assert not shim.heard(Killed)
    assert shim.wait() == 0


def test_a_zombie_counts_as_gone(shim: Shim) -> None:
    leader, member, leaver = family(shim)
    os.kill(member, signal.SIGKILL)
    wait_until(lambda: (proc_field(member, "State") or "")[:1] == "Z")
    shim.end(60_000)
    termed = shim.wait_for(Termed)
    assert (termed.total, termed.gone) == (2, 1)
    assert [process.pid for process in termed.processes] == [leader, leaver]


def test_what_ignores_term_is_killed_after_the_grace(shim: Shim) -> None:
    leader = shim.start(job("sh", "-c", "trap '' TERM; sleep 1001 & exec sleep 1002")).pid
    wait_until(lambda: proc_field(leader, "Name") == "sleep" and len(children(leader)) == 1)
    began = time.monotonic()
    shim.end(300)
    exited = shim.wait_for(Exited)
    assert 0.3 <= time.monotonic() - began < 1.0
    assert (exited.kind, exited.value) == ("kill", signal.SIGKILL)
    shim.wait_for(Empty)
    assert shim.heard(Termed)[0].total == 2
    assert shim.heard(Killed)[0].total == 2
    assert not shim.heard(Survivors)


def test_a_grace_of_zero_sends_no_term(shim: Shim) -> None:
    family(shim)
    shim.end(0)
    shim.wait_for(Empty)
    assert shim.heard(Ending) == [Ending(0, "default")]
    assert len(shim.heard(Killing)) == 1
    assert not shim.heard(Termed)
    assert shim.heard(Killed)[0].total == 3
    assert shim.heard(Exited)[0].value == signal.SIGKILL


@pytest.mark.parametrize(
    ("script", "leader"),
    [
        ("exec sleep 1001", "default"),
        ("trap '' TERM; exec sleep 1001", "caught"),
        ("trap : TERM; sleep 1001 & wait", "caught"),
    ],
)
def test_the_receipt_says_what_term_meets_in_the_command(
    shim: Shim, script: str, leader: str
) -> None:
    """Only where TERM has its default action is an exit by code certainly the command's own."""
    pid = shim.start(job("sh", "-c", script)).pid
    wait_until(lambda: proc_field(pid, "Name") == "sleep" or len(children(pid)) == 1)
    shim.end(100)
    assert shim.wait_for(Ending).leader == leader
    shim.wait_for(Empty)


def test_an_exit_that_came_before_the_end_is_told_before_it(shim: Shim) -> None:
    """Else a natural exit would be taken for the answer to an end that crossed it."""
    pid = shim.start(job("sh", "-c", "sleep 1001 & exit 4")).pid
    wait_until(lambda: not is_alive(pid))
    shim.end(0)
    shim.wait_for(Empty)
    words = [type(message) for message in shim.said]
    assert words.index(Exited) < words.index(Ending)
    assert shim.heard(Ending) == [Ending(0, "gone")]


def test_killing_is_said_before_the_first_kill(shim: Shim) -> None:
    """So that an exit by KILL is known as ours before it is told."""
    pid = shim.start(job("sh", "-c", "trap '' TERM; exec sleep 1001")).pid
    wait_until(lambda: proc_field(pid, "Name") == "sleep")
    shim.end(50)
    shim.wait_for(Empty)
    words = [type(message) for message in shim.said]
    assert words.index(Ending) < words.index(Killing) < words.index(Exited) < words.index(Killed)


TALLY = "trap 'echo t' TERM; echo r; while :; do sleep 0.01; done"


def test_a_later_end_brings_kill_nearer_and_repeats_no_term(shim: Shim) -> None:
    read_fd, write_fd = os.pipe()
    shim.start(job("sh", "-c", TALLY), [read_fd, write_fd])
    os.close(write_fd)
    assert os.read(read_fd, 2) == b"r\n"
    shim.end(60_000)
    shim.wait_for(Termed)
    shim.end(90_000)
    assert 50_000 < shim.wait_for(Ending).grace_ms <= 60_000  # never farther
    assert os.read(read_fd, 2) == b"t\n"
    shim.end(50)
    assert shim.wait_for(Ending).grace_ms <= 50
    assert shim.wait_for(Exited).value == signal.SIGKILL
    shim.wait_for(Empty)
    assert os.read(read_fd, 100) == b""
    os.close(read_fd)
    assert len(shim.heard(Termed)) == 1


def test_an_end_of_zero_cuts_the_grace_short(shim: Shim) -> None:
    pid = shim.start(job("sh", "-c", "trap '' TERM; exec sleep 1001")).pid
    wait_until(lambda: proc_field(pid, "Name") == "sleep")
    shim.end(60_000)
    shim.end(0)
    shim.wait_for(Empty)
    assert [ending.grace_ms for ending in shim.heard(Ending)] == [60_000, 0]


def end_before_the_child_runs(shim: Shim) -> int:
    """Have the shim read a job and its end at once, with its child kept from the processor."""
    (child,) = children(shim.pid)
    for pid in (shim.pid, child):
        os.sched_setaffinity(pid, {min(os.sched_getaffinity(0))})
    os.sched_setscheduler(child, os.SCHED_IDLE, os.sched_param(0))
    os.kill(shim.pid, signal.SIGSTOP)
    wait_until(lambda: (proc_field(shim.pid, "State") or "")[:1] == "T")
    shim.give(pack_job(job("sleep", "1001")))
    shim.end(3_000)
    os.kill(shim.pid, signal.SIGCONT)
    return child


def test_a_term_right_behind_the_job_is_not_lost(shim: Shim) -> None:
    """The parked child ignores TERM; KILL after the grace was all that was left."""
    child = end_before_the_child_runs(shim)
    shim.wait_for(Empty)
    assert not shim.heard(Killing)
    assert [[each.pid for each in termed.processes] for termed in shim.heard(Termed)] == [[child]]
    ends = [exited.value for exited in shim.heard(Exited)]
    assert ends == [signal.SIGTERM] or [each.stage for each in shim.heard(Failed)] == ["killed"]


def test_the_twin_that_does_not_wait_for_the_child_loses_the_term(
    start: Start, mutant: Mutant
) -> None:
    shim = start(mutant("phase == STARTING && !report->hears_term", "false"))
    end_before_the_child_runs(shim)
    shim.wait_for(Empty)
    assert shim.heard(Killing)


CONT_AFTER_TERM = "signal_process(&tree[i], SIGTERM, SIGCONT)"
STOPPED = "sleep 1001 & kill -STOP $!; exec sleep 1002"


def stop_family(shim: Shim) -> int:
    leader = shim.start(job("sh", "-c", STOPPED)).pid
    wait_until(lambda: [(proc_field(p, "State") or "")[:1] for p in children(leader)] == ["T"])
    return children(leader)[0]


def test_a_stopped_process_sees_the_term(shim: Shim) -> None:
    stop_family(shim)
    shim.end(60_000)
    shim.wait_for(Empty)
    assert not shim.heard(Killed)


def test_the_twin_without_cont_leaves_it_to_kill(start: Start, mutant: Mutant) -> None:
    shim = start(mutant(CONT_AFTER_TERM, "signal_process(&tree[i], SIGTERM, 0)"))
    stop_family(shim)
    shim.end(200)
    shim.wait_for(Empty)
    assert shim.heard(Killed)[0].total == 1


def test_nothing_is_signalled_when_the_leader_exits_by_itself(shim: Shim) -> None:
    shim.start(job("sh", "-c", "sleep 1001 & setsid sleep 1002 & sleep 0.05"))
    shim.wait_for(Exited)
    wait_until(lambda: len(children(shim.pid)) == 2)  # the leader is reaped after the word
    left = children(shim.pid)
    assert all(is_alive(pid) for pid in left)
    shim.end(60_000)
    shim.wait_for(Empty)
    assert shim.heard(Termed)[0].total == 2
    assert len(shim.heard(Exited)) == 1


def test_the_end_of_the_last_leftover_is_seen(shim: Shim) -> None:
    shim.start(job("sh", "-c", "(sleep 0.2; exit 7) & exit 3"))
    assert shim.wait_for(Exited).value == 3
    shim.wait_for(Empty)
    assert shim.wait() == 0


# ------------------------------------------------------------------------------- the subreaper

DAEMON = "setsid sh -c 'sleep 1001 & exec sleep 1002' & sleep 0.1"


def test_daemons_are_found(shim: Shim) -> None:
    shim.start(job("sh", "-c", DAEMON))
    shim.wait_for(Exited)
    shim.end(60_000)
    termed = shim.wait_for(Termed)
    assert [process.place for process in termed.processes] == ["x", "x"]
    shim.wait_for(Empty)


def test_the_twin_without_a_subreaper_loses_them(start: Start) -> None:
    pr_set_child_subreaper = 36
    shim = start(
        prepare=lambda: seccomp.refuse(
            errno.EPERM, seccomp.PRCTL, first_argument=pr_set_child_subreaper
        )
    )
    shim.start(job("sh", "-c", "setsid sleep 1009 & echo"))
    shim.wait_for(Exited)
    shim.wait_for(Empty)  # and yet it lives, as a child of this test process

    def lost() -> list[int]:  # its command line is empty for a moment, while it execs
        return [pid for pid in children(os.getpid()) if proc_field(pid, "Name") == "sleep"]

    wait_until(lambda: len(lost()) == 1)
    (pid,) = lost()
    assert b"1009" in Path(f"/proc/{pid}/cmdline").read_bytes()
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)


@pytest.mark.parametrize("program", [["runner"], ["spreader", "10000"]])
def test_processes_that_fork_while_being_killed(
    start: Start, members: Path, pids_group: Path, program: list[str]
) -> None:
    """Twenty of twenty: nothing of them is left, and within the bound of one second."""
    (pids_group / "pids.max").write_text("100")
    for n in range(20):
        shim = start(prepare=lambda: (pids_group / "cgroup.procs").write_text("0"))
        shim.start(job(members / program[0], *program[1:]))
        time.sleep(n * 0.005)  # spreads the moments, waits for nothing
        shim.end(0)
        shim.wait_for(Empty)
        assert not shim.heard(Survivors)
        assert shim.wait() == 0
        assert (pids_group / "cgroup.procs").read_text() == ""


def test_a_fork_bomb_at_the_pids_limit_is_ended(
    start: Start, members: Path, pids_group: Path
) -> None:
    """It may outlive the bound, for its failing forks take both processors; not the chase."""
    (pids_group / "pids.max").write_text("200")
    shim = start(prepare=lambda: (pids_group / "cgroup.procs").write_text("0"))
    shim.start(job(members / "spreader", "1000"))
    wait_until(lambda: len((pids_group / "cgroup.procs").read_text().split()) == 200)
    shim.end(0)
    shim.wait_for(Empty)
    assert shim.wait() == 0
    assert (pids_group / "cgroup.procs").read_text() == ""


def as_nobody() -> None:
    os.setgroups([])
    os.setresgid(65534, 65534, 65534)
    os.setresuid(65534, 65534, 65534)


@pytest.fixture
def other_user(members: Path) -> Iterator[Path]:
    """A setuid root program where another user may run it."""
    need_root()
    directory = Path(tempfile.mkdtemp(prefix="rd-setuid-"))
    directory.chmod(0o755)
    need(not os.statvfs(directory).f_flag & os.ST_NOSUID, "a temporary directory without nosuid")
    program = directory / "other_user"
    shutil.copy(members / "other_user", program)
    program.chmod(0o4755)
    yield program
    shutil.rmtree(directory)


def test_what_kill_cannot_end_is_a_survivor(start: Start, other_user: Path) -> None:
    shim = start(prepare=as_nobody)
    leader = shim.start(job("sh", "-c", '"$0" & sleep 1001', other_user)).pid
    wait_until(lambda: len(children(leader)) == 2)
    survivor = next(pid for pid in children(leader) if proc_field(pid, "Name") != "sleep")
    wait_until(lambda: (proc_field(survivor, "Uid") or "").split() == ["0"] * 4)
    began = time.monotonic()
    shim.end(0)
    assert shim.wait_for(Exited).value == signal.SIGKILL  # the others do not wait for it
    assert shim.wait_for(Survivors) == Survivors(1, (Survivor(survivor, "user"),))
    assert 1.0 <= time.monotonic() - began < 2.0
    assert survivor not in [process.pid for process in shim.heard(Killed)[0].processes]
    shim.end(5000)
    assert shim.wait_for(Ending) == Ending(0, "gone")
    assert is_alive(survivor)
    os.kill(survivor, signal.SIGKILL)
    shim.wait_for(Empty)
    assert len(shim.heard(Survivors)) == 1
    assert shim.wait() == 0


# ------------------------------------------------------------------- hang-up, lifeline, races


def hang_up(shim: Shim) -> None:
    shim.control.close()


def end_lifeline(shim: Shim) -> None:
    shim.lifeline.close()


@pytest.mark.parametrize("how", [hang_up, end_lifeline])
def test_the_end_of_either_socket_ends_the_tree(shim: Shim, how: Callable[[Shim], None]) -> None:
    pids = family(shim)
    how(shim)
    assert shim.wait() == 0
    assert not any(is_alive(pid) for pid in pids)


def test_the_lifelines_end_gives_a_grace_of_1500_ms(shim: Shim) -> None:
    pid = shim.start(job("sh", "-c", "trap '' TERM; exec sleep 1001")).pid
    wait_until(lambda: proc_field(pid, "Name") == "sleep")
    shim.lifeline.close()
    assert shim.wait_for(Ending) == Ending(1500, "caught")
    shim.end(100)
    shim.wait_for(Empty)


def test_a_shutdown_lifeline_is_an_ended_one(shim: Shim) -> None:
    shim.start(job("sleep", "1001"))
    shim.lifeline.shutdown(2)
    shim.wait_for(Empty)


@pytest.mark.parametrize("how", [hang_up, end_lifeline])
def test_either_ends_a_parked_shim(shim: Shim, how: Callable[[Shim], None]) -> None:
    how(shim)
    assert shim.wait() == 0
    assert proc_field(shim.said[0].pid, "State") is None  # type: ignore[union-attr]


def test_what_was_said_before_a_hang_up_is_still_read(shim: Shim, tmp_path: Path) -> None:
    """The shim's own messages unread makes the close a reset, which must not hide the job."""
    mark = tmp_path / "ran"
    for _ in range(20):
        shim.signal(signal.SIGUSR1, "tree")
    shim.give(pack_job(job("touch", mark)))
    shim.signal(signal.SIGCONT, "tree")
    shim.control.close()
    assert shim.wait() == 0


def test_cancel_racing_the_exit(start: Start) -> None:
    """Fifty times: one exit, one end, and never a hang, whoever wins."""
    outcomes = set()
    for n in range(50):
        shim = start()
        shim.start(job("sh", "-c", "sleep 0.002"))
        time.sleep(n * 0.0001)  # spreads the race, waits for nothing
        with contextlib.suppress(BrokenPipeError):  # it has left already
            shim.end(5000)
        shim.wait_for(Empty)
        (exited,) = shim.heard(Exited)
        outcomes.add((exited.kind, exited.value))
        assert shim.wait() == 0
    assert outcomes <= {("exit", 0), ("kill", signal.SIGTERM), ("exit", 128 + signal.SIGTERM)}


# ------------------------------------------------------------- without what old kernels lack


@pytest.mark.parametrize("refusal", [errno.ENOSYS, errno.EPERM])
def test_without_pidfds_and_close_range(start: Start, refusal: int) -> None:
    shim = start(
        prepare=lambda: seccomp.refuse(
            refusal, seccomp.PIDFD_OPEN, seccomp.PIDFD_SEND_SIGNAL, seccomp.CLOSE_RANGE
        )
    )
    pids = family(shim)
    shim.signal(signal.SIGCONT, "tree")
    assert shim.wait_for(Signalled) == Signalled(signal.SIGCONT, 3, 0)
    shim.end(60_000)
    shim.wait_for(Empty)
    assert shim.heard(Termed)[0].total == 3
    settle(*pids)


def test_without_children_files_proc_is_scanned(
    start: Start, tmp_path: Path, compile_c: Callable[..., None]
) -> None:
    compile_c(SOURCE, tmp_path / "shim", '-DCHILDREN_FILE="nope"')
    shim = start(tmp_path / "shim")
    pids = family(shim)
    shim.end(60_000)
    shim.wait_for(Empty)
    termed = shim.heard(Termed)[0]
    assert {(p.pid, p.place, p.found) for p in termed.processes} == {
        (pids[0], "g", "p"),
        (pids[1], "g", "p"),
        (pids[2], "x", "p"),
    }
    another = start(tmp_path / "shim")
    pids = family(another)
    another.end(0)
    another.wait_for(Empty)
    assert {p.pid for p in another.heard(Killed)[0].processes} == set(pids)


def test_names_with_spaces_and_parentheses(shim: Shim, tmp_path: Path) -> None:
    odd = tmp_path / "a) S 1 (b"
    odd.symlink_to("/bin/sleep")
    leader = shim.start(job("sh", "-c", '"$0" 1001 & exec "$0" 1002', odd)).pid
    wait_until(lambda: [proc_field(p, "Name") for p in children(leader)] == [odd.name])
    shim.end(60_000)
    shim.wait_for(Empty)
    assert [(p.place) for p in shim.heard(Termed)[0].processes] == ["g", "g"]


def test_children_of_other_threads_are_found(shim: Shim) -> None:
    program = (
        "import threading, subprocess, time\n"
        "t = threading.Thread(target=lambda: (subprocess.Popen(['sleep', '1001']),"
        " print('r', flush=True), time.sleep(1000)))\nt.start(); t.join()"
    )
    read_fd, write_fd = os.pipe()
    shim.start(job("python3", "-ISc", program), [read_fd, write_fd, write_fd])
    os.close(write_fd)
    assert os.read(read_fd, 2) == b"r\n"
    os.close(read_fd)
    shim.end(60_000)
    assert shim.wait_for(Termed).total == 2
    shim.wait_for(Empty)


def test_a_process_whose_first_thread_has_ended_is_no_zombie(shim: Shim) -> None:
    program = (
        "import ctypes, threading, time\n"
        "threading.Thread(target=lambda: time.sleep(1000)).start()\n"
        "ctypes.CDLL(None).pthread_exit(None)"
    )
    pid = shim.start(job("python3", "-ISc", program)).pid
    wait_until(lambda: (proc_field(pid, "State") or "")[:1] == "Z")
    assert not shim.heard(Exited)
    shim.end(60_000)
    assert shim.wait_for(Termed).total == 1
    shim.wait_for(Empty)
    assert not shim.heard(Killed)
