"""What all users share: memory, pids, disk, processor, and the limits of one's own processes."""

from __future__ import annotations

import os
import resource
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Final

import pytest

from tests.daemon.looking import last_words
from tests.harness import children, wait_for
from tests.hostile.sandbox import SEPARATE, SETTINGS, Sandbox, of_user
from tests.raw import ClosedError, RawClient, RawError

Make = Callable[..., Sandbox]
MIB: Final = 1024 * 1024

# ---------------------------------------------------------------------------------------- disk


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 4 MiB, with a folder for everyone."""
    place = Path(f"/tmp/runnerd-test-disk-{os.getpid()}")
    place.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=4m,mode=0755", "none", place], check=True)
    (place / "free").mkdir()
    (place / "free").chmod(0o777)
    yield place
    subprocess.run(["umount", "-l", place], check=True)
    place.rmdir()


FILL: Final = """
fd = os.open(sys.argv[1], os.O_WRONLY | os.O_CREAT)
size = 65536
while size:
    try:
        os.write(fd, b'x' * size)
    except OSError:
        size //= 2
for _ in range(200):
    os.write(1, b'x' * 65536)
"""


@pytest.mark.parametrize("setting", SETTINGS)
def test_a_full_disk_costs_the_journal_and_the_spool_and_no_start(
    make_sandbox: Make, small_disk: Path, setting: str
) -> None:
    """It is said, no output is lost that its reader takes, and what is written anew is whole."""
    state = small_disk / "state"
    state.mkdir(mode=0o700)
    if setting != SEPARATE:
        small_disk.chmod(0o777)
        state.rmdir()  # its own user makes it
    soon = "from runnerd.daemon import journal\njournal.RETRY_S = 0.3"  # and not in 30 s
    sandbox = make_sandbox(setting, "--spool", "any", state=state, code=soon)
    with sandbox.connect() as client:
        assert client.hello["journal"]
        victim, _ = sandbox.start_victim(client)
        (printed,) = sandbox.attack(client, FILL, small_disk / "free" / "filler")
        assert len(printed) == 200 * 65536
        sandbox.check_well(client)
        sandbox.check_unharmed(client, victim)
        assert sandbox.log("journal_failed")
        (small_disk / "free" / "filler").unlink()
        sandbox.check_well(client)
        wait_for(lambda: client.call("daemon.info")["journal"] is True, 20)
    assert sandbox.stop() == 0


# ---------------------------------------------------------------------------------------- pids

BOMB: Final = """
signal.signal(signal.SIGTERM, signal.SIG_IGN)
signal.signal(signal.SIGCHLD, signal.SIG_IGN)
tell('up')
while True:
    try:
        if os.fork() == 0:
            os.setsid()
    except OSError:
        pass                                     # as many as there may be, and on it goes
"""
NPROC: Final = 60


def limited() -> None:
    resource.setrlimit(resource.RLIMIT_NPROC, (NPROC, NPROC))


@pytest.mark.parametrize("setting", SETTINGS)
def test_a_bomb_that_takes_every_pid_is_looked_at_and_ended(
    make_sandbox: Make, setting: str
) -> None:
    """A limit of its own user's: another user is not touched, one user has the rescue lane."""
    sandbox = make_sandbox(setting, prepare=limited)
    fields = {} if sandbox.is_one_user else {"rlimits": {"nproc": [NPROC, NPROC]}}
    with sandbox.connect() as client:
        victim, _ = sandbox.start_victim(client)
        wait_for(lambda: client.call("daemon.info")["parked_shims"] == 3)
        sandbox.start_attack(client, "bomb", BOMB, **fields)
        wait_for(lambda: len(sandbox.living()) >= NPROC - 10)
        assert client.call("ping") == {}
        assert client.call("exec.inspect", exec_id="bomb")["state"] == "running"
        if sandbox.is_one_user:
            kinds = {kind_of_start(client, f"more{number}") for number in range(4)}
            assert kinds <= {("started", ""), ("start_failed", "EAGAIN")}
        client.call("exec.start", exec_id="rescue", argv=["true"], cwd="/", admission="skip",
                    **sandbox.user(other=True))  # fmt: skip
        assert client.call("exec.wait", exec_id="rescue")["code"] == 0
        assert client.call("exec.cancel", exec_id="bomb", grace_s=0)["outcome"] == "ended"
        client.call("exec.wait", exec_id="bomb", until="closed")
        sandbox.check_unharmed(client, victim)
        wait_for(lambda: client.call("daemon.info")["parked_shims"] == 3)
        sandbox.check_well(client)
        wait_for(lambda: of_user(sandbox.uid) <= of_the_daemon(sandbox))


def of_the_daemon(sandbox: Sandbox) -> set[int]:
    """Itself, its shims, and what waits under them to become a command."""
    shims = sandbox.shims()
    return {sandbox.pid} | shims | {child for shim in shims for child in children(shim)}


def kind_of_start(client: RawClient, exec_id: str) -> tuple[str, str]:
    """Start something: by a shim that is parked, as long as there is one; else it is refused."""
    try:
        client.call("exec.start", exec_id=exec_id, argv=["true"], cwd="/")
    except RawError as error:
        return error.kind, error.data["errno_name"]
    return "started", ""


