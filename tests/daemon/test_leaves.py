"""A cgroup v2 for each exec: what it holds belongs to the exec, and nothing is left of it.

On this machine's own v2 mount, which needs no controller for any of this.
"""

from __future__ import annotations

import contextlib
import functools
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from runnerd.daemon import leaf as leaf_module
from runnerd.daemon.cgroup import end_stale, give_controllers_to, own_cgroup
from runnerd.daemon.leaf import Leaf, is_held
from runnerd.daemon.signalling import send_signal
from tests import needs
from tests.daemon.looking import log_lines, planted, shim_of, tree_of
from tests.harness import REPOSITORY, RunnerdProcess, children, daemons, is_alive, wait_for
from tests.raw import RawClient
from tests.shim.needs import need_v2_cgroup

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    Start = Callable[..., RunnerdProcess]


@pytest.fixture
def parent() -> Iterator[Path]:
    """A cgroup to make leaves in, removed with all that is in it."""
    folder = need_v2_cgroup() / f"rd-leaves-{os.getpid()}"
    folder.mkdir()
    yield folder
    with contextlib.suppress(OSError):
        (folder / "cgroup.kill").write_text("1")

    def is_removed() -> bool:
        for each, _, _ in os.walk(folder, topdown=False):
            with contextlib.suppress(OSError):
                Path(each).rmdir()
        return not folder.exists()

    wait_for(is_removed)


def own_folder(parent: Path) -> Path:
    (folder,) = parent.glob("runnerd-*")
    return folder


def leaves_in(folder: Path) -> list[Path]:
    return [each for each in folder.iterdir() if each.is_dir()]


def leaf_of(pid: int) -> str:
    lines = Path(f"/proc/{pid}/cgroup").read_text().splitlines()
    return next(line[3:] for line in lines if line.startswith("0::"))


def members(leaf: Path) -> set[int]:
    with contextlib.suppress(OSError):
        return set(map(int, (leaf / "cgroup.procs").read_text().split()))
    return set()


def put(pid: int, leaf: Path) -> None:
    (leaf / "cgroup.procs").write_text(str(pid))


@pytest.fixture
def stranger() -> Iterator[subprocess.Popen[bytes]]:
    """A process that no daemon started."""
    with subprocess.Popen(["sleep", "900"]) as process:
        yield process
        process.kill()


def test_a_relative_folder_is_from_where_it_was_started(start_daemon: Start, parent: Path) -> None:
    daemon = start_daemon(
        "--cgroups", parent.name,
        env={"PYTHONPATH": str(REPOSITORY)}, prepare=lambda: os.chdir(parent.parent),
    )  # fmt: skip
    assert own_folder(parent).is_dir()
    with RawClient(daemon.socket_path) as client:
        assert client.call("daemon.info")["kill_leaves"] is True


def test_each_exec_has_its_own_and_nothing_is_left(start_daemon: Start, parent: Path) -> None:
    daemon = start_daemon("--cgroups", str(parent))
    folder = own_folder(parent)
    with RawClient(daemon.socket_path) as client:
        info = client.call("daemon.info")
        assert (info["kill_leaves"], info["memory_leaves"]) == (True, False)
        assert folder.name == f"runnerd-{info['incarnation']}"
        argv = ["sh", "-c", "setsid sleep 900 & sleep 901; :"]
        pids = [client.call("exec.start", exec_id=f"e{n}", argv=argv)["pid"] for n in range(3)]
        leaves = {leaf_of(pid) for pid in pids}
        assert len(leaves) == 3
        for pid in pids:
            tree = tree_of(pid, 3)
            assert {leaf_of(each) for each in tree} == {leaf_of(pid)}
            assert members(folder / Path(leaf_of(pid)).name) == tree
            assert leaf_of(shim_of(daemon, pid)) == leaf_of(daemon.pid)  # they stay outside
        for number in range(3):
            answer = client.call("exec.cancel", exec_id=f"e{number}", grace_s=0)
            assert answer["outcome"] == "ended"
            assert answer["receipt"]["killed_total"] == 3
        wait_for(lambda: client.call("daemon.info")["parked_shims"] == 3)
        wait_for(lambda: len(leaves_in(folder)) == 3)
        assert client.call("daemon.info")["stray_failures"] == 0
    assert daemon.stop() == 0
    assert not folder.exists()


