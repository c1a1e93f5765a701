"""`runnerd`: put the parts together, serve, and leave with a status that tells the truth."""

from __future__ import annotations

import contextlib
import os
import select
import sys
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

import runnerd.protocol  # noqa: F401 - first of all: it has msgspec imported cheaply

from .guard import CAUSE_ERROR, Guard, set_up_guard

if TYPE_CHECKING:
    from .audit_file import AuditFile
    from .options import Options
    from .tokens import Token

EX_CANTCREAT = 73  # sysexits.h
EX_SOFTWARE = 70
_SHIM = Path(__file__).parent.parent / "_native" / "runnerd-shim"


def main() -> None:
    """Run `runnerd`; does not return."""
    # First of all, before the slow imports: from here on a TERM is an orderly stop.
    from .boot import fill_standard_fds, open_fds

    inherited = open_fds()
    try:
        fill_standard_fds()
    except OSError as error:
        from .options import EX_CONFIG

        _leave(EX_CONFIG, f"runnerd: cannot open /dev/null: {error.strerror}")
    guard = set_up_guard()
    from .options import EX_CONFIG, ConfigError, check_fds, parse_options

    try:
        options = parse_options(sys.argv[1:], os.environ, str(_SHIM))
        check_fds(options, inherited)
        token = _token(options)
        audit_file = _audit_file(options)
    except ConfigError as error:
        _leave(EX_CONFIG, f"runnerd: {error}")
    code = 0
    try:
        code = _serve(options, guard, token, audit_file)
    except SystemExit:
        raise
    except BaseException as error:  # noqa: BLE001 - the last place before the process ends
        guard.arm(EX_SOFTWARE, CAUSE_ERROR)  # first: what follows may fail or get stuck
        from .log import Log

        Log(form="auto").failure("uncaught_error", error, where="main")
        code = guard.code()
    _leave(code)


def _leave(code: int, message: str | None = None) -> NoReturn:
    # Without the interpreter's tear-down: nothing of it is needed, and it could get stuck.
    if message is not None:
        # Not a log line: whoever starts the daemon by hand reads it. It waits for no reader either.
        writable = select.select([], [2], [], 0)[1]
        with contextlib.suppress(OSError):
            os.write(2, message.encode("utf-8", "replace")[:4000] + b"\n" if writable else b"")
    os._exit(code)


def _token(options: Options) -> Token | None:
    if options.token_file is None and options.token_fd is None:
        return None
    from .tokens import read_token_fd, read_token_file

    if options.token_file is not None:
        return read_token_file(options.token_file)
    assert options.token_fd is not None
    return read_token_fd(options.token_fd)


def _audit_file(options: Options) -> AuditFile | None:
    if options.audit is None:
        return None
    from runnerd.core.redaction import Redaction

    from .audit_file import AuditFile

    return AuditFile(options.audit, Redaction(options.audit_redact))


def _serve(
    options: Options, guard: Guard, token: Token | None, audit_file: AuditFile | None
) -> int:
    from runnerd.protocol.errors import RequestError

    from .listening import Listener, SocketError
    from .options import EX_CONFIG
    from .users import find_account

    if options.user is not None:
        try:
            find_account(options.user)
        except RequestError as error:
            _leave(EX_CONFIG, f"runnerd: --user: {error}")
    try:
        listener = Listener(
            options.socket,
            mode=options.socket_mode,
            owner=options.socket_owner,
            group=options.socket_group,
        )
    except SocketError as error:
        _leave(EX_CANTCREAT, f"runnerd: {error}")
    try:
        from .run import run_daemon

        return run_daemon(options, guard, listener, token, audit_file)
    finally:
        listener.close()


if __name__ == "__main__":
    main()
