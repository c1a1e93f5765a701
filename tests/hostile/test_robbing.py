"""A command that reads the daemon or a shim, traces it, takes its descriptors, or changes it."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Final

from tests.harness import wait_for
from tests.hostile.sandbox import ONE, Sandbox

ROB: Final = """
pidfd_open, pidfd_getfd, readv, writev, kcmp, setns = {
    'x86_64': (434, 438, 310, 311, 312, 308), 'aarch64': (434, 438, 270, 271, 272, 268),
}[os.uname().machine]
kcmp_file, ptrace_attach, ptrace_seize = 0, 16, 0x4206
here = (ctypes.c_long * 2)(ctypes.addressof(ctypes.create_string_buffer(8)), 8)

def read(pid, what):
    fd = os.open(f'/proc/{pid}/{what}', os.O_RDONLY)
    try:
        os.read(fd, 1)
    except OSError as error:
        if error.errno != errno.EIO:          # mem at 0: it was opened, and nothing is there
            raise
    finally:
        os.close(fd)

def write(pid, what, text):
    fd = os.open(f'/proc/{pid}/{what}', os.O_WRONLY)
    try:
        os.write(fd, text)
    finally:
        os.close(fd)

def take_descriptor(pid):
    pidfd = system(pidfd_open, pid, 0)
    try:
        for fd in range(12):
            try:
                return system(pidfd_getfd, pidfd, fd, 0)
            except OSError as error:
                if error.errno != errno.EBADF:
                    raise
    finally:
        os.close(pidfd)

def open_its_own(pid):
    'Any that is not 0, 1 or 2, whatever its number is.'
    for fd in range(3, 64):
        try:
            return os.close(os.open(f'/proc/{pid}/fd/{fd}', os.O_RDWR))
        except OSError as error:
            refused = error
    raise refused

def enter(pid):
    pidfd = system(pidfd_open, pid, 0)
    try:
        system(setns, pidfd, 0x20000000)      # CLONE_NEWPID
    except OSError as error:
        raise OSError(errno.EPERM, 'refused') if error.errno != errno.EPERM else error

def move(pid, call):
    'Memory, by a call: an address that is not there means that we might.'
    try:
        system(call, pid, ctypes.byref(here), 1, ctypes.byref(here), 1, 0)
    except OSError as error:
        if error.errno != errno.EFAULT:
            raise

def trace(pid, how):
    ctypes.set_errno(0)
    if libc.ptrace(how, pid, 0, 0) < 0:
        raise OSError(ctypes.get_errno(), 'refused')

WAYS = {
    **{f'read {what}': lambda pid, what=what: read(pid, what)
       for what in ('environ', 'mem', 'maps', 'auxv', 'io')},
    'list fd': lambda pid: os.listdir(f'/proc/{pid}/fd'),
    'list fdinfo': lambda pid: read(pid, 'fdinfo/0'),
    'open fd 0': lambda pid: os.open(f'/proc/{pid}/fd/0', os.O_RDONLY),
    'open its own fd': open_its_own,
    'where cwd': lambda pid: os.readlink(f'/proc/{pid}/cwd'),
    'where root': lambda pid: os.readlink(f'/proc/{pid}/root'),
    'where exe': lambda pid: os.readlink(f'/proc/{pid}/exe'),
    'through root': lambda pid: os.listdir(f'/proc/{pid}/root/'),
    'take descriptor': take_descriptor,
    'readv': lambda pid: move(pid, readv),
    'writev': lambda pid: move(pid, writev),
    'compare': lambda pid: system(kcmp, os.getpid(), pid, kcmp_file, 0, 0),
    'write mem': lambda pid: os.close(os.open(f'/proc/{pid}/mem', os.O_WRONLY)),
    'write its score': lambda pid: write(pid, 'oom_score_adj', b'1000'),
    'write its filter': lambda pid: write(pid, 'coredump_filter', b'0x3f'),
    'write its references': lambda pid: write(pid, 'clear_refs', b'1'),
    'seize': lambda pid: trace(pid, ptrace_seize),
    'attach': lambda pid: trace(pid, ptrace_attach),
}
tell(json.dumps([*WAYS]))
shims = children(DAEMON)
found = [DAEMON, *shims, *(child for shim in shims for child in children(shim))]
targets = [int(word) for word in sys.argv[1:]] or [
    pid for pid in found if os.path.exists(f'/proc/{pid}')
    and open(f'/proc/{pid}/comm').read() in ('runnerd\\n', 'runnerd-shim\\n')]
for pid in targets:
    if pid == os.getpid():
        continue
    robbed = [way for way, call in WAYS.items() if said(lambda: call(pid)) == 'done']
    tell(json.dumps(robbed))
"""
"""Try every way on every process given, else on the daemon, on every shim and on what waits under
one to become a command. Say what there is to try, then what worked, a line each."""

OF_A_COMMAND: Final = {"open its own fd", "attach"}
"""What does not work on `sleep` either: it has no descriptor of its own, and is seized already."""


def test_neither_daemon_nor_shims_can_be_robbed(sandbox: Sandbox) -> None:
    """Parked ones, their children, the attacker's own shim and another exec's among them."""
    with sandbox.connect() as client:
        victim, pid = sandbox.start_victim(client)
        wait_for(lambda: client.call("daemon.info")["parked_shims"] == 3)
        before = score(sandbox.pid)
        _, *robbed = sandbox.attack(client, ROB)
        assert set(robbed) == {"[]"}
        assert len(robbed) >= 7  # the daemon, two shims with commands, two with parked children
        assert score(sandbox.pid) == before
        if not sandbox.is_one_user:
            assert sandbox.attack(client, ROB, pid)[1:] == ["[]"]
        sandbox.check_unharmed(client, victim)
        sandbox.check_well(client)


def score(pid: int) -> int:
    return int(Path(f"/proc/{pid}/oom_score_adj").read_text())


def test_the_twin_that_does_not_hide_is_robbed(make_sandbox: Callable[..., Sandbox]) -> None:
    """And so is a command of the same user: every way works, so a refusal above means something."""
    code = "from runnerd.daemon import boot\nboot.hide_process = lambda: None"
    sandbox = make_sandbox(ONE, code=code)
    with sandbox.connect() as client:
        _, pid = sandbox.start_victim(client)
        lines = sandbox.attack(client, ROB, pid, sandbox.pid)
        every, command, daemon = (set(json.loads(line)) for line in lines)
        assert every - daemon == {"attach"}
        assert every - command == OF_A_COMMAND
        client.call("daemon.stop")


def test_a_shim_is_hidden_before_it_can_hide_itself(make_sandbox: Callable[..., Sandbox]) -> None:
    """Its user may not read what is executed, so that the kernel hides it from its first moment."""
    sandbox = make_sandbox(ONE)
    shims = wait_for(lambda: found if len(found := sandbox.shims()) == 3 else None)
    for pid in shims:
        assert str(Path(f"/proc/{pid}/exe").readlink()) == "/memfd:runnerd-shim (deleted)"


def test_where_memory_cannot_be_executed_a_shim_hides_itself_alone(
    make_sandbox: Callable[..., Sandbox],
) -> None:
    refused = """
real = os.posix_spawn
def refuse(path, *words, **more):
    if path.startswith("/proc/self/fd/"):
        raise PermissionError(13, "Permission denied")
    return real(path, *words, **more)
os.posix_spawn = refuse
"""
    sandbox = make_sandbox(ONE, code=refused)
    with sandbox.connect() as client:
        sandbox.check_well(client)
    assert len(sandbox.log("shim_copy_off")) == 1