def is_dead(pid: int) -> bool:
    return not is_alive(pid)


def test_what_a_cgroup_has_counted_is_read_before_it_is_removed(
    start_daemon: Start, parent: Path
) -> None:
    """The exit and the dead shim are there to be seen in the same turn, in whatever order."""
    daemon = start_daemon(
        "--cgroups",
        str(parent),
        **planted("""
            from runnerd.daemon.leaf import Leaf  # no controller is needed here
            Leaf.peak_tasks = lambda self: 7 if self.folder.is_dir() else None
        """),
    )
    with RawClient(daemon.socket_path) as client:
        for number in range(30):
            exec_id = f"e{number}"
            argv = ["sleep", "900"]
            pid = client.call("exec.start", exec_id=exec_id, argv=argv, attach={})["pid"]
            shim = shim_of(daemon, pid)
            os.kill(daemon.pid, signal.SIGSTOP)
            os.kill(pid, signal.SIGKILL)
            wait_for(functools.partial(is_dead, shim))
            os.kill(daemon.pid, signal.SIGCONT)
            its_exit = client.note("exec.exited", exec_id)["exit"]
            assert (its_exit["signal"], its_exit["peak_tasks"]) == (signal.SIGKILL, 7), number


def test_off_and_what_cannot_be_written(start_daemon: Start, tmp_path: Path) -> None:
    need_v2_cgroup()
    daemon = start_daemon("--cgroups", "off")
    with RawClient(daemon.socket_path) as client:
        assert client.call("daemon.info")["kill_leaves"] is False
        pid = client.call("exec.start", exec_id="e", argv=["sleep", "900"])["pid"]
        assert leaf_of(pid) == leaf_of(daemon.pid)
        assert client.call("exec.cancel", exec_id="e", grace_s=0)["outcome"] == "ended"
    daemon = start_daemon("--cgroups", str(tmp_path))  # no cgroup at all
    with RawClient(daemon.socket_path) as client:
        assert client.call("daemon.info")["kill_leaves"] is False
        client.call("exec.start", exec_id="e", argv=["true"])
        assert client.call("exec.wait", exec_id="e")["code"] == 0
    assert not list(tmp_path.glob("runnerd-*"))


def test_a_cgroup_mounted_read_only_as_in_a_container(start_daemon: Start) -> None:
    unshare = needs.program("unshare", "util-linux")
    mount = need_v2_cgroup()
    script = f'mount -o remount,bind,ro {mount} && exec "$@"'
    daemon = start_daemon(
        wrapper=[unshare, "--mount", "--propagation", "private", "sh", "-c", script, "sh"]
    )
    with RawClient(daemon.socket_path) as client:
        assert client.call("daemon.info")["kill_leaves"] is False
        client.call("exec.start", exec_id="e", argv=["true"])
        assert client.call("exec.wait", exec_id="e")["code"] == 0
    (ready,) = log_lines(daemon, "ready")
    assert "Read-only file system" in ready["no_leaves"]


def test_a_folder_that_is_none_is_bad_configuration(tmp_path: Path) -> None:
    with pytest.raises(AssertionError, match="is no directory"), daemons(tmp_path) as start:
        start("--cgroups", "/no/such/folder")


def test_auto_takes_our_own_cgroup(start_daemon: Start, parent: Path) -> None:
    """In a cgroup of its own, and in a mount namespace that shows that cgroup as the root."""
    daemon = start_daemon(prepare=lambda: put(os.getpid(), parent))
    with RawClient(daemon.socket_path) as client:
        pid = client.call("exec.start", exec_id="e", argv=["sleep", "900"])["pid"]
        assert leaf_of(pid).startswith(f"/{parent.name}/{own_folder(parent).name}/")
    assert daemon.stop() == 0
    unshare = needs.program("unshare", "util-linux")
    mount = need_v2_cgroup()
    for flag, shown in (
        ("--cgroup", f"umount {mount} && mount -t cgroup2 none {mount}"),
        ("--uts", f"mount --bind {parent} {mount}"),
    ):
        script = f'{shown} && exec "$@"'
        daemon = start_daemon(
            prepare=lambda: put(os.getpid(), parent),
            wrapper=[
                unshare,
                flag,
                "--mount",
                "--propagation",
                "private",
                "sh",
                "-c",
                script,
                "sh",
            ],
        )
        with RawClient(daemon.socket_path) as client:
            assert client.call("daemon.info")["kill_leaves"] is True
            assert own_folder(parent).is_dir()
        assert daemon.stop() == 0
        assert not list(parent.glob("runnerd-*"))


