"""Each number of the metrics is moved by what it counts, and by nothing a user writes.

Elsewhere: OOM kills in containers/, survivors in test_users.py, the loop's lag and the socket in
test_health.py, lost shims, refused signals and the journal in the tests of their own subjects.
"""

from __future__ import annotations

import re
import subprocess
import time
from typing import TYPE_CHECKING, Final

import pytest

from runnerd.client.errors import RemoteError
from runnerd.daemon.memory import find_cgroup
from runnerd.daemon.pressure import PressureFile
from tests import needs
from tests.cases.field import metric, open_fds
from tests.daemon.looking import planted
from tests.harness import REPOSITORY, RunnerdProcess, wait_for
from tests.raw import RawClient, RawError

if TYPE_CHECKING:
    from collections.abc import Callable

    from runnerd.client.blocking import Client

    Start = Callable[..., RunnerdProcess]

PAGE: Final = REPOSITORY / "runnerd" / "PROTOCOL.md"


def told(client: Client, name: str, **labels: str) -> float:
    return metric(client.metrics().text, name, **labels)


def lint(text: str) -> str:
    """Return what promtool has to say against an exposition."""
    promtool = needs.program("promtool", "prometheus")
    done = subprocess.run(
        [promtool, "check", "metrics"],
        input=text,
        capture_output=True,
        text=True,
        timeout=30,
        check=False,
    )
    return done.stdout + done.stderr


def as_text_format(openmetrics: str) -> str:
    """Undo the one difference that promtool, which reads 0.0.4 only, stumbles over.

    In OpenMetrics the _total of a counter belongs to the sample, in 0.0.4 to the family.
    """
    counters = set(re.findall(r"^# TYPE (\S+) counter$", openmetrics, re.MULTILINE))
    return re.sub(
        r"^# (HELP|TYPE) (\S+)",
        lambda found: f"{found[0]}_total" if found[2] in counters else found[0],
        openmetrics,
        flags=re.MULTILINE,
    )


def test_promtool_has_nothing_against_either_form(runnerd_daemon: RunnerdProcess) -> None:
    with runnerd_daemon.connect() as client:
        client.run(["echo", "x"])
        with pytest.raises(RemoteError):
            client.run(["no-such-program-anywhere"])
        text, openmetrics = client.metrics().text, client.metrics("openmetrics").text
    assert lint(text) == ""
    assert openmetrics.endswith("# EOF\n")
    assert lint(as_text_format(openmetrics)) == ""
    assert "no help text" in lint(text.replace("# HELP runnerd_execs_started_total", "# "))


def test_the_page_lists_every_metric(runnerd_daemon: RunnerdProcess) -> None:
    with runnerd_daemon.connect() as client:
        text = client.metrics().text
    types = dict(re.findall(r"^# TYPE (runnerd_\S+) (\w+)$", text, re.MULTILINE))
    row = r"^\| `(runnerd_\w+)(?:\{[\w,]+\})?` \| (\w+) \|"
    rows = re.findall(row, PAGE.read_text(), re.MULTILINE)
    pressure = {name for name, _ in rows if name.startswith("runnerd_memory_pressure_")}
    assert len(pressure) == 3
    has_pressure = PressureFile(find_cgroup()).source is not None
    shown = {name: kind for name, kind in rows if name not in pressure or has_pressure}
    assert shown == types


def test_starts_exits_and_durations(runnerd_daemon: RunnerdProcess) -> None:
    with runnerd_daemon.connect() as client:
        client.run(["sh", "-c", "sleep 0.3; echo x"])
        client.run(["true"])
        client.start(["sleep", "60"], attach=False).cancel(0)
        with pytest.raises(RemoteError):
            client.run(["no-such-program-anywhere"])
        with pytest.raises(RemoteError):
            client.run(["true"], cwd="/no/such/directory")
        wait_for(lambda: client.info().live_execs == 0)
        text = client.metrics().text
    assert metric(text, "runnerd_execs_started_total") == 3
    assert metric(text, "runnerd_exec_start_failures_total", stage="exec") == 1
    assert metric(text, "runnerd_exec_start_failures_total", stage="cwd") == 1
    assert metric(text, "runnerd_execs_exited_total", reason="exited") == 2
    assert metric(text, "runnerd_execs_exited_total", reason="cancelled") == 1
    for name, count in (("start", 3), ("first_byte", 1), ("", 3)):
        family = "_".join(filter(None, ("runnerd_exec", name, "duration_seconds")))
        assert metric(text, f"{family}_count") == count, family
        assert metric(text, f"{family}_bucket", le="3600.0") == count
        assert 0 < metric(text, f"{family}_sum") < 60
        assert metric(text, f"{family}_bucket", le="0.001") <= count
    assert metric(text, "runnerd_exec_first_byte_duration_seconds_bucket", le="0.25") == 0
    assert metric(text, "runnerd_exec_first_byte_duration_seconds_sum") >= 0.3


