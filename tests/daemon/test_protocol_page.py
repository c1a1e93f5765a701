"""runnerd/PROTOCOL.md is true: its transcripts are played, its tables compared with the code."""

from __future__ import annotations

import json
import re
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Final

import pytest

from runnerd.daemon.main import EX_CANTCREAT, EX_SOFTWARE
from runnerd.daemon.options import EX_CONFIG, EX_USAGE
from runnerd.protocol.errors import KINDS
from runnerd.protocol.framing import Encoding
from runnerd.protocol.notes import NOTIFICATIONS
from runnerd.protocol.requests import METHODS
from tests import page
from tests.harness import RunnerdProcess, daemons, wait_for
from tests.needs import program
from tests.raw import RawClient
from tests.transcripts import (
    Different,
    Player,
    Transcript,
    blocks,
    differences,
    pattern,
    transcripts,
)

TEXT: Final = page.PAGE.read_text()
TRANSCRIPTS: Final = transcripts(TEXT)
PLAYED: Final = [
    (transcript, encoding)
    for encoding in Encoding
    for transcript in TRANSCRIPTS
    if encoding is Encoding.JSON or not transcript.json_only
]

SECRET: Final = "/run/secrets/runnerd"  # no file of this machine's

# Kinds that no transcript can show, and what shows them instead.
NOT_PLAYED: Final = {
    "peer_refused": "needs a peer that is a command",
    "peer_gone": "needs a peer that is gone",
    "not_permitted": "needs a process of another user",
    "start_timeout": "needs a start that hangs",
    "stopping": "needs a request within the stop",
    "internal": "needs a defect",
    "exec_lost": "needs a daemon before this one",
}


