"""Bad input over the real socket: a typed error that names the field, and nothing else happens.

Which values are bad is written down once, in tests/unit/test_requests.py; here each of them goes
the whole way, in both encodings.
"""

from __future__ import annotations

import contextlib
import functools
import json
import os
import random
import socket
import statistics
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import msgspec
import pytest

from runnerd.protocol.fields import Params
from runnerd.protocol.framing import Encoding
from runnerd.protocol.requests import METHODS, ExecAck
from tests.daemon.looking import log_lines, shims
from tests.harness import RunnerdProcess, daemons, descendants, wait_for
from tests.raw import ClosedError, RawClient, RawError
from tests.unit.test_requests import BAD, PARTS, REQUIRED, WRONG_TYPE, WRONG_VALUE

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    Start = Callable[..., RunnerdProcess]

encodings = pytest.mark.parametrize("encoding", Encoding, ids=lambda each: each.value)
MIB: Final = 1 << 20


@pytest.fixture(scope="module")
def daemon(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunnerdProcess]:
    """One daemon for all that must leave no trace in it."""
    with daemons(tmp_path_factory.mktemp("bad")) as start:
        yield start("--hello-s", "0.5")


def rss(daemon: RunnerdProcess) -> int:
    text = Path(f"/proc/{daemon.pid}/statm").read_text()
    return int(text.split()[1]) * os.sysconf("SC_PAGE_SIZE")


def state(client: RawClient) -> tuple[Any, ...]:
    """What a refused request must not change."""
    info = client.call("daemon.info")
    return tuple(info[name] for name in ("starts", "live_execs", "stray_failures", "subscriptions"))


def method_of(kind: type[msgspec.Struct]) -> str:
    found = [method for method, params in METHODS.items() if issubclass(params, kind)]
    return found[0]


def whole(kind: type[Params], field: str, value: object) -> tuple[str, dict[str, Any], str]:
    """Return a request with one wrong field: its method, its params, and the field's name."""
    if kind in PARTS:
        params = {"argv": ["true"], PARTS[kind]: {field: value}}
        return "exec.start", params, f"{PARTS[kind]}.{field}"
    params = REQUIRED.get(kind, {}) | {field: value}
    return method_of(kind), params, field


def requests() -> Iterator[tuple[str, dict[str, Any], str]]:
    for kind, field, value in [*WRONG_TYPE, *WRONG_VALUE]:
        yield whole(kind, field, value)
    for kind, least in REQUIRED.items():
        for field in least:
            params = {name: value for name, value in least.items() if name != field}
            yield method_of(kind), params, field
    for kind in BAD:
        if kind not in PARTS:
            yield method_of(kind), REQUIRED.get(kind, {}) | {"nope": 1}, "nope"


def can_write(encoding: Encoding, params: object) -> bool:
    """JSON has no NaN (Python would write one) and MessagePack no integers beyond 64 bits."""
    try:
        if encoding is Encoding.JSON:
            json.dumps(params, allow_nan=False)
        else:
            msgspec.msgpack.encode(params)
    except (ValueError, OverflowError):
        return False
    return True


@encodings
def test_every_wrong_field_is_named_and_nothing_happens(
    daemon: RunnerdProcess, encoding: Encoding
) -> None:
    with RawClient(daemon.socket_path, encoding=encoding) as client:
        before = state(client)
        tried = 0
        for method, params, field in requests():
            if not can_write(encoding, params):
                continue
            # Bytes are bytes in MessagePack: no base64 there that could be wrong.
            is_raw = encoding is Encoding.MSGPACK and field == "data"
            with pytest.raises(RawError) as caught:
                client.call(method, **(params | {"data": 7} if is_raw else params))
            error = caught.value
            assert error.kind == "invalid_params", (method, params, error.error)
            assert error.error["code"] == -32602
            named = error.data.get("field")
            assert named is not None, error.error
            assert named.startswith(field), (named, field, params)
            assert error.error["message"].startswith(named)
            assert {"layer", "preserved", "hint", "retryable"} <= error.data.keys()
            tried += 1
        assert tried > 300
        assert state(client) == before
        assert client.call("ping") == {}
    print(f"{encoding.value}: {tried} bad requests")


