"""The options of uneven machines, and the strategies with uneven workers in virtual time."""

import json
import subprocess
import sys
import threading
import time
from itertools import cycle, pairwise
from types import SimpleNamespace

import pytest
from limits import HANG_S, NEVER_S
from stopped import wait_for_state

from bench import harness
from bench.network import cluster as cluster_module
from bench.network import uneven, uneven_strategies, validate
from bench.network.cluster import Cluster
from bench.network.links import Network
from bench.network.namespaces import can_make
from bench.network.uneven_strategies import Task, read_task
from gcnzc.exchange import Link

# machine 0 sends 100 KB to machine 1, and prints the seconds at which each frame leaves it
SEND_AND_WATCH = """
import os, socket, struct
if os.environ["RANK"] == "1":
    with socket.create_server(("0.0.0.0", 5555)) as server, server.accept()[0] as peer:
        while peer.recv(65536):
            pass
else:
    while True:
        try:
            peer = socket.create_connection(("machine1", 5555))
            break
        except ConnectionRefusedError:
            pass
    watch = socket.socket(socket.AF_PACKET, socket.SOCK_RAW, socket.ntohs(3))
    watch.bind(("eth0", 0))
    watch.setsockopt(socket.SOL_SOCKET, 35, 1)  # SO_TIMESTAMPNS of Linux
    watch.settimeout(0.5)
    peer.sendall(bytes(100_000))
    try:
        while True:
            frame, ancillary, _, address = watch.recvmsg(65536, 100)
            if address[2] == 4 and len(frame) > 1000:  # outgoing
                seconds, nanoseconds = struct.unpack("qq", ancillary[0][2])
                print(seconds % 1000 + nanoseconds / 1e9)
    except TimeoutError:
        pass
"""
needs_namespaces = pytest.mark.skipif(can_make() is not None, reason=str(can_make()))


@pytest.mark.parametrize(
    ("parse", "text", "expected"),
    [
        (uneven.slow_worker, "3:2.5", (3, 2.5)),
        (uneven.slow_link, "0-12:10", ((0, 12), 10.0)),
        (uneven.moment, "3:20", (3, 20.0)),
    ],
)
def test_options_are_parsed(parse, text, expected):
    assert parse(text) == expected


@pytest.mark.parametrize(
    ("parse", "text"),
    [
        (uneven.slow_worker, "3"),
        (uneven.slow_worker, "3:0.5"),
        (uneven.slow_worker, "3:inf"),
        (uneven.slow_worker, "3:nan"),
        (uneven.slow_link, "0:1:10"),
        (uneven.slow_link, "0-1:0"),
        (uneven.moment, "3:-1"),
    ],
)
def test_invalid_options_are_rejected(parse, text):
    with pytest.raises(ValueError):  # noqa: PT011 - argparse shows its own message
        parse(text)


def test_a_slow_link_has_a_part_of_the_lower_rate_in_both_directions():
    assert uneven.pair_rates([100, 20, None], {(0, 1): 10, (0, 2): 4}) == {
        (0, 1): 2,
        (1, 0): 2,
        (0, 2): 25,
        (2, 0): 25,
    }


@pytest.mark.parametrize(
    ("rates", "pair", "words"),
    [([100, 100], (0, 2), "worker 2 of 2"), ([None, None], (0, 1), "without a rate")],
)
def test_slow_links_need_workers_with_rates(rates, pair, words):
    with pytest.raises(ValueError, match=f"{words}\n\nhint: "):
        uneven.pair_rates(rates, {pair: 2})


def test_a_machine_sends_acknowledgements_first_and_has_a_queue_for_each_receiver():
    script = Network([10, 10, 10], 0.0, {(0, 2): 1}).interface(0)
    queues = [line for line in script.splitlines() if " tbf " in line]
    assert len(queues) == 2
    classes = [line for line in script.splitlines() if line.startswith("tc class")]
    assert [line.split(" ceil ")[1].split()[0] for line in classes] == [
        "10000000bit",
        "10000000bit",
        "10000000bit",
        "1000000bit",
    ]
    assert "tcp_congestion_control" in script
    assert "tc " not in Network([None, None], 0.0, {}).interface(0)


