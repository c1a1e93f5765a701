"""The metrics by HTTP: a real Prometheus reads them, and no client there hurts the daemon."""

from __future__ import annotations

import contextlib
import json
import re
import socket
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.parse
import urllib.request
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import pytest

from runnerd.daemon.options import ConfigError, parse_options
from tests import needs
from tests.cases.field import metric, open_fds, rss_bytes
from tests.daemon.looking import log_lines, planted
from tests.daemon.test_metrics import as_text_format, lint
from tests.harness import REPOSITORY, RUNNERD, RunnerdProcess, wait_for

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    Start = Callable[..., RunnerdProcess]

ANY_PORT: Final = ("--metrics-listen", "127.0.0.1:0")
OPENMETRICS: Final = "application/openmetrics-text; version=1.0.0"


def address(daemon: RunnerdProcess) -> tuple[str, int]:
    (line,) = log_lines(daemon, "ready")
    host, _, port = line["metrics"].rpartition(":")
    return host.strip("[]"), int(port)


def get(daemon: RunnerdProcess, path: str = "/metrics", **headers: str) -> tuple[str, str]:
    """Return the content type and the body."""
    host, port = address(daemon)
    host = f"[{host}]" if ":" in host else host
    request = urllib.request.Request(f"http://{host}:{port}{path}", headers=headers)
    with urllib.request.urlopen(request, timeout=10) as answer:
        return answer.headers["Content-Type"], answer.read().decode()


def say(daemon: RunnerdProcess, data: bytes) -> bytes:
    """Send bytes and return all that comes until the connection is closed."""
    with socket.create_connection(address(daemon), 10) as sock:
        sock.sendall(data)
        found = b""
        with contextlib.suppress(ConnectionResetError):
            while part := sock.recv(65536):
                found += part
        return found


# ------------------------------------------------------------------ what is served


def test_both_forms_are_served(start_daemon: Start) -> None:
    """The same numbers as by the socket, and promtool has nothing against them."""
    daemon = start_daemon(*ANY_PORT)
    with daemon.connect() as client:
        client.run(["echo", "x"])
        kind, text = get(daemon)
        assert kind == client.metrics().content_type == "text/plain; version=0.0.4; charset=utf-8"
        assert metric(text, "runnerd_execs_started_total") == 1
        assert lint(text) == ""
        kind, text = get(daemon, Accept=OPENMETRICS)
        assert kind == client.metrics("openmetrics").content_type
        assert text.endswith("# EOF\n")
        assert lint(as_text_format(text)) == ""
    assert say(daemon, b"HEAD /metrics HTTP/1.0\r\n\r\n").endswith(b"\r\n\r\n")


def test_it_listens_at_the_loopback_of_version_6_too(start_daemon: Start) -> None:
    with socket.socket(socket.AF_INET6) as probe:
        try:
            probe.bind(("::1", 0))
        except OSError:
            needs.skip_or_fail("this machine has no ::1")
    daemon = start_daemon("--metrics-listen", "[::1]:0")
    assert address(daemon)[0] == "::1"
    assert "runnerd_build_info" in get(daemon)[1]


@pytest.mark.parametrize(
    "where",
    ["0.0.0.0:9464", "10.0.0.1:9464", "[::]:9464", "[::2]:1", "example.org:80", "9464", ":9464",
     "127.0.0.1", "127.0.0.1:x", "127.0.0.1:65536", "127.0.0.1:-1", "[127.0.0.1]:1", "::1:80", ""],
)  # fmt: skip
def test_any_other_address_is_bad_configuration(where: str) -> None:
    with pytest.raises(ConfigError, match="--metrics-listen"):
        parse_options(["serve", "--metrics-listen", where], {}, sys.executable)


def test_bad_configuration_is_78(tmp_path: Path) -> None:
    done = subprocess.run(
        [*RUNNERD, "serve", "--socket", str(tmp_path / "s"), "--metrics-listen", "0.0.0.0:9464"],
        cwd=REPOSITORY,
        capture_output=True,
        text=True,
        timeout=20,
        check=False,
    )
    assert done.returncode == 78
    assert "no loopback address" in done.stderr
    assert done.stderr.count("\n") == 1


# ------------------------------------------------------------------ a real Prometheus


