"""Measure the accuracy of each distributed optimizer, and its throughput on slow links.

    python -m bench.network.strategies accuracy [CASE ...] [--seeds N] [--methods METHOD ...]
    python -m bench.network.strategies speed [CASE ...] [--mbit-per-s R ...] [--methods METHOD ...]

CASE is one of `CASES`, a model on a graph: `planted` (generated, with the shape of ogbn-products),
`amazon_photo` or `wide` (on a folder of ../shared/data).

`accuracy` trains with four workers on this machine. All methods use the same seeds, number of
epochs, minibatches and learning rate, except that `onebit-lamb` has its own learning rate. The
link rate does not affect these results.

`speed` trains each case for a few epochs with four workers, one on each emulated machine of
bench/network/cluster.py (which needs root), over links of each rate. The methods run one after
the other in each round. The first epoch, in which kernels are compiled, is not counted. For
methods with a warm-up, throughput is computed for a run that takes 15 % of its steps at the
throughput of `adamw`, and the rest at that of the method's own later epochs. `none` does not
exchange before the end of the run: it is the baseline.

bench/docs/plot.py combines both: accuracy by epoch from `accuracy`, with epoch times from `speed`.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import Any

from bench import harness
from bench.network.cluster import Cluster
from gcnzc import cli
from gcnzc.optim.defaults import WARMUP_SHARE

ROOT = Path(__file__).parents[2]
ARCHIVES = ROOT.parent / "shared" / "data"
WORKER = "bench.network.strategies_worker"
WORKERS = 4
LIMIT_S = 1800.0  # time limit per run
# name of each method: its options of `gcnzc train`
STREAMING = "--optimizer adamw --strategy streaming-diloco"
AUTO = "local_steps=auto,delay=auto"
METHODS = {
    "adamw": "--optimizer adamw",
    "adamw bfloat16": "--optimizer adamw --strategy average:compress=bfloat16",
    "adamw int8": "--optimizer adamw --strategy average:compress=int8",
    "onebit-adam": "--optimizer onebit-adam",
    # LAMB scales its updates by the norm of the weights, so it needs another learning rate
    "onebit-lamb": "--optimizer onebit-lamb --lr 0.006",
    "zero-one-adam": "--optimizer zero-one-adam",
    "local-sgd": "--optimizer adamw --strategy local-sgd",
    "diloco": "--optimizer adamw --strategy diloco",
    "streaming-diloco": STREAMING,
    "streaming-diloco fp4": f"{STREAMING}:compress=float4_e3m0",
    "streaming-diloco auto": f"{STREAMING}:{AUTO}",
    "streaming-diloco fp4 auto": f"{STREAMING}:compress=float4_e3m0,{AUTO}",
    "co2": "--optimizer adamw --strategy co2",
    "co2 auto": "--optimizer adamw --strategy co2:local_steps=auto",
    "co2 48": "--optimizer adamw --strategy co2:local_steps=48",
}
# methods that adapt to the link rate, which `accuracy` does not limit
TIMED = ("streaming-diloco auto", "streaming-diloco fp4 auto", "co2 auto")
# methods with a warm-up, and the share of a run's steps in which they average whole gradients
WARM, WARMUP = ("onebit-adam", "onebit-lamb"), WARMUP_SHARE
NONE = "none"
# local steps without synchronization
NO_EXCHANGE = "--optimizer adamw --strategy local-sgd:local_steps=1000000000"


@dataclass(frozen=True)
class Case:
    """A model on a graph."""

    graph: str
    options: str
    epochs: int
    """of an accuracy run"""
    evaluate_every: int = 1
    """epochs between evaluations of an accuracy run"""


CASES = {
    "amazon_photo": Case(
        "amazon_photo",
        "--fanouts 10,10 --hidden 64 --batch-size 32 --lr 0.0015",
        epochs=24,
        evaluate_every=3,
    ),
    "planted": Case(
        "planted",
        "--fanouts 10,5 --hidden 64 --batch-size 64 --lr 0.003",
        epochs=60,
        evaluate_every=5,
    ),
    # more than 5 million parameters, so the exchange dominates the step time
    "wide": Case(
        "amazon_photo",
        "--fanouts 5,5 --hidden 3400 --batch-size 32 --lr 0.001",
        epochs=4,
        evaluate_every=2,
    ),
}


def main(argv: Sequence[str] | None = None) -> None:
    """Run the requested part."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("part", choices=["accuracy", "speed"])
    parser.add_argument("cases", nargs="*", metavar="CASE", help=", ".join(CASES))
    parser.add_argument("--methods", nargs="+", choices=[*METHODS, NONE], default=None)
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--rounds", type=int, default=1, help="rounds of speed")
    parser.add_argument("--epochs", type=int, default=2, help="epochs per run of speed")
    parser.add_argument("--mbit-per-s", type=float, nargs="+", default=[10.0, 100.0, 1000.0])
    asked = parser.parse_args(argv)
    if unknown := [case for case in asked.cases if case not in CASES]:
        parser.error(f"no case {', '.join(unknown)}; there are {', '.join(CASES)}")
    with tempfile.TemporaryDirectory() as folder:
        if asked.part == "accuracy":
            for case in asked.cases or ["amazon_photo", "planted"]:
                usual = [method for method in METHODS if method not in TIMED]
                accuracy(Path(folder), case, asked.methods or usual, asked.seeds)
        else:
            methods = asked.methods or [NONE, *METHODS]
            for case in asked.cases or list(CASES):
                for rate in asked.mbit_per_s:
                    speed(Path(folder), case, methods, rate, asked.rounds, asked.epochs)


