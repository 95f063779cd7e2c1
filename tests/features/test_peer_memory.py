"""Hot rows that several GPUs split: each reads what the others have, or says why it cannot."""

import gc
import multiprocessing
import pickle
from dataclasses import replace

import pytest
import torch
from fake_driver import FakePeers

import gcnzc
from gcnzc.features import peer_memory
from gcnzc.features.pinning import pinned
from gcnzc.kernels.gather import gather_reference
from gcnzc.kernels.gather.cached import gather_cached

CPU = torch.device("cpu")
# it cannot be asked for under the interpreter
GONE = 0x7FC00000


@pytest.fixture
def near(monkeypatch):
    """All GPUs read each other's memory."""
    monkeypatch.setattr(torch.cuda, "can_device_access_peer", lambda device, peer: True)


def rows_of(columns=25, num_rows=300):
    return torch.randn(num_rows, columns)


def shares_of(rows, hot, gpus, driver):
    """What each of several processes has; they are this one, and its CPU their GPUs."""
    made = []
    for number in range(gpus):
        handle = peer_memory.handle_of(hot, len(rows), rows.shape[1] * 4, number, gpus)
        made.append(peer_memory.share(rows, hot, CPU, handle, driver))
    return made


def check_gathers(rows, hot, copies):
    """From each GPU hot rows come from the copies: those of the table are gone afterwards."""
    before, ids = rows.clone(), torch.randint(len(rows), (400,))
    rows.view(torch.int32)[hot] = GONE
    for each in copies:
        assert torch.equal(gather_cached(rows, ids, each), gather_reference(before, ids))


def test_the_rows_go_round_by_rank():
    hot = torch.tensor([9, 2, 7, 4, 1, 5, 0])
    assert [part.tolist() for part in peer_memory.parts_of(hot, 3)] == [[9, 4, 0], [2, 1], [7, 5]]
    assert [part.tolist() for part in peer_memory.parts_of(hot[:2], 4)] == [[9], [2], [], []]


@pytest.mark.usefixtures("near")
@pytest.mark.parametrize("gpus", [2, 3, 8])
@pytest.mark.parametrize("num_cached", [1, 120, 300])
def test_gpus_of_one_process(num_cached, gpus):
    rows, driver = rows_of(), FakePeers()
    hot = torch.randperm(300)[:num_cached]
    copies = peer_memory.split(rows, hot, [CPU] * gpus, driver)
    # the copies are there before another GPU reads them
    assert driver.calls[-gpus - 1 :] == [("allocate", None)] * gpus + [("synchronize",)]
    parts = peer_memory.parts_of(hot, gpus)
    assert [each.num_rows for each in copies] == [len(part) for part in parts]
    assert [each.peers.own for each in copies] == list(range(gpus))
    assert all(torch.equal(each.slots, copies[0].slots) for each in copies)
    check_gathers(rows, hot, copies)


@pytest.mark.usefixtures("near")
def test_each_gpu_is_let_to_each_other_before_it_reads(monkeypatch):
    devices, driver = [torch.device("cuda", number) for number in (3, 1, 2)], FakePeers()
    copied = []

    def fail(rows, ids, device, driver):
        copied.append(device)
        raise RuntimeError("no memory")

    monkeypatch.setattr(peer_memory, "_copied", fail)
    with pytest.raises(RuntimeError, match="no memory"):
        peer_memory.split(rows_of(), torch.arange(5), devices, driver)
    pairs = [(3, 1), (3, 2), (1, 3), (1, 2), (2, 3), (2, 1)]
    assert driver.calls == [("enable_peer", *pair) for pair in pairs]
    assert copied == devices[:1]


@pytest.mark.parametrize("far", [(0, 1), (1, 0)])
def test_gpus_that_are_too_far_apart(far, monkeypatch):
    devices, driver = [torch.device("cuda", number) for number in (0, 1)], FakePeers()

    def near(device, peer):
        return (device.index, peer.index) != far

    monkeypatch.setattr(torch.cuda, "can_device_access_peer", near)
    message = r"cuda:{} cannot read the memory of cuda:{}\n\nhint: let each GPU have copies of its"
    with pytest.raises(RuntimeError, match=message.format(*far)):
        peer_memory.split(rows_of(), torch.arange(5), devices, driver)
    assert driver.calls == []


