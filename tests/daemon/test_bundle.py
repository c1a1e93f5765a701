"""The bundle runs in any image, whatever that has or says, and gives commands the image's own.

Without an engine: in bare roots made here. tests/containers/ has it in real containers.
"""

import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Final

import pytest

from image import entry
from tests import needs
from tests.bare_root import BUNDLE, SOCKET, BareRoot
from tests.bundles import built_bundle
from tests.harness import REPOSITORY, RunnerdProcess, wait_for, with_default_signals

Daemons = Callable[..., RunnerdProcess]

BYTES_MAX = 45_000_000
SAYS_SO = """
#include <unistd.h>
__attribute__((constructor)) static void loaded(void)
{ write(1, "preloaded\\n", 10); }
"""
# One of each name that the launcher puts aside, ones that begin like them, and Python's own.
HOSTILE = {
    "LD_PRELOAD": "/hostile/preload.so",
    "LD_LIBRARY_PATH": "/hostile",
    "LD_BIND_NOW": "1",
    "GLIBC_TUNABLES": "glibc.malloc.check=3",
    "MALLOC_ARENA_MAX": "1",
    "GCONV_PATH": "/hostile",
    "LOCPATH": "/hostile",
    "NLSPATH": "/hostile",
    "LC_ALL": "xx_XX.ISO-8859-99",
    "LC_CTYPE": "tlh",
    "LANG": "",
    "LANGUAGE": "tlh",
    "LANGUAGES": "none of libc's",
    "OPENSSL_CONF": "/hostile/openssl.cnf",
    "PYTHONHOME": "/hostile",
    "PYTHONPATH": "/hostile",
    "PYTHONSTARTUP": "/hostile/start.py",
    "PYTHONMALLOC": "debug",
    "PYTHONDEVMODE": "1",
    "PYTHONUTF8": "0",
    "PYTHONCOERCECLOCALE": "warn",
    "PYTHONVERBOSE": "1",
    "HOME": "/nowhere",
    "TMPDIR": "/nowhere",
    "EMPTY": "",
}


@pytest.fixture(scope="session")
def bundle() -> Path:
    return built_bundle()


@pytest.fixture
def root(tmp_path: Path) -> Iterator[BareRoot]:
    needs.root()
    for name in ("unshare", "chroot", "ldd"):
        needs.program(name)
    made = BareRoot(tmp_path / "r")
    yield made
    made.close()


def python_words(bundle: Path, code: str) -> list[str]:
    """Return the words that run some code as the bundle's Python runs runnerd."""
    libexec = bundle / "libexec"
    words = [libexec / "runnerd", "--library-path", bundle / "lib", libexec / "interpreter"]
    return [*map(str, words), "-I", "-S", "-c", code]


# --- What is in it ---------------------------------------------------------------------------


def test_it_is_small_and_holds_what_it_should(bundle: Path) -> None:
    files = [path for path in bundle.rglob("*") if path.is_file() and not path.is_symlink()]
    assert sum(path.stat().st_size for path in files) <= BYTES_MAX
    assert {path.name for path in bundle.iterdir()} == {"bin", "lib", "libexec", "share"}
    assert {path.name for path in (bundle / "bin").iterdir()} == {"runnerd", "runnerctl", "tini"}
    assert {path.name for path in (bundle / "libexec").iterdir()} == {"runnerd", "interpreter"}
    (modules,) = (bundle / "lib").glob("python*")
    names = {path.stem for path in modules.iterdir()}
    assert names >= {"runnerd", "trio", "msgspec", "psutil", "prometheus_client", "os", "sqlite3"}
    assert not names & {
        "pip",
        "pytest",
        "_pytest",
        "hypothesis",
        "site-packages",
        "test",
        "tkinter",
    }
    sources = {
        path for path in modules.rglob("*.py") if path.relative_to(modules).parts[0] != "runnerd"
    }
    assert not sources
    licences = {path.name for path in (bundle / "share" / "licenses").iterdir()}
    assert licences >= {"runnerd", "trio", "msgspec", "psutil", "attrs", "python"}


def test_every_user_may_use_it_and_only_its_owner_change_it(bundle: Path) -> None:
    """It was made with a umask of 077."""
    for path in [bundle, *bundle.rglob("*")]:
        mode = path.stat().st_mode & 0o7777
        assert mode == 0o755 or (path.is_file() and mode == 0o644), (path, oct(mode))
    for name in ("bin/runnerd", "bin/tini", "libexec/runnerd", "libexec/interpreter"):
        assert os.access(bundle / name, os.X_OK)


def test_no_path_of_the_building_machine_is_in_it(bundle: Path) -> None:
    """But for where CPython itself was made, which it has compiled in and never looks at here."""
    ours = [os.fsencode(path) for path in (REPOSITORY, os.path.realpath(sys.prefix))]
    for path in bundle.rglob("*"):
        assert not path.is_symlink() or not path.readlink().is_absolute()
        if path.is_file():
            code = path.read_bytes()
            assert not [each for each in ours if each in code], path


