"""Emulated clusters have the requested rates and latencies, and leave nothing behind."""

import json
import os
import signal
import socket
import struct
import subprocess
import sys
import time
from contextlib import ExitStack, suppress
from pathlib import Path

import pytest
from limits import HANG_S, NEVER_S

from bench.network import cluster as bench
from bench.network.cluster import Cluster
from bench.network.namespaces import call_in, can_make

# options of sockets of Linux that Python does not name
SO_SNDBUFFORCE, SO_RCVBUFFORCE, SO_TIMESTAMPNS = 32, 33, 35
ROOT = Path(bench.__file__).parents[2]
REASON = can_make()
needs_namespaces = pytest.mark.skipif(REASON is not None, reason=f"no cluster here: {REASON}")

LIVE = """
import subprocess, sys, time
sys.path.insert(0, sys.argv[1])
from bench.network.cluster import Cluster
print("begun", flush=True)
with Cluster(3, 100, 1) as cluster:
    for worker in range(3):
        cluster.start(worker, ["sh", "-c", "setsid sleep 1000 & echo > /dev/shm/x; sleep 1000"])
    print("whole", flush=True)
    time.sleep(1000)
"""


@pytest.fixture(params=["netem", "user space"])
def switch(request, monkeypatch):
    """What delays frames."""
    if request.param == "user space":
        monkeypatch.setattr(bench, "_has_netem", lambda hub: False)
    else:
        with Cluster(1, None, 1) as cluster:
            if cluster.switch != "netem":
                pytest.skip("this kernel has no netem")
    return request.param


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ((0,), "a cluster of 0 workers"),
        ((251,), "a cluster of 251 workers"),
        ((2, [100, 100, 100]), "3 rates for 2 workers"),
        ((2, 0), "a link of 0 Mbit/s"),
        ((2, [100, -1]), "a link of -1 Mbit/s"),
        ((2, 100, -1), "a delay of -1 ms"),
        ((2, 100, 0, {(0, 2): 10}), "from worker 0 to worker 2 of 2"),
        ((2, 100, 0, {(1, 1): 10}), "from worker 1 to worker 1 of 2"),
        ((2, 100, 0, {(0, 1): 0}), "a link of 0 Mbit/s"),
    ],
)
def test_invalid_networks_are_rejected(arguments, words):
    with pytest.raises(ValueError, match=f"{words}.*\n\nhint: "):
        Cluster(*arguments)


@pytest.mark.parametrize(
    ("missing", "words"),
    [
        (lambda patch: patch.setattr(os, "geteuid", lambda: 1000), "need root, .* user 1000"),
        (lambda patch: patch.setattr(sys, "platform", "darwin"), "need Linux, and this is darwin"),
    ],
)
def test_without_privileges_the_hint_is_the_virtual_clock(missing, words, monkeypatch):
    missing(monkeypatch)
    with pytest.raises(RuntimeError, match=f"{words}\n\nhint: .*virtual clock"), Cluster(2):
        pass


def rate_of(cluster, senders, receiver, num_bytes=200_000):
    """Return the Mbit/s of frames from some machines, by the times at which the kernel has them.

    The kernel alone sends and receives: all bytes fit into the buffers of sockets.
    """

    def watch():
        found = socket.socket(socket.AF_PACKET, socket.SOCK_RAW, socket.ntohs(3))
        found.setsockopt(socket.SOL_SOCKET, SO_RCVBUFFORCE, 1 << 24)
        found.setsockopt(socket.SOL_SOCKET, SO_TIMESTAMPNS, 1)
        found.bind(("eth0", 0))
        return found

    def listen():
        found = socket.socket()
        found.setsockopt(socket.SOL_SOCKET, SO_RCVBUFFORCE, 1 << 22)
        found.bind((cluster.addresses[receiver], 0))
        found.listen()
        return found

    machines = cluster._running.ranks
    with ExitStack() as stack:
        enter = stack.enter_context
        watching = enter(call_in(machines[receiver], watch))
        listening = enter(call_in(machines[receiver], listen))
        address, pairs = listening.getsockname(), []
        for sender in senders:
            client = enter(call_in(machines[sender], lambda: socket.create_connection(address)))
            client.setsockopt(socket.SOL_SOCKET, SO_SNDBUFFORCE, 1 << 22)
            pairs.append((client, enter(listening.accept()[0])))
        for client, _ in pairs:
            client.sendall(bytes(num_bytes))
        for _, server in pairs:
            assert len(server.recv(num_bytes, socket.MSG_WAITALL)) == num_bytes
        watching.setblocking(False)
        frames = []
        with suppress(BlockingIOError):
            while True:
                frame, ((_, _, stamp),), _, _ = watching.recvmsg(1 << 17, 100)
                # data, and not an acknowledgement of this machine
                if len(frame) > 1000:
                    seconds, nanoseconds = struct.unpack("qq", stamp)
                    frames.append((seconds + 1e-9 * nanoseconds, len(frame)))
    cluster._drain()
    (first_s, first_bytes), (last_s, _) = frames[0], frames[-1]
    return (sum(size for _, size in frames) - first_bytes) * 8e-6 / (last_s - first_s)


