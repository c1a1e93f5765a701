"""The job: what one command is, as the bytes the shim's child reads from a memfd.

The layout is written down twice, here and as `struct job_header` in shim/shim_child.h, and the
two change together. A header of numbers in host order (both ends are one machine), then the
rlimits, then the supplementary groups, then cwd, argv and environment as NUL-terminated strings
with nothing after them. The child checks every length and refuses what does not add up, at stage
`job` with EINVAL.
"""

from __future__ import annotations

import struct
from typing import Final

import msgspec

JOB_MAGIC: Final = b"rjob"
JOB_VERSION: Final = 1

# The words of the job message itself; the descriptors go with it, in this order.
JOB_MESSAGE: Final = b"job"
JOB_DESCRIPTORS: Final = ("stdin", "stdout", "stderr", "memfd")

RLIM_INFINITY: Final = 2**64 - 1

_HAS_USER: Final = 1 << 0
_HAS_NICE: Final = 1 << 1
_HAS_OOM_SCORE_ADJ: Final = 1 << 2
_NO_NEW_PRIVS: Final = 1 << 3
_CONTROLLING_TERMINAL: Final = 1 << 4
_NO_CAPABILITIES: Final = 1 << 5

# magic, version, total bytes, flags, umask, nice, oom_score_adj, uid, gid, groups, rlimits,
# argc, envc, reserved
_HEADER: Final = struct.Struct("=4sIQIIiiIIIIIIQ")
_RLIMIT: Final = struct.Struct("=QQQ")


class JobUser(msgspec.Struct, frozen=True):
    """Whom a command runs as. All three are set, in the order groups, gid, uid."""

    uid: int
    gid: int
    groups: tuple[int, ...]


class Job(msgspec.Struct, frozen=True):
    """Everything the shim's child needs to become the command, but for its descriptors.

    Attributes:
        argv: The program and its arguments, without NUL. A program without a slash is looked up
            along the PATH of `env`.
        env: The whole environment, each `b"NAME=value"`.
        cwd: Entered after the user switch, so with the user's permissions.
        user: None leaves uid, gid and groups alone.
        no_capabilities: Empty every set of capabilities that a command can carry through execve,
            and fail at stage user if one is left; useless for uid 0, whom execve gives them back.
        umask: 0 to 0o777.
        nice: The absolute nice value, -20 to 19; None leaves it alone.
        oom_score_adj: Raise the score to this, unless it is higher already; None leaves it alone.
        no_new_privs: Whether setuid programs and file capabilities stop working for the command.
        ctty: Make descriptor 0 the controlling terminal of the new session.
        rlimits: (resource, soft, hard) each, RLIM_INFINITY for no limit.
    """

    argv: tuple[bytes, ...]
    env: tuple[bytes, ...]
    cwd: bytes
    user: JobUser | None
    no_capabilities: bool
    umask: int
    nice: int | None
    oom_score_adj: int | None
    no_new_privs: bool
    ctty: bool
    rlimits: tuple[tuple[int, int, int], ...]


def pack_job(job: Job) -> bytes:
    """Write a job as the bytes of its memfd.

    Args:
        job: What to run.

    Returns:
        The file's content, whole.

    Raises:
        ValueError: If argv is empty, a string contains NUL, or a number does not fit its field:
            the caller let a request through that it should have refused.
    """
    if not job.argv:
        raise ValueError("a job without argv")
    strings = (job.cwd, *job.argv, *job.env)
    text = b"\0".join(strings) + b"\0"
    if text.count(b"\0") != len(strings):
        raise ValueError("a NUL inside a string of the job")
    user = job.user or JobUser(uid=0, gid=0, groups=())
    fixed_bytes = _HEADER.size + _RLIMIT.size * len(job.rlimits) + 4 * len(user.groups)
    try:
        header = _HEADER.pack(
            JOB_MAGIC,
            JOB_VERSION,
            fixed_bytes + len(text),
            _flags(job),
            job.umask,
            job.nice or 0,
            job.oom_score_adj or 0,
            user.uid,
            user.gid,
            len(user.groups),
            len(job.rlimits),
            len(job.argv),
            len(job.env),
            0,
        )
        rlimits = b"".join(_RLIMIT.pack(*rlimit) for rlimit in job.rlimits)
        groups = struct.pack(f"={len(user.groups)}I", *user.groups)
    except struct.error as error:
        raise ValueError(f"a number of the job does not fit: {error}") from error
    return b"".join((header, rlimits, groups, text))


def _flags(job: Job) -> int:
    return (
        (_HAS_USER if job.user is not None else 0)
        | (_HAS_NICE if job.nice is not None else 0)
        | (_HAS_OOM_SCORE_ADJ if job.oom_score_adj is not None else 0)
        | (_NO_NEW_PRIVS if job.no_new_privs else 0)
        | (_CONTROLLING_TERMINAL if job.ctty else 0)
        | (_NO_CAPABILITIES if job.no_capabilities else 0)
    )
