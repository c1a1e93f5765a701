"""Valid messages of every struct, made from the structs' own types.

A field added to a struct is generated without a change here. What a type cannot say (no NUL,
the soft limit below the hard one) is in SPECIAL, by the field's name.
"""

import functools
from typing import Any, TypeVar

import msgspec
from hypothesis import reject
from hypothesis import strategies as st
from msgspec import inspect as mi

from runnerd.protocol import daemon_requests, fields, requests
from runnerd.protocol.errors import KINDS, ErrorData, RequestError

T = TypeVar("T", bound=msgspec.Struct)
Values = st.SearchStrategy[Any]

INT_MIN, INT_MAX = -(2**63), 2**63 - 1

text = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0"), max_size=20)
names = text.filter(lambda name: name != "" and "=" not in name)
exec_ids = st.from_regex(r"[A-Za-z0-9_.:-]{1,128}", fullmatch=True)
label_texts = text.filter(lambda key: 0 < len(key.encode()) <= fields.LABEL_KEY_BYTES_MAX)
labels = st.dictionaries(label_texts, text, max_size=4)
streams = st.lists(st.sampled_from(["stdout", "stderr"]), min_size=1, unique=True)
limits = st.integers(0, fields.RLIM_INFINITY) | st.just("unlimited")
limit_pairs = st.tuples(limits, limits).map(
    lambda pair: tuple(sorted(pair, key=fields.rlimit_number))
)

SPECIAL: dict[tuple[type[msgspec.Struct], str], Values] = {
    (requests.ExecStart, "argv"): st.tuples(names, st.lists(text, max_size=4)).map(
        lambda parts: [parts[0], *parts[1]]
    ),
    (requests.ExecStart, "env"): st.dictionaries(names, text | st.none(), max_size=4),
    (requests.ExecStart, "cwd"): st.none() | text.map("/{}".format),
    (requests.ExecStart, "user"): st.none() | names,
    (requests.ExecStart, "labels"): labels,
    (requests.ExecStart, "rlimits"): st.dictionaries(
        st.sampled_from([*fields.RLIMITS]), limit_pairs, max_size=4
    ),
    (requests.Pty, "term"): text.filter(bool),
    (requests.Attach, "streams"): streams,
    (requests.ExecAttach, "streams"): streams,
    (requests.ExecList, "labels"): labels,
    (requests.ExecSignal, "signal"): st.integers(1, 64)
    | st.sampled_from(["TERM", "SIGKILL", "rtmin+1", "9"]),
    (daemon_requests.EnvSet, "set"): st.dictionaries(names.map("S{}".format), text, max_size=4),
    (daemon_requests.EnvSet, "unset"): st.lists(names.map("U{}".format), max_size=4),
    (daemon_requests.SandboxClaim, "owner"): text.filter(bool),
    (daemon_requests.SandboxPin, "reason"): text.filter(bool),
    (ErrorData, "kind"): st.sampled_from([*KINDS]),
}


@functools.cache
def messages(struct: type[T]) -> st.SearchStrategy[T]:
    """Make valid instances of one struct."""
    info = mi.type_info(struct)
    assert isinstance(info, mi.StructType)
    required: dict[str, Values] = {}
    optional: dict[str, Values] = {}
    for field in info.fields:
        special = SPECIAL.get((struct, field.name))
        values = _values(field.type) if special is None else special
        (required if field.required else optional)[field.name] = values

    def make(kept: dict[str, object]) -> T:
        try:
            return struct(**kept)
        except RequestError:  # fields that exclude or need each other
            reject()

    return st.fixed_dictionaries(required, optional=optional).map(make)


def _values(kind: mi.Type) -> Values:
    match kind:
        case mi.StructType(cls=cls):
            return messages(cls)
        case mi.UnionType(types=types):
            return st.one_of([_values(part) for part in types])
        case mi.ListType(item_type=item, max_length=longest):
            return st.lists(_values(item), max_size=min(longest or 3, 3))
        case mi.TupleType(item_types=items):
            return st.tuples(*[_values(item) for item in items])
        case mi.DictType(key_type=key, value_type=value):
            return st.dictionaries(_values(key), _values(value), max_size=3)
        case mi.LiteralType(values=values):
            return st.sampled_from(values)
        case _:
            return _scalars(kind)


def _scalars(kind: mi.Type) -> Values:
    match kind:
        case mi.NoneType():
            return st.none()
        case mi.BoolType():
            return st.booleans()
        case mi.IntType(ge=low, le=high):
            return st.integers(INT_MIN if low is None else low, INT_MAX if high is None else high)
        case mi.FloatType(gt=above, ge=low, le=high):
            return st.floats(
                above if low is None else low,
                high,
                exclude_min=above is not None,
                allow_nan=False,
                allow_infinity=False,
            )
        case mi.StrType(pattern=pattern, max_length=longest):
            if pattern is not None:
                return exec_ids
            return text.filter(lambda value: longest is None or len(value) <= longest)
        case mi.BytesType():
            return st.binary(max_size=64)
        case _:
            raise NotImplementedError(kind)