def test_every_module_of_ours_imports_in_it(bundle: Path) -> None:
    """Also those that the daemon loads only when they are needed."""
    code = """
import importlib, pkgutil, sys
import runnerd, trio, psutil, prometheus_client.exposition, ssl, hashlib, sqlite3, traceback
for found in pkgutil.walk_packages(runnerd.__path__, "runnerd."):
    if "async" not in found.name:
        importlib.import_module(found.name)
assert hashlib.sha256 is not None and hashlib.sha256.__module__ == "_hashlib", hashlib.sha256
print("\\n".join(sys.path))
"""
    done = subprocess.run(
        python_words(bundle, code), capture_output=True, text=True, check=False, env={}, cwd="/"
    )
    assert done.returncode == 0, done.stderr
    assert all(line.startswith(f"{bundle}/lib/python") for line in done.stdout.split())


# --- Whatever the image is -------------------------------------------------------------------


def test_an_image_with_nothing_in_it(root: BareRoot) -> None:
    """No libc, no Python, no shell, no user: nothing of an image is needed."""
    root.serve("--user", "1234", env={})
    with root.connect() as client:
        done = client.run([f"{BUNDLE}/bin/tini", "--version"])
        assert done.stdout.startswith(b"tini version")
    said = root.run_beside(f"{BUNDLE}/bin/runnerctl", "ps", env={})
    assert said.returncode == 0, said.stderr
    os.kill(root.first_process(), signal.SIGTERM)
    assert root.wait() == 0
    assert not Path(f"{root.path}{SOCKET}").exists()


def test_it_is_pid_1_itself(root: BareRoot) -> None:
    root.serve(init=False, env={})
    with root.connect() as client:
        assert client.run([f"{BUNDLE}/bin/tini", "--version"]).exit.code == 0
        assert Path(f"/proc/{root.first_process()}/comm").read_text() == "runnerd\n"
    os.kill(root.first_process(), signal.SIGTERM)
    assert root.wait() == 0


def test_a_hostile_image_reaches_its_commands_and_not_the_daemon(
    root: BareRoot, tmp_path: Path
) -> None:
    """A library that is preloaded by variable and by file, and libraries that are none."""
    root.add("/usr/bin/env")
    source = tmp_path / "preload.c"
    source.write_text(SAYS_SO)
    preload = root.path / "hostile" / "preload.so"
    preload.parent.mkdir()
    cc = needs.program("cc", "gcc")
    subprocess.run([cc, "-shared", "-fPIC", source, "-o", preload], check=True)
    for name in ("libm.so.6", "libsqlite3.so.0", "libcrypto.so.3", "libpython3.so"):
        root.write(f"hostile/{name}", "no library")
    root.write("etc/ld.so.preload", "/hostile/preload.so\n")
    root.write("hostile/encodings/__init__.py", "raise SystemExit('hostile')")
    root.write("hostile/sitecustomize.py", "raise SystemExit('hostile')")
    root.serve(init=False, env=HOSTILE)
    lines = Path(f"/proc/{root.first_process()}/maps").read_text().splitlines()
    mapped = {line.split()[5] for line in lines if "/" in line}
    assert any(path.endswith("/lib/libc.so.6") for path in mapped)
    assert not {path for path in mapped if not path.startswith(f"{root.path}{BUNDLE}/")}
    assert "preloaded\n" not in (root.path / "log").read_text()
    with root.connect() as client:
        said = client.run(["/usr/bin/env", "-0"]).stdout
    assert said.startswith(b"preloaded\n")
    found = dict(line.split("=", 1) for line in said[10:].decode().split("\0")[:-1])
    found.pop("PATH"), found.pop("PWD", None), found.pop("_", None)
    assert found == HOSTILE


def test_users_are_found_where_the_image_wants_modules_for_it(root: BareRoot) -> None:
    """nsswitch.conf of old images says compat, whose module must fit the bundle's libc."""
    root.write("etc/passwd", "bob:x:4321:4321::/home/bob:/bin/sh\n")
    root.write("etc/group", "bob:x:4321:\n")
    root.write("etc/nsswitch.conf", "passwd: compat systemd sss\ngroup: compat systemd sss\n")
    root.serve("--user", "bob", env={})
    with root.connect() as client:
        with client.start([f"{BUNDLE}/bin/tini", "--version"]) as handle:
            assert handle.wait(10).code == 0


# --- Wherever it lies ------------------------------------------------------------------------


