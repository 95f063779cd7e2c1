"""Who is named when the store is slow, silent or gone, and what happens to the launcher."""

import json
import os
import socket
import subprocess
import threading
import time
from contextlib import contextmanager, suppress
from datetime import timedelta

import pytest
from torch.distributed import HashStore, TCPStore

from gcnzc.exchange import heartbeat
from gcnzc.exchange.heartbeat import (
    Heartbeat,
    HeartbeatMonitor,
    StoreHost,
    describe_stopped_workers,
)

# a name that nobody has (RFC 6761)
NOWHERE = ("machine0.invalid", 29400)


@contextmanager
def served():
    """A store, and a function that connects to it."""
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    yield store, store.port


def connected(port):
    limit = timedelta(seconds=60)
    return TCPStore("127.0.0.1", port, timeout=limit, wait_for_workers=False)


class Proxy:
    """A port that hands on to another what it is sent, and back, each piece after `delay_s`."""

    def __init__(self, port, delay_s):
        self.target, self.delay_s, self.is_cut_off = port, delay_s, False
        self.listener = socket.create_server(("127.0.0.1", 0))
        self.port = self.listener.getsockname()[1]
        self.run(self.accept)

    def run(self, deed, *words):
        threading.Thread(target=deed, args=words, daemon=True).start()

    def accept(self):
        while True:
            try:
                client, _ = self.listener.accept()
            except OSError:
                return
            server = socket.create_connection(("127.0.0.1", self.target))
            self.run(self.hand_on, client, server, self.delay_s)
            self.run(self.hand_on, server, client, 0.0)

    def hand_on(self, source, dest, delay_s):
        with suppress(OSError), source, dest:
            while data := source.recv(1 << 20):
                time.sleep(delay_s)
                if not self.is_cut_off:
                    dest.sendall(data)


@pytest.fixture
def quick(monkeypatch):
    # STORE_S is only waited for in full where the store does not answer
    for name, seconds in (("STORE_S", 2.0), ("LAST_WORDS_S", 0.2), ("BEAT_S", 0.1)):
        monkeypatch.setattr(heartbeat, name, seconds)


@pytest.fixture
def launcher(monkeypatch):
    """A process in the place of this one's parent, which seems to be one of torch's launchers."""
    process = subprocess.Popen(["sleep", "60"])
    monkeypatch.setattr(os, "getppid", lambda: process.pid)
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "7")
    yield process
    process.kill()
    process.wait()


class Others:
    """Workers that write signs of life directly into a store, but for some."""

    def __init__(self, store, world_size, silent):
        self.store, self.silent, self.beat = store, silent, 0
        self.ranks, self.done = range(1, world_size), threading.Event()
        self.write()
        self.thread = threading.Thread(target=self.live, daemon=True)
        self.thread.start()

    def write(self):
        self.beat += 1
        sign = json.dumps([self.beat, 5, "training", "there", ""])
        ranks = [rank for rank in self.ranks if rank not in self.silent or self.beat == 1]
        self.store.multi_set([f"gcnzc/alive/{rank}" for rank in ranks], [sign] * len(ranks))

    def live(self):
        while not self.done.wait(heartbeat.BEAT_S):
            self.write()


@pytest.mark.parametrize(("world_size", "delay_s"), [(64, 0.08), (1024, 0.005)])
def test_a_slow_store_blames_only_who_is_silent_and_ends_no_launcher(world_size, delay_s, launcher):
    with served() as (store, port):
        proxy = Proxy(port, delay_s)
        others = Others(store, world_size, silent={world_size - 2})
        alive = HeartbeatMonitor(connected(proxy.port), 0, world_size, "here")
        alive.at(5, "training")
        why = alive.culprits()
        alive.leave()
        others.done.set()
        others.thread.join()
    assert why == (
        f"worker {world_size - 2} on there gives no sign of life; it was last in step 5, at "
        "training"
    )
    assert launcher.poll() is None