@encodings
@pytest.mark.parametrize("params", [None, [], "x", 7, True, [{}]], ids=repr)
def test_parameters_that_are_no_object_are_refused(
    daemon: RunnerdProcess, encoding: Encoding, params: object
) -> None:
    with RawClient(daemon.socket_path, encoding=encoding) as client:
        for method in METHODS:
            client.sock.sendall(client.encode(method, params, f"{method}1"))
            message = client.receive()
            if params is None and not REQUIRED.get(METHODS[method]):
                continue  # absent parameters are none
            assert message["error"]["data"]["kind"] in ("invalid_params", "invalid_request")
        assert client.call("ping") == {}


WRONG_MESSAGES: Final[list[tuple[object, str]]] = [
    ([], "invalid_request"),
    ("hello", "invalid_request"),
    ({}, "invalid_request"),
    ({"jsonrpc": "2.0"}, "invalid_request"),
    ({"jsonrpc": "1.0", "id": 1, "method": "ping"}, "invalid_request"),
    ({"jsonrpc": "2.0", "id": 1, "method": 7}, "invalid_request"),
    ({"jsonrpc": "2.0", "id": 1.5, "method": "ping"}, "invalid_request"),
    ({"jsonrpc": "2.0", "id": [1], "method": "ping"}, "invalid_request"),
    ({"jsonrpc": "2.0", "id": True, "method": "ping"}, "invalid_request"),
    ({"jsonrpc": "2.0", "id": 2, "method": "no.such"}, "method_unknown"),
    ({"jsonrpc": "2.0", "id": 3, "method": "x" * 100_000}, "method_unknown"),
    ({"jsonrpc": "2.0", "method": "ping"}, "invalid_request"),
    ([{"jsonrpc": "2.0", "id": 1, "method": "ping"}], "invalid_request"),
]


@encodings
def test_what_is_no_request_is_told_so(daemon: RunnerdProcess, encoding: Encoding) -> None:
    with RawClient(daemon.socket_path, encoding=encoding) as client:
        before = state(client)
        for message, kind in WRONG_MESSAGES:
            client.sock.sendall(framed(encoding, message))
            error = client.receive()["error"]
            assert error["data"]["kind"] == kind, (message, error)
            assert len(error["message"]) < 2000
        client.answers.clear()
        assert state(client) == before


def framed(encoding: Encoding, message: object) -> bytes:
    if encoding is Encoding.JSON:
        return json.dumps(message).encode() + b"\n"
    data = msgspec.msgpack.encode(message)
    return len(data).to_bytes(4, "big") + data


@encodings
def test_before_hello_nothing_else_is_served(daemon: RunnerdProcess, encoding: Encoding) -> None:
    with RawClient(daemon.socket_path, encoding=encoding, hello=False) as client:
        for method in METHODS:
            if method == "hello":
                continue
            with pytest.raises(RawError) as caught:
                client.call(method, **REQUIRED.get(METHODS[method], {}))
            assert caught.value.kind == "hello_required"
        with pytest.raises(RawError) as caught:
            client.call("hello", protocol=[99])
        assert caught.value.data["supported"] == [1]
        assert client.call("hello", protocol=[99, 1])["protocol"] == 1


TOO_LARGE: Final = {
    Encoding.JSON: [b'{"x":"' + b"x" * (5 * MIB)],
    Encoding.MSGPACK: [(5 * MIB).to_bytes(4, "big"), b"\0\xff\xff\xff", b"\0\x40\0\x01"],
}


@encodings
def test_a_frame_too_large_is_one_error_and_a_close(
    daemon: RunnerdProcess, encoding: Encoding
) -> None:
    for data in TOO_LARGE[encoding]:
        with RawClient(daemon.socket_path, encoding=encoding) as client:
            with contextlib.suppress(OSError):
                client.sock.sendall(data)
            error = client.receive()["error"]
            assert error["data"]["kind"] == "frame_too_large"
            with pytest.raises(ClosedError):
                client.receive()


