"""A client that says exactly what a test wants, right or wrong, and keeps what it is told."""

from __future__ import annotations

import base64
import contextlib
import json
import select
import socket
import time
from typing import Any, Final, Self

import msgspec

from runnerd.protocol.framing import Encoding, FrameSplitter, frame
from tests.harness import PATIENCE

ANSWER_S: Final = 30.0 * PATIENCE


class RawError(Exception):
    """The daemon answered with an error.

    Attributes:
        error: The whole `error` object.
    """

    def __init__(self, error: dict[str, Any]) -> None:
        super().__init__(error["message"])
        self.error = error

    @property
    def kind(self) -> str:
        return str(self.error.get("data", {}).get("kind"))

    @property
    def data(self) -> dict[str, Any]:
        return dict(self.error.get("data", {}))


class ClosedError(Exception):
    """The daemon closed the connection."""


class RawClient:
    """One connection; every message is a plain dict.

    Args:
        path: The socket.
        encoding: How messages are written.
        hello: Whether to say hello at once.
    """

    def __init__(
        self, path: str, *, encoding: Encoding = Encoding.JSON, hello: bool = True
    ) -> None:
        self.sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            self.sock.connect(path)
        except OSError:
            self.sock.close()
            raise
        self.notes: list[dict[str, Any]] = []
        self.answers: dict[int | str, dict[str, Any]] = {}
        self.errors_without_id: list[dict[str, Any]] = []
        self._encoding = encoding
        self._splitter = FrameSplitter(64 * 1024 * 1024, encoding)
        self._next_id = 1
        try:
            self.hello: dict[str, Any] = self.call("hello", protocol=[1]) if hello else {}
        except BaseException:
            self.sock.close()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.sock.close()

    def encode(self, method: str, params: object, request_id: object) -> bytes:
        """Return a framed request, without checking anything."""
        message: dict[str, object] = {"jsonrpc": "2.0", "method": method, "params": params}
        if request_id is not None:
            message["id"] = request_id
        if self._encoding is Encoding.JSON:
            return frame(json.dumps(message, default=_base64).encode(), self._encoding)
        return frame(msgspec.msgpack.encode(message), self._encoding)

    def send(self, method: str, **params: object) -> int:
        """Send a request without waiting; returns its id."""
        request_id = self._next_id
        self._next_id += 1
        self.sock.sendall(self.encode(method, params, request_id))
        return request_id

    def call(self, method: str, **params: object) -> dict[str, Any]:
        """Send a request and return its result, or raise RawError."""
        return self.answer(self.send(method, **params))

    def answer(self, request_id: int | str, timeout_s: float = ANSWER_S) -> dict[str, Any]:
        """Wait for one answer; notifications meanwhile are kept in `notes`."""
        deadline_s = time.monotonic() + timeout_s
        while request_id not in self.answers:
            self.receive(deadline_s - time.monotonic())
        message = self.answers.pop(request_id)
        if "error" in message:
            raise RawError(message["error"])
        result: dict[str, Any] = message["result"]
        return result

    def receive(self, timeout_s: float = ANSWER_S) -> dict[str, Any]:
        """Wait for one message of any kind, file it and return it.

        Raises:
            ClosedError: If the daemon closed the connection.
            TimeoutError: If nothing came.
        """
        while (payload := self._splitter.next_frame()) is None:
            ready, _, _ = select.select([self.sock], [], [], max(0.0, timeout_s))
            if not ready:
                raise TimeoutError("no message of the daemon")
            self._read(1 << 18)
        return self._file(payload)

    def take(self, bytes_max: int) -> None:
        """Read once, wait for nothing more, and file the messages that are whole.

        Raises:
            ClosedError: If the daemon closed the connection.
        """
        self._read(bytes_max)
        while (payload := self._splitter.next_frame()) is not None:
            self._file(payload)

    def read_to_end(self, timeout_s: float = ANSWER_S) -> None:
        """File everything until the daemon closes the connection, which it has to."""
        deadline_s = time.monotonic() + timeout_s
        with contextlib.suppress(ClosedError):
            while True:
                self.receive(deadline_s - time.monotonic())

    def _read(self, bytes_max: int) -> None:
        try:
            data = self.sock.recv(bytes_max)
        except ConnectionResetError as error:
            raise ClosedError from error
        if not data:
            raise ClosedError
        self._splitter.feed(data)

    def _file(self, payload: bytes) -> dict[str, Any]:
        decode = json.loads if self._encoding is Encoding.JSON else msgspec.msgpack.decode
        message: dict[str, Any] = decode(payload)
        if "method" in message:
            self.notes.append(message)
        elif message.get("id") is None:
            self.errors_without_id.append(message)
        else:
            self.answers[message["id"]] = message
        return message

    def note(self, method: str, exec_id: str, timeout_s: float = ANSWER_S) -> dict[str, Any]:
        """Wait for a notification about an exec; returns its params."""
        deadline_s = time.monotonic() + timeout_s
        while True:
            for message in self.notes:
                if message["method"] == method and message["params"].get("exec_id") == exec_id:
                    params: dict[str, Any] = message["params"]
                    return params
            self.receive(deadline_s - time.monotonic())

    def output(self, exec_id: str, stream: str = "stdout") -> bytes:
        """Return the bytes of one stream received so far, in order."""
        found = (
            message["params"]
            for message in self.notes
            if message["method"] == "exec.output"
            and message["params"]["exec_id"] == exec_id
            and message["params"]["stream"] == stream
        )
        return b"".join(
            base64.b64decode(params["data"]) if self._encoding is Encoding.JSON else params["data"]
            for params in found
        )


def _base64(value: object) -> str:
    assert isinstance(value, bytes)
    return base64.b64encode(value).decode()
