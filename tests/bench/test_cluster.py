"""Emulated clusters have the requested rates and latencies, and leave nothing behind."""

import json
import os
import signal
import statistics
import subprocess
import sys
import time
from pathlib import Path

import pytest

from bench import harness
from bench.network import cluster as bench
from bench.network.cluster import Cluster, Counters
from bench.network.namespaces import can_make

ROOT = Path(bench.__file__).parents[2]
REASON = can_make()
needs_namespaces = pytest.mark.skipif(REASON is not None, reason=f"no cluster here: {REASON}")

LISTEN = """
import socket, time
server = socket.create_server(("10.0.0.1", 5000))
"""
CONNECT = """
import socket, time
while True:
    try:
        peer = socket.create_connection(("machine0", 5000))
        break
    except ConnectionRefusedError:
        time.sleep(0.01)
"""
RECEIVE = f"""{LISTEN}
peer = server.accept()[0]
print(sum(iter(lambda: len(peer.recv(1 << 16)), 0)))
"""
SEND = f"""{CONNECT}
peer.sendall(bytes(1_000_000))
"""
TAKE_FROM_TWO = f"""{LISTEN}
peers = [server.accept()[0] for _ in range(2)]
begin = time.monotonic()
for peer in peers:
    peer.send(b"!")
size = sum(len(peer.recv(500_000, socket.MSG_WAITALL)) for peer in peers)
print(size * 8e-6 / (time.monotonic() - begin))
"""
GIVE = f"""{CONNECT}
peer.recv(1)
peer.sendall(bytes(500_000))
"""
REDUCE = """
import datetime, torch, torch.distributed as dist
dist.init_process_group("gloo")
group = dist.new_group(timeout=datetime.timedelta(seconds=2))
ones = torch.full((1000,), float(1 + dist.get_rank()))
dist.all_reduce(ones, group=group)
print(dist.get_rank(), dist.get_world_size(), sorted(set(ones.tolist())), flush=True)
while True:
    dist.all_reduce(torch.ones(1000), group=group)
"""
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


