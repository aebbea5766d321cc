"""The publisher keeps its promises on every store; every broken publisher is caught by a case."""

from __future__ import annotations

from pathlib import Path

import pytest

from stitch.publisher import Publisher
from stitch.stores import open_store
from stitch.testing.broken_publishers import BROKEN_PUBLISHERS
from stitch.testing.memory_store import Cells, MemoryStore
from stitch.testing.publisher_suite import PUBLISHER_CASES, PublisherCase

each_case = pytest.mark.parametrize("case", PUBLISHER_CASES, ids=lambda case: case.__name__)


@each_case
def test_on_a_local_store(case: PublisherCase, tmp_path: Path) -> None:
    case(Publisher, lambda: open_store(str(tmp_path)))


@each_case
def test_on_a_store_without_local_files(case: PublisherCase) -> None:
    cells = Cells()
    case(Publisher, lambda: MemoryStore(cells))


@pytest.mark.parametrize(
    ("broken", "case"),
    BROKEN_PUBLISHERS,
    ids=[broken.__name__ for broken, _ in BROKEN_PUBLISHERS],
)
def test_broken_publisher_is_caught_by_its_case(
    broken: type[Publisher], case: PublisherCase
) -> None:
    cells = Cells()
    with pytest.raises(AssertionError) as caught:
        case(broken, lambda: MemoryStore(cells))
    # Broken in what it promises, not in its code, which the suite reports in the same way.
    assert not isinstance(caught.value.__cause__, TypeError | AttributeError | LookupError)