def test_who_was_put_into_it_is_ended_before_it_is_closed(
    start_daemon: Start, parent: Path, stranger: subprocess.Popen[bytes]
) -> None:
    """Nobody below the shim, so the shim says `empty`: closed is what the cgroup says as well."""
    daemon = start_daemon("--cgroups", str(parent))
    with RawClient(daemon.socket_path) as client:
        argv = ["sh", "-c", "read word"]
        pid = client.call(
            "exec.start", exec_id="e", argv=argv, stdin="pipe", attach={}, grace_s=0.2
        )["pid"]
        put(stranger.pid, own_folder(parent) / Path(leaf_of(pid)).name)
        client.call("exec.write", exec_id="e", data="Cg==", eof=True)
        assert client.note("exec.exited", "e")["exit"]["code"] == 0
        client.note("exec.closed", "e")
        assert stranger.wait(5) == -signal.SIGTERM
        assert client.call("daemon.info")["stray_failures"] == 0
    assert not log_lines(daemon, "shim_lost")


ESCAPE = """
import os, signal, sys, time
shim = os.getppid()
if not os.fork():
    os.setsid()
    if not os.fork():
        open("/proc/self/oom_score_adj", "w").write("0")
        print(os.getpid(), flush=True)
        time.sleep(900)
    os._exit(0)
os.wait()
sys.stdin.readline()
os.kill(shim, signal.SIGKILL)
time.sleep(900)
"""


@pytest.mark.parametrize("cgroups", ["parent", "off"])
def test_an_escape_by_killing_the_shim(start_daemon: Start, parent: Path, cgroups: str) -> None:
    """Where others' orphans come to the daemon too, only a cgroup tells whose this one is."""
    where = str(parent) if cgroups == "parent" else "off"
    # The shell that becomes the daemon has a child already.
    wrapper = ["sh", "-c", 'sleep 900 & exec "$@"', "sh"]
    daemon = start_daemon("--cgroups", where, wrapper=wrapper)
    (others,) = [pid for pid in children(daemon.pid) if name(pid) == "sleep"]
    with RawClient(daemon.socket_path) as client:
        argv = ["python3", "-I", "-c", ESCAPE]
        client.call("exec.start", exec_id="e", argv=argv, grace_s=0.2, attach={}, stdin="pipe")
        client.note("exec.output", "e")
        escaped = int(client.output("e"))
        client.call("exec.write", exec_id="e", data="Cg==", eof=True)
        its_exit = client.note("exec.exited", "e")["exit"]
        assert its_exit["reason"] == "internal"
        client.note("exec.closed", "e")
        assert is_alive(escaped) is (cgroups == "off")
        assert is_alive(others)
        for pid in (escaped, others):
            with contextlib.suppress(OSError):
                os.kill(pid, signal.SIGKILL)


NEST = """
import os
mount = os.environ["MOUNT"]
own = next(line[3:] for line in open("/proc/self/cgroup") if line.startswith("0::")).strip()
for depth in range(3):
    own += "/made"
    os.mkdir(mount + own)
    os.mkdir(mount + own + "-beside")
open(mount + own + "/cgroup.procs", "w").write(str(os.getpid()))
"""


