import json
import os
import signal
import subprocess
import sys
from functools import partial

import pytest
from stopped import wait_for_state
from torch.distributed import HashStore
from virtual_time import VirtualTime

from gcnzc.exchange import rendezvous
from gcnzc.exchange.rendezvous import LocalProcesses, join_workers


@pytest.fixture(autouse=True)
def clock(monkeypatch):
    clock = VirtualTime()
    monkeypatch.setattr(rendezvous, "time", clock)
    return clock


def join_all(clock, store, ranks, world_size, timeout_s=10.0):
    """Return the round's name on each of some ranks, or its error."""
    found = {}

    def join(rank):
        clock.sleep(0.1 * ((rank + 2) % 3))
        try:
            found[rank] = join_workers(store, rank, world_size, timeout_s)
        except TimeoutError as error:
            found[rank] = error

    clock.run([partial(join, rank) for rank in ranks])
    return found


def test_each_round_has_its_own_name(clock):
    store = HashStore()
    names = [join_all(clock, store, range(3), 3) for _ in range(3)]
    for found in names:
        assert len(set(found.values())) == 1
    assert len({found[0] for found in names}) == 3
    # another number of ranks, with the same store
    assert len(set(join_all(clock, store, range(2), 2).values())) == 1


def test_all_ranks_report_the_missing_rank_and_the_next_round_is_not_affected(clock):
    store = HashStore()
    found = join_all(clock, store, (0, 1), 3)
    # and not those that wait for it
    assert [str(found[rank]) for rank in (0, 1)] == ["rank 2 never connected"] * 2
    assert len(set(join_all(clock, store, range(3), 3).values())) == 1
    assert str(join_all(clock, store, (1, 2), 3, 1.0)[1]) == "rank 0 never connected"


def test_rank_0_is_reported_if_it_stops_during_the_rendezvous(clock):
    store = HashStore()
    store.set("gcnzc/round", "seven")

    def lead():
        # as rank 0, until it is stopped
        for beat in range(1, 5):
            store.set("seven/waiting", json.dumps([beat, [2]]))
            clock.sleep(1.0)

    def join():
        with pytest.raises(TimeoutError, match=r"rank 0 has stopped sending heartbeats for 6 s"):
            join_workers(store, 1, 3, timeout_s=60.0, stopped_s=6.0)

    clock.run([lead, join])
    # its last heartbeat is read after three seconds at the earliest
    assert 3.0 + 6.0 < clock.now_s < 4.0 + 6.0 + 2 * rendezvous.CHECK_S


def test_a_process_that_is_stopped_before_it_connects_is_reported_in_time(clock, monkeypatch):
    # a worker that the launcher has started, and that is stopped while it imports torch
    monkeypatch.setattr(os, "getppid", os.getpid)
    environment = os.environ | {"RANK": "2"}
    with subprocess.Popen(["sleep", "600"], env=environment) as process:
        store, found = HashStore(), {}

        def join(rank):
            with pytest.raises(TimeoutError) as error:
                join_workers(store, rank, 3, 60.0, 6.0, LocalProcesses().check_running)
            found[rank] = str(error.value)

        def stop():
            # a process that sleeps does not count as stopped
            clock.sleep(12.0)
            assert not found
            process.send_signal(signal.SIGSTOP)
            wait_for_state(process)

        try:
            clock.run([partial(join, 0), partial(join, 1), stop])
        finally:
            process.kill()
        assert clock.now_s < 12.0 + 6.0 + 3 * rendezvous.CHECK_S
    why = f"rank 2 is stopped by a signal (process {process.pid}) and did not run for 6 s"
    assert found == {0: why, 1: why}


# a process that waits in a system call, as for a device, until its child ends
WAITING = """
import ctypes, platform, time
CLONE_VFORK, SIGCHLD, CLONE = 0x4000, 17, {"x86_64": 56, "aarch64": 220}[platform.machine()]
if ctypes.CDLL(None).syscall(CLONE, CLONE_VFORK | SIGCHLD, 0, 0, 0, 0) == 0:
    time.sleep(60)
"""


def test_a_process_that_waits_for_a_device_does_not_count_as_stopped(monkeypatch):
    monkeypatch.setattr(os, "getppid", os.getpid)
    environment = os.environ | {"RANK": "2"}
    command = [sys.executable, "-I", "-S", "-c", WAITING]
    with subprocess.Popen(command, env=environment, start_new_session=True) as process:
        wait_for_state(process, "D")
        processes = LocalProcesses()
        for _ in range(3):
            processes.check_running(0.0)
        os.killpg(process.pid, signal.SIGKILL)
