"""The terminal of one command, and what is done with the daemon's side of it.

Strategy: one pseudo-terminal stands in for three pipes. The command's side is handed over like
the ends of pipes, and its shim makes it the controlling terminal before execve (shim/README.md).
Ours, the master, is held twice, once to read and once to write, so that each pump has a
descriptor of its own; closing both is the hang-up.

Three things are other than with pipes, and the pumps ask here for them:

* End of output is EIO, which says no more than that nobody has the terminal open now: it is its
  command's controlling terminal still, and /dev/tty may be opened again.
* End of input is a character, since closing the master would hang the command up.
* What waits to be read cannot be counted: FIONREAD leaves out what the kernel has not moved
  into the reader's half yet (of 15,936 bytes that a stopped reader left, it told 0).

Source: pty(7), ioctl_tty(2), termios(3); drivers/tty/pty.c and n_tty.c of Linux 6.18.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import stat
import struct
import termios
from typing import Final

from runnerd.protocol.answers import TerminalSize
from runnerd.protocol.requests import Pty

from .linux import as_filesystem_user
from .pipes import Streams
from .users import Account

_TIOCSPTLCK: Final = 0x40045431  # `termios` has names for none of these three
_TIOCGPTN: Final = 0x80045430
_TIOCGPTPEER: Final = 0x5441  # Linux 4.13
_DISABLED: Final = b"\0"  # _POSIX_VDISABLE: there is no such character
_IUTF8: Final = 0o40000  # Backspace takes away a whole character
_FLAGS: Final = os.O_RDWR | os.O_NOCTTY | os.O_CLOEXEC
_NO_PEER: Final = (errno.ENOTTY, errno.EINVAL, errno.ENOSYS, errno.EPERM)
_PTS_MAJORS: Final = range(136, 144)
_IFLAG, _LFLAG, _CC = 0, 3, 6  # of what tcgetattr returns

_BULK_BYTES: Final = 1024

HOLDS_BYTES_MAX: Final = 64 * 1024
# More than a terminal can hold unread: 15,936 bytes (measured; 4,095 in the reader's half, the
# rest on its way there). So reading this much at the exit reads all that was written before it.


class PseudoTerminal(Streams):
    """A command's terminal.

    Args:
        pty: Its size.
        account: The user who has to be able to open it by name.

    Raises:
        OSError: If there is none to be had; nothing is left open then.
    """

    is_terminal = True

    def __init__(self, pty: Pty, account: Account | None) -> None:
        super().__init__()
        master, slave = _open(account)
        self._given.append(slave)
        self.theirs = [slave, slave, slave]
        self.output[0] = master
        self._last_written = b""
        try:
            self.stdin = fcntl.fcntl(master, fcntl.F_DUPFD_CLOEXEC, 0)
            attributes = termios.tcgetattr(slave)
            attributes[_IFLAG] |= _IUTF8
            termios.tcsetattr(slave, termios.TCSANOW, attributes)
            self.resize(pty.rows, pty.cols)
        except (OSError, termios.error) as error:
            self.close()
            if isinstance(error, termios.error):  # which is no OSError, though it carries one's
                raise OSError(*error.args) from error
            raise

    def read(self, fd: int, size: int) -> bytes:
        """Read what is there; the kernel gives 4 KiB at a time, records may be larger."""
        data = b""
        while len(data) < size:
            try:
                more = os.read(fd, size - len(data))
            except OSError as error:
                if data or error.errno == errno.EIO:
                    break
                raise
            data += more
            if len(more) < _BULK_BYTES:  # most likely all: a key's echo is not asked for twice
                break
        return data

    def waiting_bytes(self, _fd: int) -> int:
        """Return the most that can be there."""
        return HOLDS_BYTES_MAX

    def write(self, fd: int, data: bytes | bytearray) -> int:
        """Write as much as it takes now."""
        size = os.write(fd, data)
        if size:
            self._last_written = bytes(data[size - 1 : size])
        return size

    def end_mark(self) -> bytes:
        """Return what ends the command's input: the terminal's end-of-file character, as it is now.

        Within a line that character only hands the line over, so there it is given twice. In raw
        mode it is a key like any other, which programs that read keys take for Ctrl-D. Nothing
        where the terminal has no such character.
        """
        if self.stdin is None:
            return b""
        try:
            attributes = termios.tcgetattr(self.stdin)
        except termios.error:
            return b""
        keys = attributes[_CC]
        mark: bytes = keys[termios.VEOF]
        if mark == _DISABLED:
            return b""
        ends_line = {b"", b"\n", mark, keys[termios.VEOL], keys[termios.VEOL2]} - {_DISABLED}
        if attributes[_IFLAG] & termios.ICRNL:
            ends_line.add(b"\r")
        within = attributes[_LFLAG] & termios.ICANON and self._last_written not in ends_line
        return mark * 2 if within else mark

    def link(self, fd: int) -> str:
        """Return what /proc/PID/fd shows of the command's side."""
        return _name(fd)

    def resize(self, rows: int, cols: int) -> bool:
        """Set the size; the kernel tells the foreground group, if it is another one.

        Returns:
            False where it has been hung up.
        """
        master = self.output[0]
        if master is None:
            return False
        fcntl.ioctl(master, termios.TIOCSWINSZ, struct.pack("HHHH", rows, cols, 0, 0))
        return True

    def size(self) -> TerminalSize | None:
        """Return the size as it is now, whoever set it; None where it has been hung up."""
        master = self.output[0]
        if master is None:
            return None
        rows, cols, _, _ = struct.unpack("HHHH", fcntl.ioctl(master, termios.TIOCGWINSZ, b"\0" * 8))
        return TerminalSize(rows=rows, cols=cols)


def _open(account: Account | None) -> tuple[int, int]:
    """Open a new terminal: its master, which does not block, and its slave, owned by the user."""
    ends = _open_ends()
    if account is None or account.switch is None:
        return ends
    try:
        os.fchown(ends[1], account.uid, -1)
    except OSError:
        # Without CAP_CHOWN. The kernel gives a new terminal to whoever opens it; with CAP_SETUID,
        # which the switch of the user needs anyway, that can be the user. Where it cannot, the
        # command has its terminal all the same, and /dev/tty, but no other name for it.
        with contextlib.suppress(OSError), as_filesystem_user(account.uid):
            theirs = _open_ends()
            for fd in ends:
                os.close(fd)
            ends = theirs
    return ends


def _open_ends() -> tuple[int, int]:
    master = os.open("/dev/ptmx", _FLAGS | os.O_NONBLOCK)
    try:
        fcntl.ioctl(master, _TIOCSPTLCK, struct.pack("i", 0))
        return master, _open_slave(master)
    except BaseException:
        os.close(master)
        raise


def _open_slave(master: int) -> int:
    try:
        # By the master, not by a name that another mount of devpts may have given away.
        return fcntl.ioctl(master, _TIOCGPTPEER, _FLAGS)
    except OSError as error:
        if error.errno not in _NO_PEER:
            raise
    slave = os.open(_name(master), _FLAGS | os.O_NOFOLLOW)
    device = os.fstat(slave)
    if not stat.S_ISCHR(device.st_mode) or os.major(device.st_rdev) not in _PTS_MAJORS:
        os.close(slave)
        raise OSError(errno.ENODEV, os.strerror(errno.ENODEV))
    return slave


def _name(master: int) -> str:
    (number,) = struct.unpack("i", fcntl.ioctl(master, _TIOCGPTN, b"\0" * 4))
    return f"/dev/pts/{number}"
