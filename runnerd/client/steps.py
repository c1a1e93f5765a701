"""Requests in a row, without saying how they are waited for.

Steps are a generator: it yields what is to be asked, is sent the answer or thrown the error, and
returns what its caller gets. So what both clients do is written once, and each drives it by its own
call().
"""

from __future__ import annotations

from collections.abc import Generator
from typing import TYPE_CHECKING, NamedTuple, TypeVar, cast

import msgspec

from .errors import ClientError

if TYPE_CHECKING:
    from typing import Protocol

    from runnerd.protocol.fields import Params

    class Caller(Protocol):
        """A client that waits in its thread."""

        def call(
            self, method: str, params: Params, *, timeout_s: float | None = None
        ) -> msgspec.Struct:
            """Make one request and wait for its answer."""

    class AsyncCaller(Protocol):
        """A client that waits in its task."""

        async def call(
            self, method: str, params: Params, *, timeout_s: float | None = None
        ) -> msgspec.Struct:
            """Make one request and wait for its answer."""


T = TypeVar("T")


class Ask(NamedTuple):
    """One request, and how long to wait for its answer, in seconds; None = as long as it takes."""

    method: str
    params: Params
    timeout_s: float | None


Steps = Generator[Ask, msgspec.Struct, T]
"""Yields requests, is sent their answers, returns what they come to."""


def drive(client: Caller, steps: Steps[T]) -> T:
    """Make the requests of these steps, waiting for each."""
    try:
        ask = next(steps)
        while True:
            try:
                answer = client.call(ask.method, ask.params, timeout_s=ask.timeout_s)
            except ClientError as error:
                ask = steps.throw(error)
            else:
                ask = steps.send(answer)
    except StopIteration as done:
        return cast("T", done.value)


async def drive_async(client: AsyncCaller, steps: Steps[T]) -> T:
    """Make the requests of these steps, waiting for each."""
    try:
        ask = next(steps)
        while True:
            try:
                answer = await client.call(ask.method, ask.params, timeout_s=ask.timeout_s)
            except ClientError as error:
                ask = steps.throw(error)
            else:
                ask = steps.send(answer)
    except StopIteration as done:
        return cast("T", done.value)
