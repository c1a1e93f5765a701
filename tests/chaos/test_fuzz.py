"""Frames and conversations at random against a real daemon; longer by hand, see fuzzing.py.

One part is for volume, from a seed that is printed; the other is hypothesis's, which looks for a
short conversation that breaks something, and shows the shortest it finds.
"""

from __future__ import annotations

import contextlib
import os
import socket
import time
from collections.abc import Iterator
from random import Random
from typing import ClassVar, Final

import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    Bundle,
    RuleBasedStateMachine,
    consumes,
    invariant,
    rule,
    run_state_machine_as_test,
)

from runnerd.protocol.errors import KINDS
from runnerd.protocol.framing import Encoding
from runnerd.protocol.requests import METHODS
from tests.chaos.checking import Log, Resources, end_everything
from tests.chaos.fuzzing import Fuzz
from tests.chaos.generating import params_of, request
from tests.harness import RunnerdProcess, daemons
from tests.raw import ClosedError, RawClient, RawError

FULL: Final = bool(os.environ.get("RUNNERD_CASES_FULL"))
FRAMES: Final = 1_000_000 if FULL else 40_000
EXAMPLES: Final = 500 if FULL else 15
STEPS: Final = 30
SEEDS: Final = st.integers(0, 2**64 - 1)


@pytest.fixture(scope="module")
def daemon(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunnerdProcess]:
    with daemons(tmp_path_factory.mktemp("fuzz")) as start:
        yield start()


def test_frames_at_random_are_answered_or_refused_and_leave_nothing(
    daemon: RunnerdProcess,
) -> None:
    """`python -m tests.chaos.fuzzing --frames N --seed S` sends the same frames again."""
    seed = int(time.time())
    print(f"seed {seed}")
    fuzz = Fuzz(daemon, seed)
    fuzz.run(FRAMES)
    fuzz.close()
    print(f"{fuzz.frames} frames: {dict(fuzz.kinds.most_common())}")
    # So that it cannot come to send nothing worth a look: commands ran, and were refused.
    assert {"result", "note exec.exited", "invalid_params", "exec_unknown"} <= fuzz.kinds.keys()
    assert fuzz.kinds.total() > FRAMES / 2


def test_every_method_is_generated_right_and_wrong() -> None:
    """One that is added to METHODS is fuzzed with no change to this folder."""
    chance = Random(1)
    for name, struct in METHODS.items():
        found = [params_of(struct)(chance) for _ in range(400)]
        assert all(isinstance(each, dict) for each in found)
        fields = {field for each in found for field in each}
        assert fields == set(struct.__struct_encode_fields__), name


