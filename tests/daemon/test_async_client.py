"""The async client against a real daemon, on asyncio and on trio."""

from __future__ import annotations

import inspect
import subprocess
import sys
import time
from typing import TYPE_CHECKING, Any

import anyio
import pytest

from runnerd.client import async_execs, blocking, execs
from runnerd.client.asynchronous import AsyncClient, connect
from runnerd.client.errors import ClientError, ClientTimeout, ConnectFailed, RemoteError
from runnerd.protocol.notes import OutputNote
from runnerd.protocol.requests import Pty
from tests.harness import is_alive

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable
    from pathlib import Path

    from runnerd.client.async_execs import AsyncExec
    from tests.harness import RunnerdProcess

    OnBoth = Callable[[Callable[[AsyncClient], Awaitable[None]]], None]

BACKENDS = ["asyncio", "trio"]


@pytest.fixture(params=BACKENDS)
def on_both(request: pytest.FixtureRequest, runnerd_daemon: RunnerdProcess) -> OnBoth:
    """Run a test's body with a client, within a minute."""

    def run(body: Callable[[AsyncClient], Awaitable[None]]) -> None:
        async def main() -> None:
            with anyio.fail_after(60):
                async with connect(runnerd_daemon.socket_path) as runner:
                    await body(runner)

        anyio.run(main, backend=request.param)

    return run


async def text_of(handle: AsyncExec) -> bytes:
    return b"".join([note.data async for note in handle.output() if isinstance(note, OutputNote)])


async def live(runner: AsyncClient) -> set[str]:
    return {each.exec_id for each in await runner.list_execs() if each.exit is None}


def test_a_command_runs_and_its_output_and_exit_come_back(on_both: OnBoth) -> None:
    async def body(runner: AsyncClient) -> None:
        proc = await runner.start(["sh", "-c", "printf 'a\\0\\377'; exit 7"])
        assert await text_of(proc) == b"a\0\xff"
        assert (await proc.wait()).code == 7

    on_both(body)


def test_run_feeds_input_and_returns_both_streams(on_both: OnBoth) -> None:
    async def body(runner: AsyncClient) -> None:
        data = bytes(range(256)) * 20_000
        done = await runner.run(["sh", "-c", "cat; echo err >&2"], input=data, sha256=True)
        assert (done.stdout, done.stderr, done.exit.code) == (data, b"err\n", 0)

    on_both(body)


def test_many_tasks_share_one_connection(on_both: OnBoth) -> None:
    async def body(runner: AsyncClient) -> None:
        done: list[int] = []

        async def one(at: int) -> None:
            text = (await runner.run(["seq", str(at), str(at + 4000)])).stdout
            assert text.split() == [b"%d" % n for n in range(at, at + 4001)]
            done.append(at)

        async with anyio.create_task_group() as tasks:
            for at in range(20):
                tasks.start_soon(one, at)
        assert sorted(done) == list(range(20))

    on_both(body)


def test_output_that_nobody_takes_holds_up_no_other(on_both: OnBoth) -> None:
    async def body(runner: AsyncClient) -> None:
        async with await runner.start(["yes"]) as stuck:
            for _ in range(5):
                assert (await runner.run(["echo", "x"])).stdout == b"x\n"
        assert stuck.exit is not None
        assert stuck.exit.reason == "cancelled"

    on_both(body)


def test_the_command_waits_for_the_reader_and_every_byte_comes(on_both: OnBoth) -> None:
    async def body(runner: AsyncClient) -> None:
        proc = await runner.start(["head", "-c", "5000000", "/dev/zero"], window_bytes=65536)
        assert len(await text_of(proc)) == 5_000_000

    on_both(body)


def test_a_task_that_waits_for_the_exit_takes_no_output_from_another(on_both: OnBoth) -> None:
    async def body(runner: AsyncClient) -> None:
        proc = await runner.start(["head", "-c", "200000", "/dev/zero"], window_bytes=65536)
        sizes: list[int] = []
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(proc.wait)
            async for note in proc.output(20):
                assert isinstance(note, OutputNote)
                sizes.append(len(note.data))
                await proc.wait()  # its answer overtakes what the window holds back
        assert sum(sizes) == 200_000

    on_both(body)


