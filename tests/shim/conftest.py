from __future__ import annotations

import contextlib
import ctypes
import os
import shlex
import shutil
import subprocess
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

import pytest

from shim import build_hook
from tests.shim.harness import Shim, shim_of, wait_until
from tests.shim.needs import need, need_pids_cgroup, need_program

HERE = Path(__file__).resolve().parent
SHIM_DIR = HERE.parent.parent / "shim"

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

SOURCE = SHIM_DIR / "runnerd_shim.c"


class Start(Protocol):
    """Starts shims that are ended with the test."""

    def __call__(
        self,
        program: Path | None = None,
        *,
        env: Mapping[str, str] | None = None,
        prepare: Callable[[], object] | None = None,
    ) -> Shim: ...


class Mutant(Protocol):
    """Builds the shim with one text of its source replaced: the twin that must fail."""

    def __call__(self, old: str, new: str) -> Path: ...


@pytest.fixture(scope="session")
def native(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path, Path]:
    """Shim, guard, spool library; $RUNNERD_TEST_CC names another compiler to test what it makes."""
    cc = shlex.split(os.environ.get("RUNNERD_TEST_CC", ""))
    if not cc:
        return build_hook.build(build_hook.NATIVE_DIR)
    directory = tmp_path_factory.mktemp("native")
    for parent in (directory, directory.parent):  # some shims run as another user
        parent.chmod(0o755)
    return build_hook.build(directory, cc=cc)


@pytest.fixture(scope="session")
def shim_program(native: tuple[Path, Path, Path]) -> Path:
    return native[0]


@pytest.fixture(scope="session")
def guard_object(native: tuple[Path, Path, Path]) -> Path:
    return native[1]


@pytest.fixture
def start(shim_program: Path) -> Iterator[Start]:
    with contextlib.ExitStack() as stack:

        def start_one(
            program: Path | None = None,
            *,
            env: Mapping[str, str] | None = None,
            prepare: Callable[[], object] | None = None,
        ) -> Shim:
            return stack.enter_context(shim_of(program or shim_program, env=env, prepare=prepare))

        yield start_one


@pytest.fixture
def shim(start: Start) -> Shim:
    return start()


@pytest.fixture(scope="session")
def compile_c() -> Callable[..., None]:
    """Compile C for a test with the system's compiler; skips where there is none."""

    def compile_one(source: Path, result: Path, *flags: str) -> None:
        command = [need_program("cc"), "-std=gnu11", "-Wall", "-O1", *flags, "-o", str(result)]
        subprocess.run([*command, str(source)], check=True)

    return compile_one


@pytest.fixture
def mutant(compile_c: Callable[..., None]) -> Iterator[Mutant]:
    directory = Path(tempfile.mkdtemp(prefix="rd-mutant-"))  # pytest's own lets no other user in
    directory.chmod(0o755)

    def build_mutant(old: str, new: str) -> Path:
        found = 0
        for path in SHIM_DIR.glob("*.[ch]"):
            text = path.read_text(encoding="utf-8")
            found += text.count(old)
            (directory / path.name).write_text(text.replace(old, new), encoding="utf-8")
        assert found == 1, f"{old!r} must stand in the sources exactly once"
        source = directory / SOURCE.name
        compile_c(source, directory / "mutant", "-Wno-unused")
        return directory / "mutant"

    yield build_mutant
    shutil.rmtree(directory)


@pytest.fixture(scope="session")
def members(tmp_path_factory: pytest.TempPathFactory, compile_c: Callable[..., None]) -> Path:
    """The directory of the C programs that behave badly on purpose."""
    out = tmp_path_factory.mktemp("members")
    for source in (HERE / "fixtures").glob("*.c"):
        compile_c(source, out / source.stem)
    return out


@pytest.fixture(scope="session")
def valgrind() -> str:
    return need_program("valgrind")


@pytest.fixture(scope="session")
def sanitized(tmp_path_factory: pytest.TempPathFactory) -> Path:
    cc = shutil.which("cc")
    need(cc, "cc with its sanitizers")
    out = tmp_path_factory.mktemp("sanitized")
    return build_hook.build(out, cc=[str(cc)], mode="sanitize")[0]


@pytest.fixture(scope="session")
def debug(tmp_path_factory: pytest.TempPathFactory) -> Path:
    cc = shutil.which("cc")
    need(cc, "cc")
    return build_hook.build(tmp_path_factory.mktemp("debug"), cc=[str(cc)], mode="debug")[0]


@pytest.fixture
def pids_group() -> Iterator[Path]:
    group = need_pids_cgroup() / f"rd-shim-full-{os.getpid()}"
    group.mkdir()
    yield group
    wait_until(lambda: not (group / "cgroup.procs").read_text(), "an empty cgroup")
    group.rmdir()


@pytest.fixture(autouse=True)
def no_descriptor_leaks() -> Iterator[None]:
    before = set(Path("/proc/self/fd").iterdir())
    yield
    # One more, for the listing itself may get another number.
    assert len(set(Path("/proc/self/fd").iterdir()) - before) <= 1


@pytest.fixture(scope="session", autouse=True)
def adopt_orphans() -> None:
    """Be the parent of what a test leaves: some machines' PID 1 reaps only every two seconds."""
    pr_set_child_subreaper = 36
    assert ctypes.CDLL(None).prctl(pr_set_child_subreaper, 1, 0, 0, 0) == 0
