"""A card so small that a problem for tests has several chunks in a part of time."""

import pytest

from tjk.ops.delta_rule import tiles


@pytest.fixture(autouse=True, scope="session")
def small_card():
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tiles, "multiprocessors", lambda: 1)
        yield
