"""Sharded caches: each GPU reads the rows of the others, or an error gives the reason."""

import gc
import multiprocessing
import pickle
from dataclasses import replace

import pytest
import torch
from fake_driver import FakePeers
from limits import HANG_S

import gcnzc
from gcnzc.features import peer_memory
from gcnzc.features.pinning import pinned
from gcnzc.kernels.gather import gather_reference
from gcnzc.kernels.gather.cached import gather_cached

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
GONE = 0x7FC00000  # a NaN


@pytest.fixture
def peer_access(monkeypatch):
    """All GPUs can read each other's memory."""
    monkeypatch.setattr(torch.cuda, "can_device_access_peer", lambda device, peer: True)


def rows_of(columns=25, num_rows=300):
    return torch.randn(num_rows, columns, pin_memory=DEVICE.type == "cuda")


def shares_of(rows, cached_ids, gpus, driver):
    """Return the share of each rank, all of them in this process and on one device."""
    made = []
    for number in range(gpus):
        handle = peer_memory.make_handle(cached_ids, len(rows), rows.shape[1] * 4, number, gpus)
        driver.process = number
        made.append(peer_memory.export_share(rows, cached_ids, DEVICE, handle, driver))
    return made


def check_gathers(rows, cached_ids, copies):
    """Check that each GPU reads cached rows from the copies, by overwriting those of the table."""
    before, ids = rows.clone(), torch.randint(len(rows), (400,))
    rows.view(torch.int32)[cached_ids] = GONE
    for each in copies:
        found = gather_cached(rows, ids.to(DEVICE), each).cpu()
        assert torch.equal(found, gather_reference(before, ids))


@pytest.mark.triton
@pytest.mark.usefixtures("peer_access")
@pytest.mark.parametrize("gpus", [2, 3, 8])
@pytest.mark.parametrize("num_cached", [1, 120, 300])
def test_gpus_of_one_process(num_cached, gpus):
    rows, driver = rows_of(), FakePeers()
    cached_ids = torch.randperm(300)[:num_cached]
    copies = peer_memory.make_sharded_rows(rows, cached_ids, [DEVICE] * gpus, driver)
    # the copies are complete before another GPU reads them
    assert driver.calls[-gpus - 1 :] == [("allocate", None)] * gpus + [("synchronize",)]
    parts = peer_memory.split_round_robin(cached_ids, gpus)
    assert [each.num_rows for each in copies] == [len(part) for part in parts]
    assert [each.peers.own for each in copies] == list(range(gpus))
    assert all(torch.equal(each.slots, copies[0].slots) for each in copies)
    check_gathers(rows, cached_ids, copies)


@pytest.mark.usefixtures("peer_access")
def test_peer_access_is_enabled_for_all_pairs_before_rows_are_copied(monkeypatch):
    devices, driver = [torch.device("cuda", number) for number in (3, 1, 2)], FakePeers()
    copied = []

    def fail(rows, ids, device, driver):
        copied.append(device)
        raise RuntimeError("no memory")

    monkeypatch.setattr(peer_memory, "_copy_rows", fail)
    with pytest.raises(RuntimeError, match="no memory"):
        peer_memory.make_sharded_rows(rows_of(), torch.arange(5), devices, driver)
    pairs = [(3, 1), (3, 2), (1, 3), (1, 2), (2, 3), (2, 1)]
    assert driver.calls == [("enable_peer", *pair) for pair in pairs]
    assert copied == devices[:1]
    driver = FakePeers({"enable_peer": 217})
    with pytest.raises(RuntimeError, match=r"cuda:3 cannot read .* cuda:1: CUDA_ERROR_NUMBER"):
        peer_memory.make_sharded_rows(rows_of(), torch.arange(5), devices, driver)


@pytest.mark.parametrize("far", [(0, 1), (1, 0)])
def test_gpus_without_peer_access_are_rejected(far, monkeypatch):
    devices, driver = [torch.device("cuda", number) for number in (0, 1)], FakePeers()

    def near(device, peer):
        return (device.index, peer.index) != far

    monkeypatch.setattr(torch.cuda, "can_device_access_peer", near)
    message = r"cuda:{} cannot read the memory of cuda:{}\n\nhint: use a separate cache on each"
    with pytest.raises(RuntimeError, match=message.format(*far)):
        peer_memory.make_sharded_rows(rows_of(), torch.arange(5), devices, driver)
    assert driver.calls == []


