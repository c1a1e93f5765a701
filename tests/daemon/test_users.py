"""Who a command is and what it may use, as it sees it: user, capabilities, limits, nice, umask.

The accounts are the test's own: the daemon runs in a mount namespace where /etc/passwd and
/etc/group are files of the test.
"""

from __future__ import annotations

import functools
import os
import resource
import shutil
import signal
import subprocess
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import pytest

from runnerd.client.errors import RemoteError
from tests import needs
from tests.cases.field import mark, marked, metric, status_field
from tests.harness import wait_for

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from runnerd.client.blocking import Client
    from tests.harness import RunnerdProcess

    Daemons = Callable[..., RunnerdProcess]
    Wrapped = Callable[..., Client]

PASSWD: Final = """\
root:x:0:0:root:/root:/bin/bash
daemon:x:1:1::/:/usr/sbin/nologin
build:x:4301:4301::/home/build:/bin/dash
plain:x:4302:4301::/home/plain:/bin/sh
"""
GROUP: Final = """\
root:x:0:
team:x:4310:build
docker:x:4311:plain,build
build:x:4301:
other:x:4399:
"""
IDS: Final = ["sh", "-c", "id -u; id -g; id -G; grep -E '^(Uid|Gid|Groups):' /proc/self/status"]
SETS: Final = ("CapInh", "CapPrm", "CapEff", "CapAmb")


@pytest.fixture
def accounts(start_daemon: Daemons) -> Iterator[Wrapped]:
    """Give a function that starts a daemon with the test's accounts, run by way of `setpriv`."""
    needs.root()
    unshare = needs.program("unshare", "util-linux")
    folder = Path(tempfile.mkdtemp(prefix="rd-accounts-"))
    folder.chmod(0o755)
    (folder / "passwd").write_text(PASSWD)
    (folder / "group").write_text(GROUP)
    mounts = (
        f"mount --bind {folder}/passwd /etc/passwd && mount --bind {folder}/group /etc/group && "
        'exec "$@"'
    )
    clients: list[Client] = []

    def start(*privileges: str, options: tuple[str, ...] = (), **more: Any) -> Client:
        wrapper = [unshare, "--mount", "--propagation", "private", "sh", "-c", mounts, "sh"]
        if privileges:
            wrapper += [needs.program("setpriv", "util-linux"), *privileges]
        client = start_daemon(*options, wrapper=wrapper, **more).connect()
        clients.append(client)
        return client

    yield start
    for client in clients:
        client.close()
    shutil.rmtree(folder)


def printed(client: Client, argv: list[str], **fields: Any) -> list[str]:
    done = client.run(argv, timeout_s=20, **fields)
    assert done.exit.code == 0, done.stderr
    return done.stdout.decode().splitlines()


def status(client: Client, **fields: Any) -> dict[str, str]:
    """Return /proc/self/status as the command sees it."""
    lines = printed(client, ["cat", "/proc/self/status"], **fields)
    return {name: value.strip() for name, _, value in (line.partition(":") for line in lines)}


def refused(client: Client, **fields: Any) -> tuple[str, str | None, str | None]:
    with pytest.raises(RemoteError) as caught:
        client.start(["true"], **fields)
    return caught.value.kind, caught.value.data.stage, caught.value.data.errno_name


@pytest.mark.parametrize(
    ("user", "uid", "gid", "groups"),
    [
        ("build", 4301, 4301, {4301, 4310, 4311}),
        ("4301", 4301, 4301, {4301, 4310, 4311}),  # a number with an entry is that account
        ("plain", 4302, 4301, {4301, 4311}),
        ("4302:4399", 4302, 4399, {4399}),
        ("plain:other", 4302, 4399, {4399}),
        ("plain:0", 4302, 0, {0}),
        ("61234", 61234, 61234, {61234}),  # no entry
        ("61234:61235", 61234, 61235, {61235}),
        ("4294967294", 4294967294, 4294967294, {4294967294}),
        ("root", 0, 0, {0}),
    ],
)
def test_every_way_to_name_a_user(
    accounts: Wrapped, user: str, uid: int, gid: int, groups: set[int]
) -> None:
    seen = status(accounts(), user=user)
    assert seen["Uid"].split() == [str(uid)] * 4
    assert seen["Gid"].split() == [str(gid)] * 4
    assert set(map(int, seen["Groups"].split())) == groups