def test_processes_are_paused_for_a_part_of_the_time(monkeypatch):
    waited_s, states, ended = {"S": 0.0, "T": 0.0}, cycle("ST"), threading.Event()

    class Event:
        """Counts the time for which the process sleeps, and that for which it is stopped."""

        def wait(self, seconds):
            wait_for_state(process, state := next(states))
            waited_s[state] += seconds
            if sum(waited_s.values()) > 10.5 * uneven.PERIOD_S:
                ended.set()
            return ended.is_set()

        def set(self):
            ended.wait(HANG_S)

    replaced = SimpleNamespace(Event=Event, Thread=threading.Thread)
    monkeypatch.setattr(uneven, "threading", replaced)
    with subprocess.Popen(["sleep", str(HANG_S)]) as process:
        try:
            with uneven.slowed(lambda worker: [process.pid], {0: 3.0}):
                pass
            wait_for_state(process, "S")
        finally:
            process.kill()
    assert waited_s["T"] / sum(waited_s.values()) == pytest.approx(2 / 3, abs=0.05)


@needs_namespaces
def test_frames_of_a_message_are_sent_one_after_the_other():
    with Cluster(2, 10) as cluster:
        ran = cluster.run(lambda worker: [sys.executable, "-c", SEND_AND_WATCH], limit_s=HANG_S)
    times = [float(word) for word in ran.output[0].split()]
    assert len(times) > 60
    # a frame takes 1.2 ms; in bursts of 64 KiB, almost all gaps would be short. Three frames may be
    # sent at once after a pause, and a receiver that waits for a core finds several frames
    gaps = sorted(after - before for before, after in pairwise(times))
    assert 0.9e-3 < gaps[len(gaps) // 2] < 1.5e-3
    assert sum(gap < 0.2e-3 for gap in gaps) < len(gaps) / 2


@needs_namespaces
def test_workers_leave_and_join(tmp_path, monkeypatch):
    # worker 0 never ends the first time that it runs
    begun = tmp_path / "begun"
    first = f"test -e {begun} || {{ touch {begun}; sleep {NEVER_S}; }}"

    class Clock:
        monotonic = time.monotonic

        def sleep(self, seconds):
            # it leaves after it has begun, however long that takes
            while not begun.exists():
                time.sleep(0.01)
            time.sleep(seconds)

    with Cluster(3) as cluster:
        monkeypatch.setattr(cluster_module, "time", Clock())
        ran = cluster.run(
            lambda worker: ["sh", "-c", f"echo begun; {':' if worker else first}"],
            leave={0: 0.3},
            join={0: 0.5, 2: 0.4},
            limit_s=HANG_S,
        )
        assert cluster.processes(0) == []
    assert (ran.codes, ran.in_time) == ([0, 0, 0], True)
    assert ran.output == ["begun\nbegun\n", "begun\n", "begun\n"]
    assert ran.wall_s >= 0.5


def test_a_task_is_the_same_after_json():
    task = Task("DiLoCo", 4, 8, 0.1, {3: 3.0})
    assert read_task(json.loads(json.dumps(task.__dict__))) == task


def test_the_simulated_time_of_a_task_is_that_of_its_bytes():
    task = {"kind": "Sum", "algorithm": "halving", "num_bytes": 400_000}
    link = Link(1e6, in_bytes_per_s=1e6)
    assert validate.simulate(task, 4, link) == pytest.approx(0.6, rel=1e-3)
    words = ["--sizes", "4096", "--kinds", "AllGather"]
    tasks = validate.make_tasks(validate._options(words), 4)
    assert [(each["algorithm"], each["num_bytes"]) for each in tasks] == [
        ("ring", 1024),
        ("doubling", 1024),
    ]


def test_results_are_recorded_only_on_request(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(harness, "RESULTS", tmp_path)
    words = ["average", "--virtual", "--workers", "2", "--steps", "1"]
    uneven_strategies.main(words)
    printed = json.loads(capsys.readouterr().out)
    assert not list(tmp_path.iterdir())
    uneven_strategies.main([*words, "--record"])
    recorded = json.loads((tmp_path / "cluster.jsonl").read_text())
    assert printed == {key: recorded[key] for key in printed}
    assert len(printed["seconds"]) == 2


def test_a_slow_worker_slows_the_others_only_if_they_wait_for_it(tmp_path, monkeypatch):
    monkeypatch.setattr(harness, "RESULTS", tmp_path)
    words = ["average", "A2CiD2, overlapped", "--virtual", "--workers", "2", "--steps", "4"]
    uneven_strategies.main([*words, "--slow-worker", "1:3", "--record"])
    lines = [json.loads(text) for text in (tmp_path / "cluster.jsonl").read_text().splitlines()]
    average, gossip = (line["seconds"] for line in lines)
    assert average[0] == pytest.approx(average[1], rel=0.01)
    assert average[0] > 4 * 3 * 0.15
    assert gossip[0] < 0.6 * gossip[1]
    assert lines[0]["slow_workers"] == {"1": 3.0}
    with pytest.raises(ValueError, match="worker 7 of 2"):
        uneven_strategies.main([*words, "--slow-worker", "7:3"])
