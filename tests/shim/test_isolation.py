"""What a command gets, what it cannot get at, and what it keeps nothing of."""

from __future__ import annotations

import ctypes
import errno
import fcntl
import os
import pty
import resource
import select
import signal
import subprocess
import sys
import termios
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from runnerd.protocol.job import JobUser
from runnerd.protocol.shimwire import Empty, Exited, OomAdjRefused
from tests.shim.harness import Shim, job, proc_field, wait_until
from tests.shim.needs import need, need_root

if TYPE_CHECKING:
    from tests.shim.conftest import Mutant, Start

NOBODY = JobUser(uid=65534, gid=65533, groups=(65532, 4))
STATUS = ("cat", "/proc/self/status")  # not grep: it catches a signal


def status_of(output: bytes) -> dict[str, str]:
    lines = (line.partition(":") for line in output.decode().splitlines())
    return {name: value.strip() for name, _, value in lines}


def ignore_and_block_everything() -> None:
    for signum in range(1, signal.NSIG):
        if signum not in (signal.SIGKILL, signal.SIGSTOP, 32, 33):  # 32, 33: the libc's own
            signal.signal(signum, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())


def test_a_command_has_default_dispositions_and_an_empty_mask(start: Start) -> None:
    shim = start(prepare=ignore_and_block_everything)
    status = status_of(shim.output(job(*STATUS))[0])
    assert {status["SigBlk"], status["SigIgn"], status["SigCgt"]} == {"0" * 16}


def test_the_twin_that_resets_no_signals_hands_them_on(start: Start, mutant: Mutant) -> None:
    program = mutant("    child_reset_signals();\n", "")
    shim = start(program, prepare=ignore_and_block_everything)
    assert status_of(shim.output(job(*STATUS))[0])["SigIgn"] != "0" * 16


def descriptors(pid: int) -> set[str]:
    return {entry.name for entry in Path(f"/proc/{pid}/fd").iterdir()}


def open_many() -> None:
    for fd in range(100, 160):
        os.dup2(0, fd)


def test_a_command_has_descriptors_0_to_2_only(start: Start) -> None:
    shim = start(prepare=open_many)
    pid = shim.start(job("sleep", "99")).pid
    wait_until(lambda: descriptors(pid) == {"0", "1", "2"})  # `started` comes amid their closing


def test_the_shim_keeps_no_descriptor_of_the_job(start: Start) -> None:
    need_root()  # to look into what is not dumpable
    shim = start(prepare=open_many)
    shim.start(job("sleep", "99"))
    wait_until(lambda: descriptors(shim.pid) == {"0", "1", "2", "3", "4"})


def close_standard_streams() -> None:
    for fd in range(3):
        os.close(fd)


def test_closed_standard_streams_are_filled(start: Start) -> None:
    need_root()  # to look into what is not dumpable
    shim = start(prepare=close_standard_streams)
    assert {Path(f"/proc/{shim.pid}/fd/{fd}").readlink() for fd in "012"} == {Path("/dev/null")}
    assert shim.output(job("echo", "whole"))[0] == b"whole\n"


def test_a_command_leads_its_own_session_and_group(shim: Shim) -> None:
    pid = shim.start(job("sleep", "99")).pid
    assert os.getsid(pid) == os.getpgid(pid) == pid
    assert os.getsid(shim.pid) != pid


def test_the_controlling_terminal_is_descriptor_0(shim: Shim) -> None:
    ours, theirs = pty.openpty()
    try:
        attributes = termios.tcgetattr(theirs)
        shim.start(job("sh", "-c", "tty; exec sleep 99 </dev/tty", ctty=True), [theirs] * 3)
        assert os.read(ours, 100).strip() == os.ttyname(theirs).encode()
        assert attributes
        os.write(ours, b"\x03")  # the terminal's own interrupt reaches the foreground group
        assert shim.wait_for(Exited).value == signal.SIGINT
    finally:
        os.close(ours)
        os.close(theirs)


def test_a_terminal_is_all_the_command_has_and_its_group_is_in_the_foreground(
    shim: Shim,
) -> None:
    ours, theirs = pty.openpty()
    try:
        script = (
            "set -- /proc/self/fd/*; "  # the glob itself has one open
            "echo $# $(ps -o pgid=,tpgid=,sid=,pid= -p $$); "
            "grep -E 'Sig(Blk|Ign)' /proc/self/status; read x"
        )
        pid = shim.start(job("sh", "-c", script, ctty=True), [theirs] * 3).pid
        said = read_terminal(ours, b"SigIgn:\t0000000000000000\r\n")
        assert said.split()[1:5] == [str(pid).encode()] * 4
        assert b"SigBlk:\t0000000000000000\r\n" in said
        assert {Path(f"/proc/{pid}/fd/{fd}").readlink() for fd in "012"} == {
            Path(os.ttyname(theirs))
        }
        assert {each.name for each in Path(f"/proc/{pid}/fd").iterdir()} == {"0", "1", "2"}
    finally:
        os.close(ours)
        os.close(theirs)


