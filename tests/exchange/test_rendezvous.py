import json
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
from torch.distributed import HashStore

from gcnzc.exchange import rendezvous
from gcnzc.exchange.local_processes import LocalProcesses
from gcnzc.exchange.rendezvous import join_workers


def join_all(store, ranks, world_size, timeout_s=10.0):
    """Return the round's name on each of some ranks, or its error."""
    found = {}

    def join(rank, delay_s):
        time.sleep(delay_s)
        try:
            found[rank] = join_workers(store, rank, world_size, timeout_s)
        except TimeoutError as error:
            found[rank] = error

    threads = [threading.Thread(target=join, args=(rank, 0.1 * ((rank + 2) % 3))) for rank in ranks]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return found


def test_each_round_has_its_own_name():
    store = HashStore()
    names = [join_all(store, range(3), 3) for _ in range(3)]
    for found in names:
        assert len(set(found.values())) == 1
    assert len({found[0] for found in names}) == 3
    # another number of ranks, with the same store
    assert len(set(join_all(store, range(2), 2).values())) == 1


def test_early_ranks_do_not_join_the_previous_round():
    store = HashStore()
    before = join_all(store, range(3), 3)[0]
    found = {}
    early = [
        threading.Thread(target=lambda r=rank: found.update({r: join_workers(store, r, 3, 10.0)}))
        for rank in (1, 2)
    ]
    for thread in early:
        thread.start()
    time.sleep(0.5)
    assert not found
    found[0] = join_workers(store, 0, 3, 10.0)
    for thread in early:
        thread.join()
    assert len(set(found.values())) == 1
    assert found[0] != before


def test_missing_ranks_are_reported():
    found = join_all(HashStore(), (0, 1, 3), 4, timeout_s=1.0)
    assert str(found[0]) == "rank 2 never connected"
    assert str(found[1]) == "rank 0 never connected"


def test_a_failed_round_does_not_affect_the_next():
    store = HashStore()
    join_all(store, (0, 1), 3, timeout_s=0.5)
    assert len(set(join_all(store, range(3), 3).values())) == 1


@pytest.mark.parametrize("world_size", [1, 8])
def test_rounds_of_any_number_of_ranks(world_size):
    assert len(set(join_all(HashStore(), range(world_size), world_size).values())) == 1


def test_all_ranks_report_the_missing_rank_and_not_those_that_wait_for_it(monkeypatch):
    monkeypatch.setattr(rendezvous, "CHECK_S", 0.1)
    store, found = HashStore(), {}

    def join(rank):
        with pytest.raises(TimeoutError) as error:
            join_workers(store, rank, 3, timeout_s=1.0)
        found[rank] = str(error.value)

    threads = [threading.Thread(target=join, args=(rank,)) for rank in (0, 1)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == {0: "rank 2 never connected", 1: "rank 2 never connected"}


def test_rank_0_is_reported_if_it_stops_during_the_rendezvous(monkeypatch):
    monkeypatch.setattr(rendezvous, "CHECK_S", 0.1)
    store, end = HashStore(), time.monotonic() + 1.0
    store.set("gcnzc/round", "seven")

    def lead():
        # as rank 0, until it is stopped
        beat = 0
        while time.monotonic() < end:
            beat += 1
            store.set("seven/waiting", json.dumps([beat, [2]]))
            time.sleep(0.1)

    thread = threading.Thread(target=lead)
    thread.start()
    began = time.monotonic()
    with pytest.raises(TimeoutError, match=r"rank 0 has stopped sending heartbeats for 0\.6 s"):
        join_workers(store, 1, 3, timeout_s=60.0, stopped_s=0.6)
    assert time.monotonic() - began < 10
    thread.join()


def test_a_process_that_is_stopped_before_it_connects_is_reported_in_time(monkeypatch):
    # a worker that the launcher has started, and that is stopped while it imports torch
    monkeypatch.setattr(os, "getppid", os.getpid)
    monkeypatch.setattr(rendezvous, "CHECK_S", 0.1)
    environment = os.environ | {"RANK": "2"}
    with subprocess.Popen(["sleep", "60"], env=environment) as process:
        store, found = HashStore(), {}

        def join(rank):
            with pytest.raises(TimeoutError) as error:
                join_workers(store, rank, 3, 60.0, 0.6, LocalProcesses().check_running)
            found[rank] = str(error.value)

        threads = [threading.Thread(target=join, args=(rank,)) for rank in (0, 1)]
        for thread in threads:
            thread.start()
        # a process that sleeps does not count as stopped
        time.sleep(1.2)
        assert not found
        process.send_signal(signal.SIGSTOP)
        began = time.monotonic()
        for thread in threads:
            thread.join()
        assert time.monotonic() - began < 10
        process.kill()
    why = f"rank 2 is stopped by a signal (process {process.pid}) and did not run for 0.6 s"
    assert found == {0: why, 1: why}


# a process that waits in a system call, as for a device, until its child ends
WAITING = """
import ctypes, platform, time
CLONE_VFORK, SIGCHLD, CLONE = 0x4000, 17, {"x86_64": 56, "aarch64": 220}[platform.machine()]
if ctypes.CDLL(None).syscall(CLONE, CLONE_VFORK | SIGCHLD, 0, 0, 0, 0) == 0:
    time.sleep(60)
"""


def state_of(pid):
    return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0]


def test_a_process_that_waits_for_a_device_does_not_count_as_stopped(monkeypatch):
    monkeypatch.setattr(os, "getppid", os.getpid)
    environment = os.environ | {"RANK": "2"}
    command = [sys.executable, "-I", "-S", "-c", WAITING]
    with subprocess.Popen(command, env=environment, start_new_session=True) as process:
        end = time.monotonic() + 60
        while state_of(process.pid) != "D":
            assert time.monotonic() < end
            time.sleep(0.05)
        processes = LocalProcesses()
        for _ in range(3):
            processes.check_running(0.0)
        os.killpg(process.pid, signal.SIGKILL)


class CountingStore:
    """A store that counts requests."""

    def __init__(self):
        self.store, self.requests = HashStore(), 0

    def __getattr__(self, name):
        def request(*args):
            self.requests += 1
            return getattr(self.store, name)(*args)

        return request


def test_waiting_for_a_thousand_ranks_takes_a_few_requests_per_poll(monkeypatch):
    monkeypatch.setattr(rendezvous, "POLL_S_PER_WORKER", 0.0)
    monkeypatch.setattr(rendezvous, "POLL_S", 0.02)
    store = CountingStore()
    with pytest.raises(TimeoutError, match=r"ranks 1, 2, 3, "):
        join_workers(store, 0, 1024, timeout_s=0.5)
    assert store.requests < 3 * 0.5 / 0.02 + 10
