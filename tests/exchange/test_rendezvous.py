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


def meet(store, ranks, world_size, timeout_s=10.0):
    """What each of some workers hears, or its error."""
    heard = {}

    def come(rank, delay_s):
        time.sleep(delay_s)
        try:
            heard[rank] = join_workers(store, rank, world_size, timeout_s)
        except TimeoutError as error:
            heard[rank] = error

    threads = [threading.Thread(target=come, args=(rank, 0.1 * ((rank + 2) % 3))) for rank in ranks]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return heard


def test_every_round_has_a_name_of_its_own():
    store = HashStore()
    names = [meet(store, range(3), 3) for _ in range(3)]
    for heard in names:
        assert len(set(heard.values())) == 1
    assert len({heard[0] for heard in names}) == 3
    # another number of workers, on the same store
    assert len(set(meet(store, range(2), 2).values())) == 1


def test_who_comes_first_does_not_join_the_round_before():
    store = HashStore()
    before = meet(store, range(3), 3)[0]
    heard = {}
    early = [
        threading.Thread(target=lambda r=rank: heard.update({r: join_workers(store, r, 3, 10.0)}))
        for rank in (1, 2)
    ]
    for thread in early:
        thread.start()
    time.sleep(0.5)
    assert not heard
    heard[0] = join_workers(store, 0, 3, 10.0)
    for thread in early:
        thread.join()
    assert len(set(heard.values())) == 1
    assert heard[0] != before


def test_who_does_not_come_is_named():
    heard = meet(HashStore(), (0, 1, 3), 4, timeout_s=1.0)
    assert str(heard[0]) == "no sign of worker 2"
    assert str(heard[1]) == "no sign of worker 0"


def test_a_round_that_failed_does_not_spoil_the_next():
    store = HashStore()
    meet(store, (0, 1), 3, timeout_s=0.5)
    assert len(set(meet(store, range(3), 3).values())) == 1


@pytest.mark.parametrize("world_size", [1, 8])
def test_any_number(world_size):
    assert len(set(meet(HashStore(), range(world_size), world_size).values())) == 1


def test_all_name_who_is_missing_and_not_who_waits_for_it():
    store, heard = HashStore(), {}

    def come(rank):
        with pytest.raises(TimeoutError) as error:
            join_workers(store, rank, 3, timeout_s=3.0)
        heard[rank] = str(error.value)

    threads = [threading.Thread(target=come, args=(rank,)) for rank in (0, 1)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert heard == {0: "no sign of worker 2", 1: "no sign of worker 2"}


def test_worker_0_is_named_when_it_stops_while_workers_meet():
    store, end = HashStore(), time.monotonic() + 3.0
    store.set("gcnzc/round", "seven")

    def lead():
        # worker 0, until it is stopped
        beat = 0
        while time.monotonic() < end:
            beat += 1
            store.set("seven/waiting", json.dumps([beat, [2]]))
            time.sleep(0.5)

    thread = threading.Thread(target=lead)
    thread.start()
    began = time.monotonic()
    with pytest.raises(TimeoutError, match="worker 0 gives no sign of life for 2 s"):
        join_workers(store, 1, 3, timeout_s=60.0, silent_s=2.0)
    assert time.monotonic() - began < 10
    thread.join()


def test_a_process_that_is_stopped_before_it_comes_is_named_in_time(monkeypatch):
    # as a worker that the launcher has started, and that was stopped while it imports torch
    monkeypatch.setattr(os, "getppid", os.getpid)
    environment = os.environ | {"RANK": "2"}
    with subprocess.Popen(["sleep", "60"], env=environment) as process:
        store, heard = HashStore(), {}

        def come(rank):
            with pytest.raises(TimeoutError) as error:
                join_workers(store, rank, 3, 60.0, 2.0, LocalProcesses().check_running)
            heard[rank] = str(error.value)

        threads = [threading.Thread(target=come, args=(rank,)) for rank in (0, 1)]
        for thread in threads:
            thread.start()
        # one that only sleeps is at work for all that is known
        time.sleep(3.0)
        assert not heard
        process.send_signal(signal.SIGSTOP)
        began = time.monotonic()
        for thread in threads:
            thread.join()
        assert time.monotonic() - began < 10
        process.kill()
    why = f"worker 2 is stopped by a signal (process {process.pid}) and did not run for 2 s"
    assert heard == {0: why, 1: why}


# a process that waits in its own kernel call, as for a device, until its child ends
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
        siblings = LocalProcesses()
        for _ in range(3):
            siblings.check_running(0.0)
        os.killpg(process.pid, signal.SIGKILL)


class CountingStore:
    """A store that counts requests, as a slow network would make felt."""

    def __init__(self):
        self.store, self.requests = HashStore(), 0

    def __getattr__(self, name):
        def request(*args):
            self.requests += 1
            return getattr(self.store, name)(*args)

        return request


def test_waiting_for_a_thousand_workers_costs_a_few_requests_a_poll(monkeypatch):
    monkeypatch.setattr(rendezvous, "POLL_S_PER_WORKER", 0.0)
    monkeypatch.setattr(rendezvous, "POLL_S", 0.02)
    store = CountingStore()
    with pytest.raises(TimeoutError, match=r"no sign of worker 1, 2, 3, "):
        join_workers(store, 0, 1024, timeout_s=0.5)
    assert store.requests < 3 * 0.5 / 0.02 + 10
