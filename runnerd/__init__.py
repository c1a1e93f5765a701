"""runnerd runs commands inside a sandbox, over a Unix socket, and tells the truth about them.

This package imports nothing: the daemon, the client and the command line each pay only for
what they use.
"""

__version__ = "0.1.0"
