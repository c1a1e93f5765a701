"""The sandbox of image/examples in a real engine: its image, its Compose file, its spawner."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import pytest
import yaml

from runnerd.client.blocking import connect
from tests.bundles import built_bundle
from tests.harness import REPOSITORY, wait_for

if TYPE_CHECKING:
    from .engine import Engine

EXAMPLES: Final = REPOSITORY / "image" / "examples"
TINI: Final = ["/opt/runnerd/bin/tini", "--version"]
SERVICES: Final = yaml.safe_load((EXAMPLES / "compose.yaml").read_text())["services"]

# Compose's words and the engine's; those with one value, and those with a list.
ONE: Final = {
    "user": "--user",
    "mem_limit": "--memory",
    "memswap_limit": "--memory-swap",
    "oom_score_adj": "--oom-score-adj",
    "pids_limit": "--pids-limit",
}
LIST: Final = {
    "cap_drop": "--cap-drop",
    "cap_add": "--cap-add",
    "security_opt": "--security-opt",
    "tmpfs": "--tmpfs",
}
NOT_RUN: Final = {
    "build",
    "image",
    "command",
    "read_only",
    "volumes",
    "stop_grace_period",
    "restart",
}


@pytest.fixture(scope="module")
def sandbox(engine: Engine) -> str:
    """The example's image on an empty base, from the bundle as image/Dockerfile has it."""
    words = ["tar", "-c", "-C", str(built_bundle()), "--transform", "s,^[.],opt/runnerd,", "."]
    with subprocess.Popen(words, stdout=subprocess.PIPE) as packed:
        imported = [engine.program, "import", "-", "runnerd-bundle"]
        subprocess.run(imported, stdin=packed.stdout, env=engine.environment, check=True)
    engine.docker("build", "--build-arg", "BASE=scratch", "--tag", "sandbox", str(EXAMPLES))
    return "sandbox"


@pytest.fixture
def running(
    engine: Engine, sandbox: str, request: pytest.FixtureRequest
) -> Iterator[tuple[str, Path]]:
    """A service of the Compose file, named by the parameter: its container, its folder."""
    service: dict[str, Any] = SERVICES[request.param]
    uid = int(service.get("user", "0").partition(":")[0])
    folder = engine.home / "run" / request.param
    folder.mkdir(parents=True)
    folder.chmod(0o700)
    os.chown(folder, uid, uid)
    options = [
        word
        for key, option in ONE.items()
        if key in service
        for word in (option, str(service[key]))
    ]
    options += [
        word
        for key, option in LIST.items()
        for value in service.get(key, [])
        for word in (option, value)
    ]
    assert set(service) <= {*ONE, *LIST, *NOT_RUN}
    assert service["read_only"] is True
    name = f"rd-{os.getpid()}-{request.param}"
    engine.docker(
        *("run", "--detach", "--name", name, "--network", "none", "--read-only", *options),
        *("--volume", f"{folder}:/run/runnerd", "--health-interval", "1s"),
        *(sandbox, *service.get("command", [])),
    )
    yield name, folder
    engine.docker("rm", "--force", "--volumes", name)


def state(engine: Engine, name: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(
        engine.docker("inspect", "--format", "{{json .State}}", name)
    )
    return found


@pytest.mark.parametrize("running", sorted(SERVICES), indirect=True)
def test_a_service_of_the_compose_file_runs(engine: Engine, running: tuple[str, Path]) -> None:
    """It gets healthy, its memory is protected, it runs a command, and it stops with 0."""
    name, folder = running
    wait_for(lambda: state(engine, name)["Health"]["Status"] == "healthy", 30)
    with connect(folder / "runnerd.sock") as client:
        assert client.run(TINI).stdout.startswith(b"tini version")
        info = client.info()
        assert info.oom_order.verdict == "protected"
        assert not info.warnings
    engine.docker("stop", name)
    ended = state(engine, name)
    assert (ended["ExitCode"], ended["OOMKilled"]) == (0, False)


def test_the_spawner_spawns_a_container(engine: Engine, sandbox: str) -> None:
    launch = [engine.program, "run", "--rm", "--network", "none", "-v", "{}:/run/runnerd", sandbox]
    done = subprocess.run(
        [sys.executable, str(EXAMPLES / "spawner.py"), *launch, "--", *TINI],
        env={**engine.environment, "PYTHONPATH": str(REPOSITORY)},
        capture_output=True,
        check=False,
        timeout=60,
    )
    assert (done.returncode, done.stdout[:12]) == (0, b"tini version"), done.stderr
    wait_for(lambda: not engine.groups(), 10)