def accuracy(folder: Path, name: str, methods: Sequence[str], seeds: int) -> None:
    """Train by each method over several seeds."""
    case = CASES[name]
    # interleaved, so that partial output compares all methods over the same seeds
    places = {
        (seed, method): folder / f"{name} {method} {seed}".replace(" ", "-")
        for seed in range(seeds)
        for method in methods
    }
    common = [
        "train",
        str(prepared(folder, case.graph)),
        "--no-tuning-profile",
        *case.options.split(),
    ]
    common += ["--epochs", str(case.epochs), "--evaluate-every", str(case.evaluate_every)]
    common += ["--timeout-s", "600"]
    asked = folder / f"{name}.json"
    asked.write_text(
        json.dumps(
            [
                [*common, "--seed", str(seed), *METHODS[method].split(), "--out", str(run)]
                for (seed, method), run in places.items()
            ]
        )
    )
    launcher = ["torchrun", "--standalone", "--nproc-per-node", str(WORKERS), "-m", WORKER]
    subprocess.run([*launcher, str(asked)], env=_environment(), check=True, stdout=sys.stderr)
    runs = {method: [_read(places[seed, method]) for seed in range(seeds)] for method in methods}
    for method, found in runs.items():
        tests = [each["test_percent"] for each in found]
        harness.record(
            "strategies",
            {"part": "accuracy", "case": name, "method": method, "workers": WORKERS},
            test_percent=statistics.mean(tests),
            spread_percent=statistics.stdev(tests) if len(tests) > 1 else None,
            tests_percent=tests,
            # of each evaluation, averaged over the seeds
            evaluated_after=found[0]["evaluated_after"],
            valid_percent=_means([each["valid_percent"] for each in found]),
            bytes_sent=_means([each["bytes_sent"] for each in found]),
            seeds_in_an_epoch=found[0]["seeds"],
            epochs=case.epochs,
            options=f"{case.options} {METHODS[method]}",
        )


