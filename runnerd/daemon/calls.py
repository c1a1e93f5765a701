"""One request while it is served, and the callbacks it leaves behind."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, ParamSpec

from runnerd.protocol.codec import RequestId
from runnerd.protocol.errors import RequestError

if TYPE_CHECKING:
    from .connection import Connection
    from .service import Service

P = ParamSpec("P")


class Call:
    """One request being served.

    Attributes:
        service: The daemon's shared parts.
        connection: Where it came from and its answer goes.
    """

    __slots__ = ("_id", "connection", "method", "service")

    def __init__(
        self, service: Service, connection: Connection, request_id: RequestId | None, method: str
    ) -> None:
        self.service = service
        self.connection = connection
        self.method = method
        self._id = request_id

    def answer(self, outcome: object) -> None:
        """Send the answer or the error."""
        if isinstance(outcome, RequestError):
            self.connection.fail(self._id, outcome)
        else:
            self.connection.answer(self._id, outcome)  # type: ignore[arg-type]

    def later(self, call: Callable[P, None]) -> Callable[P, None]:
        """Make a callback for what comes later whose failure is this request's own.

        Unwrapped, one that fails would end the exec it was left with, and keep the callbacks
        behind it from being called.
        """

        def guarded(*args: P.args, **kwargs: P.kwargs) -> None:
            try:
                call(*args, **kwargs)
            except RequestError as error:
                self.answer(error)
            except Exception as error:  # noqa: BLE001 - stray: answered, counted, survived
                self.service.stray(error, "request", method=self.method)
                self.connection.fail_inside(self._id)

        return guarded
