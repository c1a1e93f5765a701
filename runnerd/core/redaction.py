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

_NAME: Final = r"\w[\w.-]*"
_WORD: Final = re.compile(rf"-{{0,2}}({_NAME})(?:\+?=|:\s*)(?=.)", re.DOTALL)
_OPTION: Final = re.compile(rf"--?({_NAME})")
# A name, and what stands between it and its value: `=`, `: `, `": ` or behind an option a blank.
_NAMED: Final = re.compile(
    rf"(?<![\w.-])(--?)?({_NAME})"
    r"(?:((?:\\*[\"'])?(?:\[[^\]\s]{0,64}\]|\])?\s*(?:[:+?]?=+>?|:)\s*)|(?:\s|\\\n)+)"
)
_HEADER: Final = re.compile(r"\s*:\s+")
_QUOTES: Final = re.compile(r"\\.|[\"']", re.DOTALL)
_DOUBLE: Final = r"\"(?:[^\"\\]|\\.)*+\"?"
_SINGLE: Final = r"'[^']*+'?"
_QUOTED: Final = re.compile(rf"{_DOUBLE}|'(?:[^'\\]|\\.)*+'?", re.DOTALL)
# Behind a name in quotes: as in JSON, which may be quoted once more itself.
_JSON: Final = re.compile(
    rf"{_QUOTED.pattern}|(\\{{1,15}}[\"']).*?(?:\1|\Z)|\[[^\]]*+\]?|\{{[^}}]*+\}}?|[^\s,}}\]]+",
    re.DOTALL,
)
_SHELL: Final = r"\$'(?:[^'\\]|\\.)*+'?|\\.|\$?\([^)]*+\)?|`[^`]*+`?|\$"
# What a shell takes for one word, by the quote that the whole of it is in: that ends it.
_SHELL_WORD: Final = {
    "": re.compile(rf"(?:{_SHELL}|{_DOUBLE}|{_SINGLE}|[^\s;&|\"'\\`$(])++", re.DOTALL),
    '"': re.compile(
        rf"(?:\\\"(?:[^\"\\]|\\[^\"])*+(?:\\\")?|{_SHELL}|{_SINGLE}|[^\s;&|\"'\\`$(])++", re.DOTALL
    ),
    "'": re.compile(rf"(?:\\[^']|{_DOUBLE}|[^\s;&|\"'\\])++", re.DOTALL),
}
_TO_QUOTE: Final = {'"': re.compile(r"(?:[^\"\\]|\\.)++", re.DOTALL), "'": re.compile(r"[^']+")}
_LINE: Final = {
    "": re.compile(r"[^\n]+"), '"': re.compile(r"[^\"\n]+"), "'": re.compile(r"[^'\n]+"),
}  # fmt: skip
_USERINFO: Final = re.compile(r"(://[^\s/:@]{0,256}:)[^\s/@]+(?=@)|(https?://)[^\s/:@]+(?=@)")


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
        at = 0
        while (found := _WORD.match(word, at)) is not None:  # --env=NAME=VALUE has two
            if self.hides(found[1]):
                return word[: found.end()] + HIDDEN  # all of the word, blanks and quotes included
            at = found.end()
        return self.text(word)

    def text(self, text: str) -> str:
        """Return text, a shell script say, without what is assigned to such names in it."""
        kept: list[str] = []
        at, quote = 0, ""
        for found in _NAMED.finditer(text):
            if found.start() < at or not (found[1] or found[3]):
                continue  # inside what is hidden already; or two words, the first no option
            if not self.hides(found[2]):
                continue
            quote = _quote_at(text, at, found.start(), quote)
            kept.append(text[at : found.end()])
            at = found.end()
            if value := _value_pattern(text, found, quote).match(text, at):
                kept.append(HIDDEN)
                at = value.end()
        return _USERINFO.sub(_without_userinfo, "".join(kept) + text[at:])


def _quote_at(text: str, start: int, end: int, quote: str) -> str:
    """Return the quote that is open at `end`, "" for none; `quote` is open at `start`."""
    for found in _QUOTES.finditer(text, start, end):
        sign = found[0]
        if not quote:
            quote = sign if sign in "\"'" else ""
        elif sign == quote or (quote == "'" and sign == "\\'"):
            quote = ""
    return quote


def _value_pattern(text: str, found: re.Match[str], quote: str) -> re.Pattern[str]:
    """Return what matches the value behind a name, with its end.

    Args:
        text: All of it.
        found: A match of _NAMED.
        quote: Which is open at its start. An apostrophe may have opened it, so it is believed only
            where nothing nearer says more.
    """
    between = found[3] or ""
    if between[:1] in ("\\", '"', "'"):
        return _JSON
    opened = text[found.start() - 1 : found.start()]
    if opened in _TO_QUOTE:
        return _TO_QUOTE[opened]  # 'Name: value' or "NAME=value", all of it one word
    if text[found.end() : found.end() + 1] in _TO_QUOTE:
        return _QUOTED if _HEADER.fullmatch(between) else _SHELL_WORD[""]
    return (_LINE if _HEADER.fullmatch(between) else _SHELL_WORD)[quote]


def _without_userinfo(found: re.Match[str]) -> str:
    return (found[1] or found[2]) + HIDDEN
