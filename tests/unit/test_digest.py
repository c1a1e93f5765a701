"""Two starts are the same where what runs is the same, and nothing else counts."""

import hashlib
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from runnerd.core.digest import NOT_CONTENT, Content, content_of
from runnerd.protocol.codec import Codec
from runnerd.protocol.framing import Encoding
from runnerd.protocol.requests import Attach, ExecStart

from .strategies import messages

FIELDS = [field.name for field in msgspec.structs.fields(ExecStart)]


def content(**fields: Any) -> Content:
    found = content_of(ExecStart(**({"argv": ["true"], "exec_id": "e", "nonce": "n"} | fields)))
    assert found is not None
    return found


def with_nonce(start: ExecStart) -> ExecStart:
    return msgspec.structs.replace(start, exec_id="e", nonce="n")


def test_without_a_nonce_there_is_nothing_to_recognise() -> None:
    assert content_of(ExecStart(argv=["true"], exec_id="e")) is None


def test_it_is_sha256_over_the_canonical_messagepack_of_what_is_not_at_its_default() -> None:
    """Written out by hand: a journal's digests must mean the same to the next version."""
    found = content(argv=["a", "b"], env={"Z": "1", "A": None}, umask=0)
    packed = msgspec.msgpack.encode(
        {"argv": ["a", "b"], "env": {"A": None, "Z": "1"}, "umask": 0}, order="sorted"
    )
    assert found.digest == hashlib.sha256(packed).digest()
    assert found.digest.hex() == "8d485ad51d2bc14a8650ffb7939eddf17f4f46e5774ecd8f13a0547798de2c41"


@pytest.mark.parametrize("encoding", Encoding)
def test_a_default_written_out_is_a_default(encoding: Encoding) -> None:
    """In both encodings, and with a whole number for seconds."""
    codec = Codec(encoding)
    start = {"argv": ["true"], "exec_id": "e", "nonce": "n", "grace_s": 5, "env": {}, "flow": None}
    raw = msgspec.Raw(codec._module.encode(start))
    assert content_of(codec.params(raw, ExecStart)) == content()


def test_the_order_of_keys_means_nothing() -> None:
    assert content(env={"A": "1", "B": "2"}) == content(env={"B": "2", "A": "1"})


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("exec_id", "other"),
        ("horizon", 7),
        ("attach", Attach()),
        ("attach", Attach(window_bytes=1)),
    ],
)
def test_who_asks_and_how_it_hears_is_no_content(field: str, value: object) -> None:
    assert content(**{field: value}) == content()
    assert field in NOT_CONTENT


@given(messages(ExecStart).map(with_nonce), messages(ExecStart).map(with_nonce))
def test_two_starts_have_one_digest_only_where_nothing_differs(
    first: ExecStart, second: ExecStart
) -> None:
    """And where something does, the first such field is named, in the order of exec.start."""
    differing = [
        name
        for name in FIELDS
        if name not in NOT_CONTENT and getattr(first, name) != getattr(second, name)
    ]
    one, other = content_of(first), content_of(second)
    assert one is not None
    assert other is not None
    assert (one.digest == other.digest) == (not differing)
    assert one.first_difference(other) == (differing[0] if differing else None)


@given(messages(ExecStart).map(with_nonce), st.data())
def test_one_changed_field_is_the_one_named(start: ExecStart, data: st.DataObject) -> None:
    name = data.draw(st.sampled_from([each for each in FIELDS if each not in NOT_CONTENT]))
    value = getattr(with_nonce(data.draw(messages(ExecStart))), name)
    # A terminal is one stream: the two fields cannot be drawn apart.
    if name == "pty" and value is not None:
        start = msgspec.structs.replace(start, stderr="pipe")
    elif name == "stderr" and value != "pipe":
        start = msgspec.structs.replace(start, pty=None)
    changed = msgspec.structs.replace(start, **{name: value})
    one, other = content_of(start), content_of(changed)
    assert one is not None
    assert other is not None
    same = getattr(start, name) == getattr(changed, name)
    assert one.first_difference(other) == (None if same else name)


def test_what_is_kept_of_a_start_is_small_whatever_it_holds() -> None:
    found = content(env={"BIG": "x" * 1_000_000}, argv=["x" * 100_000])
    assert len(found.digest) + len(found.fields) < 200