def test_nobody_but_the_command_holds_its_terminal(shim: Shim) -> None:
    """The shim keeps none of it: the last byte is followed by the end, which is EIO."""
    ours, theirs = pty.openpty()
    try:
        shim.start(job("echo", "all", ctty=True), [theirs] * 3)
        os.close(theirs)
        theirs = -1
        shim.wait_for(Exited)
        assert read_terminal(ours, b"all\r\n") == b"all\r\n"
        with pytest.raises(OSError, match="Input/output error"):
            os.read(ours, 1)
    finally:
        os.close(ours)
        if theirs >= 0:
            os.close(theirs)


def test_a_terminal_hung_up_before_the_start_is_a_failure_and_nothing_runs(shim: Shim) -> None:
    ours, theirs = pty.openpty()
    os.close(ours)
    try:
        failed = shim.fail(job("true", ctty=True), [theirs] * 3)
        assert (failed.stage, failed.errno) == ("session", errno.EIO)
    finally:
        os.close(theirs)


def read_terminal(master: int, end: bytes) -> bytes:
    said = b""
    while end not in said:
        assert select.select([master], [], [], 20)[0], f"nothing more after {said!r}"
        said += os.read(master, 4096)
    return said


def test_umask_nice_cwd_rlimits_and_environment(shim: Shim, tmp_path: Path) -> None:
    text = "umask; nice; pwd; ulimit -n; ulimit -Hn; env"
    output, _ = shim.output(
        job(
            "/bin/bash",
            "-c",
            text,
            env=[b"PATH=/usr/bin:/bin", b"A=b\xff c"],
            cwd=os.fsencode(tmp_path),
            umask=0o027,
            nice=7,
            rlimits=((resource.RLIMIT_NOFILE, 64, 128),),
        )
    )
    lines = output.splitlines()
    assert lines[:5] == [b"0027", b"7", os.fsencode(tmp_path), b"64", b"128"]
    assert b"A=b\xff c" in lines[5:]


def test_no_new_privs(start: Start) -> None:
    assert status_of(start().output(job(*STATUS, no_new_privs=True))[0])["NoNewPrivs"] == "1"
    assert status_of(start().output(job(*STATUS))[0])["NoNewPrivs"] == "0"


# ---------------------------------------------------------------------------------- the user


def raise_ambient_capability() -> None:
    """Give what is started here a capability (NET_RAW, 13) that survives an ordinary execve."""
    libc = ctypes.CDLL(None)
    header = (ctypes.c_uint32 * 2)(0x20080522, 0)
    sets = (ctypes.c_uint32 * 6)()
    assert libc.capget(header, sets) == 0
    sets[2] |= 1 << 13
    assert libc.capset(header, sets) == 0
    assert libc.prctl(47, 2, 13, 0, 0) == 0  # PR_CAP_AMBIENT_RAISE


def test_a_user_switch_leaves_no_capability(start: Start) -> None:
    need_root()
    shim = start(prepare=raise_ambient_capability)
    status = status_of(shim.output(job(*STATUS, user=NOBODY))[0])
    assert status["Uid"].split() == ["65534"] * 4
    assert status["Gid"].split() == ["65533"] * 4
    assert set(status["Groups"].split()) == {"4", "65532"}
    assert {status[name] for name in ("CapInh", "CapPrm", "CapEff", "CapAmb")} == {"0" * 16}


DROP = "    child_check(syscall(SYS_capset, &header, sets));\n"


def test_the_twin_that_drops_none_is_caught_by_the_check(start: Start, mutant: Mutant) -> None:
    need_root()
    shim = start(mutant(DROP, ""), prepare=raise_ambient_capability)
    failed = shim.fail(job(*STATUS, user=NOBODY))
    assert (failed.stage, failed.errno) == ("user", errno.EPERM)


def test_the_twin_that_neither_drops_nor_checks_leaves_some(start: Start, mutant: Mutant) -> None:
    need_root()
    program = mutant(
        "    if (head->flags & NO_CAPABILITIES)\n        child_drop_capabilities();\n", ""
    )
    shim = start(program, prepare=raise_ambient_capability)
    status = status_of(shim.output(job(*STATUS, user=NOBODY))[0])
    assert status["CapInh"] != "0" * 16


