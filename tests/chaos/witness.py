"""What a reader was told of one exec, and whether it can be true."""

from __future__ import annotations

import base64
from typing import Any, Final

from tests.chaos.commands import Command, printed

ENDING: Final = frozenset({"cancelled", "deadline", "command signalled", "shim killed", "faults"})
"""Harms after which a command may have been ended by somebody else."""
UNSEEN: Final = frozenset({"shim killed", "faults"})
"""Harms after which nobody may have seen how it ended."""


class Witness:
    """The records of one subscription, in the order they came.

    Args:
        command: What is read.
    """

    def __init__(self, command: Command) -> None:
        self.command = command
        self.exit: dict[str, Any] | None = None
        self.closed: dict[str, Any] | None = None
        self._position = {"stdout": 0, "stderr": 0}
        self._lost = {"stdout": 0, "stderr": 0}
        self._seq = 0

    def take(self, method: str, params: dict[str, Any]) -> None:
        """Take one notification; what cannot follow what came before fails here."""
        where = f"{self.command.exec_id} {method}"
        if method == "exec.output":
            assert params["seq"] == self._seq + 1, f"{where}: {params['seq']} after {self._seq}"
            assert self.exit is None, f"{where}: output after the exit"
            self._seq = params["seq"]
            self._output(where, params)
        elif method == "exec.gap":
            assert params["first_seq"] == self._seq + 1, where
            self._seq = params["last_seq"]
            for stream in self._position:
                lost = params[f"{stream}_bytes"]
                assert lost is not None, where
                self._lost[stream] += lost
                self._position[stream] += lost
                assert params[f"{stream}_offset"] == self._position[stream], (
                    where,
                    params,
                    self._position,
                )
        elif method == "exec.exited":
            assert self.exit is None, f"{where}: told twice"
            self.exit = params["exit"]
            self._check_totals(where)
        elif method == "exec.closed":
            assert self.exit is not None, f"{where}: before the exit"
            assert self.closed is None, f"{where}: told twice"
            self.closed = params["closed"]

    def _output(self, where: str, params: dict[str, Any]) -> None:
        stream = params["stream"]
        data = base64.b64decode(params["data"])
        assert params["offset"] == self._position[stream], f"{where}: bytes left out or told twice"
        if stream == "stdout" and self.command.stdout_bytes:
            assert data == printed(params["offset"], len(data)), f"{where}: other bytes"
        self._position[stream] += len(data)

    def _check_totals(self, where: str) -> None:
        assert self.exit is not None
        for stream, position in self._position.items():
            total = self.exit[stream]["total_bytes"]
            assert total == position, f"{where}: {stream} has {total} bytes, {position} were told"


def check_exit(command: Command, its_exit: dict[str, Any], discarded_bytes: int) -> None:
    """Compare an exit with what the command itself wrote down, and with what was done to it."""
    where = (
        f"{command.exec_id}: {its_exit}, harmed by {sorted(command.harms)}, wrote {command.told()}"
    )
    code, number = its_exit["code"], its_exit["signal"]
    if code is None and number is None:
        assert command.harms & UNSEEN, f"nobody saw the end of {where}"
        return
    assert (code is None) != (number is None), where
    if "own calls" in command.harms:
        return  # what it makes of a failure is its own business
    if code is not None:
        assert command.ended_with == code, f"it did not exit so: {where}"
    else:
        assert command.harms & ENDING, f"nobody ended {where}"
    if command.harms & ENDING:
        return
    assert code == command.code, where
    assert its_exit["reason"] == "exited", where
    if command.stdout_bytes is not None:
        told = its_exit["stdout"]["total_bytes"] + discarded_bytes
        assert told >= command.stdout_bytes, f"{command.stdout_bytes} bytes were written: {where}"
