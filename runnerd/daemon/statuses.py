"""How a command ended, in one shape: as its shim reports it, or as wait4 does."""

from __future__ import annotations

import os
import resource

from runnerd.core.execs import ExitStatus
from runnerd.protocol.shimwire import Exited


def told_by_shim(message: Exited) -> ExitStatus:
    """Turn a shim's `exited` into the core's status."""
    by_code = message.kind == "exit"
    return ExitStatus(
        code=message.value if by_code else None,
        signal=None if by_code else message.value,
        core_dumped=message.kind == "dump",
        at_s=message.at_ns / 1e9,
        cpu_user_s=message.utime_us / 1e6,
        cpu_system_s=message.stime_us / 1e6,
        peak_rss_bytes=message.maxrss_kib * 1024,
        minor_faults=message.minflt,
        major_faults=message.majflt,
        block_reads=message.inblock,
        block_writes=message.oublock,
    )


def told_by_wait(status: int, usage: resource.struct_rusage, now_s: float) -> ExitStatus:
    """Turn what wait4 has returned into the core's status; `now_s` is monotonic."""
    return ExitStatus(
        code=os.WEXITSTATUS(status) if os.WIFEXITED(status) else None,
        signal=os.WTERMSIG(status) if os.WIFSIGNALED(status) else None,
        core_dumped=os.WCOREDUMP(status),
        at_s=now_s,
        cpu_user_s=usage.ru_utime,
        cpu_system_s=usage.ru_stime,
        peak_rss_bytes=usage.ru_maxrss * 1024,
        minor_faults=usage.ru_minflt,
        major_faults=usage.ru_majflt,
        block_reads=usage.ru_inblock,
        block_writes=usage.ru_oublock,
    )
