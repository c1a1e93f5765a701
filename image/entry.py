"""Where the bundle's private Python begins: give the image's environment back, then go on.

shim/bundle_launcher.c put aside, as RUNNERD_IMAGE_*, what the image says to loaders and libcs.
`posix.environ` is what `os.environ` is made from when `os` is imported: changed before that, the
daemon and its commands see the image's environment, and the private libc still does not.
"""

import posix
import sys

_ASIDE = b"RUNNERD_IMAGE_"
_LAUNCHERS_OWN = (b"LC_ALL", b"OPENSSL_CONF")


def give_back(environ: dict[bytes, bytes]) -> None:
    """Undo, in place, what the launcher did to an environment."""
    for name in _LAUNCHERS_OWN:
        environ.pop(name, None)
    for name in [each for each in environ if each.startswith(_ASIDE)]:
        environ[name.removeprefix(_ASIDE)] = environ.pop(name)


def runnerd() -> None:
    """Be `runnerd`; does not return."""
    _begin()
    from runnerd.daemon.main import main

    main()


def runnerctl() -> None:
    """Be `runnerctl`; does not return."""
    _begin()
    from runnerd.ctl.main import script

    script()


def _begin() -> None:
    assert "os" not in sys.modules, "the environment was read before it was given back"
    give_back(posix.environ)
