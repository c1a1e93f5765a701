"""A start sent again is no second start, and what is known of an exec stays answerable.

Every command here leaves a line in a file, so that a second run would be seen, whatever is said.
"""

from __future__ import annotations

import signal
import time
from typing import TYPE_CHECKING, Any

import pytest

from tests.daemon.looking import log_lines, planted
from tests.harness import RunnerdProcess, is_alive, wait_for
from tests.raw import RawClient, RawError

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    Start = Callable[..., RunnerdProcess]


def marking(place: Path, then: str = "") -> list[str]:
    return ["sh", "-c", f"echo ran >> {place}; echo out; {then}"]


def runs(place: Path) -> int:
    return len(place.read_text().splitlines()) if place.exists() else 0


def run(client: RawClient, exec_id: str, **fields: Any) -> dict[str, Any]:
    """Start a command and wait until nothing of it is left; returns the start's answer."""
    answer = client.call("exec.start", exec_id=exec_id, **({"argv": ["true"]} | fields))
    client.call("exec.wait", exec_id=exec_id, until="closed")
    return answer


def refused(client: RawClient, method: str, **params: Any) -> RawError:
    with pytest.raises(RawError) as caught:
        client.call(method, **params)
    return caught.value


def again(answer: dict[str, Any]) -> dict[str, Any]:
    """What the same start gets when it is sent again."""
    return answer | {"created": False, "subscription": None}


# ------------------------------------------------------------------ one start, many times


def test_twenty_concurrent_identical_starts_are_one_process(
    runnerd_daemon: RunnerdProcess, tmp_path: Path
) -> None:
    """Each gets the same answer and, where it attaches, all of the output."""
    marker = tmp_path / "marker"
    start: dict[str, Any] = {
        "exec_id": "one",
        "nonce": "n",
        "horizon": 0,
        "argv": marking(marker, "sleep 0.2; exit 3"),
        "attach": {"streams": ["stdout"]},
    }
    clients = [RawClient(runnerd_daemon.socket_path) for _ in range(20)]
    try:
        asked = [client.send("exec.start", **start) for client in clients]
        answers = [client.answer(asked[at]) for at, client in enumerate(clients)]
        for client in clients:
            assert client.note("exec.closed", "one")
            assert client.output("one") == b"out\n"
    finally:
        for client in clients:
            client.sock.close()
    assert runs(marker) == 1
    assert sorted(answer.pop("created") for answer in answers) == [False] * 19 + [True]
    assert all(answer == answers[0] for answer in answers)
    assert answers[0]["subscription"] == 1


def test_those_who_join_a_start_in_flight_share_its_fate(
    start_daemon: Start, tmp_path: Path
) -> None:
    """The same error for each; then id and nonce are free, also for other content."""
    daemon = start_daemon(**planted(DELAYED))
    marker = tmp_path / "marker"
    with RawClient(daemon.socket_path) as client, RawClient(daemon.socket_path) as other:
        bad: dict[str, Any] = {"exec_id": "e", "nonce": "n", "argv": ["/no/such/program"]}
        asked = [(each, each.send("exec.start", **bad)) for each in [client, other] * 5]
        errors = []
        for each, request_id in asked:
            with pytest.raises(RawError) as caught:
                each.answer(request_id)
            errors.append(caught.value.error)
        assert errors == [errors[0]] * 10
        assert errors[0]["data"]["kind"] == "start_failed"
        assert client.call("daemon.info")["starts"] == 1
        answer = run(client, "e", nonce="n", argv=marking(marker))
        assert (answer["created"], answer["starts"]) == (True, 2)
    assert runs(marker) == 1


