"""Measure the CPU time of small all-reduces, with torch's messages and with gcnzc's requests.

    python -m bench.network.message_cpu --workers 4
    python -m bench.network.message_cpu --workers 4 --before ../other-checkout

The ranks are processes on this machine. Each of them sums a small tensor by recursive doubling, in
turns with a loop of torch.distributed's `isend` and `irecv` and with the request `Sum`. The
difference of the CPU times per message is the share of gcnzc. It counts the thread that makes
the requests, so it does not depend on how long messages take; threads of gloo are not included.
`--before` also measures another checkout of gcnzc, in turns with this one.
"""

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from bench.harness import commit, record
from bench.network.tasks import Line, run_here
from gcnzc.exchange import Choices, Group, Sum, init_group
from gcnzc.exchange.requests import yield_request

ROOT = Path(__file__).parents[2]
SIZES = (64, 1024, 4096)
# each of BLOCKS blocks has SUMS sums of both kinds
BLOCKS, SUMS, WARM_UP = 15, 40, 100
TAG = 7


def main() -> None:
    """Measure, or be one of the ranks if there is the option `--rank`."""
    options = _options()
    if options.rank:
        _run_rank()
        return
    checkouts = {"now": ROOT} | ({"before": options.before} if options.before else {})
    for repetition in range(options.repetitions):
        for name, folder in checkouts.items():
            for line in run_here(options.workers, _command(folder)):
                case = {"part": "cpu", "link": "here", "workers": options.workers}
                case |= {"checkout": name, "gcnzc_commit": commit(folder)}
                record("collectives", case | {"repetition": repetition} | line)


def _command(folder: Path) -> list[str]:
    """Return the command of a rank with the gcnzc of a checkout and this file."""
    code = (
        f"import runpy, sys; sys.path.insert(0, {str(folder.resolve())!r}); import gcnzc; "
        f"sys.path[0] = {str(ROOT)!r}; sys.argv = [{__file__!r}, '--rank']; "
        "runpy.run_module('bench.network.message_cpu', run_name='__main__')"
    )
    return [sys.executable, "-P", "-c", code]


def _run_rank() -> None:
    torch.set_num_threads(1)
    with init_group(choices=Choices.always(Sum="doubling")) as group:
        for size in SIZES:
            line = measure_cpu(group, size)
            if group.rank == 0:
                print(json.dumps(line), flush=True)


def measure_cpu(group: Group, num_bytes: int) -> Line:
    """Return the CPU microseconds per message of sums of a size, with torch and with gcnzc."""
    peers = [group.rank ^ (1 << bit) for bit in range(group.world_size.bit_length() - 1)]
    values = torch.zeros(num_bytes // 4)
    scratch = [torch.zeros_like(values) for _ in peers]

    def sum_with_torch() -> None:
        receives: list[Any] = [
            dist.irecv(into, peer, None, TAG) for into, peer in zip(scratch, peers, strict=True)
        ]
        for into, peer, receive in zip(scratch, peers, receives, strict=True):
            send: Any = dist.isend(values, peer, None, TAG)
            receive.wait()
            send.wait()
            values.add_(into)

    def sum_with_gcnzc() -> None:
        group.run(yield_request(Sum(values)))

    seconds: dict[str, list[float]] = {"torch": [], "gcnzc": []}
    for function in (sum_with_torch, sum_with_gcnzc):
        _cpu_s(function, WARM_UP)
    for _ in range(BLOCKS):
        for name, function in (("torch", sum_with_torch), ("gcnzc", sum_with_gcnzc)):
            seconds[name].append(_cpu_s(function, SUMS) / (SUMS * len(peers)))
    line: Line = {"num_bytes": num_bytes, "messages": BLOCKS * SUMS * len(peers)}
    for name, values_s in seconds.items():
        line[f"{name}_us"] = 1e6 * statistics.median(values_s)
        line[f"{name}_least_us"] = 1e6 * min(values_s)
    line["share_us"] = line["gcnzc_us"] - line["torch_us"]
    line["least_share_us"] = line["gcnzc_least_us"] - line["torch_least_us"]
    return line


def _cpu_s(function: Callable[[], None], times: int) -> float:
    """Return the CPU seconds of this thread for several calls."""
    began = time.thread_time()
    for _ in range(times):
        function()
    return time.thread_time() - began


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--workers", type=int, default=4, help="a power of two")
    parser.add_argument("--before", type=Path, help="folder of another checkout of gcnzc")
    parser.add_argument("--repetitions", type=int, default=3)
    parser.add_argument("--rank", action="store_true", help=argparse.SUPPRESS)
    return parser.parse_args()


if __name__ == "__main__":
    main()
