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
    r"(?:((?:\\*[\"'])?(?:\[[^\]\s]{0,64}\]|\]{1,8})?\s*(?:[:+?]?=+>?|:)\s*)|(?:\s|\\\n)+)"
)
_HEADER: Final = re.compile(r"\s*:\s+")
_QUOTES: Final = re.compile(r"\\.|[\"']", re.DOTALL)
# Atomic groups, (?>(?:x)+), and not (?:x)++: in CPython 3.11.2, Debian 12's, that goes on behind an
# alternative that failed in the middle (mended in 3.11.5, gh-106052).
_DOUBLE: Final = r"\"(?>(?:[^\"\\]|\\.)*)\"?"
_SINGLE: Final = r"'[^']*+'?"
_QUOTED: Final = re.compile(rf"(?>(?:{_DOUBLE}|'(?>(?:[^'\\]|\\.)*)'?)+)", re.DOTALL)
_DOLLAR: Final = r"\$(?![({])"
# Behind a name in quotes: as in JSON, which may be quoted once more itself, or in a program.
_JSON: Final = re.compile(
    rf"[fbruFBRU]{{0,2}}{_QUOTED.pattern}|(\\{{1,15}}[\"']).*?(?:\1|\Z)"
    rf"|(?>(?:[^\s,}}\]$(]|{_DOLLAR})+)",
    re.DOTALL,
)
_BACKTICKS: Final = r"`(?>(?:[^`\\]|\\.)*)`?"
_SHELL: Final = rf"\$'(?>(?:[^'\\]|\\.)*)'?|\\.|{_BACKTICKS}|{_DOLLAR}"
# What a shell takes for one word, by the quote that the whole of it is in: that ends it.
_SHELL_WORD: Final = {
    "": re.compile(rf"(?>(?:{_SHELL}|{_DOUBLE}|{_SINGLE}|[^\s;&|\"'\\`$(])+)", re.DOTALL),
    '"': re.compile(
        rf"(?>(?:\\\"(?>(?:[^\"\\]|\\[^\"])*)(?:\\\")?|{_SHELL}|{_SINGLE}|[^\s;&|\"'\\`$(])+)",
        re.DOTALL,
    ),
    "'": re.compile(
        rf"(?>(?:\\[^']|{_BACKTICKS}|{_DOLLAR}|{_DOUBLE}|[^\s;&|\"'\\`$(])+)", re.DOTALL
    ),
}
_TO_QUOTE: Final = {
    '"': re.compile(rf"(?>(?:[^\"\\`$]|\\.|{_BACKTICKS}|{_DOLLAR})+)", re.DOTALL),
    "'": re.compile(r"(?>(?:[^']|'\\''|'\"'\"')+)"),
}
_LINE: Final = {
    "": re.compile(r"[^\n]+"), '"': re.compile(r"[^\"\n]+"), "'": re.compile(r"[^'\n]+"),
}  # fmt: skip
# What is in brackets is no part of these patterns: brackets nest.
_BEGINS: Final = re.compile(r"[(\[{]")
_OPENS: Final = re.compile(r"\$?\(|\$\{")
_OPENS_QUOTED: Final = re.compile(r"\$[({]")
_CLOSING: Final = {"(": ")", "[": "]", "{": "}"}
_SIGNS: Final = re.compile(r"\\++.?|[\"'()\[\]{}]", re.DOTALL)
_URL: Final = re.compile(r"(https?)?://([^\s/:]*+)")
_TO_BLANK: Final = re.compile(r"\S*+")
_PORT: Final = re.compile(r":\d*/")


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
        at = look_at = 0
        quote = ""
        while (found := _NAMED.search(text, look_at)) is not None:
            # Behind a name that is shown comes the next, in its subscript too: environ['TOKEN'].
            look_at = found.end(2)
            # Two words, of which the first is no option, are no name and its value.
            if (found[1] or found[3]) and self.hides(found[2]):
                quote = _quote_at(text, at, found.start(), quote)
                kept.append(text[at : found.end()])
                at = look_at = _value_end(text, found, quote)
                if at > found.end():
                    kept.append(HIDDEN)
        return _without_userinfo("".join(kept) + text[at:])