def test_stdin_is_written_by_tasks_in_turn(on_both: OnBoth) -> None:
    async def body(runner: AsyncClient) -> None:
        async with await runner.start(["cat"], stdin="pipe") as proc:
            async with anyio.create_task_group() as tasks:
                for at in range(10):
                    tasks.start_soon(proc.write, b"%d" % at * 10_000)
            await proc.close_stdin()
            text = await text_of(proc)
        runs = {text[at : at + 10_000] for at in range(0, 100_000, 10_000)}
        assert runs == {b"%d" % at * 10_000 for at in range(10)}

    on_both(body)


def test_a_cancelled_write_is_the_last_of_its_handle(on_both: OnBoth) -> None:
    async def body(runner: AsyncClient) -> None:
        async with await runner.start(["sleep", "60"], stdin="pipe") as proc:
            with anyio.move_on_after(0.3):
                await proc.write(bytes(4 << 20))
            with pytest.raises(ClientError, match="broken off half-way"):
                await proc.write(b"more")
            assert await runner.inspect(proc.exec_id) is not None

    on_both(body)


def test_a_cancelled_call_leaves_the_connection_usable(on_both: OnBoth) -> None:
    async def body(runner: AsyncClient) -> None:
        async with await runner.start(["sleep", "60"]) as proc:
            for _ in range(20):
                with anyio.move_on_after(0.001):
                    await proc.wait()
            assert proc.exit is None
            assert (await runner.run(["echo", "x"])).stdout == b"x\n"

    on_both(body)


def test_a_cancelled_start_leaves_nothing_running(on_both: OnBoth) -> None:
    async def body(runner: AsyncClient) -> None:
        for at in range(20):
            with anyio.move_on_after(0.0002 * at):
                proc = await runner.start(["sleep", "600"])
                with anyio.CancelScope(shield=True):
                    await proc.cancel(grace_s=0)
        with anyio.fail_after(20):
            while await live(runner):  # noqa: ASYNC110  # a level, polled
                await anyio.sleep(0.01)

    on_both(body)


def test_a_cancelled_task_ends_what_its_block_created(on_both: OnBoth) -> None:
    async def body(runner: AsyncClient) -> None:
        sleepers: list[int] = []
        with anyio.move_on_after(10) as scope:
            async with await runner.start(["sh", "-c", "sleep 60 & echo $!; wait"]) as proc:
                async for note in proc.output():
                    assert isinstance(note, OutputNote)
                    sleepers.append(int(note.data))
                    scope.cancel()
        assert len(sleepers) == 1
        assert not is_alive(sleepers[0])
        assert proc.exit is not None
        assert proc.exit.reason == "cancelled"

    on_both(body)


async def by_block(runner: AsyncClient) -> None:
    async with await runner.start(["sleep", "600"]) as proc:
        await proc.wait()


async def by_run(runner: AsyncClient) -> None:
    await runner.run(["sleep", "600"])


@pytest.mark.parametrize("use", [by_block, by_run])
@pytest.mark.parametrize("backend", BACKENDS)
def test_a_cancelled_scope_around_the_connection_ends_what_was_created(
    runnerd_daemon: RunnerdProcess, backend: str, use: Callable[[AsyncClient], Awaitable[None]]
) -> None:
    """The connection is carried on until its block has ended: an answer is needed on the way."""

    async def main() -> None:
        async with connect(runnerd_daemon.socket_path) as other, anyio.create_task_group() as tasks:
            with anyio.CancelScope() as scope:

                async def cancel() -> None:
                    with anyio.fail_after(10):
                        while not await live(other):  # noqa: ASYNC110  # a level, polled
                            await anyio.sleep(0.01)
                    scope.cancel()

                tasks.start_soon(cancel)
                async with connect(runnerd_daemon.socket_path) as runner:
                    await use(runner)
            assert scope.cancelled_caught
            with anyio.fail_after(10):  # a start without an answer so far is undone, not awaited
                while await live(other):  # noqa: ASYNC110
                    await anyio.sleep(0.01)

    began_s = time.monotonic()
    anyio.run(main, backend=backend)
    assert time.monotonic() - began_s < async_execs.CANCEL_S / 2


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_start_cancelled_with_its_connection_leaves_nothing_running(
    runnerd_daemon: RunnerdProcess, backend: str
) -> None:
    """The daemon must have taken the cancel before the connection is closed under it."""

    async def main() -> None:
        for at in range(40):
            with anyio.CancelScope() as scope:
                async with connect(runnerd_daemon.socket_path) as runner:
                    scope.deadline = anyio.current_time() + 0.0003 * at
                    async with await runner.start(["sleep", "600"]):
                        scope.cancel()
                        await anyio.sleep_forever()
        async with connect(runnerd_daemon.socket_path) as other:
            for each in await other.list_execs(live_only=True):
                exit = await other.wait(each.exec_id, timeout_s=30)
                assert exit.reason == "cancelled"

    anyio.run(main, backend=backend)