def test_the_groups_are_those_of_initgroups(accounts: Wrapped) -> None:
    """As setpriv --init-groups, which calls initgroups(3) itself, sets them beside us."""
    client = accounts()
    same = "setpriv --reuid=%s --regid=4301 --init-groups grep ^Groups: /proc/self/status"
    for name in ("build", "plain"):
        theirs = printed(client, ["sh", "-c", same % name])
        ours = printed(client, ["grep", "^Groups:", "/proc/self/status"], user=name)
        assert sorted(ours[0].split()) == sorted(theirs[0].split())


@pytest.mark.parametrize(
    ("user", "stage"),
    [
        ("nobody-here", "user"),
        ("4294967295", "user"),  # -1, which setresuid(2) takes for "leave it"
        ("build:nothing", "groups"),
        ("build:", "groups"),
        (":build", "user"),
        ("-1", "user"),
    ],
)
def test_who_is_not_there_is_not_run_as(accounts: Wrapped, user: str, stage: str) -> None:
    assert refused(accounts(), user=user) == ("start_failed", stage, "ENOENT")


def test_the_environment_tells_who_it_is(accounts: Wrapped) -> None:
    client = accounts()
    names = ["sh", "-c", 'echo "$HOME|${USER-none}|${LOGNAME-none}|${SHELL-none}"']
    assert printed(client, names, user="build") == ["/home/build|build|build|/bin/dash"]
    assert printed(client, names, user="4302") == ["/home/plain|plain|plain|/bin/sh"]
    argv = ["python3", "-c", "import os; print(*map(os.environ.get, ('HOME', 'USER', 'SHELL')))"]
    assert printed(client, argv, user="61234") == ["/ None None"]
    assert printed(client, ["env"], user="build", env_mode="replace", env={"A": "b"}) == ["A=b"]


# ------------------------------------------------------------------------------- capabilities


@pytest.mark.parametrize("user", ["build", "61234:0"])
@pytest.mark.parametrize(
    "privileges",
    [
        (),
        ("--inh-caps=+chown,+net_raw", "--ambient-caps=+chown,+net_raw"),
        ("--securebits=+no_setuid_fixup",),
    ],
    ids=["root", "ambient", "no-fixup"],
)
def test_with_a_user_no_capability_is_left(
    accounts: Wrapped, privileges: tuple[str, ...], user: str
) -> None:
    seen = status(accounts(*privileges), user=user)
    assert {seen[name] for name in SETS} == {"0" * 16}


def test_a_plain_user_gives_its_commands_no_capability_of_its_own(start_daemon: Daemons) -> None:
    """A daemon with ambient capabilities but no right to switch: its `user` can only be itself."""
    needs.root()
    setpriv = needs.program("setpriv", "util-linux")
    folder = Path(tempfile.mkdtemp(prefix="rd-", dir="/tmp"))
    shutil.chown(folder, 65534, 65534)
    wrapper = (
        setpriv, "--reuid=65534", "--regid=65534", "--clear-groups", "--inh-caps=-all,+net_raw",
        "--ambient-caps=+net_raw", "--",
    )  # fmt: skip
    try:
        with start_daemon(wrapper=wrapper, place=folder).connect() as client:
            assert status(client)["CapEff"] != "0" * 16  # as it is, where nothing is asked
            seen = status(client, user="65534")
            assert {seen[name] for name in SETS} == {"0" * 16}
            assert refused(client, user="65534:0") == ("start_failed", "groups", "EPERM")
            assert refused(client, user="root") == ("start_failed", "user", "EPERM")
    finally:
        shutil.rmtree(folder)


