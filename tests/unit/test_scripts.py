"""The set-up says the one command that mends what is missing, and then ends with 1.

Each test runs the real script with a PATH of its own: the few tools the set-up itself uses, and
interpreters that are as old or as bare as the test wants.
"""

import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest

TOP = Path(__file__).parents[2]
SCRIPTS = ["tests/run", "image/try", ".ci/run"]
TOOLS = [
    "bash",
    "cat",
    "cp",
    "cut",
    "dirname",
    "find",
    "flock",
    "id",
    "readlink",
    "rm",
    "sha256sum",
    "env",
    "mktemp",
    "uname",
    "sed",
]


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """A copy of what the set-up reads, with no environment made yet."""
    top = tmp_path / "checkout"
    for name in ("image", ".ci"):
        shutil.copytree(TOP / name, top / name, ignore=shutil.ignore_patterns("__pycache__"))
    (top / "tests").mkdir()
    for name in ("tests/run", "tests/reaper.py", "pyproject.toml"):
        shutil.copy2(TOP / name, top / name)
    return top


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """A folder to be all of PATH."""
    folder = tmp_path / "bin"
    folder.mkdir()
    for tool in TOOLS:
        found = shutil.which(tool)
        if found is not None:
            (folder / tool).symlink_to(found)
    return folder


def put_program(file: Path, script: str) -> None:
    file.write_text(f"#!/bin/sh\n{script}\n")
    file.chmod(0o755)


def put_python(path: Path, name: str, version: str, *, venv: bool = True) -> None:
    """Put a stand-in that answers the one question the set-up asks of an interpreter."""
    answer = f"echo {version} {'yes' if venv else 'no'} {path / name}"
    put_program(path / name, f'[ "$1" = -I ] && {answer}')


def run(script: Path, path: Path, **env: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [shutil.which("bash") or "bash", script],
        check=False,
        capture_output=True,
        text=True,
        timeout=60,
        stdin=subprocess.DEVNULL,
        cwd="/",
        env={"PATH": str(path), "HOME": "/nonexistent", **env},
    )


def mending_command(done: subprocess.CompletedProcess[str]) -> str:
    """Return the one command that was said, with whatever leads to root taken off it."""
    commands = [line for line in done.stderr.splitlines() if line.startswith("    ")]
    assert done.returncode == 1, done.stderr
    assert len(commands) == 1, done.stderr
    assert "This one command mends it:" in done.stderr
    return commands[0].strip()


@pytest.mark.parametrize("script", ["tests/run", "image/try"])
def test_a_python_that_is_too_old_is_named(checkout: Path, path: Path, script: str) -> None:
    put_python(path, "python3", "3.10.13")
    put_program(path / "apt-get", "exit 0")
    done = run(checkout / script, path)
    assert "3.11 or newer is needed; the one here is 3.10.13" in done.stderr
    assert f"{script}: " in done.stderr
    assert "python3" in mending_command(done)
    assert not (checkout / ".venv").exists()


def test_no_python_at_all(checkout: Path, path: Path) -> None:
    done = run(checkout / "tests/run", path)
    assert "3.11 or newer is needed, and none is here" in done.stderr
    assert "python" in mending_command(done)


def test_a_shim_that_finds_no_interpreter_is_passed_over(checkout: Path, path: Path) -> None:
    put_program(path / "python3.13", "echo 'python3.13: command not found' >&2; exit 127")
    put_python(path, "python3.12", "3.12.1", venv=False)
    put_program(path / "apt-get", "exit 0")
    done = run(checkout / "tests/run", path)
    assert "Python 3.12.1" in done.stderr
    assert "apt-get install -y python3.12-venv" in mending_command(done)


def test_a_python_that_can_make_an_environment_is_preferred(checkout: Path, path: Path) -> None:
    put_python(path, "python3.13", "3.13.0", venv=False)
    put_python(path, "python3.11", "3.11.2")
    done = run(checkout / "tests/run", path)
    assert f"with Python 3.11.2 ({path}/python3.11)" in done.stderr


def test_virtualenv_stands_in_for_ensurepip(checkout: Path, path: Path) -> None:
    put_python(path, "python3.13", "3.13.0", venv=False)
    put_program(path / "virtualenv", 'echo "virtualenv got: $*"; exit 9')
    done = run(checkout / "tests/run", path)
    assert f"virtualenv got: --quiet --python {path}/python3.13 {checkout}/.venv" in done.stdout
    assert done.returncode == 9


