"""How a command starts, and every way in which it cannot."""

from __future__ import annotations

import errno
import os
import resource
import signal
import struct
import time
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from runnerd.protocol.job import RLIM_INFINITY, JobUser, pack_job
from runnerd.protocol.shimwire import Empty, Exited, Failed, Started
from tests.shim import seccomp
from tests.shim.harness import Shim, job, proc_field, spawn_shim, wait_until
from tests.shim.needs import need, need_root

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.shim.conftest import Mutant, Start

NOBODY = JobUser(uid=65534, gid=65534, groups=(65534, 4))


def script(directory: Path, name: str, text: str | bytes, mode: int = 0o755) -> Path:
    path = directory / name
    path.write_bytes(text.encode() if isinstance(text, str) else text)
    path.chmod(mode)
    return path


def test_a_command_runs_and_the_shim_leaves(shim: Shim) -> None:
    output, exited = shim.output(job("echo", "hello"))
    assert (output, exited.kind, exited.value) == (b"hello\n", "exit", 0)
    shim.wait_for(Empty)
    assert shim.next() is None
    assert shim.wait() == 0


def test_the_parked_child_becomes_the_command(start: Start) -> None:
    shim = start()
    parked_pid = shim.said[0].pid  # type: ignore[union-attr]
    assert shim.start(job("true")).pid == parked_pid


def test_all_exit_codes_come_through(shim_program: Path) -> None:
    codes = []
    for code in range(256):
        shim = spawn_shim(shim_program)
        shim.start(job("sh", "-c", f"exit {code}"))
        codes.append(shim.wait_for(Exited))
        shim.close()
    assert [(exited.kind, exited.value) for exited in codes] == [("exit", n) for n in range(256)]


@pytest.mark.parametrize("signum", [1, 2, 9, 15, 24, 32, 33, 34, 50, 63, 64])
def test_a_signal_is_told_by_its_number(shim: Shim, signum: int) -> None:
    output, exited = shim.output(job("/bin/bash", "-c", f"kill -{signum} $$; sleep 9"))
    assert (output, exited.kind, exited.value) == (b"", "kill", signum)


def test_a_core_file_is_told(shim: Shim, tmp_path: Path) -> None:
    hard = resource.getrlimit(resource.RLIMIT_CORE)[1]
    need(hard != 0, "a hard limit on core files above 0")
    limit = RLIM_INFINITY if hard == resource.RLIM_INFINITY else hard
    shim.start(
        job(
            "sh",
            "-c",
            "kill -SEGV $$",
            cwd=os.fsencode(tmp_path),
            rlimits=((resource.RLIMIT_CORE, limit, limit),),
        )
    )
    exited = shim.wait_for(Exited)
    assert (exited.kind, exited.value) == ("dump", signal.SIGSEGV)


def test_usage_is_that_of_the_command(shim: Shim) -> None:
    program = "x = bytearray(b'a' * (48 << 20))\nfor i in range(10**6): pass"
    shim.start(job("/usr/bin/env", "python3", "-ISc", program))
    exited = shim.wait_for(Exited)
    assert exited.maxrss_kib >= 48 << 10
    assert exited.utime_us + exited.stime_us > 10_000
    assert exited.minflt > 1000


def test_started_and_exited_carry_monotonic_time(shim: Shim) -> None:
    before_ns = time.monotonic_ns()
    started = shim.start(job("true"))
    exited = shim.wait_for(Exited)
    after_ns = time.monotonic_ns()
    assert before_ns <= started.at_ns <= exited.at_ns <= after_ns


# ------------------------------------------------------------------------------ exec, and its PATH


@pytest.fixture
def oversized() -> bytes:
    return b"x" * (131072 + 1)  # MAX_ARG_STRLEN, execve(2)


@pytest.mark.parametrize(
    ("argv0", "expected"),
    [
        ("/no/such/program", errno.ENOENT),
        ("no-such-program", errno.ENOENT),
        ("", errno.ENOENT),
        ("/etc/passwd", errno.EACCES),
        ("/etc", errno.EACCES),
        ("/etc/passwd/true", errno.ENOTDIR),
        ("n" * 256, errno.ENAMETOOLONG),
        ("/" + "n" * 5000, errno.ENAMETOOLONG),
    ],
)
def test_exec_fails_with_its_errno(shim: Shim, argv0: str, expected: int) -> None:
    assert shim.fail(job(argv0)) == Failed("exec", expected, interpreter=False)
    assert shim.wait() == 0