def test_cgroups_that_a_command_made_in_its_own_go_with_it(
    start_daemon: Start, parent: Path
) -> None:
    """As a container engine does; left there, each would stay for good and be tried for ever."""
    daemon = start_daemon("--cgroups", str(parent))
    folder = own_folder(parent)
    with RawClient(daemon.socket_path) as client:
        for number in range(3):
            client.call(
                "exec.start",
                exec_id=f"e{number}",
                argv=["python3", "-I", "-c", NEST],
                env={"MOUNT": str(parent.parent)},
            )
            its_exit = client.call("exec.wait", exec_id=f"e{number}", until="closed")
            assert (its_exit["code"], its_exit["reason"]) == (0, "exited")
        wait_for(lambda: client.call("daemon.info")["parked_shims"] == 3)
        wait_for(lambda: len(leaves_in(folder)) == 3)
        assert not any(leaves_in(leaf) for leaf in leaves_in(folder))
    assert daemon.stop() == 0
    assert not folder.exists()


MANY = 1500
"""More than are looked at in one go."""


@pytest.mark.parametrize("below", ["", "one", "one/two/three"])
def test_very_many_made_cgroups_go_a_part_at_a_time(parent: Path, below: str) -> None:
    """Of who makes a hundred thousand, all at once would stop everybody for seconds."""
    leaf = Leaf(parent / "whole")
    for number in range(MANY):
        (leaf.folder / str(number) / below).mkdir(parents=True)
    assert len(leaf_module._cgroups_in(leaf.folder)) == leaf_module._MADE_MAX
    goes, left = 0, len(leaf_module.folders_in(leaf.folder))
    while not leaf.remove():
        goes += 1
        before, left = left, len(leaf_module.folders_in(leaf.folder))
        assert before - leaf_module._MADE_MAX <= left < before
    assert not leaf.folder.exists()
    assert 1 <= goes <= MANY * 10 / leaf_module._MADE_MAX


def test_a_long_way_down_is_gone_again(parent: Path) -> None:
    leaf = Leaf(parent / "whole")
    deepest = leaf.folder / "/".join("d" * 500)
    deepest.mkdir(parents=True)
    while not leaf.remove():
        assert len(leaf_module._cgroups_in(leaf.folder)) < 500


def test_what_holds_a_process_stays_and_goes_later(
    parent: Path, stranger: subprocess.Popen[bytes]
) -> None:
    leaf = Leaf(parent / "whole")
    held = leaf.folder / "a" / "b"
    for each in (held, leaf.folder / "a" / "c", leaf.folder / "d"):
        each.mkdir(parents=True)
    put(stranger.pid, held)
    for _ in range(3):
        assert not leaf.remove()
        assert leaf.pids() == [stranger.pid]
    leaf.kill()
    stranger.wait(10)
    wait_for(leaf.remove)


def test_the_leaf_of_who_made_very_many_goes_with_it(start_daemon: Start, parent: Path) -> None:
    daemon = start_daemon("--cgroups", str(parent))
    folder = own_folder(parent)
    code = (
        NEST.partition("for depth")[0]
        + f"for n in range({MANY}): os.mkdir(f'{{mount}}{{own}}/{{n}}')"
    )
    with RawClient(daemon.socket_path) as client:
        argv = ["python3", "-I", "-c", code]
        client.call("exec.start", exec_id="e", argv=argv, env={"MOUNT": str(parent.parent)})
        assert client.call("exec.wait", exec_id="e", until="closed")["code"] == 0
        wait_for(lambda: client.call("daemon.info")["parked_shims"] == 3)
        wait_for(lambda: len(leaves_in(folder)) == 3)
        assert client.call("daemon.info")["stray_failures"] == 0


@pytest.mark.parametrize("dies", [False, True])
def test_who_hides_in_a_cgroup_made_in_its_own_is_ended(
    start_daemon: Start, parent: Path, stranger: subprocess.Popen[bytes], *, dies: bool
) -> None:
    """By this daemon, or by the next one."""
    daemon = start_daemon("--cgroups", str(parent))
    folder = own_folder(parent)
    with RawClient(daemon.socket_path) as client:
        argv = ["sh", "-c", "read word"]
        pid = client.call(
            "exec.start", exec_id="e", argv=argv, stdin="pipe", attach={}, grace_s=0.2
        )["pid"]
        made = folder / Path(leaf_of(pid)).name / "made" / "twice"
        made.mkdir(parents=True)
        put(stranger.pid, made)
        if dies:
            daemon.kill()
            start_daemon("--cgroups", str(parent))
            assert stranger.wait(10) == -signal.SIGKILL
        else:
            client.call("exec.write", exec_id="e", data="Cg==", eof=True)
            client.note("exec.closed", "e")
            assert stranger.wait(5) == -signal.SIGTERM
    wait_for(lambda: not made.exists())
    wait_for(lambda: folder.exists() is not dies)


