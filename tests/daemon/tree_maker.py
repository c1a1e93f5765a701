"""A command that becomes a tree of processes: `python -SE tree_maker.py MARK PLAN`.

PLAN names each process by its traits, its children behind it in parentheses: `r(s()i(t()))`.

    r  nothing special              t  stops itself
    s  leads a session of its own   i  ignores TERM
    g  leads a group of its own     f  forks and leaves, again and again, for as long as it lives
    d  left by its parent, which has ended: a double fork

Each writes one byte to standard output when it is set up. All have MARK among their arguments.
Nothing is imported that a tree of ten would pay for ten times.
"""

import os
import signal
import sys


def build(plan: str) -> None:
    """Become the process the plan begins with; does not return."""
    traits, _, rest = plan.partition("(")
    if "s" in traits:
        os.setsid()
    if "g" in traits:
        os.setpgid(0, 0)
    if "i" in traits:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    for child in children(rest):
        start(child)
    os.write(1, b".")
    if "f" in traits:
        run_away()
    while True:
        if "t" in traits:
            os.kill(os.getpid(), signal.SIGSTOP)
        else:
            signal.pause()


def children(rest: str) -> list[str]:
    """Cut the children's plans apart; `rest` lacks the opening parenthesis."""
    found, depth, begin = [], 0, 0
    for at, char in enumerate(rest):
        depth += {"(": 1, ")": -1}.get(char, 0)
        if depth < 0:
            break
        if char == ")" and depth == 0:
            found.append(rest[begin : at + 1])
            begin = at + 1
    return found


def start(plan: str) -> None:
    """Fork a child, or a grandchild whose parent is gone."""
    if os.fork():
        if "d" in plan.partition("(")[0]:
            os.wait()
        return
    if "d" in plan.partition("(")[0] and os.fork():
        os._exit(0)
    build(plan)


def run_away() -> None:
    """Be another process every few milliseconds: whoever reads a list finds us gone."""
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    while True:
        if os.fork():
            os._exit(0)
        signal.setitimer(signal.ITIMER_REAL, 0.002)
        signal.sigwait([signal.SIGALRM])


if __name__ == "__main__":
    # The kernel sends one to a group with a stopped member when nobody of its session is left
    # above it, which a double fork can do to a tree that is not yet there.
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGALRM])
    build(sys.argv[2])