def test_a_file_of_no_format_is_no_shell_script(shim: Shim, tmp_path: Path) -> None:
    program = script(tmp_path, "plain", "echo no\n")
    assert shim.fail(job(program)) == Failed("exec", errno.ENOEXEC, interpreter=False)


def test_a_missing_interpreter_is_not_a_missing_program(shim: Shim, tmp_path: Path) -> None:
    program = script(tmp_path, "tool", "#!/no/such/interpreter\n")
    assert shim.fail(job(program)) == Failed("exec", errno.ENOENT, interpreter=True)


def test_a_missing_loader_is_not_a_missing_program(shim: Shim, tmp_path: Path) -> None:
    elf = Path("/bin/true").resolve().read_bytes()
    at = elf.find(b"/ld-")
    need(at > 0, "a dynamically linked /bin/true")
    program = script(tmp_path, "tool", elf[:at] + b"/no-" + elf[at + 4 :])
    assert shim.fail(job(program)) == Failed("exec", errno.ENOENT, interpreter=True)


def test_an_interpreter_missing_along_the_path(start: Start, tmp_path: Path) -> None:
    script(tmp_path, "tool", "#!/no/such/interpreter\n")
    path = b"PATH=/bin:" + os.fsencode(tmp_path)
    failed = start().fail(job("tool", env=[path]))
    assert failed == Failed("exec", errno.ENOENT, interpreter=True)
    later = tmp_path / "later"
    later.mkdir()
    script(later, "tool", "#!/bin/sh\n")
    start().start(job("tool", env=[path + b":" + os.fsencode(later)]))


def test_a_loop_of_links(shim: Shim, tmp_path: Path) -> None:
    (tmp_path / "loop").symlink_to("loop")
    failed = shim.fail(job(tmp_path / "loop"))
    assert failed == Failed("exec", errno.ELOOP, interpreter=False)


def test_an_argument_too_long(shim: Shim, oversized: bytes) -> None:
    assert shim.fail(job("true", oversized)) == Failed("exec", errno.E2BIG, interpreter=False)


def test_the_path_is_the_commands_own(start: Start, tmp_path: Path) -> None:
    script(tmp_path, "tool", "#!/bin/sh\necho found\n")
    env = [b"PATH=/nowhere:/etc/passwd:" + os.fsencode(tmp_path)]
    assert start().output(job("tool", env=env))[0] == b"found\n"
    assert start().output(job("sh", "-c", "echo $HOME", env=[b"HOME=/h"]))[0] == b"/h\n"
    cwd = os.fsencode(tmp_path)
    assert start().output(job("tool", env=[b"PATH=/bin::/sbin"], cwd=cwd))[0] == b"found\n"


def test_no_permission_somewhere_on_the_path_is_remembered(start: Start, tmp_path: Path) -> None:
    script(tmp_path, "tool", "#!/bin/sh\n", mode=0o644)
    path = b"PATH=" + os.fsencode(tmp_path)
    failed = start().fail(job("tool", env=[path + b":/bin"]))
    assert failed == Failed("exec", errno.EACCES, interpreter=False)
    (tmp_path / "good").mkdir()
    script(tmp_path / "good", "tool", "#!/bin/sh\n")
    start().start(job("tool", env=[path + b":" + os.fsencode(tmp_path / "good")]))


def test_a_program_still_being_written_is_waited_for(shim: Shim, tmp_path: Path) -> None:
    program = script(tmp_path, "true", Path("/bin/true").resolve().read_bytes())
    with program.open("r+b"):
        shim.give(pack_job(job(program)))
        wait_until(lambda: proc_field(shim.pid, "State"))
        assert proc_field(shim.said[0].pid, "Name") == "runnerd-shim"  # type: ignore[union-attr]
    shim.wait_for(Started)


def test_a_program_written_for_ever_is_an_error(shim: Shim, tmp_path: Path) -> None:
    program = script(tmp_path, "true", Path("/bin/true").resolve().read_bytes())
    with program.open("r+b"):
        failed = shim.fail(job(program))
    assert failed == Failed("exec", errno.ETXTBSY, interpreter=False)


# --------------------------------------------------------------------------------- other stages


def test_stage_cwd(shim: Shim) -> None:
    failed = shim.fail(job("true", cwd=b"/no/such/directory"))
    assert failed == Failed("cwd", errno.ENOENT, interpreter=False)