def test_a_cgroup_whose_files_are_kept_from_us(start_daemon: Start, parent: Path) -> None:
    """A command of the daemon's own user can do that; it ends as any other."""
    setpriv = needs.program("setpriv", "util-linux")
    # Without what lets root read every file, as a container can be started.
    wrapper = [setpriv, "--bounding-set=-dac_override,-dac_read_search", "--inh-caps=-all"]
    daemon = start_daemon("--cgroups", str(parent), wrapper=wrapper)
    script = f"""
        own={parent.parent}$(sed -n s/^0:://p /proc/self/cgroup)
        chmod 0 $own/cgroup.procs $own/cgroup.kill $own/pids.peak $own/memory.events 2>&-
        chmod 0 $own
        sleep 900 &
    """
    with RawClient(daemon.socket_path) as client:
        client.call("exec.start", exec_id="e", argv=["sh", "-c", script], grace_s=0.1)
        assert client.call("exec.wait", exec_id="e")["reason"] == "exited"
        assert client.call("exec.cancel", exec_id="e")["outcome"] == "ended"
        assert client.call("daemon.info")["stray_failures"] == 0


def name(pid: int) -> str:
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/comm").read_text().strip()
    return ""


def test_what_a_dead_daemon_left_is_ended_by_the_next(
    start_daemon: Start, parent: Path, stranger: subprocess.Popen[bytes]
) -> None:
    """Its own folder only: that of a daemon that lives is locked."""
    other = start_daemon("--cgroups", str(parent))
    others = own_folder(parent)
    dead = start_daemon("--cgroups", str(parent))
    (folder,) = set(parent.glob("runnerd-*")) - {others}
    foreign = parent / "runnerd-not-ours"
    foreign.mkdir()
    leaf = folder / "999"  # no shim's, which would kill it as well
    leaf.mkdir()
    put(stranger.pid, leaf)
    dead.kill()
    with RawClient(other.socket_path) as client:
        live = client.call("exec.start", exec_id="e", argv=["sleep", "900"])["pid"]
        began_s = time.monotonic()
        third = start_daemon("--cgroups", str(parent))
        assert folder.exists()
        assert stranger.wait(10) == -signal.SIGKILL
        assert time.monotonic() - began_s > 2  # its shims had the time to end their trees
        wait_for(lambda: not folder.exists())
        assert is_alive(live)
        assert others.exists()
        assert foreign.exists()
    assert other.stop() == 0
    assert third.stop() == 0


def test_an_empty_folder_of_a_dead_daemon_goes_at_once(start_daemon: Start, parent: Path) -> None:
    dead = start_daemon("--cgroups", str(parent))
    folder = own_folder(parent)
    dead.kill()
    wait_for(lambda: not any(members(each) for each in leaves_in(folder)))
    start_daemon("--cgroups", str(parent))
    assert not folder.exists()
    assert own_folder(parent).exists()


def test_leaves_that_cannot_be_entered_are_given_up(start_daemon: Start, parent: Path) -> None:
    """Said once; the commands run without."""
    daemon = start_daemon(
        "--cgroups",
        str(parent),
        **planted("""
            import contextlib
            from runnerd.daemon.leaf import Leaf
            opened = Leaf.opened
            @contextlib.contextmanager
            def gone(self):
                with opened(self) as fd:
                    self.folder.rmdir()
                    yield fd
            Leaf.opened = gone
        """),
    )
    with RawClient(daemon.socket_path) as client:
        for number in range(8):
            client.call("exec.start", exec_id=f"e{number}", argv=["echo", "here"], attach={})
            assert client.note("exec.exited", f"e{number}")["exit"]["code"] == 0
        assert client.call("daemon.info")["kill_leaves"] is False
    assert len(log_lines(daemon, "cgroup_leaves_off")) == 1


