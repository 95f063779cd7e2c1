"""A checkpoint is whole or missing, and one of another model is rejected with the reason."""

import os
import time
import zipfile

import pytest
import torch
from processes import FORKS

from gcnzc.train import checkpoint


def test_pickled_code_is_not_run(tmp_path):
    class Evil:
        def __reduce__(self):
            return os.system, ("touch broken",)

    checkpoint.save(tmp_path / "c.pt", {"x": Evil()})
    with pytest.raises(ValueError, match="it has other objects than tensors") as caught:
        checkpoint.load(tmp_path / "c.pt")
    # torch's message advises to unpickle it after all
    assert "weights_only" not in str(caught.value)
    assert "trust" not in str(caught.value)


def test_every_byte_is_covered_by_the_checksum(tmp_path):
    path = tmp_path / "c.pt"
    checkpoint.save(path, {"weights": torch.randn(40), "step": 7})
    whole = path.read_bytes()
    for place in range(0, len(whole), 3):
        damaged = bytearray(whole)
        damaged[place] ^= 1 << place % 8
        path.write_bytes(damaged)
        with pytest.raises(ValueError, match=r"damaged(.|\n)*hint: "):
            checkpoint.load(path)


def test_torch_reads_a_checkpoint(tmp_path):
    weights = torch.randn(40)
    checkpoint.save(tmp_path / "ours.pt", {"weights": weights})
    for state in (
        torch.load(tmp_path / "ours.pt", weights_only=True),
        torch.load(tmp_path / "ours.pt", weights_only=True, mmap=True),
        checkpoint.load(tmp_path / "ours.pt"),
    ):
        assert torch.equal(state["weights"], weights)
    assert zipfile.ZipFile(tmp_path / "ours.pt").testzip() is None


def test_states_without_the_needed_keys_are_rejected(tmp_path):
    checkpoint.save(tmp_path / "c.pt", {"x": 1})
    with pytest.raises(ValueError, match="not a checkpoint of gcnzc: it has no step\n\nhint: "):
        checkpoint.load(tmp_path / "c.pt", ["step"])


def test_another_model_is_reported_with_its_first_difference(tmp_path):
    saved = torch.nn.Linear(3, 5).state_dict()
    with pytest.raises(ValueError, match=r"weight: .*Size\(\[5, 3\]\) from checkpoint"):
        checkpoint.match(torch.nn.Linear(4, 5), saved, tmp_path / "c.pt")
    with pytest.raises(ValueError, match=r'Unexpected key.*"bias"'):
        checkpoint.match(torch.nn.Linear(3, 5, bias=False), saved, tmp_path / "c.pt")
    for damaged in (0, "400", None, {"weight": 3, "bias": 1}):
        with pytest.raises(ValueError, match=r"is a checkpoint of another model: \S+"):
            checkpoint.match(torch.nn.Linear(3, 5), damaged, tmp_path / "c.pt")


def save_without_end(path):
    step = 0
    while True:
        weights = torch.full((300_000,), float(step))
        checkpoint.save(path, {"step": step, "weights": weights})
        step += 1


def test_a_process_killed_while_saving_leaves_a_whole_checkpoint(tmp_path):
    for turn in range(2):
        path = tmp_path / f"{turn}.pt"
        process = FORKS.Process(target=save_without_end, args=(path,))
        process.start()
        while not path.exists():
            assert process.is_alive()
            time.sleep(0.001)
        time.sleep(0.013 * turn)
        process.kill()
        process.join()
        state = checkpoint.load(path)
        assert (state["weights"] == state["step"]).all()
