"""One exec's processes, described one by one for people: psutil's part.

psutil is imported at the first such request: 0.9 MB that an idle daemon need not have. Everything
that is looked at often, or while a tree is ended, is read by procfs.py (DECISIONS.md has the
figures).
"""

from __future__ import annotations

from typing import Final

from runnerd.protocol.answers import ProcessInfo

from .procfs import Stat, read_stat

LISTED_MAX: Final = 200  # 70 µs each: 14 ms in which nobody else is served


def process_infos(members: list[Stat]) -> list[ProcessInfo]:
    """Describe living processes, those that are gone meanwhile left out; at most LISTED_MAX."""
    import psutil  # noqa: PLC0415 - see above

    found: list[ProcessInfo] = []
    for stat in members[:LISTED_MAX]:
        try:
            process = psutil.Process(stat.pid)
            with process.oneshot():
                times = process.cpu_times()
                info = ProcessInfo(
                    pid=stat.pid,
                    ppid=process.ppid(),
                    command=stat.command,
                    state=process.status(),
                    uid=process.uids().effective,
                    threads=process.num_threads(),
                    rss_bytes=process.memory_info().rss,
                    cpu_s=times.user + times.system,
                    started_at=process.create_time(),
                )
            again = read_stat(stat.pid)
        except (psutil.Error, OSError):
            continue
        if again is not None and again.start_ticks == stat.start_ticks:  # else its number's next
            found.append(info)
    return found