@pytest.mark.parametrize("gpus", [1, 2, 5])
@pytest.mark.parametrize("num_cached", [3, 150])
def test_processes_open_each_other_s_memory(num_cached, gpus):
    rows, driver = rows_of(), FakePeers()
    cached_ids = torch.randperm(300)[:num_cached]
    shares = shares_of(rows, cached_ids, gpus, driver)
    # copies are complete before handles are sent
    assert [name for name, *_ in driver.calls] == ["allocate", "export", "synchronize"] * gpus
    sent = [pickle.loads(pickle.dumps(each.handle)) for each in shares]
    copies = []
    for each in shares:
        found = peer_memory.check_handles(each.handle, sent[::-1])
        driver.process = each.handle.rank
        copies.append(peer_memory.open_shares(each, found, driver))
    assert len(driver.opened) == gpus * (gpus - 1)
    check_gathers(rows, cached_ids, copies)
    # before the memory of their owners is freed
    del copies
    gc.collect()
    assert driver.opened == {}
    assert len([call for call in driver.calls if call[0] == "close"]) == gpus * (gpus - 1)
    del each, shares
    gc.collect()
    assert driver.given == {}
    assert not driver.misuses


def test_shares_that_are_joined_twice_are_open_until_the_second_is_dropped():
    rows, driver = rows_of(), FakePeers()
    shares = shares_of(rows, torch.arange(9), 2, driver)
    handles = [each.handle for each in shares]
    driver.process = 0
    first, second = (peer_memory.open_shares(shares[0], handles, driver) for _ in range(2))
    assert torch.equal(first.peers.addresses, second.peers.addresses)
    del first
    gc.collect()
    assert len(driver.opened) == 1
    check_gathers(rows, torch.arange(9), [second])
    del second
    gc.collect()
    assert driver.opened == {}
    assert not driver.misuses


def test_memory_that_cannot_be_opened_or_exported_is_reported():
    driver = FakePeers({"open": 217})
    one, other = shares_of(rows_of(), torch.arange(9), 2, driver)
    with pytest.raises(RuntimeError, match=rf"{DEVICE}.* cannot read .* rank 1's GPU: CUDA_ERROR"):
        peer_memory.open_shares(one, [one.handle, other.handle], driver)
    with pytest.raises(RuntimeError, match=r"rank 0's GPU(.|\n)*hint: use a separate cache"):
        peer_memory.open_shares(other, [one.handle, other.handle], driver)
    with pytest.raises(RuntimeError, match=rf"other processes cannot read .* of {DEVICE}: CUDA"):
        shares_of(rows_of(), torch.arange(9), 2, FakePeers({"export": 801}))


def test_wrong_bytes_from_another_process_are_detected():
    driver = FakePeers(lies=True)
    rows = rows_of()
    one, other = shares_of(rows, torch.arange(9), 2, driver)
    driver.process = 0
    with pytest.raises(RuntimeError, match=f"{DEVICE}.* reads rows from .* rank 1 that differ"):
        peer_memory.open_shares(one, [one.handle, other.handle], driver)
    # no memory stays open
    gc.collect()
    assert driver.opened == {}
    # another process's table, with the same description
    driver = FakePeers()
    one, _ = shares_of(rows, torch.arange(9), 2, driver)
    _, other = shares_of(rows + 1, torch.arange(9), 2, driver)
    same = replace(other.handle, description=one.handle.description)
    driver.process = 0
    with pytest.raises(RuntimeError, match=r"rank 1 (.|\n)*hint: do all processes have the same"):
        peer_memory.open_shares(one, [one.handle, same], driver)


