"""Turn an accepted start into a job in a shim's hands."""

from __future__ import annotations

import contextlib
import errno
import os
import resource
from collections.abc import Mapping
from typing import Final, NamedTuple

from runnerd.core.environment import Environment, joined
from runnerd.protocol.errors import RequestError
from runnerd.protocol.fields import PRIVATE_PREFIX, RLIMITS, rlimit_number
from runnerd.protocol.job import Job, pack_job
from runnerd.protocol.requests import ExecStart

from .pipes import Pipes, Streams
from .shims import Shim, ShimPool
from .spares import Spares
from .terminal import PseudoTerminal
from .users import Account, find_account

_PRIVATE_NAMES: Final = frozenset({b"NOTIFY_SOCKET"})  # sd_notify(3): ours alone to talk to

_WHAT: Final = {
    ("exec", "ENOENT"): "no such program",
    ("exec", "EACCES"): "not permitted to execute",
    ("exec", "ENOEXEC"): "not a program the kernel can run (no shell is tried)",
    ("exec", "E2BIG"): "arguments or environment too long for the kernel",
    ("exec", "ELOOP"): "too many symbolic links",
    ("exec", "ENOTDIR"): "a part of the path is no directory",
    ("exec", "ENAMETOOLONG"): "name too long",
    ("exec", "ETXTBSY"): "the program is still open for writing",
    ("cwd", "ENOENT"): "no such directory",
    ("cwd", "ENOTDIR"): "not a directory",
    ("cwd", "EACCES"): "not permitted to enter",
}
_NO_DEVPTS: Final = "devpts must be mounted at /dev/pts, and /dev/ptmx be its ptmx"
# Where the kind's own hint, that something must exist, would lead astray.
_HINTS: Final = {
    ("rlimit", "EPERM"): "ask for no more than the daemon's own hard limit; only root has more",
    ("nice", "EACCES"): "only root can ask for a priority above the daemon's own",
    ("exec", "EACCES"): "the command's user must be allowed to execute it, and to reach it",
    ("exec", "ENOEXEC"): "name the interpreter in front of it, or in a first line with #!",
    ("exec", "E2BIG"): "pass less: by stdin, or in a file",
    ("cwd", "EACCES"): "the command's user must be allowed to enter it, and to reach it",
    **{("pty", name): _NO_DEVPTS for name in ("ENOENT", "ENODEV", "ENOTTY", "ENXIO", "EIO")},
    ("pty", "ENOSPC"): "as many terminals are open as the kernel allows: kernel.pty.max",
}


class Prepared(NamedTuple):
    """What is made for a command before its process.

    Attributes:
        job: For the shim, packed.
        pipes: The command's streams, both ends still open.
        rescue: Whether it may use what is held back for one.
    """

    job: bytes
    pipes: Streams
    rescue: bool