def test_root_to_root_keeps_what_execve_would_give_back(shim: Shim) -> None:
    need_root()
    status = status_of(shim.output(job(*STATUS, user=JobUser(uid=0, gid=0, groups=())))[0])
    assert status["CapEff"] != "0" * 16
    assert status["Groups"] == ""


# ------------------------------------------------------------------------------- the OOM score

SCORE = ("cat", "/proc/self/oom_score_adj")


def raise_own_score() -> None:
    Path("/proc/self/oom_score_adj").write_text("950")


def become_nobody() -> None:
    os.setgroups([])
    os.setresgid(65534, 65534, 65534)
    os.setresuid(65534, 65534, 65534)


def make_proc_read_only() -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    clone_newns, rdonly, remount, bind, recursive, private = 0x20000, 1, 32, 4096, 16384, 1 << 18
    assert libc.unshare(clone_newns) == 0
    assert libc.mount(None, b"/", None, recursive | private, None) == 0
    assert libc.mount(None, b"/proc", None, remount | bind | rdonly, None) == 0


def test_the_score_is_raised_for_the_command_alone(shim: Shim) -> None:
    before = Path(f"/proc/{shim.pid}/oom_score_adj").read_text()
    output, _ = shim.output(job(*SCORE, oom_score_adj=900))
    assert output == b"900\n"
    assert shim.said[1].oom_score_adj == 900  # type: ignore[union-attr]
    assert before == "0\n" or int(before) < 900


def test_the_shims_own_score_stays(shim: Shim) -> None:
    before = Path(f"/proc/{shim.pid}/oom_score_adj").read_text()
    shim.start(job("sleep", "99", oom_score_adj=900))
    assert Path(f"/proc/{shim.pid}/oom_score_adj").read_text() == before


def test_a_higher_score_is_kept(start: Start) -> None:
    shim = start(prepare=raise_own_score)
    started = shim.start(job("sleep", "99", oom_score_adj=900))
    assert started.oom_score_adj == 950


def test_the_score_is_left_alone_unless_asked(start: Start) -> None:
    shim = start(prepare=raise_own_score)
    assert shim.output(job(*SCORE))[0] == b"950\n"


def test_the_score_is_raised_without_root(start: Start) -> None:
    """Where our own non-dumpable state makes the file root's, it is opened all the same."""
    need_root()
    shim = start(prepare=become_nobody)
    assert shim.output(job(*SCORE, oom_score_adj=900))[0] == b"900\n"
    assert not shim.heard(OomAdjRefused)


def test_a_refused_score_is_said_and_survived(start: Start) -> None:
    need_root()
    shim = start(prepare=make_proc_read_only)
    output, _ = shim.output(job(*SCORE, oom_score_adj=900))
    assert output == Path("/proc/self/oom_score_adj").read_bytes()
    assert shim.heard(OomAdjRefused) == [OomAdjRefused(errno.EROFS)]


# --------------------------------------------------------------------- nothing to see or to steal

READ_AS_NOBODY = """
import os, sys
os.setgroups([]); os.setresgid(65534, 65534, 65534); os.setresuid(65534, 65534, 65534)
try:
    open(f"/proc/{sys.argv[1]}/environ").read(); os.listdir(f"/proc/{sys.argv[1]}/fd")
except PermissionError:
    sys.exit(13)
"""


def can_nobody_read(pid: int) -> bool:
    command = [sys.executable, "-ISc", READ_AS_NOBODY, str(pid)]
    return {0: True, 13: False}[subprocess.run(command, check=False).returncode]


def test_neither_shim_nor_parked_child_can_be_read_by_its_own_user(start: Start) -> None:
    need_root()
    shim = start(prepare=become_nobody)
    assert not can_nobody_read(shim.pid)
    assert not can_nobody_read(shim.said[0].pid)  # type: ignore[union-attr]


def test_the_twin_that_stays_dumpable_can_be_read(start: Start, mutant: Mutant) -> None:
    need_root()
    shim = start(
        mutant(
            "    prctl(PR_SET_DUMPABLE, 0, 0, 0, 0); /* first",
            "    prctl(PR_SET_DUMPABLE, 1, 0, 0, 0); /* first",
        ),
        prepare=become_nobody,
    )
    assert can_nobody_read(shim.pid)