def test_handles_of_different_caches_are_rejected():
    cached_ids, rows = torch.arange(9), rows_of()
    zero, one, two = (peer_memory.make_handle(cached_ids, 300, 100, rank, 3) for rank in range(3))
    assert peer_memory.check_handles(one, [two, zero, one]) == [zero, one, two]
    for wrong in ([zero, one], [zero, one, one], [zero, one, two, two], []):
        with pytest.raises(ValueError, match=r"handles of ranks \[.*\] of a cache that .* 3 GPUs"):
            peer_memory.check_handles(one, wrong)
    with pytest.raises(ValueError, match="sharded over 3 GPUs"):
        peer_memory.check_handles(one, [zero, one, replace(two, world_size=4)])
    with pytest.raises(RuntimeError, match="rank 2 is on elsewhere, and this process is"):
        peer_memory.check_handles(one, [zero, one, replace(two, machine="elsewhere")])
    own = (cached_ids.flip(0), 300, 100), (cached_ids[:8], 300, 100)
    for other in (*own, (cached_ids, 301, 100), (cached_ids, 300, 200)):
        handle = peer_memory.make_handle(*other, 2, 3)
        with pytest.raises(ValueError, match=r"rank 2 caches [89] of 30[01] rows(.|\n)*hint: all"):
            peer_memory.check_handles(one, [zero, one, handle])
    for rank, world_size in ((3, 3), (-1, 3), (0, 0)):
        with pytest.raises(ValueError, match=f"rank is {rank} with a world_size of {world_size}"):
            peer_memory.make_handle(cached_ids, 300, 100, rank, world_size)
    # copies have the alignment of their rows, which must be the same in all processes
    memory = torch.randn(301 * 25)
    begins = [memory[begin : begin + 300 * 25].view(300, 25).copy_(rows) for begin in (0, 1)]
    first, second = (shares_of(table, cached_ids, 2, FakePeers()) for table in begins)
    with pytest.raises(ValueError, match="B after a line; this process caches"):
        peer_memory.check_handles(first[0].handle, [first[0].handle, second[1].handle])


@pytest.fixture
def two_gpus():
    if torch.cuda.device_count() < 2:
        pytest.skip("fewer than two GPUs")
    if not all(torch.cuda.can_device_access_peer(a, 1 - a) for a in (0, 1)):
        pytest.skip("the GPUs do not read each other's memory")


@pytest.mark.gpu
@pytest.mark.usefixtures("two_gpus")
@pytest.mark.parametrize("columns", [25, 128, 602])
def test_two_gpus_of_this_process(columns):
    rows = rows_of(columns, 20_000)
    with pinned(rows) as locked:
        table = gcnzc.cached(locked, 0.5, torch.rand(20_000), devices=["cuda:0", "cuda:1"])
        hits = 0
        for device in ("cuda:0", "cuda:1"):
            ids = torch.randint(20_000, (30_000,))
            assert torch.equal(table.gather(ids.to(device)).cpu(), rows[ids])
            hits += int(torch.isin(ids, table.cached_ids).sum())
        counters = table.counters()
        assert (counters.rows, counters.hits) == (60_000, hits)
        assert counters.peer_hits == pytest.approx(hits / 2, rel=0.05)
        before = rows.clone()
        rows.view(torch.int32)[table.cached_ids] = GONE
        for device in ("cuda:0", "cuda:1"):
            assert torch.equal(table.gather(ids.to(device)).cpu(), before[ids])
        # nothing is left behind that torch would raise
        del table
        assert torch.ones(3, device="cuda:1").sum().item() == 3


def work(rank, world_size, pipe):
    """Run one process, with a GPU of its own or one that processes share."""
    torch.cuda.set_device(rank % torch.cuda.device_count())
    torch.manual_seed(5)
    rows, scores = rows_of(25, 20_000), torch.rand(20_000)
    with pinned(rows) as locked:
        share = gcnzc.cached_share(locked, 0.5, scores, rank=rank, world_size=world_size)
        pipe.send(share.handle)
        table = share.join(pipe.recv())
        ids, before = torch.randint(20_000, (30_000,)), rows.clone()
        rows.view(torch.int32)[table.cached_ids] = GONE
        same = torch.equal(table.gather(ids.cuda()).cpu(), before[ids])
        pipe.send((same, table.counters()))
        # keep the share until all processes have gathered
        pipe.recv()


@pytest.mark.gpu
def test_one_process_for_each_gpu():
    context, world_size = multiprocessing.get_context("spawn"), 2
    pipes = [context.Pipe() for _ in range(world_size)]
    workers = [
        context.Process(target=work, args=(rank, world_size, pipe), daemon=True)
        for rank, (_, pipe) in enumerate(pipes)
    ]
    for worker in workers:
        worker.start()
    for reply in (lambda handles: handles, lambda results: "done"):
        received = []
        for pipe, _ in pipes:
            assert pipe.poll(HANG_S), "a process does not respond"
            received.append(pipe.recv())
        for pipe, _ in pipes:
            pipe.send(reply(received))
    for worker in workers:
        worker.join(HANG_S)
        assert worker.exitcode == 0
    for same, counters in received:
        assert same
        assert counters.rows == 30_000
        assert counters.peer_hits == pytest.approx(counters.hits / 2, rel=0.05)
