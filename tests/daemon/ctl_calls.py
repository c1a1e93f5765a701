"""Many command lines of runnerctl, one after the other in one process, for what each one says."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from typing import TYPE_CHECKING, Final, NamedTuple

from tests.harness import REPOSITORY

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tests.harness import RunnerdProcess

_ALL: Final = """
import contextlib, io, json, sys
from runnerd.ctl.main import main

said = []
for words in json.load(sys.stdin):
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            code = main(words)
        except SystemExit as ended:
            code = ended.code
        except BaseException as error:
            code = repr(error)
    said.append((code, out.getvalue(), err.getvalue()))
print(json.dumps(said))
"""


class Said(NamedTuple):
    """What one command line gave: `code` is a word where it ended in a traceback."""

    code: int | str
    out: str
    err: str


def say_all(daemon: RunnerdProcess, lines: Sequence[Sequence[str]]) -> list[Said]:
    """Run command lines that write nothing straight to a descriptor; each costs milliseconds."""
    done = subprocess.run(
        [sys.executable, "-c", _ALL],
        cwd=REPOSITORY,
        env={**os.environ, "RUNNERD_SOCKET": daemon.socket_path},
        input=json.dumps(lines).encode(),
        capture_output=True,
        check=True,
        timeout=60,
    )
    return [Said(*each) for each in json.loads(done.stdout)]