@pytest.fixture
def prometheus(tmp_path: Path) -> Iterator[Callable[[RunnerdProcess], Callable[[str], Any]]]:
    """Start a Prometheus that scrapes a daemon; gives what asks its API."""
    program = needs.program("prometheus")
    started: list[subprocess.Popen[bytes]] = []

    def start(daemon: RunnerdProcess) -> Callable[[str], Any]:
        host, port = address(daemon)
        config = tmp_path / "prometheus.yml"
        config.write_text(
            "global: {scrape_interval: 200ms, scrape_timeout: 200ms}\n"
            f"scrape_configs: [{{job_name: r, static_configs: [{{targets: ['{host}:{port}']}}]}}]\n"
        )
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            own = free.getsockname()[1]
        with (tmp_path / "prometheus.log").open("wb") as log:
            started.append(
                subprocess.Popen(
                    [program, f"--config.file={config}", f"--storage.tsdb.path={tmp_path / 'tsdb'}",
                     f"--web.listen-address=127.0.0.1:{own}", "--log.level=error"],
                    stdout=log, stderr=log,
                )
            )  # fmt: skip

        def ask(path: str) -> Any:
            try:
                with urllib.request.urlopen(f"http://127.0.0.1:{own}/api/v1/{path}") as answer:
                    return json.load(answer)["data"]
            except OSError:
                return None

        return ask

    yield start
    for each in started:
        each.kill()
        each.wait(10)


def test_a_real_prometheus_scrapes_it(
    start_daemon: Start, prometheus: Callable[[RunnerdProcess], Callable[[str], Any]]
) -> None:
    daemon = start_daemon(*ANY_PORT)
    with daemon.connect() as client:
        client.run(["echo", "hello"])
        ask = prometheus(daemon)

        def scraped() -> Any:
            found = ask("targets") or {}
            return [each for each in found.get("activeTargets", []) if each["health"] != "unknown"]

        (target,) = wait_for(scraped, 30)
        assert (target["health"], target["lastError"]) == ("up", "")

        def value(query: str) -> float | None:
            found = ask(f"query?{urllib.parse.urlencode({'query': query})}") or {"result": []}
            return float(found["result"][0]["value"][1]) if found["result"] else None

        wait_for(lambda: value("runnerd_execs_started_total") == 1)
        client.run(["echo", "hello"])
        wait_for(lambda: value("runnerd_execs_started_total") == 2)
        assert value('runnerd_output_bytes_total{stream="stdout"}') == 12
        assert value("histogram_quantile(0.5, runnerd_exec_duration_seconds_bucket)") is not None
        assert value("runnerd_build_info") == 1
        assert value("process_resident_memory_bytes") is not None
        # Every metric that is served is one it took, of the same kind.
        types = ask("metadata")
        text = client.metrics().text
        for name, kind in re.findall(r"^# TYPE (\S+) (\w+)$", text, re.MULTILINE):
            # It asks for OpenMetrics, where a counter's family has no _total.
            (taken,) = types.get(name) or types[name.removesuffix("_total")]
            assert taken["type"] == kind, name


# ------------------------------------------------------------------ hostile clients


@pytest.fixture
def metrics_daemon(start_daemon: Start) -> RunnerdProcess:
    return start_daemon(*ANY_PORT)


REQUESTS: Final = {
    b"GET / HTTP/1.1\r\n\r\n": b"404",
    b"GET http://127.0.0.1:1/metrics?a HTTP/1.1\r\n\r\n": b"200",
    b"GET http://127.0.0.1:1 HTTP/1.1\r\n\r\n": b"404",
    b"GET /metrics/../etc HTTP/1.1\r\n\r\n": b"404",
    b"POST /metrics HTTP/1.1\r\n\r\n": b"405",
    b"GET /metrics HTTP/2.0\r\n\r\n": b"400",
    b"GET /metrics\r\n\r\n": b"400",
    b"\x16\x03\x01\x02\x00\x01\x00\r\n\r\n": b"400",
    b"\xff\x00\n\n": b"400",
    b"GET /metrics HTTP/1.1\r\nX: " + b"x" * 10_000: b"431",
    b"GET /metrics HTTP/1.1\n\n": b"200",
    b"GET /metrics?x=1 HTTP/1.1\r\n\r\nGET /metrics HTTP/1.1\r\n\r\n": b"200",
}


