"""Several machines: torchrun in network namespaces."""

import json
import sys
from pathlib import Path

import pytest
from limits import HANG_S
from training import planted

from bench.network import cluster

ROOT = Path(__file__).parents[2]
REASON = cluster.can_make()
pytestmark = pytest.mark.skipif(REASON is not None, reason=str(REASON))


@pytest.fixture(scope="module")
def graph(tmp_path_factory):
    return planted(tmp_path_factory, 2000, 12000, 24, 4)


def torchrun(graph, run, per_node, *words, machines="2"):
    launcher = [sys.executable, "-m", "torch.distributed.run", "--nnodes", machines]
    launcher += ["--rdzv-id", "7", "--rdzv-conf", "join_timeout=60,read_timeout=10"]
    launcher += ["--nproc-per-node", str(per_node), "--rdzv-backend", "c10d", "--max-restarts", "2"]
    launcher += ["--rdzv-endpoint", "machine0:29400", "-m", "gcnzc", "train", str(graph)]
    sizes = ["--fanouts", "5,5", "--hidden", "16", "--batch-size", "30"]
    return [*launcher, *sizes, "--out", str(run), *words]


@pytest.mark.processes
def test_torchrun_trains_on_two_machines(graph, tmp_path):
    run = tmp_path / "run"
    with cluster.Cluster(workers=2, mbit_per_s=200) as machines:
        ran = machines.run(
            lambda rank: torchrun(graph, run, 2, "--epochs", "3"),
            limit_s=HANG_S,
            environment={"PYTHONPATH": str(ROOT)},
        )
    assert ran.codes == [0, 0], ran.output
    result = json.loads((run / "result.json").read_text())
    assert (result["workers"], result["epochs"]) == (4, 3)
    lines = [json.loads(line) for line in (run / "workers.jsonl").read_text().splitlines()]
    assert [line["worker"] for line in lines] == [0, 1, 2, 3] * 3
    # what crossed the network is what two of the workers, at most, sent, and headers
    sent = max(sum(line["bytes_sent"] for line in lines[rank::4]) for rank in range(4))
    assert sum(counter.sent_bytes for counter in ran.counters) > 0.2 * sent