def test_another_command_under_a_known_id_is_refused_by_kind_and_field(
    start_daemon: Start, tmp_path: Path
) -> None:
    """Live, finished and settled; nothing runs and nothing is counted."""
    daemon = start_daemon("--finished-execs-max", "1")
    marker = tmp_path / "marker"
    start: dict[str, Any] = {
        "exec_id": "e",
        "nonce": "n",
        "argv": ["sh", "-c", "read x"],
        "stdin": "pipe",
    }
    with RawClient(daemon.socket_path) as client:
        first = client.call("exec.start", **start)
        for state in ("live", "finished", "settled"):
            starts = client.call("daemon.info")["starts"]
            bad: dict[str, Any] = start | {"argv": marking(marker)}
            for nonce in ({"nonce": "m"}, {}):
                asked = {name: bad[name] for name in bad if name != "nonce"} | nonce
                error = refused(client, "exec.start", **asked)
                assert (error.kind, error.data["state"]) == ("exec_exists", state)
            for field, other in {"argv": bad["argv"], "env": {"A": "b"}, "umask": 0}.items():
                error = refused(client, "exec.start", **(start | {field: other, "sha256": True}))
                assert error.kind == "nonce_reused"
                # A settled marker has the digest alone.
                assert error.data.get("field") == (None if state == "settled" else field)
            # A default may be written out, and who attaches is no part of what is started.
            same = start | {"env": {}, "grace_s": 5, "horizon": 0}
            assert client.call("exec.start", **same) == again(first)
            assert client.call("daemon.info")["starts"] == starts
            if state == "live":
                client.call("exec.write", exec_id="e", data="Cg==")
                client.call("exec.wait", exec_id="e", until="closed")
            else:
                run(client, f"later-{state}")
    assert runs(marker) == 0


def test_a_retry_is_answered_while_the_daemon_takes_no_new_work(
    start_daemon: Start, tmp_path: Path
) -> None:
    """Full, draining and stopping: the exec is live, finished or settled."""
    daemon = start_daemon("--finished-execs-max", "1", "--live-execs-max", "2")
    marker, up = tmp_path / "marker", tmp_path / "up"
    stubborn = ["sh", "-c", f"trap '' TERM; echo ran >> {marker}; echo > {up}; exec sleep 900"]
    live: dict[str, Any] = {"exec_id": "live", "nonce": "n", "argv": stubborn}
    settled: dict[str, Any] = {"exec_id": "settled", "nonce": "n", "argv": marking(marker)}
    finished: dict[str, Any] = {"exec_id": "finished", "nonce": "n", "argv": marking(marker)}
    new: dict[str, Any] = {"exec_id": "new", "nonce": "n", "argv": marking(marker)}
    with RawClient(daemon.socket_path) as client:
        first = {each["exec_id"]: run(client, **each) for each in (settled, finished)}
        first["live"] = client.call("exec.start", **live)
        client.call("exec.start", exec_id="other", argv=["sleep", "900"])
        wait_for(up.exists)

        def check(kind: str) -> None:
            for each in (live, finished, settled):
                answer = client.call("exec.start", **each)
                assert answer == again(first[each["exec_id"]])
            assert refused(client, "exec.start", **new).kind == kind

        check("busy")
        client.call("daemon.drain")
        check("draining")
        daemon.process.send_signal(signal.SIGTERM)
        wait_for(lambda: log_lines(daemon, "stopping"))
        check("stopping")
        assert daemon.process.wait(5) == 0
    assert runs(marker) == 3


def test_a_late_copy_of_a_start_whose_marker_has_gone_does_not_run(
    start_daemon: Start, tmp_path: Path
) -> None:
    daemon = start_daemon("--finished-execs-max", "1", "--settled-execs-max", "1")
    marker = tmp_path / "marker"
    with RawClient(daemon.socket_path) as client:
        run(client, "before")
        horizon = client.call("hello", protocol=[1])["starts"]
        start: dict[str, Any] = {
            "exec_id": "e",
            "nonce": "n",
            "horizon": horizon,
            "argv": marking(marker),
        }
        first = run(client, **start)
        assert client.call("exec.start", **start) == again(first)  # kept
        run(client, "b")
        assert client.call("exec.start", **start) == again(first)  # settled
        run(client, "c")
        for method in ("exec.inspect", "exec.wait"):
            assert refused(client, method, exec_id="e").kind == "exec_unknown"
        error = refused(client, "exec.start", **start)
        assert (error.kind, error.data["field"]) == ("history_lost", "horizon")
        # Whoever knows of all that has been dropped starts something new, and of no other history.
        later: dict[str, Any] = {"exec_id": "new", "nonce": "m", "argv": marking(marker)}
        future = refused(client, "exec.start", horizon=5, **later)
        assert (future.kind, future.data["field"]) == ("history_lost", "horizon")
        assert runs(marker) == 1
        assert run(client, horizon=4, **later)["created"]
    assert runs(marker) == 2