def test_hundreds_of_execs_leave_no_leaf(start_daemon: Start, parent: Path) -> None:
    daemon = start_daemon("--cgroups", str(parent))
    folder = own_folder(parent)
    with RawClient(daemon.socket_path) as client:
        for number in range(200):
            fields: dict[str, Any] = {"exec_id": f"e{number}", "argv": ["true"]}
            client.call("exec.start", **fields)
            client.call("exec.wait", exec_id=f"e{number}", until="closed")
        wait_for(lambda: client.call("daemon.info")["parked_shims"] == 3)
        wait_for(lambda: len(leaves_in(folder)) == 3)


# ------------------------------------------------------------------- found by files that are shown


@pytest.mark.parametrize(
    ("root", "own", "inside"),
    [
        ("/", "/", ""),
        ("/", "/docker/abc", "docker/abc"),
        ("/docker/abc", "/docker/abc", ""),  # a container that shares the host's cgroup namespace
        ("/docker/abc", "/docker/abc/sub", "sub"),
        ("/", "/a b", "a b"),
    ],
)
def test_our_own_cgroup_is_found(tmp_path: Path, root: str, own: str, inside: str) -> None:
    point = tmp_path / "point of mount"
    folder = point / inside
    folder.mkdir(parents=True)
    (folder / "cgroup.procs").write_text(f"1\n{os.getpid()}\n")
    mounts, cgroup = tmp_path / "mountinfo", tmp_path / "cgroup"
    shown = str(point).replace(" ", "\\040")
    mounts.write_text(
        "22 1 0:20 / /proc rw,nosuid - proc proc rw\n"
        f"30 22 0:26 / {tmp_path}/v1 rw - cgroup cgroup rw,memory\n"
        f"31 22 0:27 {root} {shown} rw,relatime shared:9 - cgroup2 cgroup2 rw\n"
    )
    cgroup.write_text(f"4:memory:/x\n0::{own}\n")
    assert own_cgroup(mounts, cgroup) == folder


def test_a_cgroup_without_us_is_not_ours(tmp_path: Path) -> None:
    (tmp_path / "cgroup.procs").write_text("1\n")
    mounts, cgroup = tmp_path / "mountinfo", tmp_path / "cgroup"
    mounts.write_text(f"31 22 0:27 / {tmp_path} rw - cgroup2 cgroup2 rw\n")
    cgroup.write_text("0::/\n")
    assert own_cgroup(mounts, cgroup) is None
    cgroup.write_text("4:memory:/x\n")
    assert own_cgroup(mounts, cgroup) is None
    assert own_cgroup(tmp_path / "none", tmp_path / "none") is None


def test_a_leaf_is_killed_as_a_whole(parent: Path) -> None:
    """At one go, also who is being forked just then: nobody is killed one by one here."""
    leaf = Leaf(parent / "whole")
    leaf.folder.mkdir()
    if not (leaf.folder / "cgroup.kill").exists():
        needs.skip_or_fail("needs cgroup.kill, Linux 5.14")
    script = f"echo $$ > {leaf.folder}/cgroup.procs; while :; do sleep 9 & sleep 0.01; done"
    forking = subprocess.Popen(["sh", "-c", script])
    try:
        wait_for(lambda: len(leaf.pids()) > 20)
        leaf.kill()
        assert forking.wait(10) == -signal.SIGKILL
        wait_for(lambda: leaf.pids() == [] and leaf.remove())
    finally:
        for pid in leaf.pids():
            os.kill(pid, signal.SIGKILL)


@pytest.mark.parametrize("without", ["cgroup.Leaf.kill", "cgroup._kill_one"])
def test_a_stale_leaf_is_ended_at_once_or_one_by_one(
    parent: Path, stranger: subprocess.Popen[bytes], monkeypatch: pytest.MonkeyPatch, without: str
) -> None:
    """Each way alone is enough: cgroup.kill is there since Linux 5.14."""
    monkeypatch.setattr(f"runnerd.daemon.{without}", lambda *_: None)
    folder = parent / "runnerd-0123456789abcdef"
    (folder / "1").mkdir(parents=True)
    put(stranger.pid, folder / "1")
    wait_for(lambda: end_stale(folder))
    assert stranger.wait(10) == -signal.SIGKILL


