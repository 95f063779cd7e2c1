from pathlib import Path

import numpy as np
import pytest
import torch

from gcnzc.datasets import pickled


def test_other_unpicklers_are_not_affected(tmp_path):
    torch.save(np.arange(3), tmp_path / "a.pt")
    # torch keeps them in no order
    before = set(torch.serialization.get_safe_globals())
    pickled.load(tmp_path / "a.pt")
    assert set(torch.serialization.get_safe_globals()) == before
    # nor for us, when it fails
    (tmp_path / "a.pt").write_bytes(b"words")
    with pytest.raises(ValueError, match=r"a.pt cannot be read as numbers: .*\n\nhint: "):
        pickled.load(tmp_path / "a.pt")
    assert set(torch.serialization.get_safe_globals()) == before


class Harmful:
    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return (Path.touch, (self.path,))


@pytest.mark.parametrize("wrap", [lambda x: x, lambda x: [x], lambda x: {"train": x}])
def test_pickled_code_is_not_run(tmp_path, wrap):
    torch.save(wrap(Harmful(tmp_path / "was here")), tmp_path / "a.pt")
    with pytest.raises(ValueError, match="as numbers: it has other objects than tensors"):
        pickled.load(tmp_path / "a.pt")
    assert not (tmp_path / "was here").exists()
