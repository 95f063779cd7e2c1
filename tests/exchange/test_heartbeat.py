"""Which rank is reported if the store is slow or fails, and what happens to the launcher."""

import itertools
import json
import os
import re
import socket
import subprocess
import threading
import time
from contextlib import contextmanager, suppress
from datetime import timedelta
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from exchange.cases import ask
from limits import HANG_S, NEVER_S
from processes import results, shorten_waits
from torch.distributed import HashStore, TCPStore

from gcnzc import exchange
from gcnzc.exchange import run
from gcnzc.exchange.errors import Cause
from gcnzc.exchange.heartbeat import Heartbeat, HeartbeatMonitor, StoreHost, describe_stopped_ranks

# a name that never resolves (RFC 6761)
NOWHERE = ("machine0.invalid", 29400)


@contextmanager
def served():
    """Yield a store and its port."""
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    yield store, store.port


def connected(port):
    limit = timedelta(seconds=NEVER_S)
    return TCPStore("127.0.0.1", port, timeout=limit, wait_for_workers=False)


class Proxy:
    """Forwards connections to another port, each piece of data after `delay_s`."""

    def __init__(self, port, delay_s):
        self.target, self.delay_s, self.is_cut_off = port, delay_s, False
        self.listener = socket.create_server(("127.0.0.1", 0))
        self.port = self.listener.getsockname()[1]
        self.run(self.accept)

    def run(self, function, *arguments):
        threading.Thread(target=function, args=arguments, daemon=True).start()

    def accept(self):
        while True:
            try:
                client, _ = self.listener.accept()
            except OSError:
                return
            server = socket.create_connection(("127.0.0.1", self.target))
            self.run(self.forward, client, server, self.delay_s)
            self.run(self.forward, server, client, 0.0)

    def forward(self, source, dest, delay_s):
        with suppress(OSError), source, dest:
            while data := source.recv(1 << 20):
                time.sleep(delay_s)
                if not self.is_cut_off:
                    dest.sendall(data)


@pytest.fixture
def quick(monkeypatch):
    # only tests of stores that do not respond wait for all of STORE_S
    for name, seconds in (("STORE_S", 2.0), ("ERROR_OUTPUT_S", 0.2), ("BEAT_S", 0.1)):
        monkeypatch.setattr(exchange.heartbeat, name, seconds)


@pytest.fixture
def launcher(monkeypatch):
    """A process that replaces the parent of this one, and looks like a launcher of torch."""
    process = subprocess.Popen(["sleep", "60"])
    monkeypatch.setattr(os, "getppid", lambda: process.pid)
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "7")
    yield process
    process.kill()
    process.wait()


def beat_together(monitor, store, stopped, monkeypatch):
    """Write heartbeats of all other ranks before each of this rank's; some stop after the first."""
    write, beats = monitor.write, itertools.count(1)

    def write_all():
        text = json.dumps(Heartbeat(beat := next(beats), 5, "training", "there"))
        ranks = [rank for rank in range(1, monitor.world_size) if rank not in stopped or beat == 1]
        store.multi_set([f"gcnzc/alive/{rank}" for rank in ranks], [text] * len(ranks))
        write()

    monkeypatch.setattr(monitor, "write", write_all)
    write_all()


@pytest.mark.parametrize(("world_size", "delay_s"), [(64, 0.08), (1024, 0.005)])
def test_with_a_slow_store_only_stopped_ranks_are_reported_and_no_launcher_is_ended(
    world_size, delay_s, launcher, monkeypatch
):
    with served() as (store, port):
        proxy = Proxy(port, delay_s)
        monitor = HeartbeatMonitor(connected(proxy.port), 0, world_size)
        beat_together(monitor, store, {world_size - 2}, monkeypatch)
        monitor.set_status(5, "training")
        why = monitor.describe_failure().text
        monitor.stop()
    assert why == (
        f"rank {world_size - 2} on there has stopped sending heartbeats; it was last in step 5, at "
        "training"
    )
    assert launcher.poll() is None


@pytest.mark.usefixtures("quick")
def test_a_rank_without_a_network_reports_it_in_time_and_ends_its_launcher(launcher):
    with served() as (_, port):
        proxy = Proxy(port, 0.0)
        monitor = HeartbeatMonitor(connected(proxy.port), 0, 2, StoreHost("rank 1", NOWHERE))
        proxy.is_cut_off = True
        began = time.monotonic()
        why = monitor.describe_failure().text
        assert "the network of this machine has failed" in why
        monitor.stop(Cause(why))
        # and not when requests to the store end
        assert time.monotonic() - began < HANG_S
    # ended by SIGTERM, after the rank has printed the reason
    assert launcher.wait(HANG_S) == -15


CASES = {
    "stopped": "rank 1, which hosts the store, does not respond: it is stopped or very slow",
    "gone": "rank 1, which hosted the store, has ended",
    "unknown": "unknown: the store does not respond",
}


@contextmanager
def closed():
    """Yield the address of a port that refuses connections and cannot be bound."""
    with socket.socket() as holder:
        holder.bind(("127.0.0.1", 0))
        yield holder.getsockname()


@pytest.mark.usefixtures("quick")
def test_no_launcher_is_ended_if_the_store_can_be_reached(launcher):
    found, threads = {}, []
    with served() as (_, port), closed() as nobody:
        proxies = {case: Proxy(port, 0.0) for case in CASES}
        store_hosts = {
            "stopped": StoreHost("rank 1", ("127.0.0.1", proxies["stopped"].port)),
            "gone": StoreHost("rank 1", nobody),
        }

        def diagnose(case):
            store = connected(proxies[case].port)
            monitor = HeartbeatMonitor(store, 0, 2, store_hosts.get(case))
            proxies[case].is_cut_off = True
            found[case] = monitor.describe_failure().text
            monitor.stop()

        # concurrently, since each waits
        for case in CASES:
            threads.append(threading.Thread(target=diagnose, args=(case,)))
            threads[-1].start()
        for thread in threads:
            thread.join()
    assert found == CASES
    time.sleep(1)
    assert launcher.poll() is None


