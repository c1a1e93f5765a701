"""The command line of `runnerd`, and the same options as RUNNERD_* variables."""

from __future__ import annotations

import argparse
import fcntl
import os
import resource
import socket
from collections.abc import Collection, Mapping
from typing import Final, Literal, NoReturn

import msgspec

import runnerd
from runnerd.arguments import NumbersParser
from runnerd.core.bounds import Bounds
from runnerd.core.redaction import DEFAULT_PATTERNS

from .limit_texts import LIMIT_TEXTS
from .log import FORMS, LEVELS, Form, Level

EX_USAGE: Final = 64  # sysexits.h
EX_CONFIG: Final = 78

_NOFILE_RESERVED: Final = 128
_FDS_OF_AN_EXEC: Final = 6
_LIVE_EXECS_MIN: Final = 8
_IPV4_LOOPBACK: Final = 127  # 127.0.0.0/8, RFC 1122, 3.2.1.3
_IPV6_LOOPBACK: Final = bytes(15) + b"\1"
_PORT_MAX: Final = 65535
_REPEATED: Final = ("--allow-uid", "--audit-redact")
_PERCENT_MAX: Final = 100


class ConfigError(Exception):
    """The configuration is bad; the daemon exits 78."""


class Options(msgspec.Struct, kw_only=True):
    """What the daemon was told; paths are from where it was started, since it does not stay there.

    Attributes:
        socket: Where to listen.
        socket_mode: Permission bits of the socket.
        socket_owner, socket_group: Whom it is given to.
        allow_uids: Peers besides our own user and root.
        allow_overflow: Whether also who has no uid here: from beyond our user and pid namespaces.
        token_file, token_fd: Where the token comes from that every hello must carry.
        user: Who commands run as by default.
        cwd: Where they run by default.
        state_dir: Where to keep what outlives the daemon.
        spool: disk (where the state directory is on one), any (on tmpfs too) or off.
        ready_fd: Written `ready` and closed once the socket answers.
        oom_score: lower (as far as the kernel lets us) or keep.
        raise_oom_score: Whether commands get 900.
        cgroups: Where execs get a cgroup of their own: auto, off, or a folder.
        metrics_listen: A loopback address and port to serve metrics at, or None.
        log_level: The least level logged.
        log_format: How a line looks.
        audit: The file changes are written down in, or None.
        audit_redact: Patterns of further names whose values are not.
        shim: The shim's binary.
        bounds: The limits in force.
    """

    socket: str
    socket_mode: int
    socket_owner: str | None
    socket_group: str | None
    allow_uids: frozenset[int]
    allow_overflow: bool
    token_file: str | None
    token_fd: int | None
    user: str | None
    cwd: str
    state_dir: str | None
    spool: Literal["disk", "any", "off"]
    ready_fd: int | None
    oom_score: str
    raise_oom_score: bool
    cgroups: str
    metrics_listen: tuple[str, int] | None
    log_level: Level
    log_format: Form
    audit: str | None
    audit_redact: tuple[str, ...]
    shim: str
    bounds: Bounds


class _Parser(NumbersParser):
    serve_options: frozenset[str] = frozenset()
    reads_environment = False

    def error(self, message: str) -> NoReturn:
        if _Parser.reads_environment:
            raise ConfigError(f"in the RUNNERD_* variables: {message}")
        self.exit(EX_USAGE, f"runnerd: {message}\nhint: runnerd serve --help\n")


def parse_options(argv: list[str], environ: Mapping[str, str], shim: str) -> Options:
    """Read the command line, and RUNNERD_* where it is silent.

    Args:
        argv: Without the program's name.
        environ: The boot environment.
        shim: The shim that came with the package.

    Raises:
        SystemExit: 64 for bad usage, 0 for --help and --version.
        ConfigError: For a bad RUNNERD_* variable or a setting that cannot work.
    """
    if "RUNNERD_TOKEN" in environ:
        raise ConfigError(
            "RUNNERD_TOKEN: a token in the environment can be read by others; it is not taken"
        )
    parser = _parser(shim)
    if argv[:1] == ["serve"]:
        # In front of the command line's own options, so that those win.
        found = _from_environment(environ, parser.serve_options)
        _check_environment(parser, found)
        argv = ["serve", *found, *argv[1:]]
    given = parser.parse_args(argv)
    if given.command != "serve":
        parser.error("say what to do: runnerd serve")
    return _options(given)


