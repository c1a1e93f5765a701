"""A spawner in forty lines: start a sandbox, run a command in it, tell its ends apart.

    python spawner.py docker run --rm -v {}:/run/runnerd sandbox -- sh -c 'echo hello; exit 3'

{} is where the sandbox is to put its socket. Exits as the command did; 70 where the sandbox ended,
125 where it refused the command, 64 without one.
"""

import subprocess
import sys
import tempfile
import time

from runnerd.client.blocking import Client, connect
from runnerd.client.errors import ConnectFailed, RemoteError, StreamLost
from runnerd.protocol.notes import GapNote


def when_ready(socket: str, sandbox: subprocess.Popen[bytes]) -> Client:
    deadline_s = time.monotonic() + 30
    while True:
        try:
            return connect(socket, client="spawner", fence=1)
        except ConnectFailed:
            if sandbox.poll() is not None or time.monotonic() > deadline_s:
                raise
            time.sleep(0.02)


def main(launch: list[str], command: list[str]) -> int:
    with tempfile.TemporaryDirectory(prefix="sandbox-") as folder:
        sandbox = subprocess.Popen([word.replace("{}", folder) for word in launch])
        try:
            with when_ready(f"{folder}/runnerd.sock", sandbox) as client:
                work = client.start(command, deadline_s=600)
                for note in work.output():
                    if isinstance(note, GapNote):
                        print(f"{note} was not kept", file=sys.stderr)
                    else:
                        stream = sys.stdout if note.stream == "stdout" else sys.stderr
                        stream.buffer.write(note.data)
                        stream.flush()
                ended = work.wait()
                print(f"ended by {ended.reason}, oom: {ended.oom}", file=sys.stderr)
                return ended.code if ended.code is not None else 128 + (ended.signal or 0)
        except RemoteError as error:
            print(f"refused: {error}", file=sys.stderr)
            return 125
        except (ConnectFailed, StreamLost):
            print(f"the sandbox ended: {sandbox.wait(10)}", file=sys.stderr)
            return 70
        finally:
            sandbox.terminate()  # runnerd ends every command, and itself, within 2 s
            sandbox.wait()


if __name__ == "__main__":
    at = sys.argv.index("--") if "--" in sys.argv else 0
    if not sys.argv[1:at] or not sys.argv[at + 1 :]:
        print(__doc__, file=sys.stderr)
        sys.exit(64)
    sys.exit(main(sys.argv[1:at], sys.argv[at + 1 :]))