@pytest.mark.parametrize("has_launcher", [True, False])
def test_only_a_process_that_a_launcher_started_ends_with_its_parent(has_launcher, monkeypatch):
    if has_launcher:
        monkeypatch.setenv("TORCHELASTIC_RUN_ID", "7")
    else:
        # as in a script that a shell has started in the background
        monkeypatch.delenv("TORCHELASTIC_RUN_ID", raising=False)
    monkeypatch.setattr(exchange.heartbeat, "BEAT_S", 0.05)
    killed = threading.Event()
    monkeypatch.setattr(os, "kill", lambda *_: killed.set())
    monitor = HeartbeatMonitor(HashStore(), 0, 2)
    parent = os.getppid()
    monkeypatch.setattr(os, "getppid", lambda: parent + 1)
    before = monitor.beat
    while monitor.beat < before + 3 and not killed.is_set():
        time.sleep(0.05)
    monitor.stop()
    assert killed.is_set() == has_launcher


@pytest.mark.parametrize(
    ("num_steps", "message"),
    [(None, "waited 0 s for Mean of 4 bytes"), (4, "waited 0 s in step 5 for Mean of 4 bytes")],
)
def test_an_error_names_the_step_if_it_is_known(num_steps, message, monkeypatch):
    def fail(*_):
        raise RuntimeError("Connection closed by peer")

    monkeypatch.setattr(exchange.heartbeat, "BEAT_S", 0.05)
    world = SimpleNamespace(send=fail, recv=fail)
    group = exchange.Group(0, 2, "gloo", HashStore())
    group.channel("").process_group = world
    if num_steps is not None:
        group.count_step(num_steps)
    with pytest.raises(exchange.WorkerLost, match=message):
        run(ask(exchange.Mean(torch.ones(1))), group)
    group.close()


def test_a_message_that_cannot_be_started_is_a_lost_worker(monkeypatch):
    def fail(*_):
        raise RuntimeError("Connection closed by peer")

    monkeypatch.setattr(exchange.heartbeat, "BEAT_S", 0.05)
    monkeypatch.setattr(dist, "isend", fail)
    monkeypatch.setattr(dist, "irecv", fail)
    for request in (exchange.Send(torch.ones(1), 1), exchange.Receive(torch.ones(1), 1)):
        for program in (ask(request), ask(exchange.Start(request))):
            group = exchange.Group(0, 2, "gloo", HashStore())
            with pytest.raises(
                exchange.WorkerLost, match=r"rank 0 waited .*rank 1 never connected"
            ):
                run(program, group)
            group.close()


def test_the_first_cause_is_named_instead_of_the_ranks_that_it_ended():
    first = Heartbeat(3, 2, "training", "here", Cause("ValueError: no such file"))
    follow_up = Cause("rank 2 on here ended: out of memory", is_follow_up=True)
    followed = Heartbeat(3, 2, "training", "here", follow_up)
    text = describe_stopped_ranks(0, 2, range(3), {}, {1: followed, 2: first}).text
    assert text == "rank 2 on here ended: ValueError: no such file"
    # rank 2 is not a member of this subgroup
    text = describe_stopped_ranks(0, 2, range(2), {}, {1: followed}).text
    assert text == "rank 2 on here ended: out of memory"


@pytest.mark.parametrize("global_ranks", [[0, 1], [3, 5]])
def test_a_rank_that_ended_because_this_one_was_slow_is_named(global_ranks):
    own, other = global_ranks
    behind = {0: Heartbeat(3, 60, "training", "here"), 1: Heartbeat(3, 100, "training", "here")}
    after = {rank: each._replace(beat=6) for rank, each in behind.items()}
    cause = describe_stopped_ranks(1, 100, global_ranks, behind, after)
    assert "is running and still in step 60" in cause.text
    assert (cause.is_follow_up, cause.ranks) == (True, [own])
    after[1] = after[1]._replace(end=cause)
    found = describe_stopped_ranks(0, 100, global_ranks, behind, after)
    assert found.text.startswith(f"rank {other} ")
    assert found.text.endswith(f"on here ended, because {cause.text}")
    assert found.ranks == [other, own]


def leave_early(how):
    """Return this rank's error after rank 2 of three has left the group."""
    shorten_waits()
    text = ""
    try:
        with exchange.init_group(timeout_s=20) as group:
            run(ask(exchange.Mean(torch.ones(1))), group)
            if group.rank == 2 and how == "return":
                return text
            if group.rank == 2:
                raise ValueError("own error\nof two lines")
            if group.rank == 1:
                # rank 0 ends after rank 1, which is a follow-up
                run(exchange.among([1, 2], 1, exchange.Mean(torch.ones(1))), group)
            run(exchange.among([0, 1], group.rank, exchange.Mean(torch.ones(1))), group)
    except (exchange.WorkerLost, ValueError) as error:
        text = str(error)
    return text


@pytest.mark.parametrize(
    ("how", "reason"),
    [("return", "it has left the group"), ("raise", "ValueError: own error")],
)
def test_the_reason_for_leaving_is_named_on_all_ranks(how, reason, tmp_path):
    for text in results(3, tmp_path, leave_early, how)[:2]:
        assert re.search(rf"rank 2 on \S+ ended: {reason} \(", text), text
        assert text.count("ended") == 1
        assert text.count("torch.distributed reports") == 1