@pytest.mark.usefixtures("near")
def test_a_driver_that_does_not_let_one_read():
    devices, driver = (
        [torch.device("cuda", number) for number in (0, 1)],
        FakePeers({"enable_peer": 217}),
    )
    with pytest.raises(RuntimeError) as error:
        peer_memory.split(rows_of(), torch.arange(5), devices, driver)
    what, hint = str(error.value).split("\n\nhint: ")
    assert what == "cuda:0 cannot read the memory of cuda:1: CUDA_ERROR_NUMBER (217)"
    assert "copies of its own" in hint


@pytest.mark.usefixtures("near")
def test_bytes_that_are_not_those_of_the_table(monkeypatch):
    monkeypatch.setattr(peer_memory, "copy_rows", lambda rows, ids, memory: None)
    with pytest.raises(RuntimeError, match="cpu reads other rows from GPU number 0 than this"):
        peer_memory.split(rows_of(), torch.arange(5), [CPU, CPU], FakePeers())


def test_too_little_memory():
    with pytest.raises(RuntimeError, match=r"for hot rows on cpu: CUDA_ERROR_NUMBER \(2\)\n\nhint"):
        shares_of(rows_of(), torch.arange(5), 2, FakePeers({"allocate": 2}))


@pytest.mark.parametrize("gpus", [1, 2, 5])
@pytest.mark.parametrize("num_cached", [3, 150])
def test_processes_open_each_other_s_memory(num_cached, gpus):
    rows, driver = rows_of(), FakePeers()
    hot = torch.randperm(300)[:num_cached]
    shares = shares_of(rows, hot, gpus, driver)
    # copies are there before handles are made
    assert [name for name, *_ in driver.calls] == ["allocate", "export", "synchronize"] * gpus
    sent = [pickle.loads(pickle.dumps(each.handle)) for each in shares]
    copies = []
    for each in shares:
        found = peer_memory.sorted_handles(each.handle, sent[::-1])
        copies.append(peer_memory.join(each, found, driver))
    assert len(driver.opened) == gpus * (gpus - 1)
    check_gathers(rows, hot, copies)
    del copies, shares
    gc.collect()
    assert driver.opened == {}
    assert len([call for call in driver.calls if call == ("close", None)]) == gpus * (gpus - 1)


def test_memory_that_is_not_opened():
    driver = FakePeers({"open": 217})
    one, other = shares_of(rows_of(), torch.arange(9), 2, driver)
    with pytest.raises(RuntimeError, match=r"cpu cannot read .* process 1's GPU: CUDA_ERROR_NUMB"):
        peer_memory.join(one, [one.handle, other.handle], driver)
    with pytest.raises(RuntimeError, match=r"process 0's GPU(.|\n)*hint: let each GPU have copies"):
        peer_memory.join(other, [one.handle, other.handle], driver)
    with pytest.raises(RuntimeError, match=r"other processes cannot read the memory of cpu: CUDA"):
        shares_of(rows_of(), torch.arange(9), 2, FakePeers({"export": 801}))


def test_a_gpu_that_reads_other_bytes():
    driver = FakePeers(lies=True)
    rows = rows_of()
    one, other = shares_of(rows, torch.arange(9), 2, driver)
    with pytest.raises(RuntimeError, match=r"cpu reads other rows from GPU number 1 than this"):
        peer_memory.join(one, [one.handle, other.handle], driver)
    # none of them is left open
    gc.collect()
    assert driver.opened == {}
    # another process's table, which looks the same
    driver = FakePeers()
    one, _ = shares_of(rows, torch.arange(9), 2, driver)
    _, other = shares_of(rows + 1, torch.arange(9), 2, driver)
    about = replace(other.handle, about=one.handle.about)
    with pytest.raises(RuntimeError, match=r"number 1 .*\n\nhint: do all processes have the same"):
        peer_memory.join(one, [one.handle, about], driver)