# ------------------------------------------------------------------------- descriptors, output

HOARD: Final = """
held = []
try:
    while True:
        held.append(os.pipe())
except OSError:
    pass
tell('full')
while True:
    os.write(1, b'x' * 65536)
"""


def test_hoarders_that_flood_take_neither_memory_nor_answers(sandbox: Sandbox) -> None:
    """Each has every descriptor it may have, and prints without end to nobody."""
    with sandbox.connect() as client:
        ids = [sandbox.new_id("hoard") for _ in range(3)]
        before = rss(sandbox.pid)
        for exec_id in ids:
            sandbox.start_attack(client, exec_id, HOARD, attach=None)
        wait_for(lambda: all(printed(client, exec_id) > 16 * MIB for exec_id in ids), 30)
        began_s = time.monotonic()
        assert client.call("ping") == {}
        sandbox.check_well(client)
        assert time.monotonic() - began_s < 10
        assert rss(sandbox.pid) - before < 48 * MIB
        for exec_id in ids:
            sandbox.check_unharmed(client, exec_id)


def printed(client: RawClient, exec_id: str) -> int:
    """Bytes, at least as many if every record is full."""
    return int(client.call("exec.inspect", exec_id=exec_id)["last_seq"]) * 64 * 1024


def rss(pid: int) -> int:
    status = Path(f"/proc/{pid}/status").read_text()
    return int(status.partition("VmRSS:")[2].split()[0]) * 1024


# ------------------------------------------------------------------- what one may do to one's own

HINDER: Final = """
import resource
targets = [DAEMON, *children(DAEMON)]
own = SHIM
outcomes = set()
for pid in targets:
    if pid == own:
        continue
    outcomes.add(said(os.setpriority, os.PRIO_PROCESS, pid, 19))
    outcomes.add(said(os.sched_setaffinity, pid, {min(os.sched_getaffinity(0))}))
    outcomes.add(said(os.sched_setscheduler, pid, os.SCHED_IDLE, os.sched_param(0)))
    limit = lambda what, most: said(resource.prlimit, pid, what, (most, most))
    outcomes.add(limit(resource.RLIMIT_CORE, 0))
    outcomes.add(limit(resource.RLIMIT_FSIZE, 0))
    outcomes.add(limit(resource.RLIMIT_NOFILE, 16))
tell(*sorted(outcomes - {'ESRCH'}))
"""


@pytest.mark.parametrize("setting", SETTINGS)
def test_the_daemon_hindered_by_its_own_user_still_ends_what_runs(
    make_sandbox: Make, setting: str
) -> None:
    """The last of the processor, no file, sixteen descriptors: no start, but an end, and a stop."""
    sandbox = make_sandbox(setting)
    with sandbox.connect() as client:
        victim, _ = sandbox.start_victim(client)
        assert sandbox.attack(client, HINDER) == ["done" if sandbox.is_one_user else "EPERM"]
        if not sandbox.is_one_user:
            sandbox.check_well(client)
        sandbox.check_unharmed(client, victim)
        assert client.call("daemon.info")["incarnation"] == sandbox.incarnation
    assert sandbox.stop() == 0


SECOND: Final = """
import resource
tell(said(resource.prlimit, DAEMON, resource.RLIMIT_CPU, (1, 1)))
signal.signal(signal.SIGTERM, signal.SIG_IGN)
while True:
    said(connect, sys.argv[1])                   # it has to spend its second on something
"""


@pytest.mark.parametrize("setting", SETTINGS)
def test_a_second_of_processor_is_all_that_one_user_leaves_its_daemon(
    make_sandbox: Make, setting: str
) -> None:
    """A limit is the kernel's own KILL, which PID 1 dies of too. Every tree ends with it."""
    sandbox = make_sandbox(setting)
    with sandbox.connect() as client:
        victim, _ = sandbox.start_victim(client)
        sandbox.start_attack(client, "attack", SECOND, sandbox.socket_path)
        if setting == SEPARATE:
            client.note("exec.output", "attack")
            assert client.output("attack") == b"EPERM\n"
            client.call("exec.cancel", exec_id="attack", grace_s=0)
            sandbox.check_unharmed(client, victim)
            sandbox.check_well(client)
            return
        with pytest.raises(ClosedError):
            client.note("exec.exited", "attack")
    assert sandbox.daemon.process.wait(10) != 0
    assert last_words(sandbox.place / "state")["stopping_at"] is None  # it was killed
    wait_for(lambda: not of_user(sandbox.uid))


OWN_SCORE: Final = """
def score(text):
    with open('/proc/self/oom_score_adj', 'w') as file:
        file.write(text)
before = open('/proc/self/oom_score_adj').read().strip()
tell(before, said(score, '-1000'), said(score, sys.argv[1]))
"""


def test_a_command_lowers_its_own_score_no_further_than_its_start(sandbox: Sandbox) -> None:
    """Back to what the daemon was started with: scores order honest commands only."""
    with sandbox.connect() as client:
        first = Path("/proc/self/oom_score_adj").read_text().strip()
        (said,) = sandbox.attack(client, OWN_SCORE, first)
        assert said.split()[:2] == ["900", "EACCES"]
        sandbox.check_well(client)