@encodings
def test_the_largest_frame_is_taken_and_one_byte_more_is_not(
    daemon: RunnerdProcess, encoding: Encoding
) -> None:
    most = 4 * MIB
    with RawClient(daemon.socket_path, encoding=encoding) as client:
        empty = client.encode("exec.inspect", {"exec_id": "x", "nope": ""}, 7)
        for more, kind in ((0, "invalid_params"), (1, "frame_too_large")):
            text = "x" * (most - len(empty))
            data = client.encode("exec.inspect", {"exec_id": "x", "nope": text}, 7)
            beside = 1 if encoding is Encoding.JSON else 4
            text += "x" * (most + more - (len(data) - beside))
            data = client.encode("exec.inspect", {"exec_id": "x", "nope": text}, 7)
            assert len(data) - beside == most + more
            sent = threading.Thread(target=lambda data=data: send_quietly(client.sock, data))
            sent.start()
            assert client.receive()["error"]["data"]["kind"] == kind
            sent.join()


def send_quietly(sock: socket.socket, data: bytes) -> None:
    with contextlib.suppress(OSError):
        sock.sendall(data)


def test_binary_noise_costs_its_own_connection_at_most(daemon: RunnerdProcess) -> None:
    chance = random.Random(7)
    with RawClient(daemon.socket_path) as other:
        before, memory = state(other), rss(daemon)
        for number in range(150):
            noise = chance.randbytes(chance.choice((1, 3, 50, 5000, 100_000)))
            first = (b"", b"{", b"\0", b"\0\0\0\1", b'{"jsonrpc":"2.0",')[number % 5]
            with socket.socket(socket.AF_UNIX) as sock:
                sock.connect(daemon.socket_path)
                send_quietly(sock, first + noise)
                sock.shutdown(socket.SHUT_WR)
                sock.settimeout(5)
                with contextlib.suppress(ConnectionError):
                    while sock.recv(1 << 16):
                        pass
            assert other.call("ping") == {}
        assert state(other) == before
        wait_for(lambda: other.call("daemon.info")["connections"] == 1)
        print(f"noise: {(rss(daemon) - memory) / MIB:.1f} MiB more")
        assert rss(daemon) - memory < 16 * MIB
    assert log_lines(daemon, "stray_failure") == []


def test_a_first_byte_of_neither_encoding_gets_one_plain_line(daemon: RunnerdProcess) -> None:
    for data in (b"GET / HTTP/1.1\r\n\r\n", b"\xff", b"\n", b"[]\n"):
        with socket.socket(socket.AF_UNIX) as sock:
            sock.connect(daemon.socket_path)
            sock.sendall(data)
            with contextlib.suppress(ConnectionResetError):
                said = b"".join(iter(functools.partial(sock.recv, 1 << 16), b""))
                assert json.loads(said)["error"]["data"]["kind"] == "invalid_request"


@pytest.mark.parametrize(
    "data", [b"", b"{", b"\0\0", b'{"jsonrpc":"2.0","id":1,"method":"ping"}\n']
)
def test_a_client_that_says_no_hello_is_closed_in_time(daemon: RunnerdProcess, data: bytes) -> None:
    with socket.socket(socket.AF_UNIX) as sock:
        sock.connect(daemon.socket_path)
        sock.settimeout(5)
        began_s = time.monotonic()
        sock.sendall(data)
        said = b"".join(iter(lambda: sock.recv(1 << 16), b""))
        assert 0.4 < time.monotonic() - began_s < 2
        assert b"hello_required" in said


def test_half_a_frame_for_ever_is_no_hello(daemon: RunnerdProcess) -> None:
    """Byte by byte, so that it never is silent either."""
    with socket.socket(socket.AF_UNIX) as sock:
        sock.connect(daemon.socket_path)
        began_s = time.monotonic()
        with contextlib.suppress(OSError):
            while time.monotonic() < began_s + 5:
                sock.sendall(b"{" if time.monotonic() < began_s + 0.01 else b" ")
                time.sleep(0.01)
        assert time.monotonic() - began_s < 2


@encodings
def test_three_hundred_requests_are_answered_though_nobody_reads_yet(
    daemon: RunnerdProcess, encoding: Encoding
) -> None:
    with RawClient(daemon.socket_path, encoding=encoding) as client:
        ids = [client.send("ping") for _ in range(300)]
        time.sleep(0.2)
        assert all(client.answer(each) == {} for each in ids)