def _parser(shim: str) -> _Parser:
    parser = _Parser(
        prog="runnerd",
        description="Run commands inside a sandbox, over a Unix socket.",
        epilog="Exit codes: 0 asked to stop, 64 bad usage, 70 uncaught error, 73 socket cannot "
        "be had, 78 bad configuration.",
    )
    parser.add_argument("--version", action="version", version=f"runnerd {runnerd.__version__}")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", parser_class=_Parser)
    serve = commands.add_parser(
        "serve",
        help="serve until asked to stop",
        description="Serve until asked to stop. Every option can also be given as a variable: "
        "--socket-mode is RUNNERD_SOCKET_MODE; the command line wins.",
    )
    add = serve.add_argument
    add("--socket", metavar="PATH", help="default: /run/runnerd/runnerd.sock for root, else "
        "$XDG_RUNTIME_DIR/runnerd/runnerd.sock")  # fmt: skip
    add("--socket-mode", metavar="OCTAL", default="0600", help="default: %(default)s")
    add("--socket-owner", metavar="USER", help="give the socket to this user")
    add("--socket-group", metavar="GROUP", help="give the socket to this group")
    add("--allow-uid", metavar="UID", action="append", default=[],
        help="let this user in besides our own and root; may be repeated. overflow: whoever "
        "connects from beyond our user and pid namespaces, with a token")  # fmt: skip
    add("--token-file", metavar="FILE", help="ask every client for the token in this file, which "
        "nobody else may read")  # fmt: skip
    add("--token-fd", metavar="N", type=int, help="the same, read from this descriptor to its end")
    add("--token", nargs="?", const="", help=argparse.SUPPRESS)  # only to be refused
    add("--user", metavar="USER", help="who commands run as where a start does not say")
    add("--cwd", metavar="DIR", default="/", help="where they run; default: %(default)s")
    add("--state-dir", metavar="DIR", help="what outlives the daemon; default: /var/lib/runnerd, "
        "else $XDG_STATE_HOME/runnerd, else none")  # fmt: skip
    add("--spool", choices=("disk", "any", "off"), default="disk",
        help="keep output beyond the memory tail in the state directory: where that is on a disk, "
        "on tmpfs too (that is memory), or not; default: disk")  # fmt: skip
    add("--ready-fd", metavar="N", type=int, help="write `ready` there once the socket answers")
    add("--oom-score", choices=("lower", "keep"), default="lower",
        help="our own oom_score_adj: as low as it gets, or as it is; default: lower")  # fmt: skip
    add("--command-oom-score", choices=("raise", "keep"), default="raise",
        help="raise commands' oom_score_adj to 900; keep shows what happens without")  # fmt: skip
    add("--cgroups", metavar="WHERE", default="auto",
        help="a cgroup v2 for each exec: auto (below our own, where that can be written), off, or "
        "the folder of a cgroup to make them in; default: auto")  # fmt: skip
    add("--metrics-listen", metavar="HOST:PORT",
        help="serve the metrics by HTTP at /metrics too, on a loopback address; port 0 is any free "
        "one, named in the log; default: not")  # fmt: skip
    add("--log-level", choices=LEVELS, default="info", help="default: %(default)s")
    add("--log-format", choices=FORMS, default="auto",
        help="json, text, or auto: text where stderr is a terminal; default: auto")  # fmt: skip
    add("--audit", metavar="FILE", help="write down there each change that a client asks for, one "
        "JSON line each, secrets hidden by their names")  # fmt: skip
    add("--audit-redact", metavar="PATTERN", action="append", default=[],
        help="hide what goes by these names too; may be repeated. Always hidden: "
        + " ".join(DEFAULT_PATTERNS))  # fmt: skip
    add("--shim", metavar="PATH", default=shim, help="default: the one in this package")
    limits = serve.add_argument_group("limits")
    for field in msgspec.structs.fields(Bounds):
        limits.add_argument(
            "--" + field.name.replace("_", "-"),
            metavar="N",
            type=float if field.type is float or field.type == "float" else int,
            help=f"{LIMIT_TEXTS[field.name]}; default: {_default(field)}",
        )
    parser.serve_options = frozenset(serve._option_string_actions)  # noqa: SLF001
    return parser