def test_a_retry_that_attaches_gets_what_is_kept_or_no_subscription(start_daemon: Start) -> None:
    sizes = ("--transcript-total-bytes-max", "200000", "--tail-bytes-max", "150000")
    daemon = start_daemon("--spool", "off", *sizes)
    with RawClient(daemon.socket_path) as client:
        printing: dict[str, Any] = {"argv": ["sh", "-c", "head -c 100000 /dev/zero"], "nonce": "n"}
        start = printing | {"exec_id": "e", "attach": {}}
        first = run(client, **start)
        client.note("exec.closed", "e")
        replayed = client.call("exec.start", **start)
        assert replayed == first | {"created": False, "subscription": first["subscription"] + 1}
        wait_for(lambda: client.call("ping") == {} and len(client.output("e")) == 200_000)
        for exec_id in ("f", "g"):
            run(client, exec_id, **printing)
        assert client.call("exec.inspect", exec_id="e")["transcript"] == "evicted"
        assert client.call("exec.start", **start) == again(first)
        assert client.call("daemon.info")["subscriptions"] == 0


# ------------------------------------------------------------------ what stays answerable


@pytest.mark.parametrize("how", ["evicted", "forgotten"])
def test_a_settled_exec_still_answers_what_its_exit_answers(start_daemon: Start, how: str) -> None:
    daemon = start_daemon("--finished-execs-max", "1")
    with RawClient(daemon.socket_path) as client:
        run(client, "e", nonce="n", argv=["sh", "-c", "echo out; exit 3"], labels={"job": "1"})
        before = client.call("exec.inspect", exec_id="e")
        if how == "forgotten":
            assert client.call("exec.forget", exec_id="e") == {}
        else:
            run(client, "later")
        info = client.call("exec.inspect", exec_id="e", usage=True)
        gone = dict.fromkeys(("argv", "cwd", "flow", "first_seq", "last_seq", "spool"))
        gone |= {"stdin_accepted_bytes": None, "labels": {}, "transcript": how}
        assert info == before | gone | {"age_s": info["age_s"]}
        assert 0 <= info["age_s"] < 60
        for until in ("exited", "closed"):
            answer = client.call("exec.wait", exec_id="e", until=until, timeout_s=5)
            assert answer == before["exit"]
        answer = client.call("exec.cancel", exec_id="e", if_nonce="n")
        assert answer == {"outcome": "already_ended", "receipt": None, "exit": before["exit"]}
        assert refused(client, "exec.cancel", exec_id="e", if_nonce="m").kind == "not_owner"
        error = refused(client, "exec.attach", exec_id="e")
        kind = "exec_settled" if how == "forgotten" else "exec_evicted"
        assert (error.kind, error.data["exit"]) == (kind, before["exit"])
        for method, params in {"exec.signal": {"signal": "TERM"}, "exec.write": {}}.items():
            error = refused(client, method, exec_id="e", **params)
            assert (error.kind, error.data["exit"]) == ("exec_ended", before["exit"])
        assert client.call("exec.forget", exec_id="e") == {}  # no error, and the same state
        assert client.call("exec.inspect", exec_id="e")["transcript"] == how
        assert "e" not in [each["exec_id"] for each in client.call("exec.list")["execs"]]


def test_forget_frees_what_is_kept_at_once_and_takes_only_what_is_closed(
    start_daemon: Start, tmp_path: Path
) -> None:
    daemon = start_daemon()
    up = tmp_path / "up"
    with RawClient(daemon.socket_path) as client:
        lingering = ["sh", "-c", f"head -c 200000 /dev/zero; echo > {up}; sleep 900 &"]
        start: dict[str, Any] = {"exec_id": "e", "nonce": "n", "argv": lingering}
        first = client.call("exec.start", **start)
        client.call("exec.wait", exec_id="e")
        error = refused(client, "exec.forget", exec_id="e")
        assert error.kind == "exec_live"
        assert client.call("exec.inspect", exec_id="e")["state"] == "lingering"
        client.call("exec.cancel", exec_id="e")
        assert transcript_bytes(client) > 200_000
        assert client.call("exec.forget", exec_id="e") == {}
        assert transcript_bytes(client) == 0
        # Its id stays taken, and a retry hears of the first start; there is no output to attach to.
        assert client.call("exec.start", **start, attach={}) == again(first)
        assert refused(client, "exec.start", exec_id="e", argv=["true"]).kind == "exec_exists"
        assert client.call("daemon.info")["subscriptions"] == 0
        assert refused(client, "exec.forget", exec_id="nobody").kind == "exec_unknown"