def test_states_connections_and_subscriptions(runnerd_daemon: RunnerdProcess) -> None:
    with runnerd_daemon.connect() as client:
        running = client.start(["sleep", "60"])
        lingering = client.start(["sh", "-c", "sleep 60 >/dev/null 2>&1 &"], attach=False)
        lingering.wait(10)
        held = client.start(["sh", "-c", "sleep 60 &"], attach=False)
        assert told(client, "runnerd_execs", state="running") >= 1
        wait_for(lambda: told(client, "runnerd_execs", state="lingering") == 2)
        assert told(client, "runnerd_execs", state="running") == 1
        assert told(client, "runnerd_execs", state="starting") == 0
        assert told(client, "runnerd_subscriptions") == 1
        assert told(client, "runnerd_connections") == 1
        with runnerd_daemon.connect() as other:
            other.attach(running.exec_id)
            assert told(client, "runnerd_connections") == 2
            assert told(client, "runnerd_subscriptions") == 2
        wait_for(lambda: told(client, "runnerd_connections") == 1)
        assert told(client, "runnerd_subscriptions") == 1
        for each in (running, lingering, held):
            each.cancel(0)
        wait_for(lambda: told(client, "runnerd_execs") == 0)


def test_an_exec_that_drains_is_counted(runnerd_daemon: RunnerdProcess) -> None:
    """For half a second after the exit, while a child holds the pipe."""
    with runnerd_daemon.connect() as client:
        held = client.start(["sh", "-c", "sleep 60 &"], attach=False)
        seen = wait_for(
            lambda: (
                told(client, "runnerd_execs", state="draining")
                or told(client, "runnerd_execs", state="lingering")
            )
        )
        assert seen == 1
        held.cancel(0)


def test_output_counts_while_it_comes(start_daemon: Start) -> None:
    """Of each stream, before the exit too; what is not kept is counted, and the disk's part."""
    daemon = start_daemon("--spool", "any", "--spool-bytes-max", str(4 << 20))
    script = "head -c 8000000 /dev/zero; echo oh >&2; echo end; read x"
    with daemon.connect() as client:
        handle = client.start(
            ["sh", "-c", script], stdin="pipe", flow="drop", attach=False, exec_id="e"
        )
        wait_for(lambda: told(client, "runnerd_output_bytes_total", stream="stderr") == 3)
        wait_for(lambda: told(client, "runnerd_output_bytes_total", stream="stdout") == 8_000_004)
        # What the disk has not taken yet is kept beside what is on it.
        wait_for(lambda: told(client, "runnerd_output_dropped_bytes_total") > 3_000_000)
        before = told(client, "runnerd_output_dropped_bytes_total")
        assert told(client, "runnerd_spool_bytes") > 1 << 20
        assert told(client, "runnerd_transcript_bytes") > 10_000
        assert told(client, "runnerd_exec_first_byte_duration_seconds_count") == 1
        handle.write(b"\n")
        its_exit = handle.wait(10)
        assert its_exit.stdout.total_bytes == 8_000_004
        text = client.metrics().text
        assert metric(text, "runnerd_output_bytes_total") == 8_000_007
        assert metric(text, "runnerd_exec_first_byte_duration_seconds_count") == 1
        dropped = its_exit.stdout.dropped_bytes + its_exit.stderr.dropped_bytes
        assert metric(text, "runnerd_output_dropped_bytes_total") == dropped >= before
        wait_for(lambda: handle.inspect().state == "closed")
        client.forget("e")
        wait_for(lambda: told(client, "runnerd_spool_bytes") == 0)


