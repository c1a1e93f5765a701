"""Many execs in a row leave the daemon's memory as it was.

What it remembers is bounded, so the bounds are what a shorter run has to scale down: with room for
a twentieth of what is kept by default, 5,000 execs fill it as 100,000 do the default. The long
form is `python -m tests.chaos.endurance`, and RUNNERD_CASES_FULL=1.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Final

import pytest

from tests.chaos.endurance import GROWS_BYTES_MAX, MB, Endurance
from tests.harness import daemons

FULL: Final = bool(os.environ.get("RUNNERD_CASES_FULL"))
EXECS: Final = 100_000 if FULL else 5_000
OPTIONS: Final = () if FULL else ("--finished-execs-max", "51", "--settled-execs-max", "819")


@pytest.mark.timeout(1200 if FULL else 300)
def test_rss_after_many_execs_is_what_it_was_after_a_fifth(tmp_path: Path) -> None:
    with daemons(tmp_path) as start:
        endurance = Endurance(start(*OPTIONS))
        after_a_fifth = endurance.run(EXECS // 5)
        grown = endurance.run(EXECS - EXECS // 5) - after_a_fifth
        endurance.client.sock.close()
    print(f"{EXECS} execs: {grown / MB:.2f} MB more than after {EXECS // 5}")
    assert grown <= GROWS_BYTES_MAX
