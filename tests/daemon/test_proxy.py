"""200 commands through connections that are cut, delayed and split at random: nothing is lost.

Each command runs here too, by subprocess, and what the client delivers must be the same bytes in
the same order, with the same exit. A marker file counts how often each one ran. The seed is
fixed; RUNNERD_PROXY_SEED tries another.
"""

from __future__ import annotations

import os
import random
import subprocess
import threading
from typing import TYPE_CHECKING, Final, NamedTuple

import anyio
import pytest

from runnerd.client import asynchronous
from runnerd.client.blocking import connect
from runnerd.protocol.notes import GapNote, OutputNote
from tests.proxy import Proxy, Weather

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from runnerd.protocol.exits import Exit
    from tests.harness import RunnerdProcess

SEED: Final = int(os.environ.get("RUNNERD_PROXY_SEED", "2026"))
RUNS: Final = 200
AT_ONCE: Final = 4
CUT_BYTES: Final = 250_000


class Case(NamedTuple):
    """One command, with what it is fed and whether it may wait for its reader."""

    name: str
    script: str
    input: bytes
    flow: str

    @property
    def argv(self) -> list[str]:
        return ["sh", "-c", self.script]


class Reference(NamedTuple):
    """What a command does without runnerd."""

    stdout: bytes
    stderr: bytes
    code: int


def cases(directory: Path, rng: random.Random) -> Iterator[Case]:
    for at in range(RUNS):
        size = int(10 ** rng.uniform(0, 5.2))
        data = rng.randbytes(size)
        body, fed = rng.choice(
            [
                (f"seq {at} {at + size // 8}; exit {at % 256}", b""),
                ("printf a; printf b >&2; printf c; printf d >&2", b""),
                (f"exit {at % 256}", b""),
                ("kill -9 $$", b""),
                ("cat", data),
                ("cat >&2; echo done", data),
                ("head -c 5; exit 9", data),
                (f"seq {size // 8} & seq {size // 8} >&2; wait", b""),
                ("sleep 0.2 >/dev/null 2>&1 & echo up", b""),
                ("for n in 1 2 3 4 5; do echo $n; sleep 0.02; echo $n >&2; done", b""),
            ]
        )
        flow = rng.choice(["block", "block", "block", "drop"])
        yield Case(f"{at}", f"echo >> {directory}/ran-{at}; {body}", fed, flow)


def reference(case: Case, directory: Path) -> Reference:
    done = subprocess.run(case.argv, input=case.input, capture_output=True, check=False)
    (directory / f"ran-{case.name}").unlink()
    return Reference(done.stdout, done.stderr, done.returncode)


def check(
    case: Case, expected: Reference, notes: list[OutputNote | GapNote], exit: Exit | None
) -> None:
    """Every byte in its place, or in a gap that says so."""
    whole = {"stdout": expected.stdout, "stderr": expected.stderr}
    at = {"stdout": 0, "stderr": 0}
    for note in notes:
        if isinstance(note, GapNote):
            assert case.flow == "drop", f"{case}: a gap although the command waits"
            at["stdout"] += note.stdout_bytes or 0
            at["stderr"] += note.stderr_bytes or 0
            continue
        assert note.offset == at[note.stream], case.name
        at[note.stream] += len(note.data)
        assert whole[note.stream][note.offset : at[note.stream]] == note.data, case.name
    assert at == {stream: len(data) for stream, data in whole.items()}, case.name
    assert exit is not None
    code = exit.code if exit.signal is None else -exit.signal
    assert (code, exit.reason) == (expected.code, "exited"), case.name


def some(todo: list[tuple[Case, Reference]], most: int) -> Iterator[tuple[Case, Reference]]:
    """Take from what is left, as several threads do."""
    for _ in range(most):
        try:
            yield todo.pop()
        except IndexError:
            return


def run_blocking(path: str, todo: list[tuple[Case, Reference]], failures: list[str]) -> None:
    try:
        while todo:
            with connect(path) as client:
                for case, expected in some(todo, 5):
                    with client.start(
                        case.argv,
                        stdin="pipe",
                        sha256=True,
                        flow=case.flow,  # type: ignore[arg-type]
                        window_bytes=131072,
                        timeout_s=60,
                    ) as handle:
                        assert handle.created
                        feeder = client.feed(handle, case.input)
                        notes = [*handle.output(60)]
                        assert feeder.error is None
                        check(case, expected, notes, handle.exit)
    except BaseException as error:  # noqa: BLE001  # told by the test's own thread
        failures.append(f"{error!r}")


async def run_async(path: str, todo: list[tuple[Case, Reference]]) -> None:
    async def one_by_one(runner: asynchronous.AsyncClient) -> None:
        for case, expected in some(todo, RUNS):
            async with await runner.start(
                case.argv,
                stdin="pipe",
                sha256=True,
                flow=case.flow,  # type: ignore[arg-type]
                window_bytes=131072,
                timeout_s=60,
            ) as handle:
                assert handle.created
                feeder = runner.feed(handle, case.input)
                notes = [note async for note in handle.output(60)]
                assert feeder.error is None
                check(case, expected, notes, handle.exit)

    async with asynchronous.connect(path) as runner, anyio.create_task_group() as tasks:
        for _ in range(AT_ONCE):
            tasks.start_soon(one_by_one, runner)


@pytest.mark.slow
def test_nothing_is_lost_doubled_reordered_or_run_twice(
    runnerd_daemon: RunnerdProcess, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("runnerd.client.repeating.BACKOFF_FIRST_S", 0.02)
    rng = random.Random(SEED)
    todo = [(case, reference(case, tmp_path)) for case in cases(tmp_path, rng)]
    names = [case.name for case, _ in todo]
    weather = Weather(SEED, cut_bytes=CUT_BYTES)
    with Proxy(tmp_path / "proxy.sock", runnerd_daemon.socket_path, weather) as proxy:
        half, quarter = todo[::2], todo[1::4]
        rest = todo[3::4]
        failures: list[str] = []
        threads = [
            threading.Thread(target=run_blocking, args=(proxy.path, half, failures))
            for _ in range(AT_ONCE)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert failures == []
        anyio.run(run_async, proxy.path, quarter, backend="trio")
        anyio.run(run_async, proxy.path, rest, backend="asyncio")
        assert proxy.cuts > RUNS / 4, "the weather was too good to show anything"
    ran = {name: (tmp_path / f"ran-{name}").read_text().count("\n") for name in names}
    assert set(ran.values()) == {1}, {name: count for name, count in ran.items() if count != 1}