def test_it_runs_in_any_place_and_through_links(bundle: Path, tmp_path: Path) -> None:
    moved = tmp_path / "a place" / "b"
    shutil.copytree(bundle, moved, symlinks=True)
    (tmp_path / "bin").mkdir()
    link = tmp_path / "bin" / "runnerctl"
    link.symlink_to("../a place/b/bin/runnerctl")
    for words, cwd in (
        ([link], "/"),
        (["./runnerctl"], moved / "bin"),
        (["bin/runnerctl"], moved),
        (["runnerctl"], "/"),
    ):
        done = subprocess.run(
            [*map(str, words), "--version"],
            cwd=cwd,
            env={"PATH": str(tmp_path / "bin")},
            capture_output=True,
            check=True,
        )
        assert done.stdout.startswith(b"runnerctl ")


def test_a_place_whose_name_a_loader_would_split_is_refused(bundle: Path, tmp_path: Path) -> None:
    moved = tmp_path / "a:b" / "bin"
    moved.mkdir(parents=True)
    shutil.copy(bundle / "bin" / "runnerd", moved)
    done = subprocess.run([moved / "runnerd", "serve"], capture_output=True, check=False)
    assert done.returncode == 78
    assert b"cannot run in a folder of this name" in done.stderr
    shutil.copy(bundle / "bin" / "runnerd", moved / "runnerctl")
    assert subprocess.run([moved / "runnerctl"], capture_output=True, check=False).returncode == 125


def test_a_bundle_without_its_interpreter_says_what_is_missing(
    bundle: Path, tmp_path: Path
) -> None:
    (tmp_path / "bin").mkdir()
    shutil.copy(bundle / "bin" / "runnerd", tmp_path / "bin")
    done = subprocess.run([tmp_path / "bin" / "runnerd"], capture_output=True, check=False)
    assert done.returncode == 78
    assert f"{tmp_path}/libexec/runnerd: No such file".encode() in done.stderr


# --- What commands and callers see -----------------------------------------------------------


def test_commands_get_the_boot_environment_as_it_was(bundle: Path, start_daemon: Daemons) -> None:
    env = HOSTILE | {"LD_PRELOAD": "", "LD_LIBRARY_PATH": "/nowhere", "GCONV_PATH": "/nowhere"}
    daemon = start_daemon(program=[str(bundle / "bin" / "runnerd")], env=env)
    with daemon.connect() as client:
        said = client.run(["/usr/bin/env", "-0"]).stdout.decode()
    found = dict(line.split("=", 1) for line in said.split("\0")[:-1])
    wanted = {n: v for n, v in (os.environ | env).items() if not n.startswith("RUNNERD_")}
    assert found == wanted


def test_runnerctl_sees_its_callers_environment(bundle: Path, start_daemon: Daemons) -> None:
    """`run --env NAME` takes a value from it, also of a name that the launcher puts aside."""
    daemon = start_daemon(program=[str(bundle / "bin" / "runnerd")], env={"LANG": "C"})
    runnerctl = str(bundle / "bin" / "runnerctl")
    words = [runnerctl, "--socket", daemon.socket_path, "run", "--env", "LANG"]
    done = subprocess.run(
        [*words, "--", "/usr/bin/env"], env={"LANG": "tlh"}, capture_output=True, check=True
    )
    assert b"LANG=tlh\n" in done.stdout


def test_what_was_put_aside_is_given_back() -> None:
    environ = {
        b"A": b"1",
        b"RUNNERD_IMAGE_LC_ALL": b"tlh",
        b"RUNNERD_IMAGE_LD_PRELOAD": b"",
        b"RUNNERD_SOCKET": b"/s",
        b"LC_ALL": b"C",
        b"OPENSSL_CONF": b"/dev/null",
    }
    entry.give_back(environ)
    assert environ == {b"A": b"1", b"LC_ALL": b"tlh", b"LD_PRELOAD": b"", b"RUNNERD_SOCKET": b"/s"}


def test_a_root_without_dev_null_is_said(bundle: Path) -> None:
    needs.root()
    needs.program("unshare")
    script = 'mount -t tmpfs none /dev && exec "$0" serve --socket /dev/s/s'
    words = ["unshare", "--mount", "sh", "-c", script, str(bundle / "bin" / "runnerd")]
    done = subprocess.run(
        words, stdin=subprocess.DEVNULL, capture_output=True, check=False, timeout=60
    )
    said = b"runnerd: cannot open /dev/null: No such file or directory\n"
    assert (done.returncode, done.stdout, done.stderr) == (78, b"", said)


# --- How it is made --------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("words", "code"), [([], 64), (["--help"], 0), (["a", "b"], 64), (["--out=x"], 64), ([""], 64)]
)
def test_build_says_how_it_is_used(words: list[str], code: int) -> None:
    done = subprocess.run(
        [REPOSITORY / "image" / "build", *words], capture_output=True, check=False, timeout=60
    )
    assert (done.returncode, done.stdout) == (code, b"")
    assert b"image/build OUT_DIR" in done.stderr


