"""Typed minibatches that are copied to a device.

Random programs of transfers, and the order of their accesses, are in `test_happens_before.py`.
"""

import copy
from contextlib import ExitStack

import pytest
import torch
from bits import same_tensors, tensors_of
from checked_device import Device
from transfer_programs import TYPED, checked, replaced_threads, send_through, typed_loader

from gcnzc import FeatureTable, pinned
from gcnzc.loader import checks
from gcnzc.loader import loader as loaders

GPU = torch.device("cuda", 0)


@pytest.fixture(scope="module")
def tables():
    rows = {name: torch.randn(64, columns) for name, columns in (("user", 7), ("item", 12))}
    # shops have no table
    user, item = FeatureTable(rows["user"].half()), FeatureTable.quantized(rows["item"])
    return {"user": user, "item": item}


def assert_same(mine, wanted):
    """Check that minibatches on a device equal those of the CPU bit for bit."""
    for batch, want in zip(mine, wanted, strict=True):
        assert (batch.times.keys(), want.times.keys()) == ({"sample_s"}, {"sample_s", "gather_s"})
        assert torch.equal(batch.items, want.items)
        assert same_tensors(batch, want)


def test_each_type_is_gathered_by_one_launch_after_the_copy_of_all_ids(tables):
    class Recorded(Device):
        work = ()

        def new(self, priority=0, name=None):
            stream = super().new(priority, name)
            queue = stream.do

            def do(work, *args):
                self.work += ((stream.name, work.__name__, len(args)),)
                queue(work, *args)

            stream.do = do
            return stream

    device = Recorded(0)
    loader = typed_loader(tables=tables, threads=1, ahead=1)
    batch = next(iterator := iter(send_through(loader, device, tables, 0.0)))
    iterator.close()
    # the ids of four types; then the edges and offsets, the rows and pairs of blocks, the labels
    copies = [work for work in device.work if work[0] == "side 1"]
    assert copies[0] == ("side 1", "_copy", 8)
    assert [work[1] for work in copies[:4]] == ["_copy"] * 4
    gathers = [place for place, work in enumerate(device.work) if work[1] == "_gather"]
    assert gathers[:2] == [1, 2]
    assert {device.work[place][0] for place in gathers} == {"side 2"}
    assert [stage.name for stage in batch.stages] == ["gather", "copy"]
    loader._transfer.close()


@pytest.fixture
def fake_gpu(monkeypatch):
    """Let loaders for "cuda" use a simulated device, which reads all memory of the host."""
    with replaced_threads():
        device = checked(0)
        monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
        monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
        monkeypatch.setattr(loaders, "CudaStreams", lambda _: device)
        monkeypatch.setattr(checks, "can_read_host", lambda _: True)
        yield
        device.schedule.join_all()
    assert not device.races


@pytest.mark.usefixtures("fake_gpu")
def test_a_loader_for_a_gpu_opens_its_transfer(tables, monkeypatch):
    with pytest.raises(ValueError, match=r"table\['user'\]: a table on the host cannot be read"):
        typed_loader(tables=tables, device="cuda", copied_share=0.5)
    wanted = typed_loader(tables=tables)
    assert_same(typed_loader(tables=tables, device="cuda", copied_share=1.0), wanted)
    monkeypatch.setattr(torch.Tensor, "is_pinned", lambda _: True)
    options = {"device": "cuda", "copied_share": 0.3, "priority": -1}
    loader = typed_loader("links", tables=tables, **options)
    assert loader.device == GPU
    assert loader.sampler.pool is loader._transfer.host
    other = copy.deepcopy(loader)
    assert (other.copied_share, other.priority) == (0.3, -1)
    assert other._transfer is not loader._transfer
    assert_same(loader, typed_loader("links", tables=tables))


@pytest.mark.usefixtures("fake_gpu")
def test_rows_that_the_gpu_cannot_read_are_copied(tables, monkeypatch):
    monkeypatch.setattr(checks, "can_read_host", lambda _: False)
    loader = typed_loader(tables=tables, device="cuda")
    assert set(loader._transfer._shares.values()) == {1.0}
    assert_same(loader, typed_loader(tables=tables))


def test_a_minibatch_can_be_moved_with_all_its_tensors(tables):
    for batch in typed_loader("temporal links", tables=tables):
        moved = batch.to("meta")
        assert moved.items is batch.items
        assert {tensor.device.type for tensor in tensors_of(moved)} == {"meta"}
        assert len(tensors_of(moved)) == len(tensors_of(batch))


@pytest.mark.gpu
@pytest.mark.parametrize("share", [0.0, 0.3, 1.0])
@pytest.mark.parametrize("kind", TYPED)
def test_gpu_minibatches_equal_those_of_the_cpu(tables, kind, share):
    with ExitStack() as locks:
        locked = {name: locks.enter_context(pinned(own)) for name, own in tables.items()}
        loader = typed_loader(kind, device="cuda", tables=locked, copied_share=share)
        for batch in loader:
            assert {tensor.device.type for tensor in tensors_of(batch)} == {"cuda"}
        loader.set_epoch(0)
        assert_same(loader, typed_loader(kind, tables=tables))