@pytest.mark.parametrize("by", ["shim", "daemon"])
def test_whom_a_plain_user_cannot_end_is_named(start_daemon: Daemons, by: str) -> None:
    """A setuid program has made one of the tree another user: it is told, and not waited for."""
    needs.root()
    setpriv = needs.program("setpriv", "util-linux")
    folder = Path(tempfile.mkdtemp(prefix="rd-", dir="/var/tmp"))
    try:
        shutil.chown(folder, 65534, 65534)
        program = folder / "become"
        shutil.copy(setpriv, program)
        program.chmod(0o4755)
        nobody = (setpriv, "--reuid=65534", "--regid=65534", "--clear-groups", "--")
        word = mark()
        script = f"{program} --reuid=1 --regid=1 --clear-groups sleep {word} & wait"
        with start_daemon(wrapper=nobody, place=folder).connect() as client:
            handle = client.start(["sh", "-c", script], attach=False)
            wait_for(lambda: [pid for pid in marked(word) if is_owned_by(pid, 1)])
            (pid,) = (pid for pid in marked(word) if is_owned_by(pid, 1))
            if by == "daemon":
                os.kill(int(status_field(handle.pid or 0, "PPid")), signal.SIGKILL)
            answer = handle.cancel(0)
            assert answer.outcome == "survivors"
            assert answer.receipt is not None
            survivors = [(each.pid, each.reason, each.command) for each in answer.receipt.survivors]
            assert survivors == [(pid, "user", "sleep")]
            assert metric(client.metrics().text, "runnerd_survivors_total") == 1
            (info,) = client.list_execs()
            assert (info.state, info.ending) == ("lingering", "cancelled")
            assert client.run(["true"]).exit.code == 0
            os.kill(pid, signal.SIGKILL)  # as its own user could
            # A shim that is lost is a reason of its own, where that is heard of first.
            reasons = {"cancelled"} if by == "shim" else {"cancelled", "internal"}
            assert handle.wait_closed(10).reason in reasons
            assert handle.inspect().survivors == []
    finally:
        shutil.rmtree(folder)


def is_owned_by(pid: int, uid: int) -> bool:
    """Whether a process is all another user's by now, its real uid included."""
    return status_field(pid, "Uid") == "\t".join([str(uid)] * 4)


def test_root_stays_root(accounts: Wrapped) -> None:
    """Execve gives uid 0 what its bounding set allows, so nothing is promised for it."""
    client = accounts()
    assert status(client, user="root")["CapEff"] == status(client)["CapEff"]


def test_no_new_privs_stops_a_setuid_program(accounts: Wrapped) -> None:
    folder = Path(tempfile.mkdtemp(prefix="rd-", dir="/var/tmp"))
    try:
        folder.chmod(0o755)
        program = folder / "setuid-id"
        shutil.copy(needs.program("id"), program)
        program.chmod(0o4755)
        client = accounts()
        assert status(client, user="build")["NoNewPrivs"] == "0"
        assert status(client, user="build", no_new_privs=True)["NoNewPrivs"] == "1"
        assert status(client, no_new_privs=True)["NoNewPrivs"] == "1"
        gains = functools.partial(printed, client, [str(program), "-u"], user="build")
        assert gains() == ["0"]
        assert gains(no_new_privs=True) == ["4301"]
    finally:
        shutil.rmtree(folder)


# ------------------------------------------------------------------------- a daemon with little


def bounded(*kept: str) -> str:
    return f"--bounding-set=-all,{','.join('+' + name for name in kept)}"


def test_root_with_few_capabilities(accounts: Wrapped) -> None:
    """SETUID, SETGID and KILL are enough: pipes open without CHOWN, and a tree is ended."""
    client = accounts(bounded("setuid", "setgid", "kill"))
    script = "cat /dev/stdin; echo out >/dev/stdout; echo err >/dev/stderr"
    done = client.run(["sh", "-c", script], user="build", input=b"in\n", timeout_s=20)
    assert (done.exit.code, done.stdout, done.stderr) == (0, b"in\nout\n", b"err\n")
    seen = status(client, user="build")
    assert {seen[name] for name in SETS} == {"0" * 16}
    assert set(seen["Groups"].split()) == {"4301", "4310", "4311"}
    for argv in (["sleep", "60"], ["setsid", "sleep", "60"]):
        answer = client.start(argv, user="build", attach=False).cancel(0)
        assert answer.outcome == "ended"
        assert answer.receipt is not None
        assert not answer.receipt.survivors