def test_what_is_no_scrape_is_told_so(metrics_daemon: RunnerdProcess) -> None:
    for request_bytes, code in REQUESTS.items():
        found = say(metrics_daemon, request_bytes)
        # A client that is not done with sending may see a reset in place of the refusal.
        is_refused = found.startswith(b"HTTP/1.1 " + code) or (code == b"431" and not found)
        assert is_refused, request_bytes
        assert found.count(b"HTTP/1.1 ") <= 1


def test_stuck_slow_and_flooding_clients_delay_no_command(start_daemon: Start) -> None:
    """Silent ones, one byte at a time, readers that do not read, and as many requests as can be.

    Meanwhile commands start and answer, and neither memory nor descriptors grow. A flood costs
    processor time of its own, so starts are compared with starts beside one that runs idle.
    """
    daemon = start_daemon(*ANY_PORT, "--finished-execs-max", "10")  # or those are what grows
    over = threading.Event()
    get(daemon)
    fds, rss = open_fds(daemon.pid), rss_bytes(daemon.pid)
    threads = [
        threading.Thread(target=client, args=(address(daemon), over))
        for client in (_silent, _silent, _drips, _does_not_read, _floods, _floods)
    ]
    for thread in threads:
        thread.start()
    try:
        time.sleep(0.2)
        slowest_s = 0.0
        most_fds = 0
        with daemon.connect() as client:
            until_s = time.monotonic() + 4
            while time.monotonic() < until_s:
                began_s = time.monotonic()
                assert client.run(["true"]).exit.code == 0
                slowest_s = max(slowest_s, time.monotonic() - began_s)
                most_fds = max(most_fds, open_fds(daemon.pid))
            assert metric(client.metrics().text, "runnerd_stray_failures_total") == 0
    finally:
        over.set()
        for thread in threads:
            thread.join()
    print(f"slowest {slowest_s * 1e3:.0f} ms, {most_fds - fds} more descriptors")
    assert slowest_s < 1.0
    assert most_fds - fds < 40  # eight connections, a running command or two, parked shims
    assert rss_bytes(daemon.pid) - rss < 8 << 20
    # And it serves again, once those that hold its places have had their time.
    wait_for(lambda: _scrapes(daemon), 20)
    wait_for(lambda: open_fds(daemon.pid) <= fds + 10, 20)


def _scrapes(daemon: RunnerdProcess) -> bool:
    try:
        return "runnerd_build_info" in get(daemon)[1]
    except OSError:
        return False


def _silent(where: tuple[str, int], over: threading.Event) -> None:
    held: list[socket.socket] = []
    while not over.wait(0.05):
        if len(held) < 100:
            with contextlib.suppress(OSError):
                held.append(socket.create_connection(where, 0.05))
    for each in held:
        each.close()


def _drips(where: tuple[str, int], over: threading.Event) -> None:
    while not over.is_set():
        with contextlib.suppress(OSError), socket.create_connection(where, 0.5) as sock:
            for byte in b"GET /metrics HTTP/1.1\r\n" + b"X: y\r\n" * 1000:
                sock.sendall(bytes([byte]))
                if over.wait(0.001):
                    return


def _does_not_read(where: tuple[str, int], over: threading.Event) -> None:
    while not over.is_set():
        with contextlib.suppress(OSError), socket.socket() as sock:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1)
            sock.settimeout(0.5)
            sock.connect(where)
            sock.sendall(b"GET /metrics HTTP/1.1\r\n\r\n")
            over.wait(5)


def _floods(where: tuple[str, int], over: threading.Event) -> None:
    while not over.is_set():
        with contextlib.suppress(OSError), socket.create_connection(where, 0.1) as sock:
            sock.sendall(b"GET /metrics HTTP/1.1\r\n\r\n")
            sock.recv(65536)


def test_requests_are_paced(metrics_daemon: RunnerdProcess) -> None:
    """Sixty in a row take more than a second: twenty a second are served."""
    began_s = time.monotonic()
    for _ in range(60):
        assert say(metrics_daemon, b"GET / HTTP/1.1\r\n\r\n").startswith(b"HTTP/1.1 404")
    assert time.monotonic() - began_s > 1.8


