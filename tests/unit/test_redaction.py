"""What is hidden of what was asked for, and what an audit line holds of it."""

from __future__ import annotations

import json
import time
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from runnerd.core.audit import (
    AUDIT_ENTRY_BYTES,
    ITEMS_MAX,
    LINE_BYTES_MAX,
    TEXT_CHARS_MAX,
    Asked,
    Settled,
    audit_line,
    shown_params,
)
from runnerd.core.redaction import HIDDEN, Redaction
from runnerd.protocol.daemon_requests import EnvSet, Hello
from runnerd.protocol.fields import Params
from runnerd.protocol.requests import ExecSignal, ExecStart, ExecWrite, Pty

HIDE = Redaction()
S = "s3cr3t-word"


@pytest.mark.parametrize(
    "name",
    ["TOKEN", "GITHUB_TOKEN", "token", "aws-secret-access-key", "API_KEY", "ApiKey", "DB_PASSWORD",
     "db_passwd", "CREDENTIALS", "Authorization", "SSH_AUTH_SOCK", "Set-Cookie", "passphrase"],
)  # fmt: skip
def test_names_of_secrets_are_known(name: str) -> None:
    assert HIDE.hides(name)


@pytest.mark.parametrize("name", ["PATH", "HOME", "argv", "USER", "LANG", "exec_id", "cwd"])
def test_other_names_are_left(name: str) -> None:
    assert not HIDE.hides(name)


def test_patterns_can_be_added() -> None:
    more = Redaction(["DATABASE_*", "my-thing"])
    assert more.hides("database_url")
    assert more.hides("MY-THING")
    assert more.hides("TOKEN")
    assert not HIDE.hides("DATABASE_URL")


@pytest.mark.parametrize(
    ("argv", "shown"),
    [
        (["x", f"--password={S}"], ["x", f"--password={HIDDEN}"]),
        (["x", f"--password={S} and more"], ["x", f"--password={HIDDEN}"]),
        (["env", f"API_KEY={S}", "make"], ["env", f"API_KEY={HIDDEN}", "make"]),
        (["x", "--token", S, "file"], ["x", "--token", HIDDEN, "file"]),
        (["x", "--token", "--verbose", "file"], ["x", "--token", "--verbose", "file"]),
        (["x", "-token", S], ["x", "-token", HIDDEN]),
        (["curl", "-H", f"Authorization: Bearer {S}"], ["curl", "-H", f"Authorization: {HIDDEN}"]),
        (["sh", "-c", f"TOKEN={S} make"], ["sh", "-c", f"TOKEN={HIDDEN}"]),  # all of the word
        (["sh", "-c", f"a; TOKEN={S} make; b"], ["sh", "-c", f"a; TOKEN={HIDDEN} make; b"]),
        (["sh", "-c", f"a; A_KEY='{S} {S}' b"], ["sh", "-c", f"a; A_KEY={HIDDEN} b"]),
        (["sh", "-c", f"x --password {S} y"], ["sh", "-c", f"x --password {HIDDEN} y"]),
        (["x", f'{{"password": "{S}", "a": 1}}'], ["x", f'{{"password": {HIDDEN}, "a": 1}}']),
        (["git", f"https://u:{S}@host/p"], ["git", f"https://u:{HIDDEN}@host/p"]),
        (["git", f"https://{S}@host/p"], ["git", f"https://{HIDDEN}@host/p"]),
        (["git", "ssh://git@host/p"], ["git", "ssh://git@host/p"]),
        (["git", f"https://u:a@{S}@host/p"], ["git", f"https://u:{HIDDEN}@host/p"]),
        (["git", f"https://u:a/{S}@host/p"], ["git", f"https://u:{HIDDEN}@host/p"]),
        (["git", f"https://u@a.b:{S}@host/p"], ["git", f"https://{HIDDEN}@host/p"]),
        (["git", f"https://{S}@host:80/p@q"], ["git", f"https://{HIDDEN}@host:80/p@q"]),
        (["x", f"a://u:{S}@h/p@q,b://v:{S}@k"], ["x", f"a://u:{HIDDEN}@h/p@q,b://v:{HIDDEN}@k"]),
        (["npm", "http://host:4873/@a/b"], ["npm", "http://host:4873/@a/b"]),
        (["x", "https://host/a@1", "a@b"], ["x", "https://host/a@1", "a@b"]),
        (["sh", "-c", f"creds[token]={S}"], ["sh", "-c", f"creds[token]={HIDDEN}"]),
        (["x", f"--env=API_KEY=a {S}"], ["x", f"--env=API_KEY={HIDDEN}"]),
        (["x", f"--set=db.password=a,{S}"], ["x", f"--set=db.password={HIDDEN}"]),
        (["curl", f"--header=Cookie: a=1; b={S}"], ["curl", f"--header=Cookie: {HIDDEN}"]),
        (["x", f"API_KEY+={S}"], ["x", f"API_KEY+={HIDDEN}"]),
        (["x", f"--1password={S}"], ["x", f"--1password={HIDDEN}"]),
        (["echo", "password", "is"], ["echo", "password", "is"]),
        (["make", "A=b", "--jobs=4"], ["make", "A=b", "--jobs=4"]),
        ([], []),
    ],
)  # fmt: skip
def test_words_of_a_command_line(argv: list[str], shown: list[str]) -> None:
    assert HIDE.words(argv) == shown


