import threading

import pytest


@pytest.fixture(autouse=True)
def nothing_left_behind():
    yield
    assert not [t for t in threading.enumerate() if t.name.startswith("gcnzc-loader")]