def test_at_most_256_requests_of_a_connection_wait(daemon: RunnerdProcess) -> None:
    with RawClient(daemon.socket_path) as client, RawClient(daemon.socket_path) as other:
        client.call("exec.start", exec_id="e", argv=["sleep", "900"])
        ids = [client.send("exec.wait", exec_id="e") for _ in range(300)]
        kinds = []
        for each in ids[256:]:
            with pytest.raises(RawError) as caught:
                client.answer(each)
            kinds.append(caught.value.kind)
            assert caught.value.data["retry_after_s"] == 0.1
        assert set(kinds) == {"busy"}
        other.call("exec.cancel", exec_id="e", grace_s=0)
        assert all(client.answer(each)["signal"] == 9 for each in ids[:256])


def test_an_id_in_flight_cannot_be_used_again(daemon: RunnerdProcess) -> None:
    with RawClient(daemon.socket_path) as client:
        client.call("exec.start", exec_id="twice", argv=["sleep", "0.3"])
        for _ in range(2):
            client.sock.sendall(client.encode("exec.wait", {"exec_id": "twice"}, "same"))
        assert client.receive()["error"]["data"]["kind"] == "invalid_request"
        assert client.answer("same")["code"] == 0
        with pytest.raises(TimeoutError):
            client.receive(0.2)


def pings_s(client: RawClient, count: int) -> list[float]:
    took = []
    for _ in range(count):
        began_s = time.monotonic()
        client.call("ping")
        took.append(time.monotonic() - began_s)
    return took


def test_a_client_that_asks_and_never_reads_costs_nobody_anything(start_daemon: Start) -> None:
    daemon = start_daemon()
    with RawClient(daemon.socket_path) as other, RawClient(daemon.socket_path) as greedy:
        for number in range(100):
            other.call("exec.start", exec_id=f"e{number}", argv=["true"])
        alone, memory = pings_s(other, 200), rss(daemon)
        data = b"".join(greedy.encode("exec.list", {"limit": 1000}, n) for n in range(200))

        def ask() -> None:
            with contextlib.suppress(OSError):
                for _ in range(50):
                    greedy.sock.sendall(data)

        asking = threading.Thread(target=ask)
        asking.start()
        beside = pings_s(other, 200)
        asking.join(30)
        assert not asking.is_alive()
        grown = rss(daemon) - memory
        print(
            f"ping: alone {statistics.median(alone) * 1e3:.2f} ms, beside "
            f"{statistics.median(beside) * 1e3:.2f}, most {max(beside) * 1e3:.0f};"
            f" {grown / MIB:.1f} MiB more"
        )
        assert grown < 32 * MIB
        assert max(beside) < 1.0
        with contextlib.suppress(ClosedError, OSError):
            while True:
                greedy.receive(5)
        assert "runnerd_connections_stuck_total 1.0" in other.call("daemon.metrics")["text"]


def test_a_flood_of_requests_does_not_starve_another_client(start_daemon: Start) -> None:
    daemon = start_daemon()
    done = threading.Event()
    with RawClient(daemon.socket_path) as other, RawClient(daemon.socket_path) as flood:
        alone = pings_s(other, 200)
        data = b"".join(flood.encode("ping", {}, number) for number in range(2000))

        def pour() -> None:
            with contextlib.suppress(OSError):
                while not done.is_set():
                    flood.sock.sendall(data)

        def swallow() -> None:
            with contextlib.suppress(OSError):
                while not done.is_set():
                    flood.sock.recv(1 << 20)

        threads = [threading.Thread(target=pour), threading.Thread(target=swallow)]
        for thread in threads:
            thread.start()
        beside = pings_s(other, 100)
        done.set()
        flood.sock.shutdown(socket.SHUT_RDWR)
        for thread in threads:
            thread.join()
        print(
            f"ping: alone {statistics.median(alone) * 1e3:.2f} ms, beside a flood "
            f"{statistics.median(beside) * 1e3:.2f}, most {max(beside) * 1e3:.0f}"
        )
        assert statistics.median(beside) < 0.25


