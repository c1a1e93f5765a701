"""What lies over the boot environment: all or nothing, bounded, and told without values."""

import pytest

from runnerd.core.environment import Environment
from runnerd.protocol.daemon_requests import EnvSet
from runnerd.protocol.errors import RequestError

BOOT = {b"PATH": b"/bin", b"LANG": b"C", b"ODD\xff": b"\xfe"}


def made(bytes_max: int = 100) -> Environment:
    return Environment(BOOT, bytes_max)


def test_the_boot_environment_passes_through() -> None:
    assert made().variables == BOOT
    assert made().lines == (b"PATH=/bin", b"LANG=C", b"ODD\xff=\xfe")


def test_what_is_set_lies_over_it() -> None:
    its = made()
    its.change(EnvSet(set={"NEW": "", "LANG": "de"}))
    assert its.variables == {**BOOT, b"LANG": b"de", b"NEW": b""}
    assert set(its.lines) == {b"PATH=/bin", b"LANG=de", b"NEW=", b"ODD\xff=\xfe"}
    assert its.changed(to_set=True) == ["LANG", "NEW"]


def test_what_is_unset_is_gone_and_can_be_set_again() -> None:
    its = made()
    its.change(EnvSet(set={"NEW": "1"}))
    its.change(EnvSet(unset=["LANG", "NEW", "NEVER"]))
    assert its.variables == {b"PATH": b"/bin", b"ODD\xff": b"\xfe"}
    assert its.changed(to_set=True) == []
    assert its.changed(to_set=False) == ["LANG"], "of the others there is nothing to remember"
    its.change(EnvSet(set={"LANG": "C"}))
    assert its.variables == BOOT
    assert its.changed(to_set=False) == []


def test_too_much_changes_nothing() -> None:
    its = made(bytes_max=20)
    its.change(EnvSet(set={"A": "1234567"}))
    assert its.cost_bytes == 10
    before = its.variables
    with pytest.raises(RequestError) as refused:
        its.change(EnvSet(set={"B": "12345678", "A": "7654321"}))
    assert refused.value.kind == "invalid_params"
    assert "21 bytes" in refused.value.message
    assert its.variables is before
    assert its.cost_bytes == 10
    its.change(EnvSet(set={"B": "1234567"}))
    assert its.cost_bytes == 20
    assert its.variables[b"A"] == b"1234567"


def test_room_is_had_again() -> None:
    its = made(bytes_max=10)
    its.change(EnvSet(set={"A": "1234567"}))
    its.change(EnvSet(set={"B": "1234567"}, unset=["A"]))
    assert its.changed(to_set=True) == ["B"]