class Launcher:
    """Make everything a command needs and hand it to a shim.

    Args:
        pool: Where shims come from.
        spares: Descriptors for a rescue.
        environment: The daemon's boot environment; RUNNERD_* does not reach commands.
        user: Who commands run as where the request does not say.
        cwd: Where they run where it does not say.
        nofile: The soft and hard limit of descriptors that commands get; ours may be higher.
        env_bytes_max: The most that env.set may lay over the boot environment.
        raise_oom_score: Whether commands get a higher oom_score_adj; off only to show what
            happens without.
        boot_score: The oom_score_adj that everything here has which we did not start, or None.

    Attributes:
        environment: What commands inherit.
    """

    def __init__(
        self,
        pool: ShimPool,
        spares: Spares,
        environment: Mapping[bytes, bytes],
        *,
        user: str | None,
        cwd: str,
        nofile: tuple[int, int],
        env_bytes_max: int,
        raise_oom_score: bool = True,
        boot_score: int | None = None,
    ) -> None:
        self.cwd = cwd
        self._boot_score = boot_score
        self._pool = pool
        self._spares = spares
        self._user = user
        self._nofile = nofile[0] % 2**64, nofile[1] % 2**64  # -1 is RLIM_INFINITY
        self._raise_oom_score = raise_oom_score
        private = PRIVATE_PREFIX.encode()
        inherited = {
            name: value
            for name, value in environment.items()
            if not name.startswith(private) and name not in _PRIVATE_NAMES
        }
        self.environment = Environment(inherited, env_bytes_max)

    def telling_score(self, asked: int) -> int | None:
        """Return the oom_score_adj that tells a command's process from others here.

        None where commands are not raised, or the whole sandbox runs with as much (a BestEffort
        pod has 1000): there it tells nothing.
        """
        if not self._raise_oom_score or self._boot_score is None or asked <= self._boot_score:
            return None
        return asked

    def user_of(self, params: ExecStart) -> str | None:
        """Return who the command runs as, None where nobody was named: then as the daemon does."""
        return params.user or self._user

    def prepare(self, params: ExecStart) -> Prepared:
        """Make all that a command needs but its process.

        With `admission: skip` it is a rescue: it may use what is held back for one.

        Raises:
            RequestError: start_failed, with nothing left open.
        """
        if params.admission == "skip":
            with self._spares.lent():
                return self._prepare(params)
        return self._prepare(params)

    def _prepare(self, params: ExecStart) -> Prepared:
        user = self.user_of(params)
        account = None if user is None else find_account(user)
        job = pack_job(self._job(params, account))
        return Prepared(job, _streams(params, account), rescue=params.admission == "skip")

    def launch(self, prepared: Prepared) -> Shim:
        """Hand a job to a shim; what becomes of it, the shim says.

        Raises:
            RequestError: start_failed, with nothing left running; the pipes are the caller's.
        """
        try:
            with self._spares.lent() if prepared.rescue else contextlib.nullcontext():
                shim = self._hand_over(prepared)
        except OSError as error:
            raise spawn_failed(error) from error
        prepared.pipes.given()
        return shim

    def _hand_over(self, prepared: Prepared) -> Shim:
        rescue = prepared.rescue
        # A parked shim can be killed by a command of the same uid; the next one will do.
        for _ in range(self._pool.ready(rescue=rescue)):
            shim = self._pool.take(rescue=rescue)
            try:
                _send_job(shim, prepared)
            except (BrokenPipeError, ConnectionResetError):
                shim.close()
                shim.kill()
            except BaseException:
                shim.close()
                shim.kill()
                raise
            else:
                return shim
        shim = self._pool.take(rescue=rescue)
        try:
            _send_job(shim, prepared)
        except (BrokenPipeError, ConnectionResetError):
            # At the pids limit it finds no room for the child, says so and leaves, perhaps before
            # it is sent a job. Its words are still to be read: they fail the start, as they do
            # where it was slower.
            pass
        except BaseException:
            shim.close()
            shim.kill()
            raise
        return shim

    def _job(self, params: ExecStart, account: Account | None) -> Job:
        rlimits = {RLIMITS["nofile"]: self._nofile_now()} | {
            RLIMITS[name]: (rlimit_number(soft), rlimit_number(hard))
            for name, (soft, hard) in params.rlimits.items()
        }
        return Job(
            argv=tuple(argument.encode() for argument in params.argv),
            env=self._env(params, account),
            cwd=(params.cwd or self.cwd).encode(),
            user=None if account is None else account.switch,
            no_capabilities=account is not None and account.uid != 0,
            umask=params.umask,
            nice=params.nice,
            oom_score_adj=params.oom_score_adj if self._raise_oom_score else None,
            no_new_privs=params.no_new_privs,
            ctty=params.pty is not None,
            rlimits=tuple((number, soft, hard) for number, (soft, hard) in rlimits.items()),
        )

    def _nofile_now(self) -> tuple[int, int]:
        # Nobody asked for it, so it is no reason to fail: a command of our user may have lowered
        # our hard limit, prlimit(2), and new shims inherit that.
        hard_now = resource.getrlimit(resource.RLIMIT_NOFILE)[1] % 2**64
        soft, hard = self._nofile
        return min(soft, hard_now), min(hard, hard_now)

    def _env(self, params: ExecStart, account: Account | None) -> tuple[bytes, ...]:
        plain = not params.env and account is None and params.pty is None
        if plain and params.env_mode == "extend":
            return self.environment.lines
        changes: dict[bytes, bytes | None] = {}
        if params.env_mode == "extend" and account is not None:
            changes |= account.environment()
        if params.pty is not None:
            # The size is the terminal's to tell; of the daemon's own they would be a lie.
            changes |= {b"TERM": params.pty.term.encode(), b"COLUMNS": None, b"LINES": None}
        changes |= {
            name.encode(): None if value is None else value.encode()
            for name, value in params.env.items()
        }
        merged = (self.environment.variables if params.env_mode == "extend" else {}) | changes
        return joined(merged)


