"""Signals by name and number."""

import signal

import pytest
from hypothesis import given
from hypothesis import strategies as st

from runnerd.protocol.signals import SIGNAL_MAX, signal_name, signal_number


@pytest.mark.parametrize("number", range(1, SIGNAL_MAX + 1))
def test_every_number_has_a_name_that_leads_back(number: int) -> None:
    assert signal_number(signal_name(number)) == number
    assert signal_number(number) == number
    assert signal_number(str(number)) == number


@pytest.mark.parametrize("known", [s for s in signal.Signals if not s.name.startswith("SIGRT")])
def test_every_name_is_known_with_and_without_sig_in_any_case(known: signal.Signals) -> None:
    for name in (known.name, known.name[3:], known.name.lower(), known.name[3:].title()):
        assert signal_number(name) == known


@pytest.mark.parametrize(
    ("name", "number"),
    [
        ("TERM", 15),
        ("SIGKILL", 9),
        ("iot", 6),
        ("RTMIN", signal.SIGRTMIN),
        ("SIGRTMIN+0", signal.SIGRTMIN),
        ("RTMIN+2", signal.SIGRTMIN + 2),
        ("rtmax-1", signal.SIGRTMAX - 1),
        ("RTMAX", signal.SIGRTMAX),
    ],
)
def test_examples(name: str, number: int) -> None:
    assert signal_number(name) == number


@pytest.mark.parametrize(
    "text",
    [
        *["", "SIG", "0", "65", "-1", "+9", "1.0", "9 ", " 9", "9\n", "TERM\n", "TERM\0", "NOPE"],
        *["SIGSIGTERM", "SIG_DFL", "_DFL", "RTMIN-1", "RTMAX+1", "RTMIN+31", "RTMIN+", "RTMIN+ 1"],
        *["RTMIN+100", "ALRM_", "EXIT", "0009", "9" * 5000],
        *["\u017fIGTERM", "RTMIN+\u0661", "\u0669", "\uff19"],
    ],
)
def test_what_is_no_signal_is_none(text: str) -> None:
    assert signal_number(text) is None


@pytest.mark.parametrize("number", [0, -1, -9, SIGNAL_MAX + 1, 2**31, 10**30])
def test_a_number_out_of_range_is_none(number: int) -> None:
    assert signal_number(number) is None


@given(st.text() | st.integers())
def test_anything_gives_a_number_in_range_or_none(value: str | int) -> None:
    number = signal_number(value)
    assert number is None or 1 <= number <= SIGNAL_MAX