def test_handles_that_do_not_go_together():
    hot, rows = torch.arange(9), rows_of()
    zero, one, two = (peer_memory.handle_of(hot, 300, 100, number, 3) for number in range(3))
    assert peer_memory.sorted_handles(one, [two, zero, one]) == [zero, one, two]
    for wrong in ([zero, one], [zero, one, one], [zero, one, two, two], []):
        with pytest.raises(ValueError, match=r"handles of shares \[.*\] of a hot set that 3 GPUs"):
            peer_memory.sorted_handles(one, wrong)
    with pytest.raises(ValueError, match="that 3 GPUs split"):
        peer_memory.sorted_handles(one, [zero, one, replace(two, of=4)])
    with pytest.raises(RuntimeError, match="share 2 lies on elsewhere, and this process is on"):
        peer_memory.sorted_handles(one, [zero, one, replace(two, machine="elsewhere")])
    others = [
        peer_memory.handle_of(hot.flip(0), 300, 100, 2, 3),
        peer_memory.handle_of(hot[:8], 300, 100, 2, 3),
        peer_memory.handle_of(hot, 301, 100, 2, 3),
        peer_memory.handle_of(hot, 300, 200, 2, 3),
    ]
    for other in others:
        with pytest.raises(ValueError, match=r"share 2 is of [89] of 30[01] rows(.|\n)*hint: all"):
            peer_memory.sorted_handles(one, [zero, one, other])
    for number, of in ((3, 3), (-1, 3), (0, 0)):
        with pytest.raises(ValueError, match=rf"no share number {number} .* {of} GPUs"):
            peer_memory.handle_of(hot, 300, 100, number, of)
    # where copies lie in their lines goes by the table's begin
    memory = torch.randn(301 * 25)
    begins = [memory[begin : begin + 300 * 25].view(300, 25).copy_(rows) for begin in (0, 1)]
    made = [shares_of(table, hot, 2, FakePeers())[number] for number, table in enumerate(begins)]
    with pytest.raises(ValueError, match="B after a line; this process has"):
        peer_memory.sorted_handles(made[0].handle, [each.handle for each in made])


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
            hits += int(torch.isin(ids, table.hot).sum())
        counters = table.counters()
        assert (counters.rows, counters.hits) == (60_000, hits)
        assert counters.peer_hits == pytest.approx(hits / 2, rel=0.05)
        before = rows.clone()
        rows.view(torch.int32)[table.hot] = GONE
        for device in ("cuda:0", "cuda:1"):
            assert torch.equal(table.gather(ids.to(device)).cpu(), before[ids])
        # nothing is left behind that torch would raise
        del table
        assert torch.ones(3, device="cuda:1").sum().item() == 3


def work(number, of, pipe):
    """A process with a GPU of its own, or with a part of the one that there is."""
    torch.cuda.set_device(number % torch.cuda.device_count())
    torch.manual_seed(5)
    rows, scores = rows_of(25, 20_000), torch.rand(20_000)
    with pinned(rows) as locked:
        share = gcnzc.cached_share(locked, 0.5, scores, number=number, of=of)
        pipe.send(share.handle)
        table = share.joined(pipe.recv())
        ids, before = torch.randint(20_000, (30_000,)), rows.clone()
        rows.view(torch.int32)[table.hot] = GONE
        same = torch.equal(table.gather(ids.cuda()).cpu(), before[ids])
        pipe.send((same, table.counters()))
        # until all have gathered
        pipe.recv()


@pytest.mark.gpu
def test_a_process_a_gpu():
    context, of = multiprocessing.get_context("spawn"), 2
    pipes = [context.Pipe() for _ in range(of)]
    workers = [
        context.Process(target=work, args=(number, of, pipe), daemon=True)
        for number, (_, pipe) in enumerate(pipes)
    ]
    for worker in workers:
        worker.start()
    for said in (lambda handles: handles, lambda results: "done"):
        told = []
        for pipe, _ in pipes:
            assert pipe.poll(120), "a process says nothing"
            told.append(pipe.recv())
        for pipe, _ in pipes:
            pipe.send(said(told))
    for worker in workers:
        worker.join(60)
        assert worker.exitcode == 0
    for same, counters in told:
        assert same
        assert counters.rows == 30_000
        assert counters.peer_hits == pytest.approx(counters.hits / 2, rel=0.05)
