"""Put the parts together and serve until the guard says that it is over."""

from __future__ import annotations

import contextlib
import gc
import os
import secrets
import socket
import sys
import threading
import time
from collections.abc import Awaitable, Callable
from pathlib import Path

import trio

from . import boot
from .access import Allowed, find_overflow_uid
from .admission import MemoryGauge
from .audit_file import AuditFile
from .cgroup import Leaves
from .guard import Guard, cause_name
from .last_words import EXECS_LISTED, LastWords, read_last_words, write_last_words
from .launcher import Launcher
from .listening import Listener
from .log import Log
from .memory import OomCounter, find_cgroup, lower_own_score, oom_order, own_score
from .options import Options
from .poller import Poller
from .pressure import PressureFile
from .procfs import children
from .reaper import Reaper
from .remembering import Memory
from .server import Server
from .service import Service
from .shims import ShimPool
from .spares import Spares
from .spool_file import open_spool
from .stopping import finish_audit, stop, stop_without_loop, watch_guard
from .tokens import Token

_RESTARTS_MAX = 3
_GARBAGE_OBJECTS = 5000  # between two looks for cycles; we make few


def run_daemon(
    options: Options,
    guard: Guard,
    listener: Listener,
    token: Token | None,
    audit_file: AuditFile | None,
) -> int:
    """Serve; returns the exit code.

    Every error that gets here takes the stop path, so this does not raise.
    """
    log = Log(options.log_level, form=options.log_format)
    service = _assemble(options, guard, listener, log, token, audit_file)
    _catch_strays(service)
    words = _Words(service)
    try:
        trio.run(_main, service, options, listener, words)
    except BaseException as error:  # noqa: BLE001 - trio itself failed: stop without it
        service.uncaught("loop", error)
        try:
            stop_without_loop(service)
        except Exception as second:  # noqa: BLE001 - nothing new begins during a stop
            service.uncaught("stop", second)
    finish_audit(service)
    words.stopped()
    service.leaves.close()
    return guard.code()


def _assemble(
    options: Options,
    guard: Guard,
    listener: Listener,
    log: Log,
    token: Token | None,
    audit_file: AuditFile | None,
) -> Service:
    environment = dict(os.environb)
    boot.close_on_exec()
    spares = Spares()
    nofile = boot.raise_nofile()
    is_subreaper = boot.take_process()
    # PID 1 gets the orphans of `docker exec` too, and who was started by a script that became us
    # has that script's children.
    all_children_ours = os.getpid() != 1 and not children(os.getpid())
    boot_score = own_score()
    lowered = options.oom_score == "lower" and lower_own_score()
    cgroup = find_cgroup()
    order = oom_order(cgroup, lowered=lowered)
    boot.hide_process()
    poller = Poller()
    incarnation = secrets.token_hex(8)
    leaves = Leaves(options.cgroups, incarnation)
    pool = ShimPool(
        options.shim,
        guard.lifeline,
        options.bounds.parked_shims,
        leaves,
        poller=poller,
        log=log,
        is_stopping=lambda: guard.cause() is not None,
    )
    memory = Memory(options.state_dir, options.bounds, time.time())
    warnings = [*order.warnings, *memory.warnings]
    if guard.kind != "native":
        warnings.append(f"the stop deadline is held by a stand-in ({guard.kind})")
    if token is not None and token.is_short:
        warnings.append("the token is short enough to be guessed; 32 random characters are not")
    if not is_subreaper:
        warnings.append("this process is no subreaper: what a killed shim leaves is not found")
    folder = None if memory.directory is None else Path(memory.directory.path)
    spool_place = open_spool(folder, options.spool, options.bounds)
    service = Service(
        bounds=options.bounds,
        spool_place=spool_place,
        log=log,
        guard=guard,
        poller=poller,
        pool=pool,
        spares=spares,
        leaves=leaves,
        incarnation=incarnation,
        launcher=Launcher(
            pool,
            spares,
            environment,
            user=options.user,
            cwd=options.cwd,
            nofile=nofile,
            env_bytes_max=options.bounds.env_bytes_max,
            raise_oom_score=options.raise_oom_score,
            boot_score=boot_score,
        ),
        reaper=Reaper(pool, log, poller, when_open=guard.hold),
        oom_counter=OomCounter(cgroup),
        oom_order=order,
        listener=listener,
        pressure=PressureFile(cgroup),
        memory_gauge=MemoryGauge(cgroup, options.bounds.admit_memory_percent),
        is_subreaper=is_subreaper,
        all_children_ours=all_children_ours,
        warnings=warnings,
        memory=memory,
        token=token,
        audit_file=audit_file,
    )
    service.registry.restore(
        memory.pasts,
        memory.starts,
        dropped=memory.dropped,
        now_s=time.monotonic(),
        wall_s=time.time(),
    )
    return service


def _catch_strays(service: Service) -> None:
    """Failures that Python would only print: they are logged, counted and survived."""

    def unraisable(hook: sys.UnraisableHookArgs) -> None:
        if isinstance(hook.exc_value, Exception):
            service.stray(hook.exc_value, "unraisable", what=repr(hook.object)[:200])

    def in_thread(hook: threading.ExceptHookArgs) -> None:
        if isinstance(hook.exc_value, Exception):
            service.stray(hook.exc_value, "thread")

    service.pool.on_stray = lambda error: service.stray(error, "shim_pool")
    sys.unraisablehook = unraisable
    threading.excepthook = in_thread