def test_waits_that_time_out_or_lose_their_client_leave_nothing(start_daemon: Start) -> None:
    daemon = start_daemon()
    with RawClient(daemon.socket_path) as client:
        client.call("exec.start", exec_id="e", argv=["sleep", "900"])

        def storm(rounds: int) -> int:
            for _ in range(rounds):
                ids = [
                    client.send("exec.wait", exec_id="e", timeout_s=0.001, until=until)
                    for _ in range(125)
                    for until in ("exited", "closed")
                ]
                for each in ids:
                    with pytest.raises(RawError):
                        client.answer(each)
                with RawClient(daemon.socket_path) as lost:
                    for _ in range(200):
                        lost.send("exec.wait", exec_id="e", timeout_s=1e6)
                    lost.call("ping")
            return rss(daemon)

        before = storm(30)  # by then it has what it needs at most
        grown = storm(30) - before
        print(f"13,500 waits: {grown / MIB:.2f} MiB more")
        assert grown < 2 * MIB


def test_deadlines_of_days_keep_no_finished_exec(start_daemon: Start) -> None:
    daemon = start_daemon("--finished-execs-max", "8")
    with RawClient(daemon.socket_path) as client:

        def storm(count: int) -> int:
            for number in range(count):
                exec_id = f"{count}-{number}"
                client.call(
                    "exec.start", exec_id=exec_id, deadline_s=86400, env={"A": "x" * 100_000},
                    argv=["sh", "-c", "head -c 100000 /dev/zero"],
                )  # fmt: skip
                client.call("exec.wait", exec_id=exec_id, until="closed", timeout_s=86400)
            return rss(daemon)

        before = storm(160)
        grown = storm(320) - before
        print(f"320 execs with a deadline of a day: {grown / MIB:.2f} MiB more")
        assert grown < 12 * MIB  # held until their deadlines they would be 64


def test_writes_that_wait_are_bounded_in_bytes(start_daemon: Start) -> None:
    daemon = start_daemon()
    with RawClient(daemon.socket_path, encoding=Encoding.MSGPACK) as client:
        client.call("exec.start", exec_id="e", argv=["sleep", "900"], stdin="pipe")
        memory = rss(daemon)
        data = b"x" * (3 * MIB)
        ids = [client.send("exec.write", exec_id="e", data=data, wait_s=600) for _ in range(40)]
        refused = 0
        for each in ids[8:]:
            with pytest.raises(RawError) as caught:
                client.answer(each)
            assert caught.value.kind == "busy"
            told = caught.value.data
            assert (told["retryable"], told["retry_after_s"]) == (True, 1.0)
            refused += 1
        assert refused == 32
        grown = rss(daemon) - memory
        print(f"40 writes of 3 MiB that wait: {grown / MIB:.0f} MiB more")
        assert grown < 48 * MIB
        client.call("exec.cancel", exec_id="e", grace_s=0)
        for each in ids[:5]:
            with pytest.raises(RawError) as caught:
                client.answer(each)
            assert caught.value.kind == "stdin_closed"


def test_a_stdin_closed_under_a_waiting_write_is_told_and_no_failure(
    daemon: RunnerdProcess,
) -> None:
    with RawClient(daemon.socket_path, encoding=Encoding.MSGPACK) as client:
        argv = ["sh", "-c", "sleep 0.3; exec <&-; sleep 0.3"]
        client.call("exec.start", exec_id="shut", argv=argv, stdin="pipe")
        ids = [
            client.send("exec.write", exec_id="shut", data=b"x" * MIB, wait_s=60) for _ in range(4)
        ]
        kinds = []
        for each in ids:
            try:
                client.answer(each)
            except RawError as error:
                kinds.append(error.kind)
        assert set(kinds) == {"stdin_closed"}
        assert client.call("exec.wait", exec_id="shut")["reason"] == "exited"
    assert log_lines(daemon, "stray_failure") == []


def test_an_attach_past_the_limit_starts_nothing(start_daemon: Start) -> None:
    daemon = start_daemon("--subscriptions-max", "2")
    with RawClient(daemon.socket_path) as client:
        for number in range(2):
            client.call("exec.start", exec_id=f"e{number}", argv=["sleep", "900"], attach={})
        before = client.call("daemon.info")["starts"]
        with pytest.raises(RawError) as caught:
            client.call("exec.start", exec_id="more", argv=["sleep", "900"], attach={})
        assert caught.value.kind == "busy"
        assert caught.value.data["retry_after_s"] == 1.0
        info = client.call("daemon.info")
        assert (info["starts"], info["live_execs"], info["subscriptions"]) == (before, 2, 2)
        # A start that fails gives its room back.
        client.call("exec.cancel", exec_id="e0", grace_s=0)
        wait_for(lambda: client.call("daemon.info")["subscriptions"] == 1)
        with pytest.raises(RawError):
            client.call("exec.start", argv=["/nonexistent"], attach={})
        assert client.call("daemon.info")["subscriptions"] == 1
        client.call("exec.start", exec_id="more", argv=["sleep", "900"], attach={})
        client.call("exec.cancel", exec_id="more", grace_s=0)
        client.call("exec.cancel", exec_id="e1", grace_s=0)
        wait_for(lambda: client.call("daemon.info")["subscriptions"] == 0)


