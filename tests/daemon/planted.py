"""The real daemon with a fault planted in it: `python -m tests.daemon.planted serve ...`.

What PLANTED holds is run before main(). It replaces a function of the daemon's by one that fails,
so the daemon itself needs no hook for its tests.
"""

import os

from runnerd.daemon.main import main

exec(os.environ.pop("PLANTED"))
main()
