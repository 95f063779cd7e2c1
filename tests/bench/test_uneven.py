"""The options of uneven machines, workers that leave and join, and simulated times."""

import time

import pytest
from limits import HANG_S, NEVER_S

from bench.network import cluster as cluster_module
from bench.network import uneven, validate
from bench.network.cluster import Cluster
from bench.network.links import Network
from bench.network.namespaces import can_make
from gcnzc.exchange import Link

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


def test_a_slow_link_has_a_part_of_the_lower_rate_in_both_directions():
    assert uneven.pair_rates([100, 20, None], {(0, 1): 10, (0, 2): 4}) == {
        (0, 1): 2,
        (1, 0): 2,
        (0, 2): 25,
        (2, 0): 25,
    }


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


def test_the_simulated_time_of_a_task_is_that_of_its_bytes():
    task = {"kind": "Sum", "algorithm": "builtin", "num_bytes": 400_000}
    link = Link(1e6, in_bytes_per_s=1e6)
    assert validate.simulate(task, 4, link) == pytest.approx(0.6, rel=1e-3)
    words = ["--sizes", "4096", "--kinds", "AllGather"]
    tasks = validate.make_tasks(validate._options(words), 4)
    assert [(each["algorithm"], each["num_bytes"]) for each in tasks] == [
        ("builtin", 1024),
        ("doubling", 1024),
    ]
