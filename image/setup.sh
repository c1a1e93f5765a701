# shellcheck shell=bash
# The set-up that tests/run, image/try and .ci/run share: a Python that is new enough, and runnerd
# installed in an environment of its own (.venv). Sourced, never run. The caller sets SETUP_NAME
# (what to call itself in a message); afterwards $SETUP_ROOT and $SETUP_VENV are set.
#
# It writes nothing outside the checkout (but for pip's own cache) and installs nothing in the
# system. Where something is missing it says the one command that mends it, and exits 1.
# Everything up to the check for Linux must also parse in bash 3.2, the one of macOS.

SETUP_ROOT=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd -P)
SETUP_VENV=$SETUP_ROOT/.venv
# Where ziglang has to stand in for cc, it first compiles a libc, for up to a minute, into a cache:
# here, so that it is kept, and is not in the home.
export ZIG_GLOBAL_CACHE_DIR=${ZIG_GLOBAL_CACHE_DIR:-$SETUP_VENV/zig}
SETUP_PYTHON_MIN=3.11
SETUP_PYTHONS="python3.13 python3.12 python3.11 python3"

# To stderr: stdout belongs to what comes after, such as the user's own command.
setup_say() { printf '%s: %s\n' "$SETUP_NAME" "$*" >&2; }

# What is wrong, the one command that mends it, and the end.
setup_mend() {
    setup_say "$1"
    printf 'This one command mends it:\n\n    %s\n\n' "$2" >&2
    exit 1
}

setup_as_root() {
    if [ "$(id -u)" = 0 ]; then
        printf '%s' "$1"
    elif command -v sudo >/dev/null; then
        printf "sudo sh -c '%s'" "$1"
    else
        printf "su -c '%s'" "$1"
    fi
}

setup_need_linux() {
    [ "$(uname -s)" = Linux ] && return
    setup_mend "runnerd needs Linux, and this is $(uname -s)." \
        "docker run --rm -v '$SETUP_ROOT:/runnerd' python:3.13 /runnerd/$SETUP_NAME"
}

# Prints "MAJOR.MINOR.MICRO yes|no PATH" for an interpreter that runs: yes where its venv works.
# The path is the real one: through a version manager's shim each start would cost ten times as
# much, and from inside an environment (perhaps our own .venv) it is the one below it.
setup_ask_python() {
    "$1" -I -c '
import importlib.util, os, sys
if sys.implementation.name != "cpython":
    sys.exit(1)
real = getattr(sys, "_base_executable", None) or sys.executable
venv = all(importlib.util.find_spec(name) for name in ("venv", "ensurepip"))
print("%d.%d.%d" % sys.version_info[:3], "yes" if venv else "no", os.path.realpath(real))
' 2>/dev/null
}

# Is VERSION at least SETUP_PYTHON_MIN?
setup_is_new_enough() {
    local major=${1%%.*} rest=${1#*.}
    [ "$((major * 1000 + ${rest%%.*}))" -ge \
        "$((${SETUP_PYTHON_MIN%%.*} * 1000 + ${SETUP_PYTHON_MIN#*.}))" ]
}

# The command that brings a new enough Python to this distribution.
setup_python_command() {
    local ID='' VERSION_ID=''
    # shellcheck disable=SC1091
    if [ -r /etc/os-release ]; then . /etc/os-release; fi
    case $ID:$VERSION_ID in
    debian:[1-9] | debian:10* | debian:11* | ubuntu:1* | ubuntu:20*) ;; # theirs are all too old
    ubuntu:22*)
        setup_as_root "apt-get update && apt-get install -y python3.11 python3.11-venv"
        return
        ;;
    *)
        if command -v apt-get >/dev/null; then
            setup_as_root "apt-get update && apt-get install -y python3 python3-venv"
            return
        elif command -v dnf >/dev/null; then
            setup_as_root "dnf install -y python3.12"
            return
        elif command -v apk >/dev/null; then
            setup_as_root "apk add python3"
            return
        elif command -v pacman >/dev/null; then
            setup_as_root "pacman -S --noconfirm python"
            return
        elif command -v zypper >/dev/null; then
            setup_as_root "zypper install -y python312"
            return
        fi
        ;;
    esac
    if command -v uv >/dev/null; then
        printf 'uv python install 3.13'
    else
        printf 'curl -LsSf https://astral.sh/uv/install.sh | sh -s && ~/.local/bin/uv python install 3.13'
    fi
}

