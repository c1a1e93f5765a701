"""ARCHITECTURE.md's tour names every module there is, each once, and none that is not."""

from __future__ import annotations

import re
from collections import Counter

import pytest

from tests.harness import REPOSITORY

PAGE = (REPOSITORY / "runnerd/ARCHITECTURE.md").read_text()
TOUR = PAGE.split("## Where each thing is\n")[1]
LAYERS = ["protocol", "core", "daemon", "client", "ctl"]


@pytest.mark.parametrize("layer", LAYERS)
def test_the_tour_names_every_module_once(layer: str) -> None:
    begin = TOUR.index(f"`{layer}/`")
    end = TOUR.find("\n\n", begin)
    named = Counter(re.findall(r"`(\w+)`", TOUR[begin:end]))
    modules = {path.stem for path in (REPOSITORY / "runnerd" / layer).glob("[a-z]*.py")}
    assert set(named) == modules
    assert [name for name, count in named.items() if count > 1] == []