@pytest.mark.parametrize(
    ("script", "shown"),
    [
        ("curl -H 'Authorization: Bearer @' url", "curl -H 'Authorization: #' url"),
        ('curl -H "Cookie: a=1; b=@" url', 'curl -H "Cookie: #" url'),
        ('curl --header="X-Auth: @ @" url', 'curl --header="X-Auth: #" url'),
        ("cat <<E\nAuthorization: Basic @\nHost: h\nE", "cat <<E\nAuthorization: #\nHost: h\nE"),
        ("x 'API_KEY=a @' y", "x 'API_KEY=#' y"),
        ("x --password 'a @' y", "x --password # y"),
        ("x --password \\\n @ y", "x --password \\\n # y"),
        ("TOKEN=$'a\\'b @' y", "TOKEN=# y"),
        ("TOKEN='a'\\''b @' y", "TOKEN=# y"),
        ('TOKEN="a"@ y', "TOKEN=# y"),
        ('TOKEN="a\\"b @" y', "TOKEN=# y"),
        ("TOKEN=a\\ @ y", "TOKEN=# y"),
        ("TOKEN=a,@}b y", "TOKEN=# y"),
        ("TOKEN=$(echo @) y", "TOKEN=# y"),
        ("TOKEN=`echo @` y", "TOKEN=# y"),
        ("TOKEN=(a @) y", "TOKEN=# y"),
        ("TOKEN+=@ A_KEY[0]=@ y", "TOKEN+=# A_KEY[0]=# y"),
        ('sh -c "a; TOKEN=@; b" c', 'sh -c "a; TOKEN=#; b" c'),
        ("sh -c \"TOKEN='a @' b\" c", 'sh -c "TOKEN=#" c'),
        (": don't\nTOKEN='a @' y", ": don't\nTOKEN=# y"),
        ('curl "http://h/?token=@&a=1" "b"', 'curl "http://h/?token=#&a=1" "b"'),
        ("password := @ ; api_key => '@' x", "password := # ; api_key => # x"),
        ('{"password": "a\\"b @", "c": 1}', '{"password": #, "c": 1}'),
        ('{"token":12,"keys":["a","@"],"c":1}', '{"token":#,"keys":#,"c":1}'),
        ('x "{\\"token\\": \\"a @\\", 1}"', 'x "{\\"token\\": #, 1}"'),
        # A name within a subscript.
        ("os.environ['TOKEN'] = '@' ; b", "os.environ['TOKEN'] = # ; b"),
        ("h['Authorization'] = 'Bearer @'\nb", "h['Authorization'] = #\nb"),
        ('h["token"]=$(a @) b', 'h["token"]=# b'),
        ("h['token'] = f'a @' b", "h['token'] = # b"),
        ("h['token'] = \"\"\"a @\"\"\" b", "h['token'] = # b"),
        ("creds[token]=@ b", "creds[token]=# b"),
        ("a[b[token]]=@ b", "a[b[token]]=# b"),
        ("a[token]=@ b[key]=@", "a[token]=# b[key]=#"),
        # Brackets nest.
        ('{"auth": {"meta": {}, "value": "@"}, "c": 1}', '{"auth": #, "c": 1}'),
        ('{"tokens": [["a"], "@"], "c": 1}', '{"tokens": #, "c": 1}'),
        ('{"tokens": {"a": "}", "b": "@"}}', '{"tokens": #}'),
        ('{"tokens": ["\\"]", "\\\\", "@"]}', '{"tokens": #}'),
        ('x "{\\"keys\\": [\\"a]\\", \\"@\\"], 1}"', 'x "{\\"keys\\": #, 1}"'),
        ("TOKEN=$(f $(g) @) y", "TOKEN=# y"),
        ("TOKEN=a$(f $(g) @)b y", "TOKEN=# y"),
        ("TOKEN=$(f ')' @) y", "TOKEN=# y"),
        ("TOKEN=$(f \\) @) y", "TOKEN=# y"),
        ("TOKEN=${X:-b @} y", "TOKEN=# y"),
        ("TOKEN=${X:-${Y:-b} @} y", "TOKEN=# y"),
        ("TOKEN=((a b) @) y", "TOKEN=# y"),
        ("TOKEN=`f \\`g\\` @` y", "TOKEN=# y"),
        ("sh -c 'a; TOKEN=$(f @) b' c", "sh -c 'a; TOKEN=# b' c"),
        ("sh -c 'a; TOKEN=`f @` b' c", "sh -c 'a; TOKEN=# b' c"),
        ('sh -c "a; TOKEN=$(f $(g) @) b" c', 'sh -c "a; TOKEN=# b" c'),
        ('export "TOKEN=$(f "$X" @)" b', 'export "TOKEN=#" b'),
        ('export "TOKEN=`f "$X" @`" b', 'export "TOKEN=#" b'),
        ("export 'TOKEN=a'\\''b @' b", "export 'TOKEN=#' b"),
        ("tokens = [['a', 'b'], '@'] ; c", "tokens = # ; c"),
        ("token = get('a', (1, 2), '@') ; c", "token = # ; c"),
        ("{auth: {a: it's, b: {c: isn't}, v: @}} c", "{auth: #"),
        ("TOKEN=(it's (\"b )\" it's) @) y", "TOKEN=# y"),
        ("TOKEN=$(f (a @", "TOKEN=#"),  # what is not closed reaches to the end
    ],
)  # fmt: skip
def test_text_of_a_script(script: str, shown: str) -> None:
    """`@` stands for the secret, `#` for what is written down."""
    assert HIDE.text(script.replace("@", S)) == shown.replace("#", HIDDEN)