# Sets setup_python (a real path), setup_python_version and setup_python_venv (yes or no).
# The first that can make an environment wins; $PYTHON, where given, is the only candidate.
setup_find_python() {
    local name path answer version venv real newest='' newest_path=''
    setup_python=''
    while read -r path; do
        answer=$(setup_ask_python "$path") || continue
        read -r version venv real <<<"$answer"
        if ! setup_is_new_enough "$version"; then
            if [ -z "$newest" ]; then newest=$version newest_path=$path; fi
            continue
        fi
        if [ -z "$setup_python" ] || [ "$venv" = yes ]; then
            setup_python=$real setup_python_version=$version setup_python_venv=$venv
        fi
        if [ "$venv" = yes ]; then break; fi
    done < <(
        if [ -n "${PYTHON:-}" ]; then
            printf '%s\n' "$PYTHON"
        else
            for name in $SETUP_PYTHONS; do type -aP "$name" || :; done
            if command -v uv >/dev/null; then uv python find ">=$SETUP_PYTHON_MIN" 2>/dev/null || :; fi
        fi
    )
    [ -z "$setup_python" ] || return 0
    if [ -n "${PYTHON:-}" ]; then
        setup_mend "PYTHON=$PYTHON is ${newest:-no working CPython}; $SETUP_PYTHON_MIN or newer is needed." \
            "unset PYTHON"
    elif [ -n "$newest" ]; then
        setup_mend "Python $SETUP_PYTHON_MIN or newer is needed; the one here is $newest ($newest_path)." \
            "$(setup_python_command)"
    else
        setup_mend "Python $SETUP_PYTHON_MIN or newer is needed, and none is here." "$(setup_python_command)"
    fi
}

# Makes .venv anew, by whichever tool is here.
setup_make_venv() {
    setup_find_python
    local maker
    if [ "$setup_python_venv" = yes ]; then
        maker=("$setup_python" -m venv)
    elif "$setup_python" -m virtualenv --version >/dev/null 2>&1; then
        maker=("$setup_python" -m virtualenv --quiet)
    elif command -v virtualenv >/dev/null; then
        maker=(virtualenv --quiet --python "$setup_python")
    elif command -v uv >/dev/null; then
        maker=(uv venv --quiet --seed --python "$setup_python")
    else
        setup_mend "Python $setup_python_version ($setup_python) cannot make an environment: it has no ensurepip." \
            "$(setup_venv_command)"
    fi
    setup_say "making $SETUP_VENV with Python $setup_python_version ($setup_python)"
    rm -rf "$SETUP_VENV"
    "${maker[@]}" "$SETUP_VENV"
}

# The command that brings setup_python its venv: where its ensurepip was taken out, it is Debian's.
setup_venv_command() {
    local short=${setup_python_version%.*} package=python3-venv
    if [ "$(readlink -f /usr/bin/python3)" != "$setup_python" ]; then package=python$short-venv; fi
    if command -v apt-get >/dev/null; then
        setup_as_root "apt-get update && apt-get install -y $package"
    else
        printf '%s -m pip install --user virtualenv' "$setup_python"
    fi
}

