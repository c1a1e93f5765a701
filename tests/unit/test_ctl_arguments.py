"""runnerctl's options, and what they become in the request."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import pytest

from runnerd.client.errors import ClientError
from runnerd.ctl.main import COMMANDS, build_parser, main
from runnerd.ctl.run import environment, rlimit, start_params
from runnerd.protocol.requests import METHODS, Attach, ExecStart, Pty

if TYPE_CHECKING:
    from pathlib import Path


def parsed(*words: str) -> ExecStart:
    return start_params(build_parser(["run", *words]).parse_args(["run", *words]))


def test_a_plain_run_attaches_and_asks_for_nothing_else() -> None:
    assert parsed("--", "ls", "-l") == ExecStart(argv=["ls", "-l"], attach=Attach())


def test_every_option_reaches_its_field() -> None:
    params = parsed(
        *("-i", "--id", "web", "-e", "A=1=2", "--env-replace", "-w", "/srv", "-u", "app"),
        *("--label", "job=42", "--deadline", "9.5", "--grace", "0", "--rlimit", "nofile=10:20"),
        *("--orphan-ttl", "8", "--stall", "7.5"),
        *("--nice", "-5", "--umask", "077", "--no-new-privs", "--leftovers", "kill"),
        *("--merge", "--sha256", "--", "cmd"),
    )
    assert params == ExecStart(
        argv=["cmd"],
        exec_id="web",
        env={"A": "1=2"},
        env_mode="replace",
        cwd="/srv",
        user="app",
        labels={"job": "42"},
        deadline_s=9.5,
        orphan_ttl_s=8.0,
        stall_s=7.5,
        grace_s=0.0,
        rlimits={"nofile": (10, 20)},
        nice=-5,
        umask=0o077,
        no_new_privs=True,
        leftovers="kill",
        stdin="pipe",
        stderr="stdout",
        sha256=True,
        attach=Attach(),
    )


def test_t_asks_for_a_terminal_as_ours_would_be(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("runnerd.ctl.terminal.local_size", lambda: (7, 9))
    monkeypatch.setenv("TERM", "screen")
    params = parsed("-it", "--merge", "--", "sh")
    assert params.pty == Pty(rows=7, cols=9, term="screen")
    assert (params.stdin, params.stderr) == ("pipe", "pipe")
    for unfit in ("dumb", "", "x" * 129):
        monkeypatch.setenv("TERM", unfit)
        assert parsed("-t", "--", "sh").pty == Pty(rows=7, cols=9)
    monkeypatch.setattr("runnerd.ctl.terminal.local_size", lambda: None)
    monkeypatch.setenv("TERM", "screen")
    params = parsed("-dit", "--", "sh")
    assert (params.pty, params.attach) == (Pty(), None)


@pytest.mark.parametrize(
    "words", [["sh", "-c", "x", "--", "-d"], ["--", "sh", "-c", "x", "--", "-d"]]
)
def test_what_follows_the_program_is_the_programs(words: list[str]) -> None:
    assert parsed(*words).argv == ["sh", "-c", "x", "--", "-d"]


def test_a_detached_run_does_not_attach() -> None:
    assert parsed("-d", "--", "a").attach is None


def test_the_socket_may_stand_before_or_after_the_command() -> None:
    for words in (["--socket", "/s", "ps"], ["ps", "--socket", "/s"]):
        assert build_parser(words).parse_args(words).socket == "/s"


def test_variables_come_from_here_files_and_options_in_this_order(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HERE", "h")
    monkeypatch.delenv("NOWHERE", raising=False)
    file = tmp_path / "env"
    file.write_text("# comment\n\nA=file\nB= spaced \nHERE\nNOWHERE\nC=x\r\n")
    assert environment(["A=option", "E="], [str(file)]) == {
        "A": "option",
        "B": " spaced ",
        "HERE": "h",
        "C": "x",
        "E": "",
    }


@pytest.mark.parametrize("line", ["export A=1", "A =1", "two words"])
def test_a_file_written_for_a_shell_is_refused(tmp_path: Path, line: str) -> None:
    file = tmp_path / "env"
    file.write_text(f"GOOD=1\n{line}\n")
    with pytest.raises(ClientError, match="white space") as caught:
        environment([], [str(file)])
    assert line in str(caught.value)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("nofile=1:2", ("nofile", (1, 2))),
        ("core=0", ("core", (0, 0))),
        ("as=1:unlimited", ("as", (1, "unlimited"))),
        ("cpu=unlimited", ("cpu", ("unlimited", "unlimited"))),
    ],
)
def test_a_limit_is_read(text: str, expected: object) -> None:
    assert rlimit(text) == expected


@pytest.mark.parametrize(
    "words",
    [
        [],
        ["--"],
        ["-d", "-i", "a"],
        ["--json", "a"],
        ["--umask", "9", "a"],
        ["--rlimit", "nofile", "a"],
        ["--rlimit", "nofile=1:x", "a"],
        ["--rlimit", "nofile=-1", "a"],
        ["--label", "x", "a"],
        ["-e", "=x", "a"],
        ["--env-file", "/nonexistent", "a"],
    ],
)
def test_an_option_that_makes_no_sense_is_named_before_anything_runs(words: list[str]) -> None:
    with pytest.raises(ClientError) as caught:
        parsed(*words)
    assert caught.value.preserved == "nothing ran"


@pytest.mark.parametrize(
    "words", [["nosuch"], [], ["run", "--nosuch"], ["signal", "x"], ["ps", "x"]]
)
def test_bad_usage_is_125_since_2_may_be_the_commands_code(
    words: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as caught:
        main(words)
    assert caught.value.code == 125
    assert capsys.readouterr().err.startswith("runnerctl: ")


@pytest.mark.parametrize(
    ("words", "program"),
    [
        (["run", "-x", "--", "a"], "runnerctl run"),
        (["--socket", "/s", "ps", "-l"], "runnerctl ps"),
        (["--nosuch"], "runnerctl"),
    ],
)
def test_an_unknown_option_points_at_the_help_that_lists_the_options(
    words: list[str], program: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as caught:
        main(words)
    assert caught.value.code == 125
    assert capsys.readouterr().err.endswith(f"hint: {program} --help\n")


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["run", "--deadline", "soon", "--", "a"], "argument --deadline: 'soon' is no number"),
        (["run", "--nice", "1.5", "--", "a"], "argument --nice: '1.5' is no whole number"),
        (["logs", "--after", "x", "a"], "argument --after: 'x' is no whole number"),
        (["wait", "--timeout", "", "a"], "argument --timeout: '' is no number"),
        (["top", "--interval", "0"], "--interval: 0.1 to 86400 seconds"),
        (["ps", "--label", "x"], "--label: 'x' is not NAME=VALUE"),
        *(
            (
                ["health", "--wait", text],
                f"argument --wait: '{text}' is no number of seconds above 0",
            )
            for text in ("-1", "0", "nan", "1e10")
        ),
        (["health", "--wait", "x"], "argument --wait: 'x' is no number"),
        *(
            (words, f"{words[-2]} is for whoever connects through the bridge to say")
            for words in (["bridge", "--fence", "1"], ["bridge", "--token-file", "f"])
        ),
    ],
)
def test_a_bad_value_is_said_in_plain_words_with_a_hint(
    words: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as caught:
        main(words)
    assert caught.value.code == 125
    assert capsys.readouterr().err == f"runnerctl: {said}\nhint: runnerctl {words[0]} --help\n"


@pytest.mark.parametrize("name", COMMANDS)
def test_every_subcommand_explains_itself_with_an_example(
    name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as caught:
        main([name, "--help"])
    assert caught.value.code == 0
    text = capsys.readouterr().out
    assert f"usage: runnerctl {name}" in text
    assert "example" in text
    assert f"runnerctl {name}" in text.split("example", 1)[1]


def test_the_overall_help_names_every_subcommand(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["--help"])
    text = capsys.readouterr().out
    assert [name for name in COMMANDS if f"\n    {name} " not in text] == []


def test_the_schema_needs_no_daemon(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["schema"]) == 0
    assert json.loads(capsys.readouterr().out)["methods"].keys() == METHODS.keys()