def test_the_chosen_python_is_the_only_candidate(checkout: Path, path: Path) -> None:
    put_python(path, "python3", "3.13.0")
    put_python(path, "old", "3.9.18")
    done = run(checkout / "tests/run", path, PYTHON=str(path / "old"))
    assert f"PYTHON={path}/old is 3.9.18" in done.stderr
    assert mending_command(done) == "unset PYTHON"


@pytest.mark.parametrize("script", SCRIPTS)
def test_another_system_than_linux(checkout: Path, path: Path, script: str) -> None:
    (path / "uname").unlink()
    put_program(path / "uname", "echo Darwin")
    put_python(path, "python3", "3.13.0")
    done = run(checkout / script, path)
    assert "needs Linux, and this is Darwin" in done.stderr
    assert mending_command(done).startswith("docker run ")


@pytest.mark.parametrize(("argument", "code"), [("--help", 0), ("make", 64), ("--", 64)])
def test_try_says_how_it_is_used(argument: str, code: int) -> None:
    done = subprocess.run(
        [TOP / "image/try", argument], check=False, capture_output=True, text=True, timeout=60
    )
    assert done.returncode == code
    assert ("image/try -- CMD" in done.stderr) == (argument != "--")


def test_try_finds_its_daemon_while_others_end(tmp_path: Path) -> None:
    """grep's exit code is 2 then, though it has found what it was to find."""
    put_program(tmp_path / "grep", f'{shutil.which("grep")} "$@"; exit 2')
    script = """
        set -euo pipefail
        eval "$(sed -n '/^only_child() {/,/^}/p' "$1")"
        file=$2
        sh -c 'sleep 4321 & echo $!; wait' >"$file" 2>&1 &
        job=$!
        until [ -s "$file" ]; do sleep 0.01; done
        trap 'kill "$(cat "$file")"' EXIT
        only_child "$job"
    """
    words = ["bash", "-c", script, "bash", str(TOP / "image/try"), str(tmp_path / "pid")]
    env = {**os.environ, "PATH": f"{tmp_path}:{os.environ['PATH']}"}
    done = subprocess.run(words, check=False, capture_output=True, text=True, timeout=60, env=env)
    assert (done.returncode, done.stdout) == (0, (tmp_path / "pid").read_text()), done.stderr


def reaper(*argv: str) -> list[str]:
    return [sys.executable, "-I", str(TOP / "tests/reaper.py"), *argv]


def test_the_suite_starts_with_no_signal_ignored_or_blocked() -> None:
    """However it was started: this is what a shell's background job inherits."""
    show = ["grep", "-E", "^Sig(Ign|Blk)", "/proc/self/status"]
    command = ["sh", "-c", 'trap "" INT QUIT USR1; exec "$@"', "sh", *reaper(*show)]
    done = subprocess.run(command, check=True, capture_output=True, text=True, timeout=60)
    assert done.stdout.split() == ["SigBlk:", "0" * 16, "SigIgn:", "0" * 16]


def test_a_run_that_leaves_something_running_fails() -> None:
    leave = ["sh", "-c", "setsid sleep 4321 >/dev/null 2>&1 & exec true"]
    done = subprocess.run(reaper(*leave), check=False, capture_output=True, text=True, timeout=60)
    assert done.returncode == 1
    assert "left running (killed now): sleep (" in done.stderr
    pid = int(done.stderr.rpartition("(")[2].rstrip(")\n"))
    assert not Path(f"/proc/{pid}").exists()


@pytest.mark.parametrize(("script", "code"), [("exit 7", 7), ("kill -KILL $$", 128 + 9)])
def test_the_exit_code_is_the_commands(script: str, code: int) -> None:
    done = subprocess.run(reaper("sh", "-c", script), check=False, timeout=60)
    assert done.returncode == code


def test_term_ends_the_command_and_what_it_started() -> None:
    script = "sleep 4321 & echo $!; wait"
    with subprocess.Popen(reaper("sh", "-c", script), stdout=subprocess.PIPE, text=True) as run_:
        assert run_.stdout is not None
        pid = int(run_.stdout.readline())
        run_.send_signal(signal.SIGTERM)
        assert run_.wait(timeout=60) == 128 + signal.SIGTERM
    assert not Path(f"/proc/{pid}").exists()


def test_the_scripts_may_be_run() -> None:
    for script in SCRIPTS:
        assert os.access(TOP / script, os.X_OK)