def test_a_leafs_own_oom_kills(tmp_path: Path) -> None:
    leaf = Leaf(tmp_path)
    assert leaf.oom_kills() is None  # no memory controller
    (tmp_path / "memory.events").write_text("low 0\nhigh 0\nmax 7\noom 1\noom_kill 3\n")
    assert leaf.oom_kills() == 3
    assert leaf.peak_tasks() is None  # no pids controller, or a kernel before 6.1
    (tmp_path / "pids.peak").write_text("7\n")
    assert leaf.peak_tasks() == 7


def test_who_is_beyond_our_pid_namespace_has_no_number(tmp_path: Path) -> None:
    """The kernel shows each as 0, and a signal to 0 is one to our own group."""
    made = tmp_path / "runnerd-0123456789abcdef" / "1"
    made.mkdir(parents=True)
    (made / "cgroup.procs").write_text("0\n0\n4194305\n")
    assert Leaf(made).pids() == [4194305]
    assert is_held(made)
    code = """
import signal, sys
from pathlib import Path
from runnerd.daemon import cgroup, leaf, signalling
signalling.open_pidfd = lambda pid: None  # as on a kernel without
leaf.pids_in = leaf._listed_in
assert 0 in leaf.Leaf(Path(sys.argv[1], "1")).pids()
assert cgroup.end_stale(Path(sys.argv[1])) is False
print("alive")
"""
    words = [sys.executable, "-c", code, str(made.parent)]
    done = subprocess.run(
        words, check=False, capture_output=True, text=True, start_new_session=True
    )
    assert done.stdout == "alive\n", done


@pytest.mark.parametrize("pid", [0, 1, -1])
def test_no_number_that_stands_for_more_than_one_process_is_signalled(
    pid: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("runnerd.daemon.signalling.open_pidfd", lambda _: None)
    assert send_signal(pid, 0, lambda: True) is False  # 0 is sent to nobody, whatever becomes of it
    assert send_signal(os.getpid(), 0, lambda: True) is True


@pytest.mark.parametrize("who", ["1", "0"], ids=["ours", "beyond our pid namespace"])
def test_controllers_are_given_where_no_process_is_and_nowhere_else(
    tmp_path: Path, who: str
) -> None:
    """Of one with processes `pids` could be turned on: a threaded root, closed to all below."""
    folder = tmp_path / "box" / "runnerd"
    folder.mkdir(parents=True)
    for each, pids in ((folder.parent, f"{who}\n"), (folder, "")):
        (each / "cgroup.type").write_text("domain\n")
        (each / "cgroup.procs").write_text(pids)
        (each / "cgroup.subtree_control").write_text("")
    give_controllers_to(folder)
    assert (folder.parent / "cgroup.subtree_control").read_text() == ""
    assert (folder / "cgroup.subtree_control").read_text() == "+pids"  # the last of two
    (folder.parent / "cgroup.type").unlink()  # as the root, which may have both
    give_controllers_to(folder)
    assert (folder.parent / "cgroup.subtree_control").read_text() == "+pids"


def test_below_a_threaded_cgroup_there_are_no_leaves(start_daemon: Start, parent: Path) -> None:
    """Nobody may enter a leaf there, and it is found out at boot, not by the first command."""
    (parent / "threads").mkdir()
    (parent / "threads" / "cgroup.type").write_text("threaded")
    daemon = start_daemon("--cgroups", str(parent))
    with RawClient(daemon.socket_path) as client:
        info = client.call("daemon.info")
        assert (info["kill_leaves"], info["memory_leaves"]) == (False, False)
        pid = client.call("exec.start", exec_id="e", argv=["sleep", "900"])["pid"]
        assert "runnerd-" not in leaf_of(pid)
    assert not list(parent.glob("runnerd-*"))
    assert not log_lines(daemon, "cgroup_leaves_off")