def check_fds(options: Options, inherited: Collection[int]) -> None:
    """See that the descriptors named on the command line are there, and are what they should be.

    Args:
        options: The options.
        inherited: Those open at the first moment: one opened since is ours, under any number.

    Raises:
        ConfigError: If one is not.
    """
    if options.token_fd in (1, 2):
        raise ConfigError(f"--token-fd: {options.token_fd} is where output goes")
    if options.token_fd is not None and options.token_fd == options.ready_fd:
        raise ConfigError(f"--ready-fd and --token-fd: both are {options.token_fd}")
    for name, fd, wrong_way in (
        ("--ready-fd", options.ready_fd, os.O_RDONLY),
        ("--token-fd", options.token_fd, os.O_WRONLY),
    ):
        if fd is None:
            continue
        if fd not in inherited:
            raise ConfigError(f"{name}: descriptor {fd} is not open here")
        if fcntl.fcntl(fd, fcntl.F_GETFL) & os.O_ACCMODE == wrong_way:
            verb = "written" if wrong_way == os.O_RDONLY else "read"
            raise ConfigError(f"{name}: descriptor {fd} cannot be {verb}")


def _default(field: msgspec.structs.FieldInfo) -> str:
    less = ", less where few open files are allowed"
    return f"{field.default}{less if field.name in ('live_execs_max', 'connections_max') else ''}"


def _from_environment(environ: Mapping[str, str], known: frozenset[str]) -> list[str]:
    """Turn RUNNERD_* into options; others of that prefix are somebody else's."""
    found: list[str] = []
    for name, value in sorted(environ.items()):
        option = "--" + name.removeprefix("RUNNERD_").lower().replace("_", "-")
        if name.startswith("RUNNERD_") and option in known and option != "--help":
            values = value.split(",") if option in _REPEATED else [value]
            found += [f"{option}={each}" for each in values]
    return found


def _check_environment(parser: _Parser, found: list[str]) -> None:
    """Blame the environment for what it alone got wrong.

    Raises:
        ConfigError: For a bad RUNNERD_* variable.
    """
    _Parser.reads_environment = True
    try:
        parser.parse_args(["serve", *found])
    finally:
        _Parser.reads_environment = False


def _options(given: argparse.Namespace) -> Options:
    try:
        mode = int(given.socket_mode, 8)
    except ValueError as error:
        raise ConfigError(f"--socket-mode: '{given.socket_mode}' is no octal number") from error
    if not 0 <= mode <= 0o777:
        raise ConfigError(f"--socket-mode: {given.socket_mode} is not between 0 and 0777")
    uids = [uid for uid in given.allow_uid if uid != "overflow"]
    if any(not (uid.isascii() and uid.isdigit()) for uid in uids):
        raise ConfigError(f"--allow-uid: {', '.join(uids)} is neither a uid nor `overflow`")
    _check_token(given, allow_overflow="overflow" in given.allow_uid)
    if not given.cwd.startswith("/"):
        raise ConfigError(f"--cwd: '{given.cwd}' is not an absolute path")
    cgroups = given.cgroups if given.cgroups in ("auto", "off") else os.path.abspath(given.cgroups)
    if given.cgroups not in ("auto", "off") and not os.path.isdir(given.cgroups):
        raise ConfigError(f"--cgroups: '{given.cgroups}' is no directory")
    if not (os.path.isfile(given.shim) and os.access(given.shim, os.X_OK)):
        raise ConfigError(f"--shim: '{given.shim}' is no program that we may execute")
    return Options(
        socket=given.socket or default_socket(),
        socket_mode=mode,
        socket_owner=given.socket_owner,
        socket_group=given.socket_group,
        allow_uids=frozenset(map(int, uids)),
        allow_overflow="overflow" in given.allow_uid,
        token_file=given.token_file,
        token_fd=given.token_fd,
        user=given.user,
        cwd=given.cwd,
        state_dir=given.state_dir and os.path.abspath(given.state_dir),
        spool=given.spool,
        ready_fd=given.ready_fd,
        oom_score=given.oom_score,
        raise_oom_score=given.command_oom_score == "raise",
        cgroups=cgroups,
        metrics_listen=_loopback(given.metrics_listen),
        log_level=given.log_level,
        log_format=given.log_format,
        audit=None if given.audit is None else os.path.abspath(given.audit),
        audit_redact=tuple(given.audit_redact),
        shim=os.path.abspath(given.shim),
        bounds=_bounds(given),
    )