def speed(
    folder: Path, name: str, methods: Sequence[str], mbit_per_s: float, rounds: int, epochs: int
) -> None:
    """Measure the seeds per second of each method over links of one rate."""
    case = CASES[name]
    graph = prepared(folder, case.graph)
    places = {
        (turn, method): folder / f"{name} {mbit_per_s:g} {method} {turn}".replace(" ", "-")
        for turn in range(rounds)
        for method in methods
    }
    common = ["train", str(graph), "--no-tuning-profile", "--threads", "1", *case.options.split()]
    common += ["--timeout-s", "300", "--checkpoint-every-s", "100000"]
    common += ["--epochs", str(epochs), "--evaluate-every", str(epochs)]
    asked = folder / f"{name}-{mbit_per_s:g}.json"
    asked.write_text(
        json.dumps(
            [
                [*common, *METHODS.get(method, NO_EXCHANGE).split(), "--out", str(run)]
                for (_, method), run in places.items()
            ]
        )
    )
    # the emulated network shares the cores with the workers, and offload reduces its CPU time
    with Cluster(WORKERS, mbit_per_s, offload=True) as cluster:
        ran = cluster.run(
            lambda _: [sys.executable, "-m", WORKER, str(asked)],
            limit_s=LIMIT_S * len(places),
            environment={"PYTHONPATH": str(ROOT), **_one_thread()},
        )
    if any(ran.codes):
        raise SystemExit(f"error: the workers exited with {ran.codes}")
    rates: dict[str, list[float]] = {method: [] for method in methods}
    shares: dict[str, list[float]] = {method: [] for method in methods}
    sent: dict[str, int] = {}
    for (_, method), run in places.items():
        later = [json.loads(line) for line in (run / "record.jsonl").open()][1:]
        seconds = sum(line["epoch_s"] for line in later)
        rates[method].append(sum(line["seeds"] for line in later) / seconds)
        shares[method].append(sum(line["exchange_s"] for line in later) / seconds)
        sent[method] = sum(_sent_by_first(run))
    later_rates = {method: statistics.median(each) for method, each in rates.items()}
    for method in methods:
        rate = later_rates[method]
        if method in WARM:
            if "adamw" not in later_rates:
                continue
            rate = 1 / (WARMUP / later_rates["adamw"] + (1 - WARMUP) / rate)
        against: Any = {
            f"of_{other}": rate / later_rates[other]
            for other in ("adamw", NONE)
            if other in later_rates
        }
        harness.record(
            "strategies",
            {"part": "speed", "case": name, "method": method, "workers": WORKERS}
            | {"mbit_per_s": mbit_per_s, "offload": True},
            seeds_per_s=rate,
            seeds_per_s_later=later_rates[method],
            # of each round
            seeds_per_s_later_each=rates[method],
            waiting_share=statistics.median(shares[method]),
            **against,
            bytes_sent=sent[method],
            epochs=epochs,
            rounds=rounds,
            options=f"{case.options} {METHODS.get(method, NO_EXCHANGE)}",
        )


def prepared(folder: Path, name: str, shape: str = "--like ogbn-products --scale 0.01") -> Path:
    """Return the folder of a graph, prepared by the command line.

    Args:
        folder: where the graph is prepared, unless it is there.
        name: of an archive, or "planted".
        shape: options of `gcnzc make` for a planted graph.
    """
    graph = folder / name
    if graph.exists():
        return graph
    source = ARCHIVES / name / f"{name}.npz"
    if name == "planted":
        source = folder / "raw"
        assert cli.main(["make", str(source), "--kind", "planted", *shape.split()]) == 0
    assert cli.main(["prepare", str(source), str(graph)]) == 0
    return graph


def _sent_by_first(run: Path) -> list[int]:
    """Return the bytes that worker 0 sent in each epoch."""
    workers = [json.loads(line) for line in (run / "workers.jsonl").open()]
    return [line["bytes_sent"] for line in workers if line["worker"] == 0]


def _read(run: Path) -> dict[str, Any]:
    lines = [json.loads(line) for line in (run / "record.jsonl").open()]
    result = json.loads((run / "result.json").read_text())
    sent = list(accumulate(_sent_by_first(run)))
    evaluated = [number for number, line in enumerate(lines) if "valid_accuracy" in line]
    return {
        "test_percent": 100 * result["test_accuracy"],
        "evaluated_after": [number + 1 for number in evaluated],
        "valid_percent": [100 * lines[number]["valid_accuracy"] for number in evaluated],
        "bytes_sent": [sent[number] for number in evaluated],
        "seeds": lines[0]["seeds"],
    }


def _means(rows: Sequence[Sequence[float]]) -> list[float]:
    return [statistics.mean(column) for column in zip(*rows, strict=True)]


def _one_thread() -> dict[str, str]:
    return {"OMP_NUM_THREADS": "1", "NUMBA_NUM_THREADS": "1"}


def _environment() -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": str(ROOT), **_one_thread()}


if __name__ == "__main__":
    main()