@given(
    st.text(st.sampled_from("aT=:'\"\\ \n$(`[-{,#;") | st.characters(), max_size=20),
    st.sampled_from([" TOKEN=@", "\n--password=@ b", "\nX-Auth: Bearer @\n", ' {"key": "a @"}']),
)
def test_nothing_before_it_brings_a_secret_back(before: str, form: str) -> None:
    secret = "Zq7Zq7Zq7"
    assert secret not in HIDE.text(before + form.replace("@", secret))


@given(st.lists(st.text()), st.sampled_from(["--password={}", "API_KEY={}", "--token {}"]))
def test_no_surroundings_bring_a_secret_back(words: list[str], form: str) -> None:
    secret = "Zq7Zq7Zq7"
    given_words = form.format(secret).split(" ")
    shown = HIDE.words([*words, *given_words, *words])
    assert not any(secret in word for word in shown)


@pytest.mark.parametrize(
    "text",
    ["a" * 100_000, "-" * 100_000, "a-" * 50_000, " " * 100_000, "=" * 100_000, "a=" * 50_000,
     "://" * 30_000, "TOKEN='" * 10_000, "a " * 50_000, 'KEY="' * 20_000, "://a" * 25_000,
     "KEY=(" * 20_000, "KEY=`" * 20_000, "'KEY: " * 20_000, '"KEY":\\"' * 10_000, "KEY=$" * 20_000,
     '"KEY":' + "\\" * 50_000 + '"' + "\\" * 50_000, "KEY: " * 20_000, "KEY=" + "\\" * 100_000,
     "KEY=$(" * 20_000, "KEY=${" * 20_000, "KEY=()" * 20_000, "KEY=([)]" * 12_000,
     'KEY=(")' * 16_000, "KEY=('" * 16_000, "KEY[KEY[" * 12_000, "[" * 100_000, "a[b]=" * 20_000,
     '"KEY":{' * 14_000, '"KEY":' + "[{" * 50_000, "KEY=(" + "\\" * 100_000, "://a:b" * 16_000,
     "://a:" + "@" * 100_000, "http://a@" * 11_000, "://@a:/" * 14_000, "://" + "a" * 100_000,
     "https://" * 12_000, "https://" + "a" * 100_000, "KEY[" * 25_000, "a\\" * 50_000],
)  # fmt: skip
def test_every_search_takes_linear_time(text: str) -> None:
    """It runs with the GIL: a request must not stop the loop. n squared takes minutes."""
    began_s = time.process_time()
    HIDE.words([text])
    HIDE.text(text)
    assert time.process_time() - began_s < 2


_WORDS = st.sampled_from(["a", '"b ) ]"', "it's", '"c\\" }"', "-d", "1,"])
_NESTED = st.recursive(
    _WORDS,
    lambda inner: st.builds(
        lambda pair, parts: pair[0] + " ".join(parts) + pair[1],
        st.sampled_from(["()", "[]", "{}"]),
        st.lists(inner, max_size=4),
    ),
    max_leaves=20,
)


