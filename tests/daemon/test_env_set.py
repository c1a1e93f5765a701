"""Variables of later commands: where they lie, whom they reach, and what is never shown."""

from __future__ import annotations

import base64
import json
from typing import TYPE_CHECKING

import pytest

from tests import needs
from tests.raw import RawClient, RawError

if TYPE_CHECKING:
    from collections.abc import Callable

    from tests.harness import RunnerdProcess

    Daemons = Callable[..., RunnerdProcess]


def environment(client: RawClient, **fields: object) -> dict[str, str]:
    """Return what a command is given."""
    request = client.send("exec.start", argv=["/usr/bin/env", "-0"], attach={}, **fields)
    exec_id = client.answer(request)["exec_id"]
    client.note("exec.exited", exec_id)
    lines = client.output(exec_id).decode().split("\0")[:-1]
    return dict(line.split("=", 1) for line in lines)


def test_each_layer_lies_over_the_one_before(start_daemon: Daemons) -> None:
    """Boot environment, env.set, the user's own names, the start's env."""
    daemon = start_daemon(env={"FROM": "boot", "BOOT": "1", "RUNNERD_PLANTED": "x"})
    with RawClient(daemon.socket_path) as client:
        answer = client.call("env.set", set={"FROM": "set", "SET": "1", "HOME": "/set"})
        assert answer == {"set_total": 3, "unset_total": 0, "used_bytes": 9 + 6 + 10}
        found = environment(client, env={"START": "1"})
        assert (found["FROM"], found["BOOT"], found["SET"], found["START"]) == (
            "set",
            "1",
            "1",
            "1",
        )
        assert found["HOME"] == "/set"
        found = environment(client, env={"FROM": "start", "SET": None})
        assert found["FROM"] == "start"
        assert "SET" not in found
        assert not [name for name in found if name.startswith("RUNNERD_")]
        assert environment(client, env={"A": "1"}, env_mode="replace") == {"A": "1"}


def test_a_users_home_is_the_users(start_daemon: Daemons) -> None:
    needs.root()
    with RawClient(start_daemon().socket_path) as client:
        client.call("env.set", set={"HOME": "/set", "USER": "set", "OTHER": "set"})
        found = environment(client, user="nobody")
        assert (found["USER"], found["OTHER"]) == ("nobody", "set")
        assert found["HOME"] != "/set"
        assert environment(client, user="nobody", env={"HOME": "/start"})["HOME"] == "/start"


def test_what_runs_already_keeps_its_own(runnerd_daemon: RunnerdProcess) -> None:
    with RawClient(runnerd_daemon.socket_path) as client:
        script = 'read line; echo "[$LATE]"'
        client.call("exec.start", exec_id="old", argv=["sh", "-c", script], stdin="pipe", attach={})
        client.call("env.set", set={"LATE": "1"})
        client.call("exec.write", exec_id="old", data=base64.b64encode(b"\n").decode())
        client.note("exec.exited", "old")
        assert client.output("old") == b"[]\n"
        assert environment(client)["LATE"] == "1"


def test_unset_takes_away_and_connections_share(start_daemon: Daemons) -> None:
    daemon = start_daemon(env={"BOOT": "1"})
    with RawClient(daemon.socket_path) as one, RawClient(daemon.socket_path) as other:
        one.call("env.set", set={"A": "1"}, unset=["BOOT"])
        found = environment(other)
        assert found["A"] == "1"
        assert "BOOT" not in found
        other.call("env.set", unset=["A"])
        assert "A" not in environment(one)


def test_a_path_that_was_set_finds_the_program(runnerd_daemon: RunnerdProcess) -> None:
    with RawClient(runnerd_daemon.socket_path) as client:
        client.call("env.set", set={"PATH": "/nowhere"})
        with pytest.raises(RawError, match="no such program"):
            client.call("exec.start", argv=["true"])
        client.call("env.set", set={"PATH": "/nowhere:/usr/bin:/bin"})
        client.call("exec.start", argv=["true"])


def test_what_is_refused_changes_nothing(start_daemon: Daemons) -> None:
    daemon = start_daemon("--env-bytes-max", "20")
    with RawClient(daemon.socket_path) as client:
        assert client.hello["limits"]["env_bytes"] == 20
        for params, field in (
            ({"set": {"OK": "1", "RUNNERD_SOCKET": "/x"}}, "set['RUNNERD_SOCKET']"),
            ({"set": {"OK": "1"}, "unset": ["RUNNERD_X"]}, "unset[0]"),
            ({"set": {"OK": "1"}, "unset": ["OK"]}, "unset[0]"),
            ({"set": {"OK": "1", "": "2"}}, "set['']"),
            ({"set": {"OK": "x" * 17}}, "set"),
        ):
            with pytest.raises(RawError) as refused:
                client.call("env.set", **params)
            assert (refused.value.kind, refused.value.data["field"]) == ("invalid_params", field)
        assert "OK" not in environment(client)
        assert client.call("env.set", set={"OK": "x" * 16})["used_bytes"] == 20


def test_names_are_told_and_values_never(runnerd_daemon: RunnerdProcess) -> None:
    with RawClient(runnerd_daemon.socket_path) as client:
        client.call("env.set", set={"TOKEN": "s3cret-value"}, unset=["PATH"])
        info = client.call("daemon.info")
        assert (info["env_set"], info["env_unset"]) == (["TOKEN"], ["PATH"])
        client.call("exec.start", exec_id="e", argv=["/bin/true"])
        told = [info, client.call("exec.inspect", exec_id="e"), client.call("daemon.metrics")]
        assert "s3cret-value" not in json.dumps(told)
    assert "s3cret-value" not in runnerd_daemon.log_path.read_text()


def test_runnerctl_sets_unsets_and_lists(runnerd_daemon: RunnerdProcess) -> None:
    ctl = runnerd_daemon.ctl
    assert ctl("env", "set", "A=1=2", "B=").returncode == 0
    assert ctl("run", "--", "sh", "-c", 'echo "$A.${B-none}"').stdout == b"1=2.\n"
    assert ctl("env", "unset", "B", "PATH").returncode == 0
    assert ctl("env").stdout == b"A\nPATH (unset)\n"
    assert ctl("run", "--", "/bin/sh", "-c", 'echo "$A.${B-none}"').stdout == b"1=2.none\n"
    refused = ctl("env", "set", "RUNNERD_X=1")
    assert refused.returncode == 125
    assert b"the daemon's own" in refused.stderr
    assert ctl("env", "set").returncode == 125
    assert ctl("env", "set", "NOT_SET_HERE_AT_ALL").returncode == 125
