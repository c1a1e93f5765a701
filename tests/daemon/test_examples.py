"""What image/examples shows is valid, and what can run without an engine runs as it says."""

import json
import os
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import kubernetes_validate
import pytest
import yaml
from compose_spec import PyCompose

from runnerd.daemon.options import parse_options
from tests import needs
from tests.bare_root import BareRoot
from tests.harness import REPOSITORY, RUNNERD

EXAMPLES: Final = REPOSITORY / "image" / "examples"
KUBERNETES: Final = ("1.27", "1.31", kubernetes_validate.latest_version())
SPAWNER_LINES_MAX: Final = 40


def load(name: str) -> Any:
    return yaml.safe_load((EXAMPLES / name).read_text())


# --- The spawner -----------------------------------------------------------------------------


def spawn(*command: str, options: tuple[str, ...] = ()) -> subprocess.CompletedProcess[bytes]:
    launch = [*RUNNERD, "serve", "--socket", "{}/runnerd.sock", *options]
    words = [sys.executable, str(EXAMPLES / "spawner.py"), *launch, "--", *command]
    env = {**os.environ, "PYTHONPATH": str(REPOSITORY)}  # a spawner of its own has it installed
    return subprocess.run(words, env=env, capture_output=True, check=False, timeout=60)


def test_the_spawner_passes_on_what_the_command_prints_and_how_it_ends() -> None:
    done = spawn("sh", "-c", "echo out; echo err >&2; exit 3")
    assert (done.returncode, done.stdout) == (3, b"out\n"), done.stderr
    assert b"err\nended by exited, oom: " in done.stderr
    assert spawn("sh", "-c", "kill -USR1 $$").returncode == 128 + 10


def test_the_spawner_tells_the_end_of_the_sandbox_from_the_commands() -> None:
    """The command kills its shim's parent, which is the daemon."""
    done = spawn("sh", "-c", "read a b c d e </proc/$PPID/stat; kill -9 $d; exec sleep 60")
    assert done.returncode == 70
    assert b"the sandbox ended: -9\n" in done.stderr
    assert spawn("true", options=("--no-such-option",)).returncode == 70


def test_the_spawner_says_what_was_refused_and_how_it_is_used() -> None:
    done = spawn("no-such-program")
    assert (done.returncode, done.stdout) == (125, b"")
    assert b"refused: cannot execute 'no-such-program': no such program\n" in done.stderr
    usage = spawn()
    assert usage.returncode == 64
    assert b"python spawner.py docker run" in usage.stderr
    assert b"Traceback" not in done.stderr + usage.stderr


def test_the_spawner_is_as_short_as_it_says() -> None:
    lines = (EXAMPLES / "spawner.py").read_text().splitlines()
    code = lines[lines.index("def main(launch: list[str], command: list[str]) -> int:") :]
    assert len([line for line in code if line.strip()]) <= SPAWNER_LINES_MAX


# --- Compose ---------------------------------------------------------------------------------


def compose(document: Any) -> None:
    read = PyCompose.from_json(json.dumps(document))
    read.validate()
    read.to_spec()


def test_the_compose_file_is_valid() -> None:
    document = load("compose.yaml")
    compose(document)
    for service in document["services"].values():
        parse_options(["serve", *service.get("command", [])], {}, "/bin/true")
    document["services"]["one-user"]["cap_dorp"] = []
    with pytest.raises(ValueError, match="cap_dorp"):
        compose(document)


# --- Kubernetes ------------------------------------------------------------------------------


@pytest.mark.parametrize("version", KUBERNETES)
def test_the_pod_is_valid(version: str) -> None:
    pod = load("pod.yaml")
    kubernetes_validate.validate(pod, version, strict=True)
    pod["spec"]["containers"][0]["readinesProbe"] = {}
    with pytest.raises(kubernetes_validate.ValidationError):
        kubernetes_validate.validate(pod, version, strict=True)


@pytest.fixture
def pod_root(tmp_path: Path) -> Iterator[BareRoot]:
    """A root directory as the pod has it: one plain user, volumes that everybody may write."""
    needs.root()
    context = load("pod.yaml")["spec"]["securityContext"]
    made = BareRoot(tmp_path / "r", f"{context['runAsUser']}:{context['runAsGroup']}")
    for volume in load("pod.yaml")["spec"]["containers"][0]["volumeMounts"]:
        folder = Path(f"{made.path}{volume['mountPath']}")
        folder.mkdir(exist_ok=True)
        folder.chmod(0o777)
    yield made
    made.close()


def test_the_pods_daemon_and_probes_run_as_it_says(pod_root: BareRoot) -> None:
    (container,) = load("pod.yaml")["spec"]["containers"]
    env = {each["name"]: each["value"] for each in container["env"]}
    pod_root.serve(env=env)
    assert (pod_root.path / "run" / "state" / "last-words.json").exists()
    for probe in ("startupProbe", "livenessProbe", "readinessProbe"):
        done = pod_root.run_beside(*container[probe]["exec"]["command"], env=env)
        assert done.returncode == 0, (probe, done.stderr)
    before_stop = container["lifecycle"]["preStop"]["exec"]["command"]
    assert pod_root.run_beside(*before_stop, env=env).returncode == 0
    ready = pod_root.run_beside(*container["readinessProbe"]["exec"]["command"], env=env)
    assert ready.returncode == 1, "draining, and it is no longer ready"


# --- Dockerfiles -----------------------------------------------------------------------------


def instructions(path: Path) -> list[tuple[str, str]]:
    """Return the instructions of a Dockerfile, with what follows each in one line."""
    text = path.read_text().replace("\\\n", " ")
    lines = [line for line in text.splitlines() if line.strip() and not line.startswith("#")]
    return [(word, rest.strip()) for word, _, rest in (line.partition(" ") for line in lines)]


def test_the_example_image_asks_for_what_there_is() -> None:
    found = instructions(EXAMPLES / "Dockerfile")
    env = dict(
        word.split("=", 1) for name, rest in found if name == "ENV" for word in shlex.split(rest)
    )
    (entry,) = [json.loads(rest) for name, rest in found if name == "ENTRYPOINT"]
    options = parse_options(entry[entry.index("serve") :], env, "/bin/true")
    assert (options.socket, options.cwd) == ("/run/runnerd/runnerd.sock", "/workspace")
    assert not [name for name, _ in found if name == "RUN"], "a base may have no shell"


def test_the_bundles_image_holds_the_bundle_alone() -> None:
    last = instructions(REPOSITORY / "image" / "Dockerfile")[-2:]
    assert last == [("FROM", "scratch"), ("COPY", "--from=build /opt/runnerd /opt/runnerd")]