def test_nothing_of_the_command_shows_in_the_shim(shim: Shim) -> None:
    need_root()  # to look into what is not dumpable
    shim.start(job("sleep", "99.5", env=[b"PATH=/bin", b"SECRET=hush"]))
    assert Path(f"/proc/{shim.pid}/cmdline").read_bytes() == b"runnerd-shim\0"
    assert Path(f"/proc/{shim.pid}/environ").read_bytes() == b""
    assert proc_field(shim.pid, "Name") == "runnerd-shim"
    with Path(f"/proc/{shim.pid}/mem").open("rb", buffering=0) as memory:
        for line in Path(f"/proc/{shim.pid}/maps").read_text().splitlines():
            if line.split()[1].startswith("rw"):
                start, _, end = line.split()[0].partition("-")
                memory.seek(int(start, 16))
                assert b"hush" not in memory.read(int(end, 16) - int(start, 16))


def test_the_shim_ignores_stray_signals(shim: Shim) -> None:
    for signum in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGPIPE, signal.SIGUSR1):
        os.kill(shim.pid, signum)
        os.kill(shim.said[0].pid, signum)  # type: ignore[union-attr]
    assert shim.output(job("echo", "on"))[0] == b"on\n"


def test_a_large_environment_arrives(shim: Shim) -> None:
    env = [b"PATH=/bin", *(b"V%d=" % n + b"x" * 1000 for n in range(1500))]
    need(resource.getrlimit(resource.RLIMIT_STACK)[0] >= 8 << 20, "a stack limit of 8 MiB")
    output, _ = shim.output(job("sh", "-c", "echo $V1499 | wc -c", env=env))
    assert output.strip() == b"1001"


def test_pipes_are_the_commands_own(shim: Shim) -> None:
    read_fd, write_fd = os.pipe()
    shim.start(job("sh", "-c", "exec >&- 2>&-; sleep 0.3"), [read_fd, write_fd, write_fd])
    os.close(write_fd)
    assert os.read(read_fd, 1) == b""  # EOF while it lives: nobody else holds the other end
    assert not fcntl.fcntl(read_fd, fcntl.F_GETFL) & os.O_NONBLOCK
    assert not shim.heard(Exited)
    os.close(read_fd)
    shim.wait_for(Empty)


@pytest.mark.parametrize("n", range(3))
def test_the_child_leaves_with_a_killed_shim_while_parked(start: Start, n: int) -> None:
    shim = start()
    child: int = shim.said[0].pid  # type: ignore[union-attr]
    os.kill(shim.pid, signal.SIGKILL)
    shim.wait()  # from here on the child is ours
    wait_until(lambda: (proc_field(child, "State") or "Z")[0] == "Z")
    os.waitpid(child, 0)


def test_a_stopped_parked_child_leaves_with_a_killed_shim(start: Start) -> None:
    """Stopped, it sees no end of its socket."""
    shim = start()
    child: int = shim.said[0].pid  # type: ignore[union-attr]
    stop(child)
    os.kill(shim.pid, signal.SIGKILL)
    shim.wait()
    wait_until(lambda: (proc_field(child, "State") or "Z")[0] == "Z")
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGKILL


def test_a_stopped_parked_child_goes_on_with_its_job(shim: Shim) -> None:
    stop(shim.said[0].pid)  # type: ignore[union-attr]
    output, exited = shim.output(job("echo", "hello"))
    assert (output, exited.value) == (b"hello\n", 0)


def stop(pid: int) -> None:
    wait_until(lambda: proc_field(pid, "State") == "S (sleeping)")  # it waits for its job
    os.kill(pid, signal.SIGSTOP)
    wait_until(lambda: (proc_field(pid, "State") or "")[:1] == "T")


def test_a_command_outlives_its_killed_shim(start: Start) -> None:
    """It is not parked any more: its end is for runnerd to bring about, by TERM first."""
    shim = start()
    script = "trap 'exit 42' TERM; echo up; while :; do sleep 0.01; done"
    read_fd, write_fd = os.pipe()
    with os.fdopen(read_fd) as stream:
        pid = shim.start(job("sh", "-c", script), [write_fd, write_fd, write_fd]).pid
        os.close(write_fd)
        assert stream.readline() == "up\n"
        os.kill(shim.pid, signal.SIGKILL)
        shim.wait()
        os.kill(pid, signal.SIGTERM)
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 42


def test_a_killed_shim_loses_no_status(start: Start, mutant: Mutant) -> None:
    """Between the word and the reap: what adopts the zombie still finds its status."""
    program = mutant(
        "    while (waitpid(leader, NULL, 0) < 0 && errno == EINTR)\n        ;\n    leader_reaped",
        "    raise(SIGKILL);\n    leader_reaped",
    )
    shim = start(program)
    pid = shim.start(job("sh", "-c", "exit 42")).pid
    assert shim.wait_for(Exited).value == 42
    shim.wait()
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 42