class Conversations(RuleBasedStateMachine):
    """A few connections to one daemon, each with its own state."""

    daemon: ClassVar[RunnerdProcess]
    control: ClassVar[RawClient]
    log: ClassVar[Log]
    resources: ClassVar[Resources]
    runs: ClassVar[int] = 0

    clients = Bundle("clients")

    def __init__(self) -> None:
        super().__init__()
        Conversations.runs += 1
        self._names = f"h{Conversations.runs:06}-"  # of one length: chance cuts by it
        self._open: list[RawClient] = []

    @rule(target=clients, encoding=st.sampled_from(Encoding), hello=st.booleans())
    def connect(self, encoding: Encoding, hello: bool) -> RawClient:
        client = RawClient(self.daemon.socket_path, encoding=encoding, hello=False)
        self._open.append(client)
        if hello:
            client.hello = client.call("hello", protocol=[1], fence="current")
        return client

    @rule(client=clients, seed=SEEDS, spoilt=st.sampled_from((0.0, 1.0)))
    def ask(self, client: RawClient, seed: int, spoilt: float) -> None:
        self._send(client, self._request(client, Random(seed), spoilt))

    @rule(client=clients, seed=SEEDS, count=st.integers(2, 20))
    def ask_twice_by_one_id(self, client: RawClient, seed: int, count: int) -> None:
        self._send(client, self._request(client, Random(seed), 0.0) * count)

    @rule(client=clients, seed=SEEDS, cuts=st.lists(st.integers(0, 300), max_size=8))
    def ask_in_pieces(self, client: RawClient, seed: int, cuts: list[int]) -> None:
        data = self._request(client, Random(seed), 0.2)
        for cut in cuts:
            self._send(client, data[:cut])
            data = data[cut:]
        self._send(client, data)

    @rule(client=clients, noise=st.binary(max_size=200))
    def say_noise(self, client: RawClient, noise: bytes) -> None:
        self._send(client, noise)

    @rule(client=clients, size=st.sampled_from((4 << 20, (4 << 20) + 1, 5 << 20)))
    def say_much(self, client: RawClient, size: int) -> None:
        self._send(client, client.encode("ping", {"x": "y" * size}, 1))

    @rule(client=clients, depth=st.sampled_from((100, 2000, 100_000)))
    def nest_deeply(self, client: RawClient, depth: int) -> None:
        self._send(client, b'{"jsonrpc":"2.0","id":1,"params":' + b"[" * depth + b"\n")

    @rule(client=clients)
    def half_close(self, client: RawClient) -> None:
        with contextlib.suppress(OSError):
            client.sock.shutdown(socket.SHUT_WR)

    @rule(client=consumes(clients), seed=SEEDS)
    def leave_amid_a_frame(self, client: RawClient, seed: int) -> None:
        chance = Random(seed)
        data = self._request(client, chance, 0.0)
        self._send(client, data[: chance.randrange(len(data))])
        self._open.remove(client)
        client.sock.close()

    @rule(client=clients)
    def read(self, client: RawClient) -> None:
        with contextlib.suppress(ClosedError, TimeoutError, OSError):
            while not client.hello:  # its noise may have chosen the other encoding
                client.sock.settimeout(0.0)
                if not client.sock.recv(1 << 18):
                    return
            while True:
                client.receive(0.0)
        for said in (*client.errors_without_id, *client.answers.values()):
            if "error" in said:
                kind = said["error"]["data"]["kind"]
                assert kind in KINDS.keys() - {"internal"}, said
        client.errors_without_id.clear()
        client.answers.clear()

    def _request(self, client: RawClient, chance: Random, spoilt: float) -> bytes:
        return request(
            chance, client._encoding, chance.randrange(50),
            names=self._names, spoilt=spoilt, bytes_too=True,
        )  # fmt: skip

    def _send(self, client: RawClient, data: bytes) -> None:
        client.sock.settimeout(0.2)  # a peer that does not read its answers is not read either
        with contextlib.suppress(OSError):
            client.sock.sendall(data)

    @invariant()
    def it_serves_others(self) -> None:
        assert self.control.call("ping") == {}
        assert self.log.failures() == []

    def teardown(self) -> None:
        for client in self._open:
            self.read(client)
            client.sock.close()
        self.control.call("hello", protocol=[1], fence="current")
        with contextlib.suppress(RawError):
            self.control.call("daemon.undrain")
        end_everything(self.control)
        self.resources.check()


def test_no_conversation_breaks_anything(
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    with daemons(tmp_path_factory.mktemp("conversations")) as start:
        machine = Conversations
        machine.daemon = start()
        machine.control = RawClient(machine.daemon.socket_path)
        machine.log = Log(machine.daemon.log_path)
        machine.resources = Resources(machine.daemon, machine.control)
        run_state_machine_as_test(
            machine,
            settings=settings(
                max_examples=EXAMPLES,
                stateful_step_count=STEPS,
                deadline=None,
                print_blob=True,
                database=None,
                # To shrink takes as long as what is left behind is waited for, each time.
                phases=[Phase.generate, *([Phase.shrink] if FULL else [])],
                suppress_health_check=list(HealthCheck),
            ),
        )
        machine.control.sock.close()
        machine.log.close()
