"""A bound nobody uses protects nothing, and misleads whoever sets it."""

import ast
import functools
from pathlib import Path

import msgspec
import pytest

import runnerd
from runnerd.core import bounds
from runnerd.core.bounds import Bounds
from runnerd.daemon.limit_texts import LIMIT_TEXTS

PACKAGE = Path(runnerd.__file__).parent
HERE = PACKAGE / "core" / "bounds.py"
UNITS = {"KIB", "MIB"}
FIELDS = [field.name for field in msgspec.structs.fields(Bounds)]
CONSTANTS = [name for name in vars(bounds) if name.isupper() and name not in UNITS]


@functools.cache
def used_words() -> tuple[frozenset[str], frozenset[str]]:
    """Return the attributes and the plain names read anywhere but in bounds.py.

    What is told to clients there is no use: a limit that is only told is not kept.
    """
    attributes: set[str] = set()
    names: set[str] = set()
    for path in PACKAGE.rglob("*.py"):
        if path == HERE:
            continue
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Load):
                attributes.add(node.attr)
            elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load):
                names.add(node.id)
    return frozenset(attributes), frozenset(names)


@pytest.mark.parametrize("field", FIELDS)
def test_every_limit_is_kept_by_somebody(field: str) -> None:
    assert field in used_words()[0]


@pytest.mark.parametrize("name", CONSTANTS)
def test_every_constant_is_used(name: str) -> None:
    assert name in used_words()[1]


def test_every_limit_says_what_it_limits_and_what_happens_past_it() -> None:
    assert sorted(LIMIT_TEXTS) == sorted(FIELDS)
    for name, text in LIMIT_TEXTS.items():
        assert ";" in text or "and no further" in text, name


def test_an_unused_word_would_be_noticed() -> None:
    attributes, names = used_words()
    assert "frames_per_fortnight_max" not in attributes
    assert "FORTNIGHT_S" not in names
    assert len(FIELDS) > 10
    assert len(CONSTANTS) > 10


def test_limits_agree_with_each_other() -> None:
    """Not each default alone but what they promise together."""
    limits = Bounds()
    assert limits.tail_bytes_min <= limits.tail_bytes_max <= limits.transcript_total_bytes_max
    # However many are live, tails at their smallest fit the total.
    assert limits.live_execs_max * limits.tail_bytes_min <= limits.transcript_total_bytes_max
    assert limits.stdin_queue_bytes_max <= limits.stdin_total_bytes_max
    # The stop path: grace, then KILL and the last bytes, then the deadline.
    assert bounds.STOP_GRACE_S < bounds.STOP_FLUSH_S < bounds.STOP_DEADLINE_S