def test_an_exposition_is_made_once_a_second(metrics_daemon: RunnerdProcess) -> None:
    """What is read right after another scrape may be as old as that; a second later it is not."""

    def started() -> float:
        return metric(get(metrics_daemon)[1], "runnerd_execs_started_total")

    with metrics_daemon.connect() as client:

        def is_old() -> bool:
            before = started()
            client.run(["true"])
            return started() == before

        wait_for(is_old)
        count = metric(client.metrics().text, "runnerd_execs_started_total")
        wait_for(lambda: started() == count)


def test_a_request_in_many_pieces_is_given_up(metrics_daemon: RunnerdProcess) -> None:
    """Long before its five seconds are over: each piece costs a turn of the loop."""
    with socket.create_connection(address(metrics_daemon), 10) as sock:
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        sent = 0
        with contextlib.suppress(ConnectionError):
            for byte in b"GET /metrics HTTP/1.1\r\n" * 10:
                sock.sendall(bytes([byte]))
                sent += 1
                time.sleep(0.01)
        # As many pieces as were read; a busy daemon reads several at once.
        assert sent < 230


# ------------------------------------------------------------------ its own failures


def test_a_port_that_is_taken_hurts_nobody(start_daemon: Start) -> None:
    """Said by health, counted as stray, and served once it is free."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        faster = "from runnerd.daemon import metrics_port\nmetrics_port._AGAIN_S = 0.2\n"
        daemon = start_daemon("--metrics-listen", f"127.0.0.1:{port}", **planted(faster))
        assert log_lines(daemon, "ready")[0]["metrics"] is None
        with daemon.connect() as client:
            assert client.run(["true"]).exit.code == 0
            assert "metrics_off" in {each.kind for each in client.health().degraded}
            strays = metric(
                client.metrics().text, "runnerd_stray_failures_total", task="metrics_port"
            )
            assert strays >= 1
    with daemon.connect() as client:
        wait_for(lambda: "metrics_off" not in {each.kind for each in client.health().degraded})
    found = socket.create_connection(("127.0.0.1", port), 5)
    found.sendall(b"GET /metrics HTTP/1.1\r\n\r\n")
    assert found.recv(100).startswith(b"HTTP/1.1 200")
    found.close()


def test_what_fails_as_it_is_made_is_tried_again(start_daemon: Start) -> None:
    """An import without a descriptor, say: it was never tried again, and the port stayed bound."""
    fault = """
from runnerd.daemon import metrics_port
original = metrics_port.exposition
metrics_port._AGAIN_S = 0.5
times = 1
def failing(*args):
    global times
    if times:
        times -= 1
        raise OSError(24, 'Too many open files')
    return original(*args)
metrics_port.exposition = failing
"""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    daemon = start_daemon("--metrics-listen", f"127.0.0.1:{port}", **planted(fault))
    assert log_lines(daemon, "ready")[0]["metrics"] is None
    assert log_lines(daemon, "stray_failure")[0]["task"] == "metrics_port"
    with daemon.connect() as client:
        wait_for(lambda: "metrics_off" not in {each.kind for each in client.health().degraded})
    with socket.create_connection(("127.0.0.1", port), 10) as found:
        found.sendall(b"GET /metrics HTTP/1.1\r\n\r\n")
        assert found.recv(100).startswith(b"HTTP/1.1 200")


@pytest.mark.parametrize("where", ["_accept", "_response_to"])
def test_a_defect_in_it_is_a_stray_failure(start_daemon: Start, where: str) -> None:
    is_async = "async " if where == "_accept" else ""
    fault = f"""
from runnerd.daemon import metrics_port
original = metrics_port.MetricsPort.{where}
metrics_port._AGAIN_S = 0.2
times = 1
{is_async}def failing(self, *args):
    global times
    if times:
        times -= 1
        raise ValueError('planted')
    return {"await " if is_async else ""}original(self, *args)
metrics_port.MetricsPort.{where} = failing
"""
    daemon = start_daemon(*ANY_PORT, **planted(fault))
    if where == "_response_to":
        assert say(daemon, b"GET /metrics HTTP/1.1\r\n\r\n") == b""
    with daemon.connect() as client:
        wait_for(
            lambda: metric(
                client.metrics().text, "runnerd_stray_failures_total", task="metrics_port"
            )
        )
        assert client.run(["true"]).exit.code == 0
        wait_for(lambda: "metrics_off" not in {each.kind for each in client.health().degraded})
    assert len(log_lines(daemon, "stray_failure")) == 1
    assert not log_lines(daemon, "uncaught_error")
