"""What must not be written down of what was asked for: values that go by the names of secrets.

A value is hidden by its name: of a variable, a field, an option or a header. Names are matched by
patterns as a shell has them, whatever their case. Too much is hidden rather than too little: a
`--keyring` is no key. No I/O.

Every search here is linear in the text: it may be a hostile command's.
"""

from __future__ import annotations

import fnmatch
import re
from collections.abc import Iterable
from typing import Final

DEFAULT_PATTERNS: Final = (
    "*TOKEN*", "*SECRET*", "*PASSWORD*", "*PASSWD*", "*PASSPHRASE*", "*KEY*", "*CREDENTIAL*",
    "*AUTH*", "*COOKIE*",
)  # fmt: skip
HIDDEN: Final = "<redacted>"

_NAME: Final = r"[A-Za-z_][\w.-]*"
_WORD: Final = re.compile(rf"-{{0,2}}({_NAME})(?:=|:\s*)(?=.)", re.DOTALL)
_OPTION: Final = re.compile(rf"--?({_NAME})")
# A name, and what stands between it and its value: `=`, `: `, `": ` or behind an option a blank.
_NAMED: Final = re.compile(rf"(?<![\w.-])(--?)?({_NAME})([\"']?\s*[=:]\s*|\s+)")
_VALUE: Final = re.compile(r"\"[^\"]*\"?|'[^']*'?|[^\s;&|,}]+")
_USERINFO: Final = re.compile(r"(://[^\s/:@]{0,256}:)[^\s/@]+(?=@)")


class Redaction:
    """Hide values by their names.

    Args:
        patterns: Further ones, beside DEFAULT_PATTERNS.
    """

    def __init__(self, patterns: Iterable[str] = ()) -> None:
        every = (*DEFAULT_PATTERNS, *patterns)
        self._hidden = re.compile("|".join(map(fnmatch.translate, every)), re.IGNORECASE)

    def hides(self, name: str) -> bool:
        """Whether what goes by this name is hidden; `-` and `_` in it are the same."""
        return bool(self._hidden.match(name) or self._hidden.match(name.replace("-", "_")))

    def value(self, name: str, text: str) -> str:
        """Return a named value as it may be written down."""
        return HIDDEN if self.hides(name) else self.text(text)

    def words(self, argv: Iterable[str]) -> list[str]:
        """Return a command line: --password=x, NAME=VALUE, `Name: value`, and --password x."""
        shown: list[str] = []
        is_value = False
        for word in argv:
            if is_value and not word.startswith("-"):
                shown.append(HIDDEN)
                is_value = False
                continue
            option = _OPTION.fullmatch(word)
            is_value = option is not None and self.hides(option[1])
            shown.append(self._word(word))
        return shown

    def _word(self, word: str) -> str:
        found = _WORD.match(word)
        if found is not None and self.hides(found[1]):
            return word[: found.end()] + HIDDEN  # all of the word, blanks and quotes included
        return self.text(word)

    def text(self, text: str) -> str:
        """Return text, a shell script say, without what is assigned to such names in it."""
        kept: list[str] = []
        at = 0
        for found in _NAMED.finditer(text):
            if found.start() < at or not (found[1] or found[3].strip()):
                continue  # inside what is hidden already; or two words, the first no option
            if self.hides(found[2]) and (value := _VALUE.match(text, found.end())):
                kept += text[at : found.end()], HIDDEN
                at = value.end()
        return _USERINFO.sub(rf"\1{HIDDEN}", "".join(kept) + text[at:])
