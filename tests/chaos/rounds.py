"""Rounds of chaos against one daemon: `python -m tests.chaos.rounds --rounds 1000 --seed 1`.

A round starts a handful of commands through several clients, does harm to everything at random
for about half a second, undoes it, lets all come to an end, and then looks whether what the daemon
said was true and nothing is left. What a round does is told by its seed alone, so
`--seed S --only N` does the Nth again; how the machine interleaves it is not.
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import functools
import os
import select
import signal
import statistics
import time
from collections.abc import Callable, Iterator
from random import Random
from typing import Any, Final

from tests.chaos.checking import end_everything
from tests.chaos.commands import Command, command
from tests.chaos.harms import (
    DAEMON_CALLS,
    SHIM_CALLS,
    Failing,
    FewDescriptors,
    FullDisk,
    kill_for_good,
    send,
    shims_of,
)
from tests.chaos.witness import Witness, check_exit
from tests.chaos.world import World, scratch, small_disk
from tests.harness import daemons
from tests.raw import ClosedError, RawClient, RawError

LASTS_S: Final = 0.4
_END_S: Final = 30.0
_DAYS_S: Final = 86400.0
Act = Callable[[RawClient], None]


class Round:
    """One round.

    Args:
        world: The daemon.
        number: Which it is.
        again: How many this world has had: the same round again has other names.
        chance: What decides all of it.
    """

    def __init__(self, world: World, number: int, again: int, chance: Random) -> None:
        self.world = world
        self.chance = chance
        self.did: list[str] = []
        self.fired = 0
        self.strays: list[dict[str, Any]] = []
        self.commands = [
            command(chance, f"r{number}.{again}:{at}", world.folder)
            for at in range(chance.randrange(2, 7))
        ]
        self._witnesses: dict[str, Witness] = {}
        self._asked: dict[int, Command] = {}
        self._began: dict[str, dict[str, Any]] = {}
        self._refused: dict[str, RawError] = {}
        self._undo: list[Callable[[], object]] = []
        self._clients: list[int] = []
        self._is_cut = False  # our reader's connection met a fault

    # ------------------------------------------------------------------ what happens

    def run(self) -> None:
        """Do all of it; raises AssertionError where an invariant is broken."""
        began_s = time.monotonic()
        plan = self._plan()
        try:
            with RawClient(self.world.daemon.socket_path) as reader:
                for at_s, act in plan:
                    self._read_until(reader, began_s + at_s)
                    act(reader)
                self._read_until(reader, began_s + LASTS_S)
                self._stop_harming()
                self._bring_to_end(reader)
        finally:
            self._stop_harming()
        self._check()

    def _plan(self) -> list[tuple[float, Act]]:
        chance = self.chance
        acts: list[tuple[float, Act]] = [
            (chance.uniform(0, 0.15), functools.partial(self._start, each))
            for each in self.commands
        ]
        for harm in chance.choices(HARMS, k=chance.randrange(5)):
            # Often before the starts: those have most of the edges.
            at_s = chance.choice((0.0, chance.uniform(0, LASTS_S)))
            seed = chance.getrandbits(64)
            acts.append((at_s, functools.partial(self._harm, harm, Random(seed))))
        return sorted(acts, key=lambda act: act[0])

    def _harm(
        self, harm: Callable[[Round, Random, RawClient], None], chance: Random, reader: RawClient
    ) -> None:
        self.did.append(harm.__name__.strip("_"))
        harm(self, chance, reader)

    def _start(self, each: Command, reader: RawClient) -> None:
        chance = self.chance
        start = dict(each.start)
        if chance.random() < 0.8:
            window = chance.choice((None, None, 1, 100_000))
            start["attach"] = {} if window is None else {"window_bytes": window}
            self._witnesses[each.exec_id] = Witness(each)
        with self._may_be_cut():
            self._asked[reader.send("exec.start", **start)] = each
            if each.stdin:
                for at in range(0, len(each.stdin), 60_000):
                    data = each.stdin[at : at + 60_000]
                    reader.send("exec.write", exec_id=each.exec_id, offset=at, data=data, wait_s=20)
                reader.send(
                    "exec.write", exec_id=each.exec_id, offset=len(each.stdin), eof=True, wait_s=20
                )

    @contextlib.contextmanager
    def _may_be_cut(self) -> Iterator[None]:
        try:
            yield
        except (ClosedError, OSError):
            self._is_cut = True

    def _read_until(self, reader: RawClient, until_s: float) -> None:
        while (left_s := until_s - time.monotonic()) > 0 and not self._is_cut:
            ready, _, _ = select.select([reader.sock], [], [], left_s)
            if ready:
                self._take(reader)
        time.sleep(max(0.0, until_s - time.monotonic()))

    def _take(self, reader: RawClient) -> None:
        with self._may_be_cut():
            reader.take(1 << 18)
        acks: dict[int, int] = {}
        for note in reader.notes:
            params = note["params"]
            witness = self._witnesses.get(params.get("exec_id"))
            assert witness is not None, note
            witness.take(note["method"], params)
            if note["method"] == "exec.output":
                acks[params["subscription"]] = params["seq"]
        reader.notes.clear()
        with self._may_be_cut():
            for subscription, seq in acks.items():
                message = reader.encode(
                    "exec.ack", {"subscription": subscription, "seq": seq}, None
                )
                reader.sock.sendall(message)
        for asked in [*self._asked.keys() & reader.answers.keys()]:
            each, answer = self._asked.pop(asked), reader.answers.pop(asked)
            if "error" in answer:
                self._refused[each.exec_id] = RawError(answer["error"])
            else:
                self._began[each.exec_id] = answer["result"]
                each.pid = answer["result"]["pid"]
        reader.answers.clear()

    # ------------------------------------------------------------------ harms

    def all_harmed(self, harm: str) -> None:
        """Note a harm that may have met any of the commands."""
        for each in self.commands:
            each.harms.add(harm)

    def _until_end(self, undo: Callable[[], object]) -> None:
        self._undo.append(undo)

    def _fail_calls(self, pid: int, calls: dict[str, str], chance: Random, who: str) -> None:
        failing = Failing(pid, calls, chance)
        self.did[-1] += f" {who} {failing.what}"
        self.all_harmed("faults")

        def end() -> None:
            self.fired += failing.end()

        self._until_end(end)

    def fail_daemon_calls(self, chance: Random, _reader: RawClient) -> None:
        if not any("strace" in each for each in self.did):
            self._fail_calls(self.world.daemon.pid, DAEMON_CALLS, chance, "strace daemon")

    def fail_shim_calls(self, chance: Random, _reader: RawClient) -> None:
        found = shims_of(self.world.daemon.pid)
        if found and not any("strace" in each for each in self.did):
            shim, below = chance.choice(found)
            pid = chance.choice([shim, *sorted(below)])
            if pid != shim:
                self.all_harmed("own calls")  # it is, or will be, one of the commands
            with contextlib.suppress(FileNotFoundError):  # it may have left meanwhile
                self._fail_calls(pid, SHIM_CALLS, chance, "strace shim")

    def few_descriptors(self, chance: Random, _reader: RawClient) -> None:
        if not any("prlimit" in each for each in self.did):
            more = chance.choice((0, 1, 3, 6, 12))
            self.did[-1] += f" prlimit +{more}"
            self.all_harmed("few descriptors")
            self._until_end(FewDescriptors(self.world.daemon.pid, more).end)

    def full_disk(self, chance: Random, _reader: RawClient) -> None:
        self._until_end(FullDisk(self.world.disk, chance.choice((0, 0, 4096, 300_000))).end)

    def jump_clock(self, chance: Random, _reader: RawClient) -> None:
        self.world.shared.jump_clock(chance.uniform(-30, 30) * chance.choice((1, 3600, _DAYS_S)))

    def refuse_watches(self, chance: Random, _reader: RawClient) -> None:
        shared = self.world.shared
        asked = chance.choice((1, 1, 2, 4))
        shared.refuse_watches(asked)
        self.all_harmed("faults")

        def end() -> None:
            self.fired += asked - shared.watches_to_refuse
            shared.refuse_watches(0)

        self._until_end(end)

    def kill_shim(self, chance: Random, _reader: RawClient) -> None:
        found = shims_of(self.world.daemon.pid)
        if found:
            shim, _ = chance.choice(found)
            self.all_harmed("shim killed")  # whose it was may change until the signal is there
            send(shim, signal.SIGKILL)

    def stop_shim(self, chance: Random, _reader: RawClient) -> None:
        found = shims_of(self.world.daemon.pid)
        if found:
            shim, _ = chance.choice(found)
            send(shim, signal.SIGSTOP)
            self._until_end(lambda: send(shim, signal.SIGCONT))

    def signal_command(self, chance: Random, _reader: RawClient) -> None:
        known = [each for each in self.commands if each.pid is not None]
        number = chance.choice((signal.SIGSTOP, signal.SIGKILL, signal.SIGSEGV, signal.SIGTERM))
        if not known:
            return
        each = chance.choice(known)
        assert each.pid is not None
        # By its parent, so that the pid cannot be somebody else's by now.
        if not any(each.pid in below for _, below in shims_of(self.world.daemon.pid)):
            return
        if number != signal.SIGSTOP:
            each.harms.add("command signalled")
        pid = each.pid
        send(pid, number)
        if number == signal.SIGSTOP:
            self._until_end(lambda: send(pid, signal.SIGCONT))

    def stop_daemon(self, chance: Random, _reader: RawClient) -> None:
        send(self.world.daemon.pid, signal.SIGSTOP)
        time.sleep(chance.choice((0.01, 0.05, 0.2)))
        send(self.world.daemon.pid, signal.SIGCONT)

    def cancel(self, chance: Random, reader: RawClient) -> None:
        each = chance.choice(self.commands)
        each.harms.add("cancelled")
        with self._may_be_cut():
            reader.send("exec.cancel", exec_id=each.exec_id, grace_s=chance.choice((0, 0.1)))

    def add_client(self, chance: Random, _reader: RawClient) -> None:
        exec_ids = [each.exec_id for each in self.commands]
        pid = os.fork()
        if pid == 0:
            _client(self.world.daemon.socket_path, chance, exec_ids)
        self._clients.append(pid)

    def kill_client(self, chance: Random, _reader: RawClient) -> None:
        if self._clients:
            kill_for_good(self._clients.pop(chance.randrange(len(self._clients))))

    def stop_client(self, chance: Random, _reader: RawClient) -> None:
        if self._clients:
            send(chance.choice(self._clients), signal.SIGSTOP)

    # ------------------------------------------------------------------ the end

    def _stop_harming(self) -> None:
        while self._undo:
            self._undo.pop()()
        while self._clients:
            kill_for_good(self._clients.pop())

    def _bring_to_end(self, reader: RawClient) -> None:
        """End what would not end; wait for the others, and read on meanwhile."""
        control = self.world.look()
        until_s = time.monotonic() + _END_S
        while self._asked and not self._is_cut:
            assert time.monotonic() < until_s, f"no answer to {self._asked}"
            self._read_until(reader, time.monotonic() + 0.02)
        for each in self.commands:
            if each.code is None or self._is_cut:
                each.harms.add("deadline" if "deadline_s" in each.start else "cancelled")
                each.harms.add("cancelled")
                control.send(
                    "exec.cancel", exec_id=each.exec_id, grace_s=0, wait=False, tombstone=False
                )
        waits = {
            each.exec_id: control.send(
                "exec.wait", exec_id=each.exec_id, until="closed", timeout_s=_END_S
            )
            for each in self.commands
        }
        self._ends: dict[str, dict[str, Any] | RawError] = {}
        for exec_id, asked in waits.items():
            while asked not in control.answers:
                assert time.monotonic() < until_s, f"{exec_id} does not end"
                self._read_until(reader, time.monotonic() + 0.02)
                with contextlib.suppress(TimeoutError):
                    control.receive(0.0)
            try:
                self._ends[exec_id] = control.answer(asked)
            except RawError as error:
                self._ends[exec_id] = error
        for witness in self._witnesses.values():
            while (
                witness.command.exec_id in self._began and not self._is_cut and not witness.closed
            ):
                assert time.monotonic() < until_s, f"{witness.command.exec_id}: no closed was told"
                self._read_until(reader, time.monotonic() + 0.02)

    # ------------------------------------------------------------------ what must hold

    def _check(self) -> None:
        control = self.world.look()
        self.strays = self.world.log.failures()
        assert not [each for each in self.strays if each["event"] != "stray_failure"], self.strays
        if not self.fired:
            assert not self.strays, self.strays
        for each in self.commands:
            if each.exec_id in self._refused:
                self._check_refused(each, self._refused[each.exec_id])
            else:
                self._check_ended(control, each)
        end_everything(control)
        self.world.resources.check()

    def _check_refused(self, each: Command, error: RawError) -> None:
        assert error.kind in ("start_failed", "cancelled", "busy", "internal", "start_timeout"), (
            error.error
        )
        if error.kind == "internal":
            assert each.harms & {"faults", "shim killed"}, error.error
        elif error.kind != "start_timeout":
            assert not each.began, f"{each.exec_id} ran, and was refused: {error.error}"

    def _check_ended(self, control: RawClient, each: Command) -> None:
        end = self._ends[each.exec_id]
        if isinstance(end, RawError):
            # Nobody heard what became of its start, or it was cancelled before.
            assert self._is_cut, f"{each.exec_id} was started, and then: {end.error}"
            assert end.kind == "exec_unknown", end.error
            assert not each.began or each.harms & {"faults", "shim killed"}, end.error
            return
        again = Witness(each)
        discarded = self._read_again(control, each, again)
        assert again.exit == end, f"{each.exec_id}: {again.exit} is not {end}"
        witness = self._witnesses.get(each.exec_id)
        if witness is not None and not self._is_cut:
            assert witness.exit == end, f"{each.exec_id}: {witness.exit} is not {end}"
            assert witness.closed is not None, each.exec_id
        if "deadline_s" in each.start:
            each.harms.add("deadline")
        check_exit(each, end, discarded)

    def _read_again(self, control: RawClient, each: Command, again: Witness) -> int:
        control.notes.clear()
        control.call("exec.attach", exec_id=each.exec_id)
        while again.closed is None:
            while not control.notes:
                control.receive()
            for note in control.notes:
                again.take(note["method"], note["params"])
            control.notes.clear()
        return int(again.closed["discarded_bytes"])


HARMS: Final = (
    Round.fail_daemon_calls, Round.fail_daemon_calls, Round.fail_shim_calls,
    Round.few_descriptors, Round.refuse_watches, Round.full_disk, Round.jump_clock,
    Round.kill_shim, Round.stop_shim,
    Round.signal_command, Round.signal_command, Round.stop_daemon, Round.cancel,
    Round.add_client, Round.add_client, Round.kill_client, Round.stop_client,
)  # fmt: skip


def _client(path: str, chance: Random, exec_ids: list[str]) -> None:
    """Be a client in a process of its own, which reads slowly or well, until it is killed."""
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    signal.alarm(60)
    try:
        with RawClient(path) as client:
            for exec_id in exec_ids:
                params: dict[str, Any] = {"exec_id": exec_id}
                if chance.random() < 0.5:
                    params |= {"subscriber": f"s{chance.randrange(2)}", "window_bytes": 50_000}
                client.send("exec.attach", **params)
            while True:
                client.take(chance.choice((1, 1000, 1 << 18)))
                time.sleep(chance.choice((0, 0.001, 0.02)))
    finally:
        os._exit(0)


def _where(stray: dict[str, Any]) -> str:
    """Return what failed and where in the daemon it came from, in one line."""
    places = [line.strip() for line in stray["traceback"].splitlines() if "runnerd/daemon" in line]
    return f"{stray.get('task')}: {stray['error']} {places[-1:]}"


class Chaos:
    """Rounds, one after the other.

    Args:
        world: The daemon.
        seed: Of everything.
    """

    def __init__(self, world: World, seed: int) -> None:
        self.did: collections.Counter[str] = collections.Counter()
        self.strays: collections.Counter[str] = collections.Counter()
        self.fired = 0
        self.rss_bytes: list[int] = []
        self._world = world
        self._seed = seed

    def round(self, number: int) -> None:
        """Do one, which its number and the seed tell."""
        each = Round(self._world, number, len(self.rss_bytes), Random(f"{self._seed}/{number}"))
        try:
            each.run()
        except BaseException as error:
            error.add_note(f"in round {number} of seed {self._seed}, which did {each.did}")
            for said in [*each.strays, *self._world.log.failures()]:
                error.add_note(f"{said['event']}: {said.get('traceback', said)}")
            raise
        finally:
            self.did.update(word.split()[0] for word in each.did)
            self.fired += each.fired
            self.strays.update(map(_where, each.strays))
            for path in self._world.folder.glob("[0-9]"):
                path.unlink()
        self.rss_bytes.append(self._world.resources.rss())

    def rss_grown_bytes(self) -> float:
        """Return how much more the last fifth of the rounds held than the second fifth."""
        fifth = max(1, len(self.rss_bytes) // 5)
        before = statistics.median(self.rss_bytes[fifth : 2 * fifth] or self.rss_bytes)
        return statistics.median(self.rss_bytes[-fifth:]) - before


def main() -> None:
    """Do chaos by hand, for as long as one likes."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=int(time.time()))
    parser.add_argument("--only", type=int, help="this round alone, --rounds times")
    given = parser.parse_args()
    print(f"seed {given.seed}", flush=True)
    began_s = time.monotonic()
    with scratch() as folder, small_disk(folder) as disk, daemons(folder) as start:
        world = World(start, folder, disk)
        chaos = Chaos(world, given.seed)
        for number in range(given.rounds):
            chaos.round(number if given.only is None else given.only)
            if (number + 1) % 50 == 0:
                took_s = time.monotonic() - began_s
                rss = chaos.rss_bytes[-1] >> 10
                print(f"{number + 1} rounds, {took_s:.0f} s, {rss} KiB", flush=True)
        world.close()
    print(
        f"{chaos.fired} system calls failed; RSS grew by {chaos.rss_grown_bytes() / 1024:.0f} KiB"
    )
    for counted in (chaos.did, chaos.strays, world.log.events):
        for name, count in counted.most_common():
            print(f"{count:>8} {name}")


if __name__ == "__main__":
    main()