def _quote_at(text: str, start: int, end: int, quote: str) -> str:
    """Return the quote that is open at `end`, "" for none; `quote` is open at `start`."""
    for found in _QUOTES.finditer(text, start, end):
        sign = found[0]
        if not quote:
            quote = sign if sign in "\"'" else ""
        elif sign == quote or (quote == "'" and sign == "\\'"):
            quote = ""
    return quote


def _value_end(text: str, found: re.Match[str], quote: str) -> int:
    """Return where the value behind a name ends.

    Args:
        text: All of it.
        found: A match of _NAMED.
        quote: Which is open at its start. An apostrophe may have opened it, so it is believed only
            where nothing nearer says more.
    """
    at = found.end()
    pattern, opening = _value_patterns(text, found, quote)
    opens = (opening if opening is _OPENS_QUOTED else _BEGINS).match(text, at)
    while True:
        if opens is not None:
            at = _closed(text, opens.end() - 1)
        if (piece := pattern.match(text, at)) is not None:
            at = piece.end()
        if (opens := opening.match(text, at)) is None:
            return at


def _value_patterns(
    text: str, found: re.Match[str], quote: str
) -> tuple[re.Pattern[str], re.Pattern[str]]:
    """Return what matches a value as far as the next bracket, and what opens one within it."""
    between = found[3] or ""
    if between[:1] in ("\\", '"', "'"):
        return _JSON, _OPENS
    opened = text[found.start() - 1 : found.start()]
    if opened in _TO_QUOTE:
        return _TO_QUOTE[opened], _OPENS_QUOTED  # 'Name: value' or "NAME=value": one word
    if text[found.end() : found.end() + 1] in _TO_QUOTE:
        return (_QUOTED if _HEADER.fullmatch(between) else _SHELL_WORD[""]), _OPENS
    return (_LINE if _HEADER.fullmatch(between) else _SHELL_WORD)[quote], _OPENS


def _closed(text: str, start: int) -> int:
    """Return what is behind the bracket that closes the one at `start`; all, where none does.

    An apostrophe may be no quote, and nor may anything; then brackets behind it count: the farthest
    end is taken.
    """
    return max(_close(text, start, quotes) for quotes in ("\"'", '"', ""))


def _close(text: str, start: int, quotes: str) -> int:
    awaited: list[str] = []
    quote, level = "", 0
    for sign in _SIGNS.finditer(text, start):
        escapes, char = len(sign[0]) - 1, sign[0][-1]
        if quote:
            # Quoted once more, a quote is written \" and one within it \\\", and so on.
            if char == quote and escapes % (2 * level + 2) == level:
                quote = ""
        elif char in "\"'":
            if char in quotes:
                quote, level = char, escapes if escapes & (escapes + 1) == 0 else 0
        elif escapes % 2 == 1 and quotes:
            continue
        elif char in _CLOSING:
            awaited.append(_CLOSING[char])
        elif awaited and char == awaited[-1]:  # any other is none of these
            awaited.pop()
            if not awaited:
                return sign.end()
    return len(text)


def _without_userinfo(text: str) -> str:
    """Return text without the passwords in URLs, and without what is the user of an http one."""
    kept: list[str] = []
    at = word_end = last_at = 0
    for found in _URL.finditer(text):
        if found.end() >= word_end:
            last = _TO_BLANK.match(text, found.end())
            assert last is not None
            word_end = last.end()
            last_at = text.rfind("@", found.end(), word_end)
        start, end = _userinfo(text, found, word_end, last_at)
        if at <= start < end:
            kept += text[at:start], HIDDEN
            at = end
    return "".join(kept) + text[at:]


def _userinfo(text: str, found: re.Match[str], word_end: int, last_at: int) -> tuple[int, int]:
    """Return where what is hidden of a URL begins and ends; the same where nothing is.

    Args:
        text: All of it.
        found: A match of _URL.
        word_end: Where the word ends that it is in.
        last_at: Where in that is the last @, -1 where none is.
    """
    begin, user_end = found.span(2)
    first_at = found[2].find("@")
    if text[user_end : user_end + 1] == ":" and _PORT.match(text, user_end) is None:
        slash = text.find("/", user_end, word_end)
        end = text.rfind("@", user_end, slash if slash >= 0 else word_end)
        # A / has to be written %2F in a password; where none else is before an @, it is in one.
        end = last_at if end < 0 else end
        if end > user_end:
            return (user_end + 1 if first_at < 0 else begin), end
    if found[1] and first_at >= 0:
        return begin, begin + found[2].rfind("@")
    return begin, begin