async def _main(service: Service, options: Options, listener: Listener, words: _Words) -> None:
    allowed = Allowed(options.allow_uids, options.allow_overflow, find_overflow_uid())
    server = Server(service, listener.socket, allowed)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(_core, service, "poller", service.poller.run)
        nursery.start_soon(_core, service, "reaper", service.reaper.run)
        nursery.start_soon(_core, service, "accept", lambda: server.run(nursery))
        # What is there now stays: looked through again and again it costs an exec 3 %.
        gc.freeze()
        gc.set_threshold(_GARBAGE_OBJECTS)
        service.pool.refill()
        service.expire()
        service.pulse.start(server.replace)
        if options.metrics_listen is not None:
            _serve_metrics(service, options.metrics_listen, nursery)
        service.pool.end_stale_leaves()
        _say_ready(service, options, words)
        await _core(service, "guard", lambda: watch_guard(service))
        words.stopping()
        _notify("STOPPING=1")
        await stop(service, listener)
        nursery.cancel_scope.cancel()


def _serve_metrics(service: Service, address: tuple[str, int], nursery: trio.Nursery) -> None:
    from .metrics_port import MetricsPort  # noqa: PLC0415 - only who asks for it pays for it

    try:
        service.metrics_port = MetricsPort(service, address)
    except Exception as error:  # noqa: BLE001 - stray: nobody's command needs metrics
        service.stray(error, "metrics_port")
    else:
        nursery.start_soon(service.metrics_port.run)


async def _core(service: Service, name: str, serve: Callable[[], Awaitable[None]]) -> None:
    """Run a core task. Its failure is uncaught: the stop path begins, and it serves that stop."""
    for _ in range(_RESTARTS_MAX):
        try:
            await serve()
        except Exception as error:  # noqa: BLE001 - an uncaught error has one path, and this is it
            service.uncaught(name, error)
        else:
            return
    await trio.sleep_forever()


def _say_ready(service: Service, options: Options, words: _Words) -> None:
    order = service.oom_order
    for warning in service.warnings:
        service.log.warning("boot_warning", warning=warning)
    place = service.spool.place
    service.log.info(
        "ready",
        socket=service.socket_path,
        incarnation=service.incarnation,
        version=service.version,
        pid=os.getpid(),
        uid=os.geteuid(),
        guard=service.guard.kind,
        oom_verdict=order.verdict,
        oom_score=order.own_score,
        oom_room=order.room,
        memory_limit_bytes=order.limit_bytes,
        protects_up_to_bytes=order.protects_up_to_bytes,
        cap_sys_resource=order.cap_sys_resource,
        kill_leaves=service.leaves.kill,
        memory_leaves=service.leaves.memory,
        no_leaves=service.leaves.reason,
        metrics=None if service.metrics_port is None else service.metrics_port.address,
        spool_directory=place.directory,
        spool_reason=place.reason,
    )
    words.ready()
    _notify("READY=1")
    if options.ready_fd is not None:
        with contextlib.suppress(OSError):
            os.write(options.ready_fd, b"ready\n")
            os.close(options.ready_fd)


def _notify(state: str) -> None:
    """Tell the service manager. Source: sd_notify(3)."""
    address = os.environ.get("NOTIFY_SOCKET", "")
    if not address.startswith(("/", "@")):
        return
    if address.startswith("@"):
        address = "\0" + address[1:]
    with (
        contextlib.suppress(OSError),
        socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_NONBLOCK) as sock,
    ):
        sock.sendto(state.encode(), address)


class _Words:
    """Keep last-words.json true over the daemon's life."""

    def __init__(self, service: Service) -> None:
        self._service = service
        self._folder = None if service.state_path is None else Path(service.state_path)
        self._words = LastWords(
            incarnation=service.incarnation,
            version=service.version,
            pid=os.getpid(),
            started_at=time.time(),
        )
        if self._folder is None:
            service.log.info("state_directory", reason=service.journal.reason)
        self._tell_of_before(self._folder)
        self._write()

    def _tell_of_before(self, folder: Path | None) -> None:
        before = None if folder is None else read_last_words(folder)
        if before is not None and before.stopped_at is None:
            self._service.log.warning(
                "died_before",
                incarnation=before.incarnation,
                pid=before.pid,
                ready_at=before.ready_at,
                stopping_at=before.stopping_at,
            )

    def _write(self) -> None:
        if self._folder is None:
            return
        failure = write_last_words(self._folder, self._words)
        if failure is not None:
            self._service.log.warning("last_words_failed", error=failure)
            self._service.warnings.append(failure)
            self._folder = None

    def ready(self) -> None:
        """The socket answers."""
        self._words.ready_at = time.time()
        self._write()

    def stopping(self) -> None:
        """The stop has begun."""
        self._service.spares.give_up()  # nothing comes after it, and the file needs one
        cause = self._service.guard.cause()
        live = [running.exec for running in self._service.met_by_stop()]
        self._words.stopping_at = time.time()
        self._words.cause = None if cause is None else cause_name(cause)
        self._words.code = self._service.guard.code()
        self._words.live_execs = [each.exec_id for each in live[:EXECS_LISTED]]
        self._words.live_total = len(live)
        self._write()

    def stopped(self) -> None:
        """The process is about to leave."""
        if self._words.stopping_at is None:
            self.stopping()
        self._words.stopped_at = time.time()
        self._write()