def _loopback(text: str | None) -> tuple[str, int] | None:
    """Take apart an address that only this machine can reach; no name is looked up.

    Raises:
        ConfigError: If it is none.
    """
    if text is None:
        return None
    host, _, port = text.rpartition(":")
    host = "127.0.0.1" if host == "localhost" else host
    bare = host.removeprefix("[").removesuffix("]")
    try:
        if bare != host:
            is_loopback = socket.inet_pton(socket.AF_INET6, bare) == _IPV6_LOOPBACK
        else:
            is_loopback = socket.inet_pton(socket.AF_INET, host)[0] == _IPV4_LOOPBACK
    except OSError as error:
        raise ConfigError(f"--metrics-listen: '{text}' is no ADDRESS:PORT") from error
    if not is_loopback:
        raise ConfigError(f"--metrics-listen: {host} is no loopback address: others could reach it")
    if not (port.isascii() and port.isdigit() and int(port) <= _PORT_MAX):
        raise ConfigError(f"--metrics-listen: '{port}' is no port")
    return bare, int(port)


def _check_token(given: argparse.Namespace, *, allow_overflow: bool) -> None:
    if given.token is not None:
        raise ConfigError(
            "--token: a token on the command line can be read by others; it is not taken: use "
            "--token-file or --token-fd"
        )
    if given.token_file is not None and given.token_fd is not None:
        raise ConfigError("--token-file and --token-fd: give one of them")
    if allow_overflow and given.token_file is None and given.token_fd is None:
        raise ConfigError(
            "--allow-uid overflow: lets in whoever has no uid here, so it needs a token: "
            "--token-file or --token-fd"
        )


def default_socket() -> str:
    """Return where to listen where nothing was said.

    Raises:
        ConfigError: If there is no place for it.
    """
    runtime = os.environ.get("XDG_RUNTIME_DIR")
    if os.geteuid() == 0 or os.access("/run/runnerd", os.W_OK):
        return "/run/runnerd/runnerd.sock"
    if runtime:
        return f"{runtime}/runnerd/runnerd.sock"
    raise ConfigError("no place for the socket: XDG_RUNTIME_DIR is not set; say --socket PATH")


def _bounds(given: argparse.Namespace) -> Bounds:
    asked = {}
    for field in msgspec.structs.fields(Bounds):
        value = getattr(given, field.name)
        if value is None:
            continue
        if field.name == "admit_memory_percent":
            if not 0 <= value <= _PERCENT_MAX:
                raise ConfigError(f"--admit-memory-percent: {value} is not 0 to {_PERCENT_MAX}")
        elif not value > 0:
            raise ConfigError(f"--{field.name.replace('_', '-')}: {value} is not above 0")
        asked[field.name] = value
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    if hard == resource.RLIM_INFINITY:
        hard = 2**20
    fitting = {
        "live_execs_max": max(
            _LIVE_EXECS_MIN, min(1024, (hard - _NOFILE_RESERVED) // _FDS_OF_AN_EXEC)
        ),
        "connections_max": max(16, min(512, hard // 4)),
    }
    return Bounds(**(fitting | asked))