def least_round_trip_ms(cluster, connections=30):
    """Return the least round trip from machine 0 to machine 1 and back, by the kernel's clock."""
    machines, found = cluster._running.ranks, []
    with call_in(machines[1], lambda: socket.create_server((cluster.addresses[1], 0))) as server:
        address = server.getsockname()
        for _ in range(connections):
            with call_in(machines[0], lambda: socket.create_connection(address)) as client:
                info = client.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 152)
                # tcpi_min_rtt, in microseconds
                found.append(struct.unpack_from("I", info, 148)[0] / 1000)
    return min(found)


@needs_namespaces
def test_links_have_the_requested_rate():
    with Cluster(3, [80, 80, 40], links={(0, 1): 10}) as cluster:
        assert cluster.switch == "bridge"
        # the link's own; the receiver's; the sender's, back on the link that is slow one way only
        asked = {(0, 1): 10, (0, 2): 40, (1, 0): 80, (2, 0): 40}
        for (sender, receiver), mbit_per_s in asked.items():
            # other work on this machine may hold up a sender, but nothing makes a link faster
            rate = max(rate_of(cluster, [sender], receiver) for _ in range(3))
            assert 0.9 * mbit_per_s < rate < 1.05 * mbit_per_s, (sender, receiver)
        # nothing of it is counted later
        counted = cluster.counters()
        time.sleep(0.1)
        assert cluster.counters() == counted


@needs_namespaces
def test_frames_arrive_with_the_requested_latency(switch):
    with Cluster(2, 100, 5) as cluster:
        assert cluster.switch == switch
        assert 10 <= least_round_trip_ms(cluster) < 15
        found = cluster.measure(seconds=0.2)
    # the median of round trips between processes, to which other work on this machine adds
    assert found.round_trip_ms >= 10
    assert found.mbit_per_s > 0
    with Cluster(2) as cluster:
        assert least_round_trip_ms(cluster) < 5


@needs_namespaces
def test_exit_codes_and_the_time_limit():
    with Cluster(2) as cluster:
        ran = cluster.run(lambda rank: ["sh", "-c", f"exit {3 * rank}"])
        assert (ran.codes, ran.in_time) == ([0, 3], True)
        long = NEVER_S
        ran = cluster.run(
            lambda rank: ["sh", "-c", f"sleep {long * rank} & sleep {long * rank}"], limit_s=3
        )
        assert (ran.codes, ran.in_time) == ([0, 137], False)
        assert ran.wall_s >= 3
        assert cluster.processes(1) == []


@needs_namespaces
def test_processes_that_a_command_leaves_behind_are_listed():
    with Cluster(1) as cluster:
        ran = cluster.run(lambda _: ["sh", "-c", f"sleep {NEVER_S} & echo done"])
        assert (ran.codes, ran.output) == ([0], ["done\n"])
        (left,) = cluster.processes(0)
        assert Path(f"/proc/{left}/cmdline").read_text().split("\0")[0] == "sleep"
        cluster.kill(0)
        assert cluster.processes(0) == []