def test_the_cwd_is_entered_as_the_user(start: Start, tmp_path: Path) -> None:
    need_root()
    private = tmp_path / "private"
    private.mkdir(mode=0o700)
    cwd = os.fsencode(private)
    failed = start().fail(job("true", cwd=cwd, user=NOBODY))
    assert failed == Failed("cwd", errno.EACCES, interpreter=False)
    start().start(job("true", cwd=cwd))


def test_stage_rlimit(start: Start) -> None:
    above_hard = (resource.RLIMIT_CPU, 10, 5)
    failed = start().fail(job("true", rlimits=(above_hard,)))
    assert failed == Failed("rlimit", errno.EINVAL, interpreter=False)
    assert start().fail(job("true", rlimits=((999, 1, 1),))).stage == "rlimit"


def test_stage_umask(shim: Shim) -> None:
    assert shim.fail(job("true", umask=0o1000)) == Failed("umask", errno.EINVAL, interpreter=False)


def as_nobody() -> None:
    os.setgroups([65534])
    os.setresgid(65534, 65534, 65534)
    os.setresuid(65534, 65534, 65534)


def test_stage_nice(start: Start) -> None:
    need_root()
    failed = start(prepare=as_nobody).fail(job("true", nice=-20))
    assert failed == Failed("nice", errno.EACCES, interpreter=False)


def test_stage_groups_without_the_right_to_change_them(start: Start) -> None:
    need_root()
    failed = start(prepare=as_nobody).fail(job("true", user=NOBODY))
    assert failed == Failed("groups", errno.EPERM, interpreter=False)


def test_stage_user(start: Start) -> None:
    need_root()
    shim = start(prepare=lambda: seccomp.refuse(errno.EPERM, seccomp.SETRESUID))
    failed = shim.fail(job("true", user=NOBODY))
    assert failed == Failed("user", errno.EPERM, interpreter=False)


@pytest.mark.parametrize(
    ("uid", "gid", "stage"), [(2**32 - 1, 1, "user"), (1, 2**32 - 1, "groups")]
)
def test_an_id_of_minus_one_is_not_unchanged(start: Start, uid: int, gid: int, stage: str) -> None:
    need_root()
    failed = start().fail(job("true", user=JobUser(uid=uid, gid=gid, groups=())))
    assert failed == Failed(stage, errno.EINVAL, interpreter=False)


def test_stage_session(shim: Shim) -> None:
    failed = shim.fail(job("true", ctty=True))
    assert failed == Failed("session", errno.ENOTTY, interpreter=False)


def test_stage_streams(shim: Shim) -> None:
    nothing = (resource.RLIMIT_NOFILE, 1, 1)
    failed = shim.fail(job("true", rlimits=(nothing,)))
    assert failed == Failed("streams", errno.EBADF, interpreter=False)


def header(content: bytes) -> list[int | bytes]:
    return list(struct.unpack_from("=4sIQIIiiIIIIIIQ", content))


def malformed() -> Iterator[tuple[str, bytes]]:
    good = pack_job(job("true", "a", rlimits=((resource.RLIMIT_CPU, 5, 5),)))
    yield "empty", b""
    yield "half a header", good[:40]
    yield "cut short", good[:-1]
    yield "one byte more", good + b"x"
    changes: list[tuple[int, str, int | bytes]] = [
        (0, "magic", b"boj\0"),
        (1, "version", 2),
        (2, "total", len(good) + 1),
        (3, "unknown flag", 1 << 31),
        (9, "groups", 2**32 - 1),
        (10, "rlimits", 2**32 - 1),
        (11, "no argv", 0),
        (11, "argc", 3),
        (12, "envc", 0),
        (12, "envc", 2**32 - 1),
        (13, "reserved", 1),
    ]
    for index, name, value in changes:
        words = header(good)
        words[index] = value
        yield f"{name}={value!r}", struct.pack("=4sIQIIiiIIIIIIQ", *words) + good[64:]


@pytest.mark.parametrize("content", [pytest.param(c, id=name) for name, c in malformed()])
def test_a_malformed_job_is_refused(shim: Shim, content: bytes) -> None:
    shim.give(content)
    assert shim.wait_for(Failed) == Failed("job", errno.EINVAL, interpreter=False)
    shim.wait_for(Empty)


def test_a_job_without_its_descriptors_is_refused(shim: Shim) -> None:
    shim.send(b"job")
    assert shim.wait_for(Failed) == Failed("job", errno.EINVAL, interpreter=False)
    shim.wait_for(Empty)