@pytest.fixture(scope="module", params=list(Encoding), ids=lambda encoding: encoding.value)
def shared_daemon(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[RunnerdProcess]:
    """One daemon for all transcripts of one encoding that ask for none of their own."""
    with daemons(tmp_path_factory.mktemp("page")) as start:
        yield start()


def _end_everything(path: str) -> None:
    with RawClient(path) as client:
        for info in client.call("exec.list", limit=1000)["execs"]:
            if info["state"] != "closed":
                client.call("exec.cancel", exec_id=info["exec_id"], grace_s=0)


@pytest.mark.parametrize(
    "transcript",
    [each for each in TRANSCRIPTS if each.options is None],
    ids=lambda transcript: transcript.name,
)
def test_the_daemon_does_what_the_page_shows(
    shared_daemon: RunnerdProcess, request: pytest.FixtureRequest, transcript: Transcript
) -> None:
    encoding = request.node.callspec.params["shared_daemon"]
    if encoding is Encoding.MSGPACK and transcript.json_only:
        return  # bytes that are no message cannot be said in the other encoding
    try:
        Player(shared_daemon.socket_path, encoding, "runnerd/PROTOCOL.md").play(transcript)
    finally:
        _end_everything(shared_daemon.socket_path)


@pytest.mark.parametrize(
    ("transcript", "encoding"),
    [pair for pair in PLAYED if pair[0].options is not None],
    ids=lambda value: value.value if isinstance(value, Encoding) else value.name,
)
def test_a_daemon_with_the_options_named_does_what_the_page_shows(
    start_daemon: Callable[..., RunnerdProcess],
    tmp_path: Path,
    transcript: Transcript,
    encoding: Encoding,
) -> None:
    assert transcript.options is not None
    secret = tmp_path / "secret"
    secret.write_text("an-example-of-thirty-two-letters\n")
    secret.chmod(0o400)
    options = [str(secret) if each == SECRET else each for each in transcript.options]
    daemon = start_daemon(*options)
    Player(daemon.socket_path, encoding, "runnerd/PROTOCOL.md").play(transcript)


def test_the_bytes_shown_in_hexadecimal_are_the_bytes_on_the_wire(
    runnerd_daemon: RunnerdProcess,
) -> None:
    shown = [block for block in blocks(TEXT) if block.info == ["hex"]]
    assert shown
    for block in shown:
        with RawClient(runnerd_daemon.socket_path, encoding=Encoding.MSGPACK) as client:
            client.sock.settimeout(10)
            for line in block.lines:
                raw = bytes.fromhex(line[4:])
                if line.startswith("--> "):
                    client.sock.sendall(raw)
                else:
                    assert client.sock.recv(len(raw)).hex(" ") == raw.hex(" ")


def test_trying_it_by_hand_with_socat_works_as_shown(runnerd_daemon: RunnerdProcess) -> None:
    program("socat")
    hand = [block for block in blocks(TEXT) if block.heading == "Try it by hand"]
    script = "\n".join(hand[0].lines) + "\n"
    default = "/run/runnerd/runnerd.sock"
    assert script.startswith("socat ")
    assert default in script
    done = subprocess.run(
        ["sh", "-c", script.replace(default, runnerd_daemon.socket_path)],
        capture_output=True,
        timeout=30,
        check=True,
    )
    answered = [json.loads(line) for line in done.stdout.splitlines()]
    shown = [step for step in TRANSCRIPTS[0].steps if step.what == "expect"]
    assert len(answered) == len(shown), done
    for step, message in zip(shown, answered, strict=True):
        assert not differences(pattern(step.text), message, {}), (step, message)
    sent = [step.text for step in TRANSCRIPTS[0].steps if step.what == "send"]
    assert [line for line in hand[0].lines if line.startswith("{")] == sent


# ------------------------------------------------------------------ what the page must contain


def test_every_part_made_from_the_code_is_there_and_is_what_the_code_makes() -> None:
    shown = page.generated_parts(TEXT)
    assert shown.keys() == page.GENERATED.keys()
    stale = [name for name, text in shown.items() if text != page.GENERATED[name]().strip("\n")]
    assert not stale, "run `python -m tests.page`"


@pytest.mark.parametrize("name", [*METHODS, *NOTIFICATIONS])
def test_every_method_and_notification_is_shown_at_work(name: str) -> None:
    steps = [step for transcript in TRANSCRIPTS for step in transcript.steps]
    assert any(f'"method": "{name}"' in step.text for step in steps)


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_of_error_is_shown_at_work_where_that_can_be(kind: str) -> None:
    steps = [step for transcript in TRANSCRIPTS for step in transcript.steps]
    shown = any(f'"kind": "{kind}"' in step.text for step in steps)
    assert shown != (kind in NOT_PLAYED)


def test_every_event_of_the_log_is_documented_with_its_level_and_fields() -> None:
    section = TEXT.partition("### The log\n")[2].partition("\n### ")[0]
    rows = re.findall(r"^\| `(\w+)` \| (\w+) \| (.*?) \| (.+) \|$", section, re.MULTILINE)
    documented = {event: (level, fields) for event, level, fields, _ in rows}
    assert documented == page.logged_events()


def test_the_exit_codes_are_those_of_the_code() -> None:
    section = TEXT.partition("### Exit codes\n")[2].partition("\n### ")[0]
    shown = set(map(int, re.findall(r"^\| (\d+) \|", section, re.MULTILINE)))
    assert shown == {0, EX_USAGE, EX_SOFTWARE, EX_CANTCREAT, EX_CONFIG}


def test_every_link_inside_the_page_leads_somewhere() -> None:
    headings = re.findall(r"^#+ (.+)$", TEXT, re.MULTILINE)
    anchors = {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}
    assert set(re.findall(r"\]\(#([^)]+)\)", TEXT)) <= anchors


def _expected_lines(*info: str) -> list[Any]:
    (block,) = [block for block in blocks(TEXT) if block.info == list(info)]
    joined = "\n".join(block.lines).replace("\n    ", " ")
    return [pattern(line) for line in joined.splitlines()]


def test_the_log_and_the_last_words_are_as_shown(
    start_daemon: Callable[..., RunnerdProcess], tmp_path: Path
) -> None:
    folder = tmp_path / "state"
    daemon = start_daemon("--state-dir", str(folder))
    assert daemon.stop() == 0
    lines = [json.loads(line) for line in daemon.log_path.read_text().splitlines()]
    lines = [line for line in lines if line["event"] != "boot_warning"]
    assert differences(_expected_lines("json", "log"), lines, {}) == []

    daemon = start_daemon("--state-dir", str(folder))
    with RawClient(daemon.socket_path) as client:
        client.call("exec.start", exec_id="spoke-last", argv=["sleep", "1000"])
    assert daemon.stop() == 0
    words = wait_for(lambda: json.loads((folder / "last-words.json").read_text()))
    assert differences(_expected_lines("json", "last-words"), [words], {}) == []


def test_the_claim_is_as_shown(runnerd_daemon: RunnerdProcess) -> None:
    with RawClient(runnerd_daemon.socket_path, hello=False) as client:
        client.call("hello", protocol=[1], fence=1)
        client.call("sandbox.claim", owner="spawner-7", expect="unclaimed", nonce="c-1")
    written = Path(runnerd_daemon.socket_path).parent / "state" / "claim.json"
    shown = _expected_lines("json", "claim")
    assert differences(shown, [json.loads(written.read_text())], {}) == []


# ------------------------------------------------------------------ the player itself

PING: Final = (
    "# Some heading\n\n```transcript\n"
    '--> {"jsonrpc": "2.0", "id": 1, "method": "ping"}\n'
    '<-- {"jsonrpc": "2.0", "id": 1, "result": {}}\n'
    "```\n"
)
LIST: Final = (
    "# Some heading\n\n```transcript\n"
    '--> {"jsonrpc": "2.0", "id": 1, "method": "exec.list", "params": {}}\n'
    '<-- {"jsonrpc": "2.0", "id": 1, "result": {"execs": [], "next_cursor": null}}\n'
    "```\n"
)


@pytest.mark.parametrize("encoding", list(Encoding))
@pytest.mark.parametrize(
    ("text", "right", "wrong", "said"),
    [
        (PING, "{}}", '{"pong": 1}}', "at result: pong is missing"),
        (PING, '"id": 1, "result": {}', '"id": 1, "error": {}', "at : error is missing"),
        (LIST, ', "next_cursor": null', "", "at result: next_cursor is not on the page"),
        (LIST, "null", "<count>", "at result.next_cursor: expected an integer, 0 or more"),
        (LIST, "[]", "[<any>]", "at result.execs: expected 1 items, got 0"),
        (LIST, "null", "0", "at result.next_cursor: expected 0, got null"),
        (PING, '<-- {"jsonrpc": "2.0", "id": 1, "result": {}}', "# silent", "said more than this"),
        (PING, '"result": {}}\n', '"result": {}}\n<-- (closed)\n', "did not close the connection"),
    ],
)
def test_a_wrong_line_is_found_and_said(
    runnerd_daemon: RunnerdProcess,
    monkeypatch: pytest.MonkeyPatch,
    encoding: Encoding,
    text: str,
    right: str,
    wrong: str,
    said: str,
) -> None:
    monkeypatch.setattr("tests.transcripts.ANSWER_S", 0.3)
    player = Player(runnerd_daemon.socket_path, encoding, "page.md")
    player.play(transcripts(text)[0])
    assert text.count(right) == 1
    (planted,) = transcripts(text.replace(right, wrong))
    assert planted.name == "some-heading-1"
    with pytest.raises(Different) as failure:
        Player(runnerd_daemon.socket_path, encoding, "page.md").play(planted)
    told = str(failure.value)
    assert said in told
    assert re.match(r"page\.md:[456]: ", told)
    assert '  received    <-- {"' in told or "did not close" in told


def test_an_answer_that_never_comes_is_said(
    runnerd_daemon: RunnerdProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tests.transcripts.ANSWER_S", 0.3)
    (planted,) = transcripts(PING.replace('<-- {"jsonrpc": "2.0", "id": 1', '<-- {"id": 2'))
    with pytest.raises(Different, match="the daemon said nothing"):
        Player(runnerd_daemon.socket_path, Encoding.JSON).play(planted)


def test_notifications_of_a_subscription_in_the_wrong_order_are_found(
    runnerd_daemon: RunnerdProcess,
) -> None:
    by_hand = next(each for each in TRANSCRIPTS if each.name == "try-it-by-hand-1")
    steps = [*by_hand.steps]
    steps[-1], steps[-2] = steps[-2], steps[-1]
    with pytest.raises(Different, match="at method: expected"):
        Player(runnerd_daemon.socket_path, Encoding.JSON).play(by_hand._replace(steps=steps))


@pytest.mark.parametrize(
    ("text", "value", "seen"),
    [
        ('{"a": <pid>, ...}', {"a": 7, "b": 1}, {"pid": 7}),
        ('["x", ...]', ["x", "y"], {}),
        ('{"m": "pid <count>, <text>"}', {"m": "pid 3, a"}, {"count": "3", "text": "a"}),
        ('{"m": "<text>", "n": "a < b ... c"}', {"m": "", "n": "a < b ... c"}, {"text": ""}),
        ("[<seconds>, <score>]", [0.5, None], {"seconds": 0.5, "score": None}),
        ("<any>", [1], {"any": [1]}),
    ],
)
def test_a_pattern_fits_what_it_should(text: str, value: Any, seen: dict[str, Any]) -> None:
    caught: dict[str, Any] = {}
    assert differences(pattern(text), value, caught) == []
    assert caught == seen


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ('{"a": <pid>}', {"a": 1}),
        ('{"a": <pid>}', {"a": True}),
        ('{"a": 1}', {"a": 1.0}),
        ('{"a": 1}', {"a": True}),
        ('{"a": 1, ...}', {"b": 1}),
        ('["x", ...]', []),
        ("[]", ["x"]),
        ('"<hex>"', "0123456789abcdeg"),
        ("<time>", 5.0),
        ("<ms>", -1.0),
        ('"text"', None),
        ('"a<count>"', "b1"),
    ],
)
def test_a_pattern_fits_nothing_else(text: str, value: Any) -> None:
    assert differences(pattern(text), value, {})


def test_a_line_that_is_no_transcript_is_refused() -> None:
    with pytest.raises(AssertionError, match="line 4 is no transcript"):
        transcripts("# H\n\n```transcript\n-> {}\n```\n")