@given(
    st.lists(_NESTED, max_size=5),
    st.lists(_NESTED, max_size=5),
    st.sampled_from(
        ["TOKEN=$(@)", "TOKEN=(@)", "TOKEN=${X:-@}", '{"key": [@]}', "h['auth'] = {@}",
         "keys = [@]", 'x "TOKEN=$(@) b" c']
    ),
)  # fmt: skip
def test_however_brackets_nest_what_is_in_them_is_hidden(
    before: list[str], behind: list[str], form: str
) -> None:
    secret = "Zq7Zq7Zq7"
    inside = " ".join([*before, secret, *behind])
    assert secret not in HIDE.text(form.replace("@", inside))
    assert secret not in HIDE.text(form.replace("@", f"({inside}) b"))


@settings(max_examples=50, deadline=None)
@given(
    st.lists(
        st.sampled_from(["KEY", "=", ": ", "$(", "(", ")", "[", "]", "{", "}", '"', "'", "\\", "`",
                         "://", "@", "/", ":", "https", " ", "\n", "a", "--", "${", ","]),
        min_size=1, max_size=8,
    ),
    st.lists(st.sampled_from(["KEY=(", '"KEY":{', "://a:", "'", '"', ""]), max_size=2),
)  # fmt: skip
def test_whatever_is_repeated_takes_linear_time(pieces: list[str], before: list[str]) -> None:
    piece = "".join(pieces)
    text = "".join(before) + piece * (64 * 1024 // len(piece))
    began_s = time.process_time()
    HIDE.text(text)
    assert time.process_time() - began_s < 1


def line(params: Params | None, **more: Any) -> dict[str, Any]:
    asked = Asked(
        1.5, 3, 7, 8, 9, "me", 2, "exec.start", params, more.pop("stdin_bytes", None),
        AUDIT_ENTRY_BYTES,
    )  # fmt: skip
    raw = audit_line(Settled(asked, "ok", "e"), HIDE)
    assert len(raw) <= LINE_BYTES_MAX
    assert raw.count(b"\n") == 1
    read: dict[str, Any] = json.loads(raw)
    return read


def test_a_line_says_who_what_and_what_came_of_it() -> None:
    start = ExecStart(argv=["make", f"K_KEY={S}"], env={"A": "b", "TOKEN": S, "C": None}, cwd="/x")
    assert line(start) == {
        "at": 1.5, "connection": 3, "pid": 7, "uid": 8, "gid": 9, "client": "me", "fence": 2,
        "method": "exec.start", "exec_id": "e", "result": "ok",
        "params": {
            "argv": ["make", f"K_KEY={HIDDEN}"], "env": {"A": "b", "TOKEN": HIDDEN, "C": None},
            "cwd": "/x",
        },
    }  # fmt: skip


def test_stdin_data_is_its_length() -> None:
    assert line(ExecWrite(exec_id="e", eof=True), stdin_bytes=5)["params"] == {
        "exec_id": "e", "eof": True, "data_bytes": 5,
    }  # fmt: skip
    # Nor would it be there, should it ever be handed over.
    assert S not in json.dumps(line(ExecWrite(exec_id="e", data=S.encode())))


def test_fields_are_hidden_by_their_names_too() -> None:
    assert shown_params(Hello(protocol=[1], token=S, fence=4), HIDE) == {
        "protocol": [1], "token": HIDDEN, "fence": 4,
    }  # fmt: skip
    assert shown_params(EnvSet(set={"A_SECRET": S, "A": "b"}), HIDE)["set"] == {
        "A_SECRET": HIDDEN, "A": "b",
    }  # fmt: skip
    shown = shown_params(ExecStart(argv=["a"], pty=Pty(rows=50), labels={"api-key": S}), HIDE)
    assert shown == {"argv": ["a"], "pty": {"rows": 50}, "labels": {"api-key": HIDDEN}}
    assert shown_params(ExecSignal(exec_id="e", signal=9), HIDE) == {"exec_id": "e", "signal": 9}


@settings(max_examples=20)
@given(st.lists(st.text(st.characters()), min_size=1, max_size=5))
def test_whatever_is_asked_for_the_line_is_bounded_json(words: list[str]) -> None:
    many = [word * 3000 for word in words] * 100
    start = msgspec.convert({"argv": ["x"]}, ExecStart)
    start.argv = ["x", *many]
    start.env = {f"{n}{word}": word * 3000 for n, word in enumerate(words * 100)}
    start.labels = {word[:10]: word for word in words}
    read = line(start)
    if read["params"] is not None:
        assert len(read["params"]["argv"]) <= ITEMS_MAX + 1
        assert max(map(len, read["params"]["argv"])) < 12 * (TEXT_CHARS_MAX + 32)
    else:
        assert read["cut"] is True
