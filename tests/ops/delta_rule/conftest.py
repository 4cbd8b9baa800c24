"""A card that problems for tests do not fill: time is cut in parts, unless heads are many."""

import pytest

from tjk.ops.delta_rule import tiles


@pytest.fixture(autouse=True, scope="session")
def small_card():
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tiles, "multiprocessors", lambda: 2)
        yield
