"""The figures use the daemon tests' fixtures."""

from tests.daemon.conftest import runnerd_daemon, start_daemon

__all__ = ["runnerd_daemon", "start_daemon"]