# What an installation depends on: while this is the same, .venv is used as it is.
setup_fingerprint() {
    (
        shopt -s nullglob
        cd "$SETUP_ROOT" && cat pyproject.toml image/setup.sh shim/*.[chS] shim/*.py | sha256sum
    ) | cut -d' ' -f1
}

# setup_is_ready LEVEL: nothing to do?
setup_is_ready() {
    [ "$(cat "$SETUP_VENV/made-for" 2>/dev/null)" = "$SETUP_ROOT ${PYTHON:-}" ] &&
        "$SETUP_VENV/bin/python" -c '' 2>/dev/null || return 1
    [ "$(cat "$SETUP_VENV/installed-$1" 2>/dev/null)" = "$(setup_fingerprint)" ] &&
        [ -n "$(find "$SETUP_ROOT/runnerd/_native" -type f -perm -100 -print -quit)" ]
}

# What `pip install` is given for a level, one a line. pip reads dependency groups itself only
# since 25.1, and Debian 12 has 23.0.
setup_requirements() {
    "$SETUP_VENV/bin/python" -I - "$SETUP_ROOT" "$1" <<'PYTHON'
import sys
import tomllib

root, level = sys.argv[1:]
with open(f"{root}/pyproject.toml", "rb") as file:
    settings = tomllib.load(file)
group = settings["dependency-groups"]["dev"] if level == "dev" else []
for line in settings["project"]["dependencies"] + group:
    if not isinstance(line, str):
        sys.exit(f"a dependency group within a group is not understood here: {line}")
    print(line)
PYTHON
}

setup_install() {
    local level=$1 requirements=() line
    while read -r line; do requirements+=("$line"); done < <(setup_requirements "$level")
    [ "${#requirements[@]}" -gt 0 ] || exit 1
    setup_say "installing runnerd (editable: it builds its C programs) and, from PyPI, into $SETUP_VENV:"
    setup_say "  ${requirements[*]}"
    rm -f "$SETUP_VENV"/installed-*
    # PIP_USER from someone's environment would send it all to their home.
    if ! PIP_USER=0 "$SETUP_VENV/bin/python" -m pip install -qq --disable-pip-version-check \
        --no-input --no-warn-script-location -e "$SETUP_ROOT" "${requirements[@]}" >&2; then
        setup_say "pip could not install; what it said is above. Nothing is half done: run this again."
        exit 1
    fi
    setup_fingerprint >"$SETUP_VENV/installed-run"
    if [ "$level" = dev ]; then setup_fingerprint >"$SETUP_VENV/installed-dev"; fi
}

setup_need_writable() {
    [ -w "$SETUP_ROOT" ] && { [ ! -e "$SETUP_VENV" ] || [ -w "$SETUP_VENV" ]; } && return
    setup_mend "$SETUP_ROOT is not yours to write, and its environment and C programs are made there." \
        "cp -R '$SETUP_ROOT' ~/runnerd-copy && ~/runnerd-copy/$SETUP_NAME"
}

# setup_environment run|dev: .venv with runnerd and what it needs; dev adds the tools and tests.
setup_environment() {
    local began=$SECONDS
    setup_need_linux
    unset PYTHONPATH PYTHONHOME # someone else's modules are not what is tried here
    if setup_is_ready "$1"; then return; fi
    setup_need_writable
    # One set-up at a time: two would install into each other.
    if command -v flock >/dev/null; then
        exec 9<"$SETUP_ROOT"
        flock --nonblock 9 || { setup_say "waiting for another set-up of this checkout" && flock 9; }
    fi
    if ! setup_is_ready "$1"; then
        if [ "$(cat "$SETUP_VENV/made-for" 2>/dev/null)" != "$SETUP_ROOT ${PYTHON:-}" ] ||
            ! "$SETUP_VENV/bin/python" -c '' 2>/dev/null; then
            setup_make_venv
            printf '%s\n' "$SETUP_ROOT ${PYTHON:-}" >"$SETUP_VENV/made-for"
        fi
        setup_install "$1"
        setup_say "set up in $((SECONDS - began)) s; kept in $SETUP_VENV for the next time"
    fi
    if command -v flock >/dev/null; then exec 9<&-; fi
}