def test_an_attach_at_the_limit_may_replace_its_own_older_one(start_daemon: Start) -> None:
    daemon = start_daemon("--subscriptions-max", "1")
    with RawClient(daemon.socket_path) as first, RawClient(daemon.socket_path) as second:
        attach = {"subscriber": "a"}
        first.call("exec.start", exec_id="e", argv=["sleep", "900"], attach=attach)
        for name in (None, "b"):
            with pytest.raises(RawError) as caught:
                second.call("exec.attach", exec_id="e", subscriber=name)
            assert caught.value.kind == "busy"
        assert first.notes == []
        for client in (second, first):
            client.call("exec.attach", exec_id="e", subscriber="a")
            assert client.call("daemon.info")["subscriptions"] == 1
        assert second.note("exec.superseded", "e")["subscriber"] == "a"
        first.call("exec.cancel", exec_id="e", grace_s=0)
        wait_for(lambda: first.call("daemon.info")["subscriptions"] == 0)


def test_a_start_sent_again_is_answered_at_the_limit(start_daemon: Start) -> None:
    """Nothing is started, so nothing needs room; its attach finds none and says so by null."""
    daemon = start_daemon("--subscriptions-max", "1")
    start: dict[str, Any] = {"exec_id": "e", "nonce": "n", "argv": ["sleep", "900"]}
    failing: dict[str, Any] = {"exec_id": "f", "nonce": "n", "argv": ["/nonexistent"]}
    with RawClient(daemon.socket_path) as client, RawClient(daemon.socket_path) as other:
        answer = client.call("exec.start", **start, attach={})
        for again in (client, other):
            told = again.call("exec.start", **start, attach={"subscriber": "b"})
            assert told == answer | {"created": False, "subscription": None}
        with pytest.raises(RawError) as caught:
            client.call("exec.start", **failing, attach={})
        assert caught.value.kind == "busy"
        client.call("exec.detach", subscription=answer["subscription"])
        with pytest.raises(RawError) as caught:
            client.call("exec.start", **failing, attach={})
        assert caught.value.kind == "start_failed"
        # Sent twice at once, one waits for the other, and still only one subscribes.
        both = [client.send("exec.start", **start | {"exec_id": "g"}, attach={}) for _ in range(2)]
        at_once = [client.answer(each)["subscription"] is None for each in both]
        assert at_once == [False, True]
        assert client.call("daemon.info")["subscriptions"] == 1
        for exec_id in ("e", "g"):
            client.call("exec.cancel", exec_id=exec_id, grace_s=0)
        wait_for(lambda: client.call("daemon.info")["subscriptions"] == 0)


@encodings
def test_a_wrong_ack_is_counted_and_costs_nothing(
    daemon: RunnerdProcess, encoding: Encoding
) -> None:
    """The one notification of a client: like every notification, it is never answered."""
    assert issubclass(METHODS["exec.ack"], ExecAck)
    with RawClient(daemon.socket_path, encoding=encoding) as client:
        client.sock.sendall(client.encode("exec.ack", {"subscription": 77, "seq": 1}, None))
        client.sock.sendall(client.encode("exec.ack", {"subscription": "x"}, None))
        assert client.call("ping") == {}
        assert client.errors_without_id == []
        text = client.call("daemon.metrics")["text"]
        assert 'runnerd_refusals_total{kind="subscription_unknown"}' in text


def test_nothing_of_all_that_ran(daemon: RunnerdProcess) -> None:
    """Last: the daemon that took all of it has its parked shims and nothing else."""
    wait_for(lambda: len(shims(daemon)) == 3)
    assert len(descendants(daemon.pid)) == 6
    assert log_lines(daemon, "uncaught_error") == []
