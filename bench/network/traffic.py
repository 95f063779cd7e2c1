"""Count the bytes that each method of exchange sends, at the interfaces of a cluster.

    python -m bench.network.traffic [--workers N] [--elements N ...]
                                  [--parts PART ...] [--ways WAY ...]

Random gradients of a model of so many elements are exchanged for some steps; ratios are of the
bytes that left the interfaces, headers and acknowledgements included, in the same run.

    stage       a step of the stage in which 1-bit Adam sends signs, beside whole float32 gradients
    run         100 steps of 1-bit Adam and 1-bit LAMB, of which 15 are warm-up, beside float16
    streaming   two rounds of Streaming DiLoCo, H = 100, float4_e3m0, and with 8 fragments how much
                the fullest step sends, beside bfloat16 gradients at every step

It runs on the machines of bench/network/cluster.py, which needs root.
"""

import argparse
import json
import sys
from collections.abc import Iterator, Sequence
from typing import Any

from bench.harness import record
from bench.network.cluster import Cluster

WORKER = "bench.network.traffic_worker"
MBIT_PER_S = 1000.0
PARTS = ("stage", "run", "streaming")
Line = dict[str, Any]


def main(argv: Sequence[str] | None = None) -> None:
    """Measure what the command line says, and record it."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--workers", type=int, default=4)
    parser.add_argument("--elements", type=int, nargs="+", default=[100_000, 1_000_000])
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=PARTS)
    parser.add_argument("--ways", nargs="+", help="only these, beside the first of each part")
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
        # each part begins with what the others are compared with
        first = firsts.setdefault((task["part"], task["elements"]), line)
        times = first["wire_bytes_per_step"] / line["wire_bytes_per_step"]
        line |= {
            "times_fewer": times,
            "times_fewer_by_ledger": first["ledger_bytes"]
            / first["steps"]
            / (line["ledger_bytes"] / line["steps"]),
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
        for way in ("onebit-adam float16", "onebit-lamb float16", "onebit-adam", "onebit-lamb"):
            yield {"way": way, "steps": 100, "skip": 0, "warmup": 15}
    else:
        yield {"way": "bfloat16", "steps": 20, "skip": 1}
        for fragments in (1, 8):
            how = {"local_steps": 100, "fragments": fragments}
            yield {"way": "streaming-diloco float4_e3m0", "steps": 200, "skip": 101, **how}


def results(workers: int, tasks: Sequence[Line]) -> Iterator[tuple[Line, Line]]:
    """Yield each task with the counts of its workers."""
    with Cluster(workers, MBIT_PER_S) as cluster:
        words = [json.dumps(task) for task in tasks]
        ran = cluster.run(lambda _: [sys.executable, "-m", WORKER, *words])
    if any(ran.codes):
        raise SystemExit(f"error: the workers ended with {ran.codes}")
    for task, text in zip(tasks, ran.output[0].splitlines(), strict=True):
        yield task, {"steps": task["steps"], **json.loads(text)}


if __name__ == "__main__":
    main()
