"""A list that is too long for one message comes in pages, and none is lost between them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from tests.raw import RawClient

if TYPE_CHECKING:
    from collections.abc import Callable

    from tests.harness import RunnerdProcess

COUNT = 90
LABELS = {f"{n:02d}" + "\1" * 61: "\1" * 256 for n in range(32)}  # six bytes each in JSON


def test_execs_with_much_to_show_make_shorter_pages(
    start_daemon: Callable[..., RunnerdProcess],
) -> None:
    """Else an answer of a legal size for each of them would be over what a connection may hold."""
    daemon = start_daemon("--outgoing-bytes-max", str(4 * 1024 * 1024))
    with RawClient(daemon.socket_path) as client:
        for n in range(COUNT):
            client.call("exec.start", exec_id=f"e{n}", argv=["true", "x" * 3900], labels=LABELS)
        pages: list[list[dict[str, Any]]] = []
        cursor: int | None = 0
        while cursor is not None:
            answer = client.call("exec.list", limit=1000, cursor=cursor)
            pages.append(answer["execs"])
            cursor = answer["next_cursor"]
    assert len(pages) > 1
    assert [info["exec_id"] for page in pages for info in page] == [f"e{n}" for n in range(COUNT)]


def test_one_exec_at_a_time_is_always_shown(runnerd_daemon: RunnerdProcess) -> None:
    with RawClient(runnerd_daemon.socket_path) as client:
        client.call("exec.start", exec_id="a", argv=["true"])
        client.call("exec.start", exec_id="b", argv=["true"])
        first = client.call("exec.list", limit=1)
        second = client.call("exec.list", limit=1, cursor=first["next_cursor"])
    assert [info["exec_id"] for info in first["execs"] + second["execs"]] == ["a", "b"]
    assert second["next_cursor"] is None