def test_refusals_and_stray_failures(start_daemon: Start) -> None:
    fault = """
from runnerd.daemon import methods
def ping(call, params):
    raise ValueError('planted')
methods.HANDLERS['ping'] = ping
"""
    daemon = start_daemon(**planted(fault))
    with daemon.connect() as client:
        with pytest.raises(RemoteError):
            client.attach("nobody")
        with pytest.raises(RemoteError):
            client.ping()
        text = client.metrics().text
    assert metric(text, "runnerd_refusals_total", kind="exec_unknown") == 1
    assert metric(text, "runnerd_stray_failures_total") == 1


def test_facts_and_the_process(runnerd_daemon: RunnerdProcess) -> None:
    with runnerd_daemon.connect() as client:
        info, text = client.info(), client.metrics().text
    assert metric(text, "runnerd_build_info", version=info.version, guard="native") == 1
    assert metric(text, "runnerd_oom_order_info", verdict=info.oom_order.verdict) == 1
    assert metric(text, "process_open_fds") == pytest.approx(open_fds(runnerd_daemon.pid), abs=5)
    assert metric(text, "process_resident_memory_bytes") > 10_000_000
    assert metric(text, "process_cpu_seconds_total") > 0
    assert abs(metric(text, "process_start_time_seconds") - time.time()) < 120


def test_nothing_that_a_user_writes_becomes_a_label(runnerd_daemon: RunnerdProcess) -> None:
    word = "wordofauser"
    with RawClient(runnerd_daemon.socket_path) as client:
        for method, params in (
            ("exec.start", {"exec_id": word, "argv": ["true", word], "labels": {word: word}}),
            ("exec.start", {"argv": [word], "cwd": f"/{word}", "user": word}),
            ("exec.start", {"argv": [f"/{word}"]}),
            ("exec.attach", {"exec_id": f"{word}-2", "subscriber": word}),
            ("exec.signal", {"exec_id": word, "signal": word}),
            (word, {word: word}),
            ("ping", {word: 1}),
        ):
            try:
                client.call(method, **params)
            except RawError:
                continue
        text = client.call("daemon.metrics")["text"]
    assert metric(text, "runnerd_refusals_total") >= 4
    assert word not in text


# ------------------------------------------------------------------ memory pressure


def test_pressure_is_what_the_kernel_says(runnerd_daemon: RunnerdProcess) -> None:
    """Between two looks of ours at the same file."""
    kernel = PressureFile(find_cgroup())  # the daemon's is ours
    before = kernel.read()
    if before is None:
        needs.skip_or_fail("this kernel counts no pressure")
    with runnerd_daemon.connect() as client:
        text = client.metrics().text
    after = kernel.read()
    assert after is not None
    assert metric(text, "runnerd_memory_pressure_info", source=str(kernel.source)) == 1
    waiting = metric(text, "runnerd_memory_pressure_waiting_seconds_total")
    assert before.some.total_s <= waiting <= after.some.total_s
    if before.full is not None and after.full is not None:
        stalled = metric(text, "runnerd_memory_pressure_stalled_seconds_total")
        assert before.full.total_s <= stalled <= after.full.total_s


def test_nobody_pays_for_what_nobody_asks_for(start_daemon: Start) -> None:
    """Without --metrics-listen nothing of HTTP is imported before the first scrape."""
    look = """
import sys
from runnerd.daemon import methods
from runnerd.protocol.answers import Empty
def ping(call, params):
    words = ('http', 'prometheus_client', 'wsgiref', 'runnerd.daemon.metrics_port')
    call.service.log.info('seen', modules=[word for word in words if word in sys.modules])
    call.answer(Empty())
methods.HANDLERS['ping'] = ping
"""
    daemon = start_daemon(**planted(look))
    with daemon.connect() as client:
        client.ping()
        client.metrics()
        client.ping()
    lines = [line for line in daemon.log_path.read_text().splitlines() if '"seen"' in line]
    assert '"modules":[]' in lines[0]
    assert "prometheus_client" in lines[1]
    assert "metrics_port" not in lines[1]