def transcript_bytes(client: RawClient) -> float:
    text = client.call("daemon.metrics")["text"]
    (line,) = [each for each in text.splitlines() if each.startswith("runnerd_transcript_bytes ")]
    return float(line.split()[1])


def test_a_restart_forgets_no_start_and_makes_up_no_exit(
    start_daemon: Start, tmp_path: Path
) -> None:
    """One exec has ended, of one only the command has, one was lost; none of them runs again."""
    marker, place = tmp_path / "marker", tmp_path / "d"
    place.mkdir()
    ended: dict[str, Any] = {"exec_id": "ended", "nonce": "n", "argv": marking(marker, "exit 3")}
    left: dict[str, Any] = {"exec_id": "left", "nonce": "n", "argv": marking(marker, "sleep 900 &")}
    lost: dict[str, Any] = {"exec_id": "lost", "nonce": "n", "argv": marking(marker, "sleep 900")}
    first = start_daemon(place=place)
    with RawClient(first.socket_path) as client:
        answers = {"ended": run(client, **ended)}
        answers["left"] = client.call("exec.start", **left)
        exits = {name: client.call("exec.wait", exec_id=name) for name in ("ended", "left")}
        answers["lost"] = client.call("exec.start", **lost)
        # The journal is written in order: once this start is in it, so is all that was before.
        assert client.call("exec.start", exec_id="last", argv=["true"])["journaled"]
        wait_for(lambda: runs(marker) == 3)
        before = client.call("exec.inspect", exec_id="lost")
    first.kill()
    wait_for(lambda: not is_alive(answers["lost"]["pid"]))
    with RawClient(start_daemon(place=place).socket_path) as client:
        assert client.hello["starts"] == 4
        for each in (ended, left):
            name = each["exec_id"]
            assert client.call("exec.start", **each, horizon=0, attach={}) == again(answers[name])
            for until in ("exited", "closed"):
                answer = client.call("exec.wait", exec_id=name, until=until, timeout_s=5)
                assert answer == exits[name]
            error = refused(client, "exec.attach", exec_id=name)
            assert (error.kind, error.data["exit"]) == ("exec_lost", exits[name])
            assert error.data["incarnation"] == before["incarnation"]
            answer = client.call("exec.cancel", exec_id=name)
            assert answer == {"outcome": "already_ended", "receipt": None, "exit": exits[name]}
        asked = {"exec.start": lost, "exec.signal": {"signal": "TERM"}}
        for method in ("exec.wait", "exec.attach", "exec.cancel", "exec.write", *asked):
            params = asked.get(method, {})
            error = refused(client, method, **({"exec_id": "lost"} | params))
            assert error.kind == "exec_lost", method
            assert error.data["pid"] == answers["lost"]["pid"]
            assert error.data["incarnation"] == before["incarnation"]
            assert "exit" not in error.data
        info = client.call("exec.inspect", exec_id="lost")
        shown = {"state", "argv", "cwd", "user", "labels", "incarnation", "accepted", "accepted_at"}
        assert {name: info[name] for name in shown} == {name: before[name] for name in shown} | {
            "state": "closed"
        }
        assert (info["exit"], info["closed"], info["transcript"]) == (None, None, "lost")
        listed = client.call("exec.list")["execs"]
        assert [each["exec_id"] for each in listed] == ["ended", "left", "lost", "last"]
        assert refused(client, "exec.start", **(ended | {"nonce": "m"})).kind == "exec_exists"
        assert refused(client, "exec.start", **(ended | {"umask": 0})).kind == "nonce_reused"
        assert client.call("exec.forget", exec_id="lost") == {}
        assert client.call("exec.inspect", exec_id="lost")["argv"] is None
        assert run(client, "new")["starts"] == 5
    assert runs(marker) == 3


# ------------------------------------------------------------------ cancel


DELAYED = """
    import time
    from runnerd.daemon.running import Running
    original = Running.launch
    def later(self):
        self._service.poller.call_at(time.monotonic() + 0.3, self, lambda: original(self))
    Running.launch = later
"""


def starting(client: RawClient, exec_id: str) -> bool:
    execs = client.call("exec.list", state=["starting"])["execs"]
    return exec_id in [each["exec_id"] for each in execs]


