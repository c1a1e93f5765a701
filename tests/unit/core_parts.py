"""Parts of the core, small enough to go past each of their limits."""

from typing import Any

from runnerd.core.blocks import Record
from runnerd.core.bounds import RECORD_COST_BYTES, Bounds
from runnerd.core.budget import TailBudget
from runnerd.core.execs import Exec, ExitStatus
from runnerd.core.flow import chunk_bytes
from runnerd.core.transcript import Transcript
from runnerd.protocol.requests import Attach, ExecStart

NOW_S = 1000.0
WALL_S = 1_700_000_000.0

# A full tail keeps a few records of a few hundred bytes; six live execs have to share.
SMALL = Bounds(
    tail_bytes_max=8 * RECORD_COST_BYTES,
    tail_bytes_min=3 * RECORD_COST_BYTES,
    transcript_total_bytes_max=24 * RECORD_COST_BYTES,
)


def start_params(**fields: Any) -> ExecStart:
    return ExecStart(argv=["true"], **fields)


def blocking(**fields: Any) -> ExecStart:
    return start_params(attach=Attach(), **fields)


def make_exec(
    params: ExecStart | None = None,
    *,
    budget: TailBudget | None = None,
    oom_kills: int | None = 0,
    alone: bool = True,
) -> Exec:
    return Exec(
        "e",
        1,
        params or start_params(),
        cwd="/",
        now_s=NOW_S,
        wall_s=WALL_S,
        budget=budget or TailBudget(SMALL),
        oom_kills=oom_kills,
        alone=alone,
    )


def make_transcript(budget: TailBudget | None = None, *, sha256: bool = False) -> Transcript:
    budget = budget or TailBudget(Bounds())
    transcript = Transcript(budget, sha256=sha256)
    budget.add(transcript)
    return transcript


def exit_status(code: int | None = 0, signal: int | None = None, at_s: float = NOW_S) -> ExitStatus:
    return ExitStatus(code=code, signal=signal, at_s=at_s)


def kept_records(transcript: Transcript) -> list[Record]:
    """Read everything a new reader would be given."""
    found: list[Record] = []
    seq = 0
    while (record := transcript.record_after(seq)) is not None:
        found.append(record)
        seq = record.seq
    return found


def fill(transcript: Transcript, budget: TailBudget, cost: int) -> None:
    """Write as a pump does, until that much was written."""
    until = transcript.end_cost + cost
    while transcript.end_cost < until:
        transcript.append(0, b"x" * chunk_bytes(budget.tail_bytes))


def run_to_close(its_exec: Exec, now_s: float, *, output: bytes = b"") -> None:
    """Take an accepted exec through an uneventful life."""
    its_exec.started(100, 900, now_s, WALL_S)
    if output:
        its_exec.output(0, output, now_s)
    its_exec.exited(exit_status(at_s=now_s), by_itself=True)
    its_exec.drained(now_s, WALL_S, oom_kills=0, starts=its_exec.number)
    its_exec.emptied(now_s, WALL_S)