def _streams(params: ExecStart, account: Account | None) -> Streams:
    try:
        if params.pty is None:
            return Pipes(params, account)
        return PseudoTerminal(params.pty, account)
    except OSError as error:
        if params.pty is None:
            raise spawn_failed(error) from error
        number = error.errno or errno.EIO
        message = f"cannot make a terminal: {os.strerror(number).lower()}"
        raise start_failed("pty", number, message) from error


def _send_job(shim: Shim, prepared: Prepared) -> None:
    memfd = os.memfd_create("job", os.MFD_CLOEXEC)
    try:
        rest = memoryview(prepared.job)
        while rest:
            rest = rest[os.write(memfd, rest) :]
        shim.send_job([*prepared.pipes.theirs, memfd])
    finally:
        os.close(memfd)


def spawn_failed(error: OSError) -> RequestError:
    """Make the error for a start that never reached a shim: no process, pipe or memory."""
    return start_failed(
        "spawn", error.errno or errno.EIO, f"cannot start a process: {error.strerror}"
    )


def start_failed(stage: str, number: int, message: str) -> RequestError:
    """Make a start_failed error."""
    name = errno.errorcode.get(number, str(number))
    retryable = name in ("EAGAIN", "ENOMEM", "EMFILE", "ENFILE", "ETXTBSY")
    retryable = retryable or (stage, name) == ("pty", "ENOSPC")
    return RequestError(
        "start_failed",
        message,
        stage=stage,
        errno=number,
        errno_name=name,
        retryable=retryable,
        hint=_HINTS.get((stage, name)),
    )


def explain_failure(
    stage: str,
    number: int,
    params: ExecStart,
    *,
    user: str | None,
    cwd: str,
    interpreter: bool,
) -> RequestError:
    """Make the error for what a shim reported, in words that name the thing at fault.

    Args:
        stage: Where it failed, in the shim's words.
        number: The errno; the signal where the stage is `killed`.
        params: As requested.
        user: Who the command was to run as, by the request or by the daemon's own option.
        cwd: Where, likewise.
        interpreter: Whether it is the program's interpreter that is missing.
    """
    name = errno.errorcode.get(number, str(number))
    if stage == "exec" and interpreter:
        message = f"cannot execute '{params.argv[0]}': its interpreter does not exist"
        return start_failed(stage, number, message)
    subject = {
        "exec": f"cannot execute '{params.argv[0][:200]}'",
        "cwd": f"cannot enter '{cwd}'",
        "user": f"cannot become user '{user}'",
        "groups": f"cannot take the groups of '{user}'",
        "rlimit": f"cannot set {_limits_at_fault(params)}",
        "fork": "cannot make the command's process",
        "nice": f"cannot set nice {params.nice}",
        "killed": "the process was killed before it became the command",
    }.get(stage, f"cannot start the command (stage {stage})")
    if stage == "killed":
        return start_failed(stage, errno.EINTR, f"{subject}, by signal {number}")
    what = _WHAT.get((stage, name)) or os.strerror(number).lower()
    return start_failed(stage, number, f"{subject}: {what}")


def _limits_at_fault(params: ExecStart) -> str:
    """Name the limits above the daemon's own hard ones; all of them where none is."""
    hard_now = {name: resource.getrlimit(RLIMITS[name])[1] % 2**64 for name in params.rlimits}
    too_high = [
        f"{name} to {hard} (the daemon's hard limit is {hard_now[name]})"
        for name, (_, hard) in params.rlimits.items()
        if rlimit_number(hard) > hard_now[name]
    ]
    return "rlimit " + ", ".join(too_high or params.rlimits)
