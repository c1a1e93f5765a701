"""A seccomp filter that refuses system calls, as container engines and old kernels do."""

from __future__ import annotations

import ctypes
import platform
import struct

_PR_SET_NO_NEW_PRIVS, _PR_SET_SECCOMP, _MODE_FILTER = 38, 22, 2
_LOAD, _JUMP_IF_EQUAL, _RETURN = 0x20, 0x15, 0x06
_ALLOW, _ERRNO = 0x7FFF0000, 0x00050000

KILL = {"x86_64": 62, "aarch64": 129}[platform.machine()]
CLOSE_RANGE, PIDFD_OPEN, PIDFD_SEND_SIGNAL = 436, 434, 424
SETRESUID = {"x86_64": 117, "aarch64": 147}[platform.machine()]
CAPSET = {"x86_64": 126, "aarch64": 91}[platform.machine()]
SENDMSG = {"x86_64": 46, "aarch64": 211}[platform.machine()]
PRCTL = {"x86_64": 157, "aarch64": 167}[platform.machine()]


def refuse(errno: int, *numbers: int, first_argument: int | None = None) -> None:
    """Make system calls of this process, and all it starts, fail with an errno.

    Args:
        errno: What they say.
        numbers: The system calls.
        first_argument: Refuse only those with this first argument.
    """
    code: list[tuple[int, int, int, int]] = []
    for number in numbers:
        steps = 2 if first_argument is None else 4
        code.append((_LOAD, 0, 0, 0))  # seccomp_data.nr
        code.append((_JUMP_IF_EQUAL, 0, steps - 1, number))
        if first_argument is not None:
            code.append((_LOAD, 0, 0, 16))  # the low half of args[0]
            code.append((_JUMP_IF_EQUAL, 0, 1, first_argument))
        code.append((_RETURN, 0, 0, _ERRNO | errno))
    code.append((_RETURN, 0, 0, _ALLOW))
    text = ctypes.create_string_buffer(b"".join(struct.pack("=HBBI", *step) for step in code))
    program = struct.pack("@HP", len(code), ctypes.addressof(text))
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "PR_SET_NO_NEW_PRIVS")
    if libc.prctl(_PR_SET_SECCOMP, _MODE_FILTER, program, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "PR_SET_SECCOMP")
