"""Rows, ids and counters of minibatches that are copied to a device.

Random programs of transfers, and the order of their accesses, are in `test_happens_before.py`.
"""

import pytest
import torch
from checked_device import Device

from gcnzc import FeatureTable
from gcnzc.features.cache import cached
from gcnzc.loader.transfer import Transfer
from gcnzc.sampling.batch import Batch

NUM_NODES = 3000


def table_of(kind, num_columns=12):
    rows = torch.randn(NUM_NODES, num_columns)
    if kind in ("codes", "columns"):
        return FeatureTable.quantized(rows, scale_columns=5 if kind == "columns" else None)
    return FeatureTable(rows.to(getattr(torch, kind)))


def start(transfer, count):
    """Start a batch of random nodes; return it with their ids."""
    ids = transfer.host.empty(count, torch.int64).random_(NUM_NODES)
    return transfer.start(Batch(ids, ids[:0], ())), ids.clone()


@pytest.mark.parametrize("kind", ["float32", "float16", "bfloat16", "int8", "codes", "columns"])
@pytest.mark.parametrize("num_columns", [1, 7, 33])
@pytest.mark.parametrize("cached_share", [None, 0.01, 0.5, 1.0])
def test_two_engines_give_the_same_rows_as_a_plain_gather(kind, num_columns, cached_share):
    table, device = table_of(kind, num_columns), Device(0)
    if cached_share is not None:
        table = cached(table, cached_share, torch.arange(NUM_NODES), device="cpu")
    for share in (0.0, 0.01, 0.5, 0.99, 1.0):
        transfer = Transfer(device, table, share)
        for count in (0, 1, 2, 300):
            pending, ids = start(transfer, count)
            x, expected = transfer.wait(pending).x, table.gather(ids)
            assert x.dtype == table.dtype
            assert torch.equal(x, expected)
            device.own.do(device.read, x)
        transfer.close()
    assert not device.races


@pytest.mark.parametrize("kind", ["codes", "columns", "float32"])
def test_no_thread_waits_for_the_device_while_it_queues_a_batch(kind, monkeypatch):
    transfer = Transfer(Device(0), table_of(kind), 0.5)

    def copy_to_host(tensor):
        raise AssertionError("a copy to the host waits for all work of the stream")

    with monkeypatch.context() as patched:
        patched.setattr(torch.Tensor, "cpu", copy_to_host)
        pending, _ = start(transfer, 30)
    assert [stage.lane for stage in pending.batch.stages] == ["gather stream", "copy stream"]
    transfer.wait(pending)


def test_copied_rows_do_not_count_as_hits():
    table = cached(table_of("float32"), 1.0, torch.rand(NUM_NODES), device="cpu")
    transfer = Transfer(Device(0), table, 0.25)
    transfer.wait(start(transfer, 400)[0])
    counters = table.counters()
    assert (counters.rows, counters.hits) == (400, 300)
