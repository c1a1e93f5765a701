"""What crosses the socket and the shim's control socket: messages, framing, errors. No I/O."""

import sys

# msgspec takes its type hints from typing_extensions where that happens to be installed, and
# from typing otherwise; on our Pythons they are the same. typing_extensions loads inspect, dis
# and ast: an eighth of all of runnerctl's own time, and a twentieth of the daemon's way to ready.
if "typing_extensions" not in sys.modules:
    sys.modules["typing_extensions"] = None  # type: ignore[assignment]
    import msgspec  # noqa: F401

    del sys.modules["typing_extensions"]