@pytest.mark.usefixtures("quick")
def test_a_worker_that_is_cut_off_says_so_in_time_and_ends_its_launcher(launcher):
    with served() as (_, port):
        proxy = Proxy(port, 0.0)
        alive = HeartbeatMonitor(
            connected(proxy.port), 0, 2, "here", StoreHost("worker 1", NOWHERE)
        )
        proxy.is_cut_off = True
        began = time.monotonic()
        why = alive.culprits()
        assert "this machine is cut off" in why
        alive.leave(why)
        assert time.monotonic() - began < 20
    # by SIGTERM, when the worker has said why
    assert launcher.wait(30) == -15


CASES = {
    "silent": "worker 1, which keeps the store, does not answer: it is stopped, or very slow",
    "gone": "worker 1, which kept the store, is gone",
    "unknown": "unknown: the store does not answer",
}


@contextmanager
def closed():
    """The address of a port on which nobody listens, and that nobody else can take."""
    with socket.socket() as holder:
        holder.bind(("127.0.0.1", 0))
        yield holder.getsockname()


@pytest.mark.usefixtures("quick")
def test_a_launcher_that_can_be_reached_is_never_ended(launcher):
    found, threads = {}, []
    with served() as (_, port), closed() as nobody:
        proxies = {case: Proxy(port, 0.0) for case in CASES}
        keepers = {
            "silent": StoreHost("worker 1", ("127.0.0.1", proxies["silent"].port)),
            "gone": StoreHost("worker 1", nobody),
        }

        def ask(case):
            alive = HeartbeatMonitor(connected(proxies[case].port), 0, 2, "here", keepers.get(case))
            proxies[case].is_cut_off = True
            found[case] = alive.culprits()
            alive.leave()

        # all at once, since each waits
        for case in CASES:
            threads.append(threading.Thread(target=ask, args=(case,)))
            threads[-1].start()
        for thread in threads:
            thread.join()
    assert found == CASES
    time.sleep(1)
    assert launcher.poll() is None


def test_a_worker_that_never_came_is_named(monkeypatch):
    monkeypatch.setattr(heartbeat, "BEAT_S", 0.1)
    with served() as (_, port):
        alive = HeartbeatMonitor(
            connected(port), 0, 2, "here", StoreHost("worker 1", ("127.0.0.1", port))
        )
        assert alive.culprits() == "worker 1 never came"
        alive.leave()


@pytest.mark.parametrize("has_launcher", [True, False])
def test_only_a_process_that_a_launcher_started_ends_with_its_parent(has_launcher, monkeypatch):
    if has_launcher:
        monkeypatch.setenv("TORCHELASTIC_RUN_ID", "7")
    else:
        # a shell, say, that started a script in the background
        monkeypatch.delenv("TORCHELASTIC_RUN_ID", raising=False)
    monkeypatch.setattr(heartbeat, "BEAT_S", 0.05)
    killed = threading.Event()
    monkeypatch.setattr(os, "kill", lambda *_: killed.set())
    alive = HeartbeatMonitor(HashStore(), 0, 2, "here")
    parent = os.getppid()
    monkeypatch.setattr(os, "getppid", lambda: parent + 1)
    before = alive.beat
    while alive.beat < before + 3 and not killed.is_set():
        time.sleep(0.05)
    alive.leave()
    assert killed.is_set() == has_launcher


def test_workers_of_a_subgroup_are_named_by_their_ranks_among_all():
    silent = {1: Heartbeat(beat=3, step=2, doing="training", host="here")}
    text = describe_stopped_workers(0, 2, range(2), silent, silent, [0, 2])
    assert text.startswith("worker 2, rank 1 of the subgroup, on here gives no sign of life")
    assert describe_stopped_workers(0, 2, range(2), silent, silent).startswith(
        "worker 1 on here gives no sign"
    )
