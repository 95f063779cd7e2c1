"""Measure the throughput and the accuracy of training by number of workers.

    python -m bench.training.workers speed [--rounds N]
    python -m bench.training.workers accuracy [GRAPH ...] [--seeds N]

`speed` trains on a planted graph with one worker on one core and with two workers on two cores,
interleaved, with one thread per worker. It takes the median epoch, without the first. Throughput is
measured with and without the time of the gradient exchange. The exit status is 1 if two workers are
not 1.8 times as fast as one without the exchange, and 2 if there are fewer than two cores.

`accuracy` trains with 1, 2 and 4 workers with the same total batch size, over several seeds. The
exit status is 1 if a mean differs from that of one worker by more than the sum of both standard
deviations. GRAPH is `planted`, or a folder of ../shared/data.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from bench import harness
from bench.network.strategies import prepared

ROOT = Path(__file__).parents[2]
TARGET = 1.8
SHAPE = "--nodes {} --edges {} --num-features 100"

SPEED = "--layers 2 --fanouts 10,10 --hidden 128 --epochs 4 --evaluate-every 4"
ACCURACY = "--layers 2 --fanouts 10,10 --hidden 64 --epochs 10"
TOTAL = 256  # seeds per step, of all workers


def main(argv: Sequence[str] | None = None) -> int:
    """Run the requested part, and return the exit status."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("part", choices=["speed", "accuracy"])
    parser.add_argument("graphs", nargs="*", metavar="GRAPH", default=["planted", "amazon_photo"])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--nodes", type=int, default=40_000, help="of the planted graph")
    options = parser.parse_args(argv)
    with tempfile.TemporaryDirectory() as folder:
        if options.part == "speed":
            return speed(Path(folder), options.rounds, options.nodes)
        within = [
            accuracy(Path(folder), graph, options.seeds, options.nodes) for graph in options.graphs
        ]
        return 0 if all(within) else 1


def speed(folder: Path, rounds: int, nodes: int) -> int:
    """Compare one worker on one core with two workers on two, and return the exit status."""
    graph = prepared(folder, "planted", SHAPE.format(nodes, 10 * nodes))
    cores = sorted(os.sched_getaffinity(0))
    if len(cores) < 2:
        print("speed: two cores are needed", file=sys.stderr)
        return 2
    without_exchange: dict[int, list[float]] = {1: [], 2: []}
    overall: dict[int, list[float]] = {1: [], 2: []}
    for round_ in range(rounds):
        for workers in (1, 2):
            run = folder / f"speed-{round_}-{workers}"
            train(graph, run, workers, f"{SPEED} --threads 1 --batch-size 512", cores[:workers])
            lines = [json.loads(line) for line in (run / "record.jsonl").open()][1:]
            without_exchange[workers].append(
                statistics.median(x["seeds"] / (x["epoch_s"] - x["exchange_s"]) for x in lines)
            )
            overall[workers].append(statistics.median(x["seeds"] / x["epoch_s"] for x in lines))
    figures = {}
    for workers in (1, 2):
        figures[workers] = statistics.median(without_exchange[workers])
        harness.record(
            "workers",
            {"part": "speed", "graph": "planted", "nodes": nodes, "workers": workers},
            seeds_per_s=statistics.median(overall[workers]),
            seeds_per_s_without_exchange=figures[workers],
            rounds=rounds,
            options=f"{SPEED} --threads 1 --batch-size 512",
        )
    ratio = figures[2] / figures[1]
    print(f"two workers are {ratio:.2f} times as fast as one, without the exchange", flush=True)
    return 0 if ratio >= TARGET else 1


def accuracy(folder: Path, name: str, seeds: int, nodes: int) -> bool:
    """Measure one graph, and return whether more workers are as accurate as one."""
    graph = prepared(folder, name, SHAPE.format(nodes, 10 * nodes))
    found: dict[int, list[float]] = {}
    for workers in (1, 2, 4):
        found[workers] = []
        for seed in range(seeds):
            run = folder / f"{name}-{workers}-{seed}"
            options = f"{ACCURACY} --batch-size {TOTAL // workers} --seed {seed}"
            train(graph, run, workers, options, sorted(os.sched_getaffinity(0)))
            result = json.loads((run / "result.json").read_text())
            found[workers].append(100 * result["test_accuracy"])
        harness.record(
            "workers",
            {"part": "accuracy", "graph": name, "workers": workers, "total_batch": TOTAL},
            test_percent=statistics.mean(found[workers]),
            spread_percent=statistics.stdev(found[workers]),
            tests_percent=found[workers],
            options=ACCURACY,
        )
    return all(
        abs(statistics.mean(found[workers]) - statistics.mean(found[1]))
        <= statistics.stdev(found[workers]) + statistics.stdev(found[1])
        for workers in (2, 4)
    )


def train(graph: Path, run: Path, workers: int, options: str, cores: Sequence[int]) -> None:
    """Run `gcnzc train` in a subprocess that is limited to the given cores."""
    command = [sys.executable, "-m", "gcnzc", "train", str(graph), "--out", str(run)]
    one = {"OMP_NUM_THREADS": "1", "NUMBA_NUM_THREADS": "1"}
    ran = subprocess.run(
        [*command, "--workers", str(workers), "--no-tuning-profile", *options.split()],
        env={**os.environ, "PYTHONPATH": str(ROOT), **one},
        capture_output=True,
        text=True,
        preexec_fn=lambda: os.sched_setaffinity(0, cores),
        check=False,
    )
    if ran.returncode:
        raise RuntimeError(f"gcnzc train failed:\n{ran.stderr}")


if __name__ == "__main__":
    sys.exit(main())
