"""At a container's own memory limit: who dies, what is told, and how far the protection goes."""

from __future__ import annotations

import signal
import time
from typing import TYPE_CHECKING, Any, Final

import pytest

from tests.containers.container import AS_ROOT
from tests.containers.planting import planted
from tests.harness import wait_for

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from tests.containers.container import Container

    Start = Callable[..., Container]

MIB: Final = 1 << 20
LIMIT_MIB: Final = 256
LIMITS: Final = (
    *("--memory", f"{LIMIT_MIB}m", "--memory-swap", f"{LIMIT_MIB}m", "--oom-score-adj", "500"),
)
HOGS: Final = 20
FAT: Final = "held = bytearray(b'x' * 4096) * ({mib} * 256)\n"


def limited(
    container: Start, tmp_path: Path, *serve: str, fat_mib: int = 0, **more: Any
) -> Container:
    """Start one at the limit, with a score of 500 for all, and a daemon that holds so much."""
    options = [*AS_ROOT["options"], *LIMITS]
    if fat_mib:
        options += planted(FAT.format(mib=fat_mib), tmp_path)
    words = (*AS_ROOT["serve"], "--oom-score", "keep", *serve)
    return container(options=options, serve=words, **more)


def test_a_hog_dies_and_the_container_lives_20_of_20(container: Start, tmp_path: Path) -> None:
    sandbox = limited(container, tmp_path)
    began_s = time.time()
    with sandbox.connect() as client:
        order = client.info().oom_order
        assert (order.verdict, order.own_score, order.command_score) == ("protected", 500, 900)
        assert order.limit_bytes == LIMIT_MIB * MIB
        for _ in range(HOGS):
            handle = client.start(["eat", "1", "900"], attach=False)
            its_exit = client.wait(handle.exec_id, until="closed", timeout_s=60)
            assert (its_exit.signal, its_exit.reason) == (signal.SIGKILL, "exited")
            assert (its_exit.oom.verdict, its_exit.oom.kills) == ("killed", 1)
        assert client.run(["echo", "x"]).stdout == b"x\n"
    assert sandbox.state()["Running"]
    assert wait_for(lambda: sandbox.events(began_s, "oom"))
    print(f"{HOGS} hogs, {len(sandbox.events(began_s, 'oom'))} oom events of the engine")
    sandbox.stop()
    state = sandbox.state()
    # True as soon as anything in it was killed: that the daemon lived is told by the code.
    assert (state["ExitCode"], state["OOMKilled"]) == (0, True)


def test_many_middling_children_die_and_the_container_lives(
    container: Start, tmp_path: Path
) -> None:
    """None of them is large; and with six commands the verdict says what can be known."""
    sandbox = limited(container, tmp_path)
    with sandbox.connect() as client:
        handle = client.start(["eat", "8", "60"], attach=False, grace_s=0)
        wait_for(lambda: oom_kills(sandbox) >= 4, 30)
        client.cancel(handle.exec_id)
        before = oom_kills(sandbox)
        handles = [
            client.start(["eat", "1", "60"], admission="skip", attach=False, grace_s=0)
            for _ in range(8)
        ]
        wait_for(lambda: oom_kills(sandbox) - before >= 4, 30)
        verdicts = set()
        for each in handles:
            client.cancel(each.exec_id)
            verdicts.add(client.wait(each.exec_id, timeout_s=20).oom.verdict)
        assert verdicts <= {"possible", "killed", "child"}
        assert "possible" in verdicts
        assert client.info().stray_failures == 0
    sandbox.stop()
    assert sandbox.state()["ExitCode"] == 0


def oom_kills(sandbox: Container) -> int:
    """Read the kernel's counter for the container."""
    return int((sandbox.group("memory") / "memory.oom_control").read_text().split()[-1])


@pytest.mark.parametrize(
    ("serve", "fat_mib", "lives"),
    [
        ((), 70, True),  # 70 and 31 of its own: below 0.4 of the limit
        (("--command-oom-score", "keep"), 130, False),  # equal scores: the bigger one dies
        ((), 190, False),  # beyond 0.4 of the limit and half of the rest no score helps
    ],
    ids=["protected", "the twin without the raise", "the limit of the protection"],
)
def test_how_far_the_protection_goes(
    container: Start,
    tmp_path: Path,
    serve: tuple[str, ...],
    fat_mib: int,
    lives: bool,
) -> None:
    sandbox = limited(container, tmp_path, *serve, fat_mib=fat_mib)
    with sandbox.connect(reconnect_s=0) as client:
        info = client.info()
        assert info.rss_bytes is not None
        is_below = info.rss_bytes < (info.oom_order.protects_up_to_bytes or 0)
        assert is_below is lives, (info.rss_bytes, info.oom_order)
        handle = client.start(["eat", "1", "900"], attach=False)
        if lives:
            assert client.wait(handle.exec_id, timeout_s=60).oom.verdict == "killed"
    if lives:
        sandbox.stop()
        assert sandbox.state()["ExitCode"] == 0
    else:
        assert sandbox.wait() == 137
        assert sandbox.state()["OOMKilled"]
        assert not sandbox.log_lines("stopping")
        assert not sandbox.processes()
