"""Measure the bytes that each optimizer sends, at the network interfaces of an emulated cluster.

    python -m bench.network.traffic [--workers N] [--elements N ...]
                                  [--parts PART ...] [--ways METHOD ...]

Each optimizer takes some steps with random gradients of a model with a given number of elements.
Ratios compare the bytes sent by the interfaces in the same run, with headers and acknowledgements.

    stage       steps of 1-bit Adam and 1-bit LAMB after warm-up, which send signs, compared with
                averaging float32 gradients
    run         100 steps of 1-bit Adam and 1-bit LAMB, of which 15 are warm-up, compared with
                float16 gradients
    streaming   200 steps of Streaming DiLoCo in float4_e3m0, synchronized every 100 steps in 1 or 8
                fragments, compared with bfloat16 gradients; also the most bytes sent in one step
    methods     96 steps of each method of bench/strategies/compare.py with its defaults, compared
                with averaging float32 gradients; the last exchanges, in `finalize`, count as well

It runs on the emulated machines of bench/network/cluster.py, which needs root.
"""

import argparse
import json
import sys
from collections.abc import Iterator, Sequence
from typing import Any

from bench.harness import record
from bench.network.cluster import Cluster
from bench.strategies.compare import METHODS

WORKER = "bench.network.traffic_worker"
MBIT_PER_S = 1000.0
PARTS = ("stage", "run", "streaming", "methods")
Line = dict[str, Any]


def main(argv: Sequence[str] | None = None) -> None:
    """Run the measurements of the command line and record them."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--workers", type=int, default=4)
    parser.add_argument("--elements", type=int, nargs="+", default=[100_000, 1_000_000])
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=PARTS)
    parser.add_argument("--ways", nargs="+", help="only these methods, and each part's baseline")
    options = parser.parse_args(argv)
    tasks = [
        {"part": part, "elements": elements, **task}
        for part in options.parts
        for elements in options.elements
        for number, task in enumerate(tasks_of(part))
        if not (number and options.ways) or task["way"] in options.ways
    ]
    firsts: dict[tuple[str, int], Line] = {}
    for task, line in results(options.workers, tasks):
        # the first task of each part is the baseline of the others
        first = firsts.setdefault((task["part"], task["elements"]), line)
        times = first["wire_bytes_per_step"] / line["wire_bytes_per_step"]
        line |= {
            "times_fewer": times,
            "times_fewer_by_ledger": first["ledger_bytes"]
            / first["steps"]
            / (line["ledger_bytes"] / line["steps"]),
            "wire_of_ledger": line["wire_bytes"] / line["ledger_bytes"],
        }
        record("traffic", {"workers": options.workers, **task}, **line)


def tasks_of(part: str) -> Iterator[Line]:
    """Return the tasks of a part; the first one is the baseline."""
    if part == "stage":
        yield {"way": "float32", "steps": 20, "skip": 2}
        yield {"way": "onebit-adam", "steps": 200, "skip": 3, "warmup": 1}
        yield {"way": "onebit-lamb", "steps": 200, "skip": 3, "warmup": 1}
    elif part == "run":
        yield {"way": "float16", "steps": 20, "skip": 1}
        for method in ("onebit-adam float16", "onebit-lamb float16", "onebit-adam", "onebit-lamb"):
            yield {"way": method, "steps": 100, "skip": 0, "warmup": 15}
    elif part == "methods":
        for method in METHODS:
            yield {"way": method, "steps": 96, "skip": 0}
    else:
        yield {"way": "bfloat16", "steps": 20, "skip": 1}
        for fragments in (1, 8):
            options = {"local_steps": 100, "fragments": fragments}
            yield {"way": "streaming-diloco float4_e3m0", "steps": 200, "skip": 101, **options}


def results(workers: int, tasks: Sequence[Line]) -> Iterator[tuple[Line, Line]]:
    """Yield each task with the counts of its workers."""
    with Cluster(workers, MBIT_PER_S) as cluster:
        words = [json.dumps(task) for task in tasks]
        ran = cluster.run(lambda _: [sys.executable, "-m", WORKER, *words])
    if any(ran.codes):
        raise SystemExit(f"error: the workers exited with {ran.codes}")
    for task, text in zip(tasks, ran.output[0].splitlines(), strict=True):
        yield task, {"steps": task["steps"], **json.loads(text)}


if __name__ == "__main__":
    main()
