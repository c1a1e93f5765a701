"""Who a command runs as: a name or number turned into ids, groups and a home."""

from __future__ import annotations

import errno
import grp
import os
import pwd
from typing import NamedTuple

from runnerd.protocol.errors import RequestError
from runnerd.protocol.job import JobUser

from .linux import CAP_SETUID, has_capability

_ID_MAX = 2**32 - 2  # 2**32 - 1 means "leave it" to setresuid(2)


class Account(NamedTuple):
    """A user as a command needs it.

    Attributes:
        switch: What the shim switches to; None where the daemon is that user already.
        home, name, shell: From the passwd file; name and shell are None for an unknown uid.
        uid, gid: Its ids.
    """

    switch: JobUser | None
    uid: int
    gid: int
    home: str
    name: str | None
    shell: str | None

    def environment(self) -> dict[bytes, bytes | None]:
        """Return HOME, USER, LOGNAME and SHELL; None removes the daemon's own."""
        name, shell = self.name, self.shell
        return {
            b"HOME": os.fsencode(self.home),
            b"USER": None if name is None else os.fsencode(name),
            b"LOGNAME": None if name is None else os.fsencode(name),
            b"SHELL": None if shell is None else os.fsencode(shell),
        }


def find_account(text: str) -> Account:
    """Resolve `name`, `uid`, `uid:gid` or `name:group`.

    Supplementary groups are those initgroups(3) would give; none where a group is named or the
    uid has no passwd entry.

    Raises:
        RequestError: start_failed at stage user or groups: no such user or group, or the daemon
            may not become it.
    """
    who, colon, group = text.partition(":")
    entry = _passwd(who)
    uid = entry.pw_uid if entry is not None else _number(who)
    if uid is None:
        raise _refused("user", errno.ENOENT, f"there is no user '{who}'")
    gid = entry.pw_gid if entry is not None else uid
    groups: tuple[int, ...] = (gid,)
    if colon:
        named = _group(group)
        if named is None:
            raise _refused("groups", errno.ENOENT, f"there is no group '{group}'")
        gid, groups = named, (named,)
    elif entry is not None:
        groups = tuple(os.getgrouplist(entry.pw_name, gid))
    switch: JobUser | None = JobUser(uid=uid, gid=gid, groups=groups)
    if not has_capability(CAP_SETUID):
        if uid != os.geteuid() or gid != os.getegid():
            raise _refused(
                "user" if uid != os.geteuid() else "groups",
                errno.EPERM,
                f"the daemon may not become '{text}'",
                "for other users runnerd runs as root, with CAP_SETUID and CAP_SETGID",
            )
        switch = None
    return Account(
        switch=switch,
        uid=uid,
        gid=gid,
        home=(entry.pw_dir or "/") if entry is not None else "/",
        name=entry.pw_name if entry is not None else None,
        shell=(entry.pw_shell or "/bin/sh") if entry is not None else None,
    )


def _number(text: str) -> int | None:
    if text.isascii() and text.isdigit() and len(text) <= 10 and int(text) <= _ID_MAX:
        return int(text)
    return None


def _passwd(who: str) -> pwd.struct_passwd | None:
    number = _number(who)
    try:
        return pwd.getpwnam(who) if number is None else pwd.getpwuid(number)
    except (KeyError, ValueError):
        return None


def _group(name: str) -> int | None:
    number = _number(name)
    if number is not None:
        return number
    try:
        return grp.getgrnam(name).gr_gid
    except (KeyError, ValueError):
        return None


def _refused(stage: str, number: int, message: str, hint: str | None = None) -> RequestError:
    return RequestError(
        "start_failed",
        message,
        stage=stage,
        errno=number,
        errno_name=errno.errorcode[number],
        hint=hint,
    )