@needs_namespaces
def test_a_process_can_be_paused_and_continued(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    with Cluster(1) as cluster, (tmp_path / "pipe").open("r+b", buffering=0) as pipe:
        # it ends when it has read a byte
        words = ["head", "-c", "1", str(tmp_path / "pipe")]
        process = cluster.start(0, words, stdout=subprocess.DEVNULL)
        while not cluster.processes(0):
            time.sleep(0.01)
        (running,) = cluster.processes(0)
        os.kill(running, signal.SIGSTOP)
        pipe.write(b"!")
        with pytest.raises(subprocess.TimeoutExpired):
            process.wait(0.6)
        os.kill(running, signal.SIGCONT)
        assert process.wait(HANG_S) == 0


@needs_namespaces
@pytest.mark.parametrize("delay_ms", [0, 1])
def test_a_machine_can_be_disconnected_and_reconnected(delay_ms):
    def send(cluster, size):
        frame = f"socket.socket(type=socket.SOCK_DGRAM).sendto(bytes({size}), ('10.0.0.2', 9))"
        cluster.start(0, [sys.executable, "-c", f"import socket; {frame}"]).wait()

    def send_until_one_arrives(cluster):
        before, end = cluster.counters()[1], time.monotonic() + HANG_S
        while cluster.counters()[1] == before:
            assert time.monotonic() < end
            send(cluster, 1)
            time.sleep(0.1)

    with Cluster(2, None, delay_ms) as cluster:
        send_until_one_arrives(cluster)
        for worker in (0, 1):
            cluster.link_down(worker)
            before = cluster.counters()[1].received_bytes
            send(cluster, 1400)
            cluster.link_up(worker)
            # frames keep their order, so that the one before would have arrived
            send_until_one_arrives(cluster)
            assert cluster.counters()[1].received_bytes - before < 1400
        send(cluster, 1400)
        send_until_one_arrives(cluster)
        assert cluster.counters()[1].received_bytes - before > 1400


def state():
    """What a cluster could leave behind, apart from processes."""
    links = subprocess.run(["ip", "-brief", "link"], capture_output=True, text=True, check=True)
    named = sorted(Path("/run/netns").glob("*"))
    mounts = Path("/proc/mounts").read_text()
    return [line.split()[0] for line in links.stdout.splitlines()], named, mounts


def processes_with(word):
    found = []
    for path in Path("/proc").glob("[0-9]*/environ"):
        try:
            if word.encode() in path.read_bytes():
                found.append(int(path.parent.name))
        except OSError:
            pass
    return found


@needs_namespaces
@pytest.mark.parametrize("killed_after_s", [0.08, None])
def test_a_cluster_that_is_killed_at_any_moment_leaves_nothing_behind(killed_after_s):
    before = state()
    word = f"GCNZC_TEST_CLUSTER={os.getpid()}-{killed_after_s}"
    name, value = word.split("=")
    with subprocess.Popen(
        [sys.executable, "-c", LIVE, str(ROOT)],
        env={**os.environ, name: value},
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    ) as process:
        assert process.stdout.readline() == "begun\n"
        if killed_after_s is None:
            assert process.stdout.readline() == "whole\n"
            # the shells and their sleepers run
            end = time.monotonic() + HANG_S
            while len(processes_with(word)) < 3 * 5:
                assert time.monotonic() < end
        else:
            time.sleep(killed_after_s)
        process.kill()
        process.stdout.close()
    end = time.monotonic() + HANG_S
    while left := processes_with(word):
        assert time.monotonic() < end, left
        time.sleep(0.01)
    assert state() == before


@needs_namespaces
def test_the_command_runs_a_program_on_every_machine():
    script = [sys.executable, "-m", "bench.network.cluster", "--workers", "2"]

    def say(*words):
        return subprocess.run([*script, *words], capture_output=True, text=True, check=False)

    links = ["--mbit-per-s", "100,50", "--link", "0:1=10"]
    done = say(*links, "--", "sh", "-c", "echo $RANK; exit $RANK")
    assert done.returncode == 1
    assert set(done.stderr.splitlines()) == {"[0] 0", "[1] 1"}
    line = json.loads(done.stdout)
    assert (line["codes"], line["in_time"]) == ([0, 1], True)
    assert (line["mbit_per_s"], line["links"]) == ([100, 50], {"0:1": 10})
    assert line["counters"] == [dict.fromkeys(line["counters"][0], 0)] * 2
    done = say("--measure", "--mbit-per-s", "50")
    assert done.returncode == 0
    assert json.loads(done.stdout)["measured"]["0:1"]["mbit_per_s"] > 0
    done = say("--link", "0:7=10", "--measure")
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("error: a link from worker 0 to worker 7 of 2\nhint: ")
    assert say().returncode == 2
