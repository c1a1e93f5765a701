"""The job's bytes: what goes in can be read back by the layout the shim's source writes down."""

from __future__ import annotations

import re
import struct
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from runnerd.protocol.job import JOB_VERSION, Job, JobUser, pack_job

SOURCE = Path(__file__).resolve().parents[2] / "shim" / "shim_child.h"
HEADER = struct.Struct("=4sIQIIiiIIIIIIQ")

U32 = st.integers(0, 2**32 - 1)
TEXT = st.binary(max_size=30).map(lambda text: text.replace(b"\0", b"x"))
USERS = st.builds(JobUser, uid=U32, gid=U32, groups=st.lists(U32, max_size=5).map(tuple))
JOBS = st.builds(
    Job,
    argv=st.lists(TEXT, min_size=1, max_size=5).map(tuple),
    env=st.lists(TEXT, max_size=5).map(tuple),
    cwd=TEXT,
    user=st.none() | USERS,
    umask=st.integers(0, 0o777),
    nice=st.none() | st.integers(-20, 19),
    oom_score_adj=st.none() | st.integers(-1000, 1000),
    no_new_privs=st.booleans(),
    no_capabilities=st.booleans(),
    ctty=st.booleans(),
    rlimits=st.lists(
        st.tuples(st.integers(0, 15), *[st.integers(0, 2**64 - 1)] * 2), max_size=3
    ).map(tuple),
)


def unpack(content: bytes) -> Job:
    """The layout, read as the shim's child reads it."""
    (
        magic,
        version,
        total,
        flags,
        umask,
        nice,
        score,
        uid,
        gid,
        groups,
        rlimits,
        argc,
        envc,
        spare,
    ) = HEADER.unpack_from(content)
    assert (magic, version, total, spare) == (b"rjob", JOB_VERSION, len(content), 0)
    at = HEADER.size
    limits = tuple(struct.iter_unpack("=QQQ", content[at : at + 24 * rlimits]))
    at += 24 * rlimits
    members = struct.unpack_from(f"={groups}I", content, at)
    at += 4 * groups
    strings = content[at:].split(b"\0")
    assert strings.pop() == b""
    assert len(strings) == 1 + argc + envc
    return Job(
        argv=tuple(strings[1 : 1 + argc]),
        env=tuple(strings[1 + argc :]),
        cwd=strings[0],
        user=JobUser(uid=uid, gid=gid, groups=members) if flags & 1 else None,
        umask=umask,
        nice=nice if flags & 2 else None,
        oom_score_adj=score if flags & 4 else None,
        no_new_privs=bool(flags & 8),
        ctty=bool(flags & 16),
        rlimits=limits,
        no_capabilities=bool(flags & 32),
    )


@given(JOBS)
def test_a_job_can_be_read_back(job: Job) -> None:
    assert unpack(pack_job(job)) == job


def good(**changes: object) -> Job:
    fields: dict[str, object] = {
        "argv": (b"true",),
        "env": (),
        "cwd": b"/",
        "user": None,
        "umask": 0o22,
        "nice": None,
        "oom_score_adj": None,
        "no_new_privs": False,
        "no_capabilities": False,
        "ctty": False,
        "rlimits": (),
    }
    return Job(**{**fields, **changes})  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "changes",
    [
        {"argv": ()},
        {"argv": (b"a\0b",)},
        {"env": (b"A=\0",)},
        {"cwd": b"/\0"},
        {"umask": -1},
        {"umask": 2**32},
        {"nice": 2**31},
        {"user": JobUser(uid=-1, gid=0, groups=())},
        {"user": JobUser(uid=0, gid=0, groups=(2**32,))},
        {"rlimits": ((0, -1, 0),)},
        {"rlimits": ((0, 1),)},
    ],
)
def test_what_cannot_be_written_is_refused(changes: dict[str, object]) -> None:
    with pytest.raises(ValueError):
        pack_job(good(**changes))


def test_the_shims_source_has_the_same_version_and_flags() -> None:
    text = SOURCE.read_text(encoding="utf-8")
    assert re.findall(r"JOB_VERSION = (\d+)", text) == [str(JOB_VERSION)]
    flags = dict(re.findall(r"([A-Z_]+) = 1 << (\d)", text))
    assert flags == {
        "HAS_USER": "0",
        "HAS_NICE": "1",
        "HAS_OOM_SCORE_ADJ": "2",
        "NO_NEW_PRIVS": "3",
        "CONTROLLING_TERMINAL": "4",
        "NO_CAPABILITIES": "5",
    }
