"""The keys that leave a command's terminal while the command goes on.

Notation, as docker has it: keys parted by commas, each one character or ctrl- and a letter or one
of six signs. Nothing at all = there are none.
"""

from __future__ import annotations

from typing import Final

from runnerd.client.errors import ClientError

DEFAULT_KEYS: Final = "ctrl-p,ctrl-q"
_WITH_CTRL: Final = "abcdefghijklmnopqrstuvwxyz@[\\]^_"


def detach_keys(text: str) -> bytes:
    """Read the notation.

    Raises:
        ClientError: If it is none.
    """
    return b"".join(map(_key, text.split(","))) if text else b""


def _key(word: str) -> bytes:
    if len(word) == 1 and word.isascii():
        return word.encode()
    name = word.removeprefix("ctrl-")
    if name != word and len(name) == 1 and name in _WITH_CTRL:
        return bytes([ord(name.upper()) & 0x1F])
    raise ClientError(
        f"--detach-keys: '{word}' is no key",
        preserved="nothing ran",
        hint="keys parted by commas: a character, or ctrl- with a-z @ [ \\ ] ^ _",
    )


class DetachScanner:
    """Find the keys among what is typed.

    What may be their beginning is held back until the next key shows that it is not: with the
    default keys one Ctrl-P arrives together with the key after it.

    Args:
        keys: What detach_keys returned.
    """

    def __init__(self, keys: bytes) -> None:
        self._keys = keys
        self._held = b""

    def take(self, typed: bytes) -> tuple[bytes, bool]:
        """Return what is to be passed on, and whether the keys were pressed; then nothing after."""
        if not self._keys:
            return typed, False
        passed = bytearray()
        for at in range(len(typed)):
            self._held += typed[at : at + 1]
            while not self._keys.startswith(self._held):
                passed += self._held[:1]
                self._held = self._held[1:]
            if self._held == self._keys:
                self._held = b""
                return bytes(passed), True
        return bytes(passed), False