@needs_namespaces
def test_a_missing_tool_is_reported_by_name(monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    assert can_make().startswith("no command ip, tc, ")


@needs_namespaces
def test_links_have_the_requested_rate():
    with Cluster(3, [80, 80, 40], links={(0, 1): 10}) as cluster:
        assert cluster.switch == "bridge"
        # the link's own; the receiver's; the sender's, back on the link that is slow one way only
        asked = {(0, 1): 10, (0, 2): 40, (1, 0): 80, (2, 0): 40}
        for link, mbit_per_s in asked.items():
            found = [cluster.measure(*link, seconds=0.2) for _ in range(3)]
            rate = statistics.median(each.mbit_per_s for each in found)
            # a busy machine is slower, or measures a short time; headers are not counted
            assert 0.5 * mbit_per_s < rate < 1.05 * mbit_per_s, link
        # nothing of it is counted later
        counted = cluster.counters()
        time.sleep(0.1)
        assert cluster.counters() == counted


@needs_namespaces
@pytest.mark.parametrize("offload", [False, True])
def test_segmentation_offload_does_not_change_the_rate(offload):
    with Cluster(2, 100, offload=offload) as cluster:
        before = cluster.counters()[0]
        found = [cluster.measure(seconds=0.3) for _ in range(3)]
        sent = cluster.counters()[0] - before
    assert 50 < statistics.median(each.mbit_per_s for each in found) < 105
    assert (sent.sent_bytes / sent.sent_packets > 5000) == offload


@needs_namespaces
def test_senders_share_the_rate_of_the_receiver():
    with Cluster(3, 20) as cluster:
        programs = [TAKE_FROM_TWO, GIVE, GIVE]
        ran = cluster.run(lambda rank: [sys.executable, "-c", programs[rank]], limit_s=20)
    assert ran.codes == [0, 0, 0]
    assert 10 < float(ran.output[0]) < 20


@needs_namespaces
def test_frames_arrive_with_the_requested_latency(switch):
    with Cluster(2, 100, 5) as cluster:
        assert cluster.switch == switch
        found = [cluster.measure(seconds=0.5) for _ in range(3)]
    # other work on this machine adds to one or the other
    assert 10 <= min(each.round_trip_ms for each in found) < 20
    assert max(each.mbit_per_s for each in found) < 100
    with Cluster(2) as cluster:
        assert cluster.measure(seconds=0.1).round_trip_ms < 5


@needs_namespaces
def test_interfaces_count_the_bytes_sent(switch, capfd):
    with Cluster(3, None, 0.1) as cluster:
        assert cluster.switch == switch
        programs = [RECEIVE, SEND, ""]
        ran = cluster.run(lambda rank: [sys.executable, "-c", programs[rank]], limit_s=20)
        # TCP's last words may still be on their way
        deadline = time.monotonic() + 2
        while True:
            receiver, sender, idle = cluster.counters()
            if receiver.received_bytes == sender.sent_bytes or time.monotonic() > deadline:
                break
    assert (ran.codes, ran.in_time) == ([0, 0, 0], True)
    assert ran.output == ["1000000\n", "", ""]
    assert "[0] 1000000\n" in capfd.readouterr().err
    # a frame of 1514 B carries 1448 B
    assert 1_000_000 * 1514 / 1448 <= sender.sent_bytes < 1_050_000
    assert 1_000_000 / 1448 <= sender.sent_packets < 750
    assert receiver == Counters(
        sender.received_bytes,
        sender.sent_bytes,
        sender.received_packets,
        sender.sent_packets,
    )
    assert idle == Counters(0, 0, 0, 0)
    assert 1_000_000 < ran.counters[1].sent_bytes <= sender.sent_bytes


@needs_namespaces
def test_machines_have_separate_namespaces():
    mark = f"of-{os.getpid()}"
    look = "cat /proc/sys/kernel/hostname; ls /sys/class/net"
    words = ["sh", "-c", f"{look}; echo > /dev/shm/{mark}-$RANK; echo $KEPT"]
    with Cluster(2) as cluster:
        first = cluster.run(lambda _: words, environment={"KEPT": "1"})
        second = cluster.run(lambda _: ["ls", "/dev/shm"])
    assert first.output == [f"machine{rank}\neth0\nlo\n1\n" for rank in range(2)]
    assert second.output == [f"{mark}-{rank}\n" for rank in range(2)]
    assert not list(Path("/dev/shm").glob(f"{mark}-*"))


@needs_namespaces
def test_exit_codes_and_the_time_limit():
    with Cluster(2) as cluster:
        ran = cluster.run(lambda rank: ["sh", "-c", f"exit {3 * rank}"])
        assert (ran.codes, ran.in_time) == ([0, 3], True)
        ran = cluster.run(
            lambda rank: ["sh", "-c", f"sleep {100 * rank} & sleep {100 * rank}"], limit_s=0.5
        )
        assert (ran.codes, ran.in_time) == ([0, 137], False)
        assert 0.5 <= ran.wall_s < 5
        assert cluster.processes(1) == []


@needs_namespaces
def test_processes_that_a_command_leaves_behind_are_listed():
    with Cluster(1) as cluster:
        begin = time.monotonic()
        ran = cluster.run(lambda _: ["sh", "-c", "sleep 100 & echo done"])
        assert (ran.codes, ran.output) == ([0], ["done\n"])
        (left,) = cluster.processes(0)
        assert Path(f"/proc/{left}/cmdline").read_text().split("\0")[0] == "sleep"
        cluster.kill(0)
        assert cluster.processes(0) == []
        assert time.monotonic() - begin < 10


@needs_namespaces
def test_a_process_can_be_paused_and_continued():
    with Cluster(1) as cluster:
        process = cluster.start(0, ["sleep", "0.3"])
        while not cluster.processes(0):
            time.sleep(0.01)
        (running,) = cluster.processes(0)
        os.kill(running, signal.SIGSTOP)
        with pytest.raises(subprocess.TimeoutExpired):
            process.wait(0.6)
        os.kill(running, signal.SIGCONT)
        assert process.wait(10) == 0


@needs_namespaces
@pytest.mark.parametrize("delay_ms", [0, 1])
def test_a_machine_can_be_disconnected_and_reconnected(delay_ms):
    send = "import socket; socket.socket(type=socket.SOCK_DGRAM).sendto(b'x', ('10.0.0.2', 9))"

    def arrives(cluster):
        before = cluster.counters()[1].received_packets
        cluster.start(0, [sys.executable, "-c", send]).wait()
        time.sleep(0.02)
        return cluster.counters()[1].received_packets > before

    def wait_for_one(cluster):
        deadline = time.monotonic() + 5
        while not arrives(cluster):
            assert time.monotonic() < deadline
            time.sleep(0.1)

    with Cluster(2, None, delay_ms) as cluster:
        wait_for_one(cluster)
        for worker in (0, 1):
            cluster.link_down(worker)
            assert not arrives(cluster)
            cluster.link_up(worker)
            wait_for_one(cluster)


@pytest.mark.processes
@needs_namespaces
def test_workers_reduce_until_a_link_breaks():
    with Cluster(2, 100, 1) as cluster:
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.DEVNULL}
        workers = [cluster.start(rank, [sys.executable, "-c", REDUCE], **pipes) for rank in (0, 1)]
        said = [worker.stdout.readline() for worker in workers]
        assert said == ["0 2 [3.0]\n", "1 2 [3.0]\n"]
        cluster.link_down(1)
        # by an error, within the group's timeout
        assert [worker.wait(20) for worker in workers] == [1, 1]
        for worker in workers:
            worker.stdout.close()


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
@pytest.mark.parametrize("killed_after_s", [0, 0.04, 0.08, 0.15, 0.25, None])
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
            deadline = time.monotonic() + 5
            while len(processes_with(word)) < 3 * 5:
                assert time.monotonic() < deadline
        else:
            time.sleep(killed_after_s)
        process.kill()
        process.stdout.close()
    deadline = time.monotonic() + 5
    while left := processes_with(word):
        assert time.monotonic() < deadline, left
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
    assert 25 < json.loads(done.stdout)["measured"]["0:1"]["mbit_per_s"] < 50
    done = say("--link", "0:7=10", "--measure")
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("error: a link from worker 0 to worker 7 of 2\nhint: ")
    assert say().returncode == 2


def test_measured_links_are_recorded(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(harness, "RESULTS", tmp_path)
    measured = {"0:1": {"round_trip_ms": 2.5, "mbit_per_s": 95.0}}
    bench._record({"workers": 2, "mbit_per_s": 100.0}, measured)
    line = json.loads((tmp_path / "cluster.jsonl").read_text())
    assert (line["link"], line["workers"], line["mbit_per_s"]) == ("0:1", 2, 100.0)
    assert (line["measured_round_trip_ms"], line["measured_mbit_per_s"]) == (2.5, 95.0)
    assert capsys.readouterr().out == ""
