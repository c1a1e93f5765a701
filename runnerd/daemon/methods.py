"""What each method does: one function a method, called in the order the requests came.

None of them waits. Those whose answer comes later (start, wait, cancel, write, signal) leave a
callback behind, so no request needs a task, a thread or a process of its own.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Final

import runnerd.protocol.refusal  # noqa: F401 - now: when it is needed no descriptor may be left
from runnerd.core.activity import WORK
from runnerd.core.fence import changes
from runnerd.core.past import Past
from runnerd.core.remembered import no_output, over
from runnerd.protocol.answers import (
    AttachAnswer,
    Empty,
    EnvAnswer,
    ExecInfo,
    ListAnswer,
    SignalAnswer,
    StartAnswer,
    TerminalSize,
    WriteAnswer,
)
from runnerd.protocol.codec import Codec, Request
from runnerd.protocol.daemon_answers import HelloAnswer
from runnerd.protocol.daemon_requests import DaemonMetrics, EnvSet, Hello
from runnerd.protocol.errors import RequestError
from runnerd.protocol.fields import NoParams, Params
from runnerd.protocol.requests import (
    METHODS,
    PROTOCOL_VERSIONS,
    Attach,
    ExecAck,
    ExecAttach,
    ExecDetach,
    ExecForget,
    ExecInspect,
    ExecList,
    ExecResize,
    ExecSignal,
    ExecStart,
    ExecWrite,
)

from .attaching import subscribe
from .calls import Call
from .ends import cancel, wait
from .health import health
from .inspecting import daemon_info, exec_info, past_info, start_answer
from .metrics import exposition
from .running import Running
from .sandbox import activity, claim, drain, pin, stop, undrain

if TYPE_CHECKING:
    from .connection import Connection
    from .service import Service

_PAGE_CHARS: Final = 512 * 1024
# Of argv and labels in one page of exec.list. JSON writes a character as 6 bytes at most, so with
# 1,000 execs' other fields a page stays under a client's frame and our own outgoing limit.


def dispatch(service: Service, connection: Connection, codec: Codec, request: Request) -> None:
    """Serve one request.

    Raises:
        RequestError: What its answer says; nothing was changed.
    """
    kind = METHODS.get(request.method)
    if not connection.is_open and request.method != "hello" and (kind or service.token):
        raise RequestError("hello_required", f"send hello before {request.method[:64]}")
    if kind is None:
        raise RequestError("method_unknown", f"there is no method '{request.method[:64]}'")
    try:
        params = codec.params(request.params, kind)
    except RequestError:
        if changes(request.method):
            connection.audit(request, None)
        raise
    if request.id is None and request.method != "exec.ack":
        raise RequestError("invalid_request", "only exec.ack may be sent without an id")
    call = Call(service, connection, request.id, request.method)
    if _changes(call, params):
        connection.audit(request, params)
        service.fencing.fence.check(connection.fence)
    elif isinstance(params, Hello) and params.fence is not None:
        connection.audit(request, params)  # it may take the sandbox from whoever has it
    _serve(call, params)
    if request.method in WORK:
        service.activity.worked(time.monotonic())


def _changes(call: Call, params: Params) -> bool:
    return changes(call.method, getattr(params, "subscriber", None))


def _serve(call: Call, params: Params) -> None:
    handler = functools.partial(HANDLERS[call.method], call, params)
    exec_id = getattr(params, "exec_id", None)
    if exec_id is not None and call.method not in ("exec.start", "exec.cancel"):
        running = call.service.running.get(exec_id)
        # In order: one that names an exec still starting waits for it. A cancel does not.
        if running is not None and running.when_started(
            call.later(functools.partial(_serve_late, call, params, handler))
        ):
            return
    handler()


def _serve_late(call: Call, params: Params, handler: Callable[[], None]) -> None:
    if _changes(call, params):  # the sandbox may have a new owner by now
        call.service.fencing.fence.check(call.connection.fence)
    handler()


def _check_token(call: Call, params: Hello) -> None:
    """Gate 3, before a hello tells anything or has any effect.

    Raises:
        RequestError: unauthorized.
    """
    service, connection = call.service, call.connection
    if service.token is None or service.token.matches(params.token):
        return
    what = "missing" if params.token is None else "wrong"
    service.counters.tokens_refused[what] += 1
    service.log.warning(
        "token_refused",
        connection=connection.number,
        what=what,
        pid=connection.peer.pid,
        uid=connection.peer.uid,
        total=service.counters.tokens_refused.total(),
    )
    connection.count_wrong_token()
    raise RequestError(
        "unauthorized",
        "this daemon asks for a token"
        if params.token is None
        else "the token is not this daemon's",
        hint="say hello with the token that the daemon was given, see runnerctl --token-file",
    )


def _hello(call: Call, params: Hello) -> None:
    _check_token(call, params)
    service = call.service
    spoken = [version for version in params.protocol if version in PROTOCOL_VERSIONS]
    if not spoken:
        raise RequestError(
            "protocol_unsupported",
            f"none of {params.protocol[:8]} is spoken here",
            supported=list(PROTOCOL_VERSIONS),
        )
    if params.incarnation not in (None, service.incarnation):
        raise RequestError(
            "incarnation_changed",
            f"this is incarnation {service.incarnation}, not {params.incarnation}",
        )
    connection = call.connection
    connection.is_open = True
    connection.client = params.client
    connection.hold()  # what comes behind the hello of a new owner waits until that is durable

    @call.later
    def durable(is_durable: bool) -> None:  # noqa: FBT001 - an answer, not a mode
        connection.release()
        call.answer(
            HelloAnswer(
                protocol=spoken[0],
                incarnation=service.incarnation,
                version=service.version,
                features=service.features,
                limits=service.limits,
                starts=service.registry.starts,
                fence=service.fencing.fence.highest,
                journal=is_durable,
                claim=service.claiming.ownership.claim,
                claim_durable=service.claiming.is_durable,
            )
        )

    try:
        connection.fence = service.fencing.take(params.fence, durable)
    except BaseException:
        connection.release()
        raise


def _ping(call: Call, _params: NoParams) -> None:
    call.answer(Empty())


def _start(call: Call, params: ExecStart) -> None:
    connection = call.connection
    has_room = False

    def admit() -> None:
        # Before anything runs: a started command whose attach is refused would be a lie.
        nonlocal has_room
        if params.attach is not None:
            connection.reserve_subscription()
            has_room = True

    def use_room() -> None:
        nonlocal has_room
        if has_room:
            has_room = False
            connection.unreserve_subscription()

    @call.later
    def started(outcome: Running | Past | RequestError, *, created: bool) -> None:
        use_room()
        if isinstance(outcome, RequestError):
            call.answer(outcome)
        elif isinstance(outcome, Past):
            call.answer(start_answer(outcome))
        else:
            call.answer(_start_answer(call, outcome, params.attach, created=created))

    try:
        call.service.start(params, started, admit)
    except BaseException:
        use_room()
        raise


def _start_answer(
    call: Call, running: Running, attach: Attach | None, *, created: bool
) -> StartAnswer:
    its_exec = running.exec
    subscription = None
    if attach is not None and not call.connection.is_gone and not its_exec.is_evicted:
        try:
            subscription = subscribe(call.connection, running, attach)
        except RequestError as error:
            # What is known of a start is told again, whether or not there is room to read it.
            if created or error.kind != "busy":
                raise
    assert its_exec.pid is not None
    return StartAnswer(
        exec_id=its_exec.exec_id,
        pid=its_exec.pid,
        created=created,
        starts=its_exec.number,
        oom_score_adj=its_exec.oom_score_adj,
        journaled=its_exec.journaled,
        subscription=None if subscription is None else subscription.number,
    )


def _attach(call: Call, params: ExecAttach) -> None:
    if call.connection.is_gone:
        return  # it waited for the start, and its connection did not: nobody would ever end it
    running = call.service.known(params.exec_id, no_output)
    its_exec = running.exec
    subscription = subscribe(call.connection, running, params, params.after, params.tail_bytes)
    call.answer(
        AttachAnswer(
            subscription=subscription.number,
            state=its_exec.state.shown,  # type: ignore[arg-type]
            pid=its_exec.pid if its_exec.status is None else None,
            first_seq=its_exec.transcript.first_seq,
            last_seq=its_exec.transcript.last_seq,
            after=subscription.cursor_seq,  # nothing was sent yet
        )
    )


def _detach(call: Call, params: ExecDetach) -> None:
    call.connection.unsubscribe(params.subscription)
    call.answer(Empty())


def _ack(call: Call, params: ExecAck) -> None:
    if call.connection.was_open(params.subscription):
        call.answer(Empty())  # it crossed with `closed`, which nobody can prevent
        return
    subscription, running = call.connection.subscription(params.subscription)
    subscription.ack(params.seq)
    running.readers.advanced()
    call.connection.wake(subscription)
    call.answer(Empty())


def _write(call: Call, params: ExecWrite) -> None:
    running = call.service.known(params.exec_id, over)

    @call.later
    def reply(outcome: WriteAnswer | RequestError) -> None:
        call.answer(outcome)

    running.streams.write(params, reply, writer=call.connection)


def _signal(call: Call, params: ExecSignal) -> None:
    running = call.service.known(params.exec_id, over)
    if not running.exec.is_live or (params.to == "command" and running.exec.status is not None):
        raise RequestError(
            "exec_ended", f"exec '{params.exec_id}' has ended; nothing was signalled"
        )

    @call.later
    def reply(outcome: int | RequestError) -> None:
        call.answer(
            outcome if isinstance(outcome, RequestError) else SignalAnswer(signalled=outcome)
        )

    running.tree.signal(params.number, params.to, reply)


def _resize(call: Call, params: ExecResize) -> None:
    running = call.service.known(params.exec_id, over)
    running.streams.resize(TerminalSize(rows=params.rows, cols=params.cols))
    call.answer(Empty())


def _inspect(call: Call, params: ExecInspect) -> None:
    found = call.service.found(params.exec_id)
    if isinstance(found, Past):
        call.answer(past_info(found))
        return
    call.answer(exec_info(call.service, found, usage=params.usage, tree=params.tree, holders=True))


def _list(call: Call, params: ExecList) -> None:
    service = call.service
    execs, cursor = service.registry.page(
        params.cursor,
        params.limit,
        states=None if params.state is None else frozenset(params.state),
        labels=params.labels,
    )
    infos: list[ExecInfo] = []
    size = 0
    for each in execs:
        if isinstance(each, Past):
            info = past_info(each)
        else:
            info = exec_info(service, service.running[each.exec_id], usage=params.usage)
        size += _text_chars(info)
        if infos and size > _PAGE_CHARS:
            cursor = infos[-1].accepted
            break
        infos.append(info)
    call.answer(ListAnswer(execs=infos, next_cursor=cursor))


def _text_chars(info: ExecInfo) -> int:
    return sum(map(len, (*(info.argv or ()), *info.labels, *info.labels.values())))


def _forget(call: Call, params: ExecForget) -> None:
    call.service.forget(params.exec_id)
    call.answer(Empty())


def _env_set(call: Call, params: EnvSet) -> None:
    environment = call.service.launcher.environment
    environment.change(params)
    call.answer(
        EnvAnswer(
            set_total=len(environment.changed(to_set=True)),
            unset_total=len(environment.changed(to_set=False)),
            used_bytes=environment.cost_bytes,
        )
    )


def _events(call: Call, _params: NoParams) -> None:
    reader = call.connection.subscribe_events()
    call.answer(call.service.events.answer(reader, call.service.registry.state))


def _info(call: Call, _params: NoParams) -> None:
    call.answer(daemon_info(call.service))


def _health(call: Call, _params: NoParams) -> None:
    call.answer(health(call.service))


def _metrics(call: Call, params: DaemonMetrics) -> None:
    try:
        made = exposition(call.service, params.format)
    except OSError as error:  # its library is read at the first time, and there is no descriptor
        raise RequestError(
            "busy", f"the metrics cannot be made now: {error.strerror}", retry_after_s=1.0
        ) from error
    call.answer(made)


# Each takes its own kind of Params, as METHODS pairs them; no type can say so for a mapping.
HANDLERS: Final[dict[str, Callable[[Call, Any], None]]] = {
    "hello": _hello,
    "ping": _ping,
    "exec.start": _start,
    "exec.attach": _attach,
    "exec.detach": _detach,
    "exec.ack": _ack,
    "exec.write": _write,
    "exec.signal": _signal,
    "exec.resize": _resize,
    "exec.cancel": cancel,
    "exec.wait": wait,
    "exec.inspect": _inspect,
    "exec.list": _list,
    "exec.forget": _forget,
    "env.set": _env_set,
    "sandbox.claim": claim,
    "sandbox.pin": pin,
    "sandbox.activity": activity,
    "events.subscribe": _events,
    "daemon.info": _info,
    "daemon.health": _health,
    "daemon.metrics": _metrics,
    "daemon.drain": drain,
    "daemon.undrain": undrain,
    "daemon.stop": stop,
}