def test_an_attached_exec_is_left_alone(on_both: OnBoth) -> None:
    async def body(runner: AsyncClient) -> None:
        async with await runner.start(["sleep", "60"], attach=False) as made:
            async with await runner.attach(made.exec_id) as handle:
                assert not handle.created
            assert (await runner.inspect(made.exec_id)).state == "running"

    on_both(body)


def test_an_error_of_the_block_comes_out_as_it_is(on_both: OnBoth) -> None:
    async def body(runner: AsyncClient) -> None:
        with pytest.raises(RemoteError) as caught:
            await runner.start(["/nonexistent/program"])
        assert caught.value.kind == "start_failed"
        with pytest.raises(ClientTimeout):
            await runner.wait((await runner.start(["sleep", "9"])).exec_id, timeout_s=0.05)
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        on_both(body)


@pytest.mark.parametrize("backend", BACKENDS)
def test_no_daemon_is_an_error_and_no_group_of_them(tmp_path: Path, backend: str) -> None:
    async def main() -> None:
        async with connect(tmp_path / "none"):
            pass

    with pytest.raises(ConnectFailed):
        anyio.run(main, backend=backend)


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_stopped_daemon_tells_the_exit_first(
    runnerd_daemon: RunnerdProcess, backend: str
) -> None:
    async def main() -> None:
        async with connect(runnerd_daemon.socket_path) as runner:
            proc = await runner.start(["sleep", "60"])
            await runner.stop()
            assert await text_of(proc) == b""
            assert proc.exit is not None
            assert proc.exit.reason == "stopped"

    anyio.run(main, backend=backend)


def test_a_terminal_follows_the_size_it_is_told(on_both: OnBoth) -> None:
    async def body(runner: AsyncClient) -> None:
        script = "stty size; read x; stty size; read x; stty size"
        async with await runner.start(
            ["sh", "-c", script], stdin="pipe", pty=Pty(rows=7, cols=77)
        ) as proc:
            found = bytearray()

            async def until(text: bytes) -> None:
                async for note in proc.output(20):
                    assert isinstance(note, OutputNote)
                    found.extend(note.data)
                    if text in found:
                        return

            await until(b"7 77\r\n")
            await proc.resize(8, 88)
            await proc.write(b"\n")
            await until(b"8 88\r\n")
            await runner.resize(proc.exec_id, 9, 99)
            await proc.write(b"\n")
            await until(b"9 99\r\n")
            with pytest.raises(RemoteError, match="rows"):
                await proc.resize(0, 80)
            pty = (await proc.inspect()).pty
            assert pty is not None
            assert (pty.rows, pty.cols) == (9, 99)

    on_both(body)


def test_what_the_blocking_client_can_ask_this_one_can_too(on_both: OnBoth) -> None:
    async def body(runner: AsyncClient) -> None:
        answer = await runner.set_env({"APP_ASYNC": "yes"}, unset=["HOME"])
        assert (answer.set_total, answer.unset_total) == (1, 1)
        script = "echo $APP_ASYNC ${HOME-none}"
        assert (await runner.run(["sh", "-c", script])).stdout == b"yes none\n"
        async with await runner.start(["sh", "-c", "sleep 60 & echo up; wait"]) as proc:
            async for _ in proc.output(20):
                break
            assert [each.exec_id for each in await runner.list_execs(live_only=True)] == [
                proc.exec_id
            ]
            assert len(await runner.list_execs()) == 2
            processes = (await proc.inspect(usage=True, tree=True)).processes
            assert processes is not None
            assert len(processes) == 2

    on_both(body)


