"""Texts of a sandbox on a person's terminal: none of them moves the cursor. Real daemon."""

from __future__ import annotations

import json
import shutil
from typing import TYPE_CHECKING, Final

from tests.daemon.ctl_calls import say_all
from tests.harness import wait_for

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from tests.harness import RunnerdProcess

EVIL: Final = "\x1b[2J\x9b2J\x7f\u202e"
"""Clears the screen, in both ways to begin a command, and has what follows run from the right."""
MADE: Final[list[tuple[str, ...]]] = [
    ("env", "set", f"{EVIL}=1"),
    ("env", "unset", f"{EVIL}2"),
    ("pin", EVIL),
]
ASKED: Final[list[tuple[str, ...]]] = [
    *(("ps", *more) for more in ((), ("--all",), ("--tree",), ("--json",), ("--label", EVIL))),
    ("top", "--once"),
    *(
        (name, *more)
        for name in ("info", "health", "activity")
        for more in ((), ("--json",), (f"--{EVIL}",))
    ),
    ("env",),
    ("inspect", "x", "--tree", "--usage"),
    ("wait", EVIL),
    ("signal", "x", EVIL),
    ("forget", EVIL, EVIL),
    ("unpin", f"{EVIL}2"),
    ("run", "-d", "--", f"/{EVIL}"),
    ("run", "-d", "-w", f"/{EVIL}", "--", "true"),
    ("run", "-d", "-u", EVIL, "--", "true"),
    ("run", "-d", "--json", "--label", f"{EVIL}={EVIL}", "--", "true"),
    ("--socket", f"/{EVIL}", "health"),
    ("--socket", f"/{EVIL}", "ps"),
    ("--token-file", f"/{EVIL}", "ps"),
    ("cancel", "x", "--grace", "0"),
    ("cancel", "x", "--json"),
    (EVIL,),
    ("claim", EVIL, "--expect", "any", "--fence", "1"),
    ("claim", "another", "--expect", "unclaimed", "--fence", "2"),
    ("info",),
]


def test_no_text_of_others_reaches_a_terminal_as_it_is(
    runnerd_daemon: RunnerdProcess, tmp_path: Path
) -> None:
    program = tmp_path / EVIL[:5]
    shutil.copy(shutil.which("sleep") or "", program)
    watching = [runnerd_daemon.start_ctl("events", *more) for more in ((), ("--json",))]
    with runnerd_daemon.connect() as client:
        wait_for(lambda: client.info().connections == 3)
        client.start(
            [f"./{program.name}", "60"], exec_id="x", cwd=str(tmp_path), labels={EVIL: EVIL}
        )
        wait_for(lambda: client.inspect("x", tree=True).processes[0].command == program.name)
    lines = [*MADE, *ASKED]
    told = say_all(runnerd_daemon, lines)
    shown = [(line, each.out + each.err) for line, each in zip(lines, told, strict=True)]
    runnerd_daemon.ctl("stop", "--fence", "current")
    shown += [(("events",), b"".join(each.communicate(timeout=20)).decode()) for each in watching]
    assert [(line, text) for line, text in shown if not printable(text)] == []
    texts = dict(shown)
    for line in (("ps",), ("ps", "--tree"), ("env",), ("activity",), ("info",), ("top", "--once")):
        assert "\\x1b[2J" in texts[line], line
    known = json.loads(texts["inspect", "x", "--tree", "--usage"])
    assert known["labels"] == {EVIL: EVIL}, "it is JSON all the same"


def printable(text: str) -> bool:
    return text.replace("\n", "").isprintable()


def test_hints_name_what_a_person_can_see_and_do(
    start_daemon: Callable[..., RunnerdProcess],
) -> None:
    """Not a field of an error's data, and no option that is refused next."""
    daemon = start_daemon("--live-execs-max", "1")
    with daemon.connect() as client:
        client.start(["sleep", "60"], exec_id="x")
        lines = [("run", "-d", "--", "true"), ("attach", "-it", "x")]
        busy, no_terminal = say_all(daemon, lines)
    assert busy.err.endswith("\nhint: wait for 1 s\n")
    assert no_terminal.err.endswith("\nhint: leave out -i to watch it only\n")