def make(out: Path, **env: str) -> subprocess.CompletedProcess[bytes]:
    return subprocess.run(
        [sys.executable, "-m", "image.bundle", str(out)],
        env={**os.environ, **env},
        cwd=REPOSITORY,
        capture_output=True,
        check=False,
        timeout=60,
    )


def test_a_folder_that_is_no_bundle_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "home").mkdir()
    (tmp_path / "home" / "mine").touch()
    done = make(tmp_path / "home")
    assert (done.returncode, done.stdout) == (1, b"")
    assert b"home is there and is no bundle" in done.stderr
    assert [path.name for path in tmp_path.rglob("*")] == ["home", "mine"]


def test_it_is_made_for_no_other_machine(tmp_path: Path) -> None:
    """The Python that it copies is this machine's."""
    other = "aarch64" if os.uname().machine == "x86_64" else "x86_64"
    done = make(tmp_path / "b", RUNNERD_BUILD_TARGET=other)
    assert done.returncode == 1
    assert b"whose Python it copies" in done.stderr
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("place", "text"),
    [
        ("file/b", "Not a directory"),
        ("read-only/b", "Read-only file system"),
        ("n" * 255, "File name too long"),
    ],
)
def test_a_place_where_nothing_can_be_made_is_said(tmp_path: Path, place: str, text: str) -> None:
    (tmp_path / "file").touch()
    (tmp_path / "read-only").symlink_to("/sys")  # mounted so, or one where nothing can be made
    done = make(tmp_path / place)
    assert (done.returncode, done.stdout) == (1, b"")
    assert done.stderr.startswith(b"image/build: cannot make /"), done.stderr
    assert text in done.stderr.decode() or place.startswith("read-only")
    assert done.stderr.count(b"\n") == 1
    assert {path.name for path in tmp_path.iterdir()} == {"file", "read-only"}


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_build_that_is_interrupted_leaves_nothing(tmp_path: Path, number: int) -> None:
    """Ctrl-C, which reaches the whole group, and a TERM or HUP to it; while it compiles."""
    process = subprocess.Popen(
        [sys.executable, "-m", "image.bundle", str(tmp_path / "b")],
        cwd=REPOSITORY,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        start_new_session=True,
        preexec_fn=with_default_signals,  # noqa: PLW1509  # no threads here
    )
    try:
        wait_for(lambda: list(tmp_path.glob(".b.*/lib/python*/*")))
        os.killpg(process.pid, number) if number == signal.SIGINT else process.send_signal(number)
        said = process.communicate(timeout=60)
    finally:
        process.kill()
    assert process.returncode == 128 + number
    assert said == (b"", b"image/build: interrupted\n")
    assert not list(tmp_path.iterdir())


STRUCK: Final = """
import os, pathlib, signal, sys
from image import bundle

after, renames, rename = int(sys.argv[1]), 0, pathlib.Path.rename

def struck(self, target):
    global renames
    rename(self, target)
    renames += 1
    if renames == after:
        os.kill(os.getpid(), signal.SIGTERM)

pathlib.Path.rename = struck
bundle.fill = lambda out: (out / "share").mkdir(parents=True)
sys.argv[1:] = sys.argv[2:]
sys.exit(bundle.main())
"""


@pytest.mark.parametrize(("after", "is_the_old_one"), [(1, True), (2, False)])
def test_a_build_that_is_interrupted_as_it_takes_its_place_leaves_one_bundle(
    tmp_path: Path, after: int, *, is_the_old_one: bool
) -> None:
    """Between the two renames nothing is in the place: what was before comes back to it."""
    contents = tmp_path / "b" / "share" / "contents.json"
    contents.parent.mkdir(parents=True)
    contents.touch()
    done = subprocess.run(
        [sys.executable, "-c", STRUCK, str(after), str(tmp_path / "b")],
        cwd=REPOSITORY,
        capture_output=True,
        check=False,
        preexec_fn=with_default_signals,
        timeout=60,
    )
    assert (done.returncode, done.stderr) == (143, b"image/build: interrupted\n")
    assert [path.name for path in tmp_path.iterdir()] == ["b"]
    assert contents.exists() == is_the_old_one


def test_a_build_through_a_link_is_made_where_it_leads(bundle: Path, tmp_path: Path) -> None:
    """Anew in the place of the bundle that is there."""
    (tmp_path / "to" / "share").mkdir(parents=True)
    shutil.copy(bundle / "share" / "contents.json", tmp_path / "to" / "share")
    (tmp_path / "b").symlink_to("to")
    done = make(tmp_path / "b")
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "b").is_symlink()
    assert (tmp_path / "to" / "bin" / "runnerd").is_file()
    assert {path.name for path in tmp_path.iterdir()} == {"b", "to"}