def test_both_clients_take_the_same_arguments() -> None:
    """What one can do and the other cannot is an oversight, but for what is told here."""
    for one, other in [(blocking.Client, AsyncClient), (execs.Exec, async_execs.AsyncExec)]:
        for name in (public(one) & public(other)) - {"run"}:  # a task's scope is its patience
            if inspect.isroutine(getattr(one, name)):
                theirs = inspect.signature(getattr(other, name)).parameters
                assert [*inspect.signature(getattr(one, name)).parameters] == [*theirs], name
    loop_of_their_own = {"fileno", "unsent_bytes", "wake_at_s", "send", "receive_events"}
    by_the_block = {"close", "greet", "prepared"}
    assert public(blocking.Client) - public(AsyncClient) == loop_of_their_own | by_the_block
    assert public(AsyncClient) <= public(blocking.Client)
    assert public(execs.Exec) - public(async_execs.AsyncExec) == {"take_output"}


def public(kind: type) -> set[str]:
    return {name for name in dir(kind) if not name.startswith("_")}


def test_a_string_as_input_is_refused_before_anything_runs(on_both: OnBoth) -> None:
    text: Any = "b\na\n"

    async def body(runner: AsyncClient) -> None:
        with pytest.raises(AssertionError, match="input is bytes"):
            await runner.run(["cat"], input=text)
        assert await runner.list_execs() == []

    on_both(body)


def test_without_anyio_it_says_what_to_install() -> None:
    script = "import sys; sys.modules['anyio'] = None; import runnerd.client.asynchronous"
    done = subprocess.run(
        [sys.executable, "-c", script], check=False, capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 1
    assert done.stderr.endswith("pip install 'runnerd[async]'\n")


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_start_repeated_when_its_output_is_gone_says_so_with_the_exit(
    backend: str, start_daemon: Callable[..., RunnerdProcess]
) -> None:
    async def main(path: str) -> None:
        again: dict[str, Any] = {"exec_id": "deploy", "nonce": "n-1"}
        argv = ["sh", "-c", "exit 3"]
        async with connect(path) as runner:
            await (await runner.start(argv, **again)).wait_closed(30)
            await (await runner.start(["true"])).wait_closed(30)
            handle = await runner.start(argv, **again)
            with pytest.raises(RemoteError) as caught:
                await handle.output(30).__anext__()
            assert caught.value.data.exit is not None
            assert caught.value.data.exit.code == (await handle.wait(30)).code == 3

    anyio.run(main, start_daemon("--finished-execs-max", "1").socket_path, backend=backend)


def test_a_new_owner_ends_a_run_whose_command_waits_for_the_rest_of_its_input(
    on_both: OnBoth, runnerd_daemon: RunnerdProcess, tmp_path: Path
) -> None:
    async def body(runner: AsyncClient) -> None:
        go = tmp_path / "go"
        go.unlink(missing_ok=True)
        script = f"while [ ! -e {go} ]; do sleep 0.02; done; exec cat >/dev/null"
        refused: list[str] = []
        has_ended = anyio.Event()

        async def run() -> None:
            with pytest.raises(RemoteError) as caught:
                await runner.run(["sh", "-c", script], input=bytes(4 << 20), exec_id="fed")
            refused.append(caught.value.kind)
            has_ended.set()

        async def is_fed() -> bool:
            fed = "fed" in await live(runner) and await runner.inspect("fed")
            return bool(fed and fed.stdin_accepted_bytes)

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(run)
            while not await is_fed():
                pass
            async with connect(runnerd_daemon.socket_path, fence=1) as owner:
                go.touch()
                await has_ended.wait()
                await owner.cancel("fed", grace_s=0)
        assert refused == ["fenced"]

    on_both(body)