def test_the_pipes_are_the_users_where_we_may_give_them(accounts: Wrapped) -> None:
    argv = ["stat", "-Lc", "%u %a", "/dev/stdin", "/dev/stdout", "/dev/stderr"]
    assert printed(accounts(), argv, user="build", stdin="pipe") == ["4301 600"] * 3
    client = accounts(bounded("setuid", "setgid", "kill"))
    assert printed(client, argv, user="build", stdin="pipe") == ["0 666"] * 3


def test_what_is_missing_is_named(accounts: Wrapped) -> None:
    client = accounts(bounded("setuid", "kill"))
    assert refused(client, user="build") == ("start_failed", "groups", "EPERM")
    client = accounts(bounded("setgid", "kill"))
    assert refused(client, user="build") == ("start_failed", "user", "EPERM")
    assert printed(client, ["id", "-u"], user="root") == ["0"]  # who it is already
    client = accounts(bounded("setuid", "kill"), options=("--user", "build"))
    for user in (None, "plain"):  # by the daemon's option, or by the request
        with pytest.raises(RemoteError, match=f"the groups of '{user or 'build'}'"):
            client.start(["true"], user=user)


# -------------------------------------------------------------------------------------- limits


def test_limits_by_name(accounts: Wrapped) -> None:
    limits: dict[str, Any] = {"nofile": (100, 200), "core": (0, 0), "fsize": (4096, "unlimited")}
    lines = printed(accounts(), ["cat", "/proc/self/limits"], user="build", rlimits=limits)
    words = {line[:25].strip(): line[25:].split() for line in lines}
    assert words["Max open files"][:2] == ["100", "200"]
    assert words["Max core file size"][:2] == ["0", "0"]
    assert words["Max file size"][:2] == ["4096", "unlimited"]


def test_a_refused_raise_is_an_error_and_runs_nothing(accounts: Wrapped, tmp_path: Path) -> None:
    client = accounts("--bounding-set=-sys_resource")
    proof = tmp_path / "ran"
    with pytest.raises(RemoteError) as caught:
        client.run(["touch", str(proof)], rlimits={"nofile": (2**20, 2**20)})
    data = caught.value.data
    assert (caught.value.kind, data.stage, data.errno_name) == ("start_failed", "rlimit", "EPERM")
    hard = resource.prlimit(client.info().pid, resource.RLIMIT_NOFILE)[1]
    assert f"nofile to 1048576 (the daemon's hard limit is {hard})" in str(caught.value)
    assert not proof.exists()


def test_a_lowered_hard_limit_of_the_daemons_fails_nobody(accounts: Wrapped) -> None:
    """Nobody has asked for a limit: what we were started with is given back as far as it goes."""
    client = accounts("--bounding-set=-sys_resource")
    resource.prlimit(client.info().pid, resource.RLIMIT_NOFILE, (900, 1000))
    for _ in range(8):  # more than are parked from before
        assert printed(client, ["true"]) == []
    assert printed(client, ["sh", "-c", "ulimit -Hn"]) == ["1000"]


def test_nice_and_umask(accounts: Wrapped) -> None:
    client = accounts(bounded("setuid", "setgid", "kill"))
    seen = ["sh", "-c", "nice; umask"]
    assert printed(client, seen, user="build", nice=19) == ["19", "0022"]
    assert printed(client, seen, umask=0o077) == [str(os.nice(0)), "0077"]
    assert refused(client, nice=-5) == ("start_failed", "nice", "EACCES")


def test_the_umask_is_ours_by_default_whatever_the_daemon_was_started_with(
    accounts: Wrapped,
) -> None:
    def narrow() -> None:
        os.umask(0o077)

    client = accounts(prepare=narrow)
    assert printed(client, ["sh", "-c", "umask"]) == ["0022"]


def test_setpriv_agrees(accounts: Wrapped) -> None:
    """What the status file says is not our reading alone."""
    dump = subprocess.run(
        ["setpriv", "--reuid=4301", "--regid=4301", "--clear-groups", "setpriv", "--dump"],
        capture_output=True, text=True, check=True,
    )  # fmt: skip
    lines = printed(accounts(), ["setpriv", "--dump"], user="4301:4301")
    wanted = [line for line in dump.stdout.splitlines() if "capabilities" in line.lower()]
    assert [line for line in lines if "capabilities" in line.lower()] == wanted