def test_a_job_with_too_many_descriptors_is_refused(shim: Shim) -> None:
    null = os.open("/dev/null", os.O_RDWR)
    try:
        shim.give(pack_job(job("true")), extra=[null, null, null])
        assert shim.wait_for(Failed).stage == "job"
    finally:
        os.close(null)


# ------------------------------------------------------------------------ killed before execve


def held_at_exec(shim: Shim, program: Path) -> int:
    """Give a job whose execve is retried, and wait until its child stands there."""
    pid: int = shim.said[0].pid  # type: ignore[union-attr]
    shim.give(pack_job(job(program)))
    # Parked it blocks SIGCHLD; the mask is emptied last of all, and it sleeps between two tries.
    wait_until(lambda: proc_field(pid, "SigBlk") == "0" * 16)
    wait_until(lambda: proc_field(pid, "State") == "S (sleeping)")
    return pid


PF_CHECK = "read_process(leader, &process) && process.flags & PF_FORKNOEXEC"


@pytest.fixture
def busy_program(tmp_path: Path) -> Iterator[Path]:
    program = script(tmp_path, "true", Path("/bin/true").resolve().read_bytes())
    with program.open("r+b"):
        yield program


def test_a_child_killed_at_execve_is_no_start(shim: Shim, busy_program: Path) -> None:
    os.kill(held_at_exec(shim, busy_program), signal.SIGKILL)
    assert shim.wait_for(Failed) == Failed("killed", signal.SIGKILL, interpreter=False)
    shim.wait_for(Empty)
    assert not shim.heard(Started)


def test_the_twin_that_takes_a_killed_child_for_a_start(
    start: Start, mutant: Mutant, busy_program: Path
) -> None:
    shim = start(mutant(PF_CHECK, "false"))
    os.kill(held_at_exec(shim, busy_program), signal.SIGKILL)
    shim.wait_for(Started)


def test_a_child_killed_while_parked(shim: Shim) -> None:
    os.kill(shim.said[0].pid, signal.SIGKILL)  # type: ignore[union-attr]
    assert shim.wait_for(Failed) == Failed("killed", signal.SIGKILL, interpreter=False)
    shim.wait_for(Empty)
    assert shim.wait() == 0


def test_an_end_before_the_job_leaves_no_process(shim: Shim) -> None:
    shim.end(5000)
    shim.wait_for(Empty)
    assert shim.wait() == 0
    assert proc_field(shim.said[0].pid, "State") is None  # type: ignore[union-attr]


def test_an_end_during_the_start_is_no_start(shim: Shim, busy_program: Path) -> None:
    held_at_exec(shim, busy_program)
    shim.end(5000)
    assert shim.wait_for(Failed) == Failed("killed", signal.SIGTERM, interpreter=False)
    shim.wait_for(Empty)


@pytest.mark.parametrize("number", [errno.ETOOMANYREFS, errno.ENOMEM, errno.ENOBUFS])
def test_a_job_that_cannot_be_handed_on_is_said_at_once(start: Start, number: int) -> None:
    """The child would wait for it, and runnerd for the child."""
    shim = start(prepare=lambda: seccomp.refuse(number, seccomp.SENDMSG))
    child = shim.said[0].pid  # type: ignore[union-attr]
    assert shim.fail(job("true")) == Failed("job", number, interpreter=False)
    assert shim.wait() == 0
    assert proc_field(child, "State") is None


# ------------------------------------------------------------------------------ at the pids limit


def test_a_parked_pair_starts_when_no_pid_is_free(start: Start, pids_group: Path) -> None:
    shim = start(prepare=lambda: (pids_group / "cgroup.procs").write_text("0"))
    (pids_group / "pids.max").write_text("2")
    assert shim.output(job("echo", "rescued"))[0] == b"rescued\n"
    shim.wait_for(Empty)


def test_no_pid_for_the_child_is_told(shim_program: Path, pids_group: Path) -> None:
    (pids_group / "pids.max").write_text("1")
    shim = spawn_shim(shim_program, prepare=lambda: (pids_group / "cgroup.procs").write_text("0"))
    try:
        assert shim.next() == Failed("fork", errno.EAGAIN, interpreter=False)
        assert os.waitstatus_to_exitcode(shim.wait()) == 111
    finally:
        shim.close()


def test_without_a_control_socket_it_leaves_with_100(shim_program: Path) -> None:
    pid = os.posix_spawn(
        shim_program,
        ["runnerd-shim"],
        {},
        file_actions=[(os.POSIX_SPAWN_OPEN, 3, "/dev/null", os.O_RDWR, 0)],
    )
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 100