@pytest.mark.parametrize("bound", [{}, {"if_nonce": "n"}])
def test_a_cancel_between_acceptance_and_launch_is_not_lost(
    start_daemon: Start, tmp_path: Path, bound: dict[str, str]
) -> None:
    """It is answered at once, and the command never runs: not then, and not when sent again."""
    daemon = start_daemon(**planted(DELAYED))
    marker = tmp_path / "marker"
    start: dict[str, Any] = {"exec_id": "e", "nonce": "n", "argv": marking(marker)}
    with RawClient(daemon.socket_path) as client, RawClient(daemon.socket_path) as other:
        asked = [client.send("exec.start", **start), client.send("exec.start", **start)]
        wait_for(lambda: starting(other, "e"))
        assert refused(other, "exec.cancel", exec_id="e", if_nonce="m").kind == "not_owner"
        assert starting(other, "e")
        began_s = time.monotonic()
        answer = other.call("exec.cancel", exec_id="e", **bound)
        assert answer == {"outcome": "ended", "receipt": None, "exit": None}
        assert time.monotonic() - began_s < 0.25  # not held up by what it was waiting for
        for each in asked:
            with pytest.raises(RawError) as caught:
                client.answer(each)
            assert caught.value.kind == "cancelled"
        assert refused(other, "exec.start", **start).kind == "cancelled"
        # Timers run in order: once this one has started, the first one's launch has come and gone.
        run(other, "later")
        assert runs(marker) == 0
        other_nonce = start | {"nonce": "m"}
        if bound:
            assert run(other, **other_nonce)["created"]  # it is not what was cancelled
        else:
            assert refused(other, "exec.start", **other_nonce).kind == "cancelled"
        assert other.call("daemon.info")["live_execs"] == 0
    assert runs(marker) == bool(bound)


def test_a_stop_between_acceptance_and_launch_is_not_lost(
    start_daemon: Start, tmp_path: Path
) -> None:
    daemon = start_daemon(**planted(DELAYED))
    marker = tmp_path / "marker"
    with RawClient(daemon.socket_path) as client, RawClient(daemon.socket_path) as other:
        asked = client.send("exec.start", exec_id="e", argv=marking(marker))
        wait_for(lambda: starting(other, "e"))
        began_s = time.monotonic()
        daemon.process.send_signal(signal.SIGTERM)
        with pytest.raises(RawError) as caught:
            client.answer(asked)
        assert caught.value.kind == "stopping"
        assert daemon.process.wait(5) == 0
        assert time.monotonic() - began_s < 1
    assert runs(marker) == 0


def test_a_cancel_acts_only_on_the_exec_whose_nonce_it_names(
    runnerd_daemon: RunnerdProcess,
) -> None:
    with RawClient(runnerd_daemon.socket_path) as client:
        for nonce in ({"nonce": "n"}, {}):
            exec_id = f"e{len(nonce)}"
            pid = client.call("exec.start", exec_id=exec_id, argv=["sleep", "900"], **nonce)["pid"]
            for _ in range(2):
                error = refused(client, "exec.cancel", exec_id=exec_id, if_nonce="m")
                assert error.kind == "not_owner"
                assert client.call("exec.inspect", exec_id=exec_id)["ending"] is None
                assert is_alive(pid)
        answer = client.call("exec.cancel", exec_id="e1", if_nonce="n")
        assert answer["outcome"] == "ended"
        assert refused(client, "exec.cancel", exec_id="e1", if_nonce="m").kind == "not_owner"
        answer = client.call("exec.cancel", exec_id="e1", if_nonce="n")
        assert answer["outcome"] == "already_ended"


def test_a_tombstone_bound_to_a_nonce_is_met_by_that_start_alone(
    runnerd_daemon: RunnerdProcess, tmp_path: Path
) -> None:
    marker = tmp_path / "marker"
    with RawClient(runnerd_daemon.socket_path) as client:
        answer = client.call("exec.cancel", exec_id="e", if_nonce="n")
        assert answer["outcome"] == "tombstoned"
        start: dict[str, Any] = {"exec_id": "e", "argv": marking(marker)}
        for _ in range(2):
            assert refused(client, "exec.start", nonce="n", **start).kind == "cancelled"
        assert runs(marker) == 0
        assert run(client, nonce="m", **start)["created"]
        assert refused(client, "exec.start", nonce="n", **start).kind == "exec_exists"
    assert runs(marker) == 1
