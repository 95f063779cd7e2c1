"""Measure how well `gcnzc cost` predicts the time of a training step, at several link rates.

    python -m bench.network.cost data/photo --workers 2 --mbit-per-s 10 100 1000
    python -m bench.network.cost data/photo --workers 2 --picture FILE.png
    python -m bench.network.cost --message

The workers train on the emulated machines of bench/network/cluster.py, which needs root. They share
the cores of this machine, so the compute time of a step is measured with the same number of workers
over links without a rate limit; it includes the time that they wait for the slowest worker. The
prediction uses this compute time, the link's rate, and the given delay and time per message.

Within a run, the rate changes after every epoch, from unlimited through all rates and again, so
that other load on this machine affects all rates equally. Only the second half of each epoch
counts. Times are the first quintile of those steps (one step in five is faster). `--message`
measures the time of a small message between two machines. `--picture` draws the predicted step
times and the newest recorded ones, and measures nothing.
"""

import argparse
import json
import math
import os
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from bench.harness import RESULTS, Timing, record
from bench.network.cluster import Cluster
from bench.network.links import MAX_MBIT_PER_S, tbf
from gcnzc.cli.commands import cost as cost_command
from gcnzc.cli.commands.cost import CostConfig
from gcnzc.cli.plots import StepTimes, step_times
from gcnzc.cli.reports import network as network_report
from gcnzc.graph import load
from gcnzc.optim import cost as optim_cost
from gcnzc.train.run_folder import TRACE
from gcnzc.train.tracing import WARM_UP as WARM_UP_STEPS

WARM_UP, ROUNDS = 200, 1000  # of messages
# each worker sends to the other, and waits for what that one sent
MESSAGE = f"""
import json, statistics, time, torch
from gcnzc.exchange import SendReceive, init_group
def ask(request):
    return (yield request)
with init_group() as group:
    values, seconds = torch.zeros(1), []
    for _ in range({WARM_UP + ROUNDS}):
        begin = time.perf_counter()
        group.run(ask(SendReceive(values, 1 - group.rank)))
        seconds.append(time.perf_counter() - begin)
    seconds = seconds[{WARM_UP}:]
    print(json.dumps([min(seconds), *statistics.quantiles(seconds, n=10)]))
"""


NO_LIMIT = MAX_MBIT_PER_S
# file in bench/results, under the former name of the command `gcnzc cost`
RESULTS_NAME = "plan"


@dataclass(frozen=True)
class Step:
    """The time of a step of worker 0, from the end of the previous step."""

    seconds: float
    exchange_s: float  # includes waiting for other workers


@dataclass(frozen=True)
class Trained:
    """The counted steps, and the bytes that a worker sent, by Mbit/s."""

    steps: dict[float, list[Step]]
    sent_bytes: dict[float, float]  # per step; includes what the end of the epoch sends


def main() -> None:
    """Run the measurements of the command line and record them."""
    options = _options()
    if options.message:
        timing, least_s = message()
        loads = os.getloadavg()[0]
        case = {"part": "message", "machines": 2}
        record(RESULTS_NAME, case, timing, least_s=least_s, load_average=loads)
    if options.picture is not None:
        draw(options)
    elif options.data is not None:
        for workers in options.workers:
            compare(options, workers)


def message() -> tuple[Timing, float]:
    """Return the time and the least time of exchanging 4 bytes over links without a limit."""
    with Cluster(2) as cluster:
        ran = cluster.run(lambda _: [sys.executable, "-c", MESSAGE], limit_s=120)
    _check_exit_codes(ran.codes)
    least_s, *tenths = json.loads(ran.output[0])
    return Timing(tenths[4], tenths[1], tenths[7], ROUNDS), least_s


def config_of(options: argparse.Namespace, workers: int) -> CostConfig:
    """Return the configuration that is predicted and trained."""
    return CostConfig(
        data=options.data,
        workers=(workers,),
        delay_ms=options.delay_ms,
        message_us=options.message_us,
        fanouts=tuple(options.fanouts),
        layers=len(options.fanouts),
        batch_size=options.seeds // workers,
        hidden=options.hidden,
        threads=1,
        device="cpu",
    )


def compare(options: argparse.Namespace, workers: int) -> None:
    """Train at each rate, and record the predicted and the measured step time."""
    config = config_of(options, workers)
    loaded = load.load(options.data)
    # unlimited before and after, since other load changes during the run
    rates = [NO_LIMIT, *options.mbit_per_s] * options.cycles + [NO_LIMIT]
    found = trained(config, workers, len(loaded.split["train"]), rates, options.limit_s)
    seconds = {rate: [step.seconds for step in each] for rate, each in found.steps.items()}
    computed = optim_cost.Computed(_fast(seconds[NO_LIMIT]))
    model = cost_command.build_model(config, loaded)
    method = optim_cost.default_method(model, workers)
    for rate in options.mbit_per_s:
        network = optim_cost.Network(rate, config.delay_ms / 1e3, config.message_us / 1e6)
        cost = optim_cost.step_cost(model, workers, network, method)
        line = network_report.line_of(cost, computed, network)
        measured_s = _fast(seconds[rate])
        record(
            RESULTS_NAME,
            {
                "part": "step",
                "data": options.data.name,
                "workers": workers,
                "mbit_per_s": rate,
                "delay_ms": config.delay_ms,
                "message_us": config.message_us,
                "method": method,
                "hidden": config.hidden,
                "fanouts": config.fanouts,
                "batch_size": config.batch_size,
            },
            crowded_compute_s=computed.seconds,
            predicted_step_s=line["step_s"],
            measured_step_s=measured_s,
            predicted_over_measured=line["step_s"] / measured_s,
            predicted_exchange_s=line["exchange_s"],
            measured_exchange_and_waiting_s=_fast([step.exchange_s for step in found.steps[rate]]),
            predicted_sent_bytes=line["sent_bytes"],
            measured_sent_bytes=found.sent_bytes[rate],
            crowded_compute_median_s=statistics.median(seconds[NO_LIMIT]),
            measured_step_median_s=statistics.median(seconds[rate]),
            counted_steps=len(seconds[rate]),
            load_average=os.getloadavg()[1],
        )


def draw(options: argparse.Namespace) -> None:
    """Draw the predicted step times, and the newest recorded ones of the same configuration."""
    loaded = load.load(options.data)
    compute_s, curves, measured = {}, {}, {}
    for workers in options.workers:
        config = config_of(options, workers)
        same = {"workers": workers, "batch_size": config.batch_size, "hidden": config.hidden}
        lines = [
            line
            for line in _lines(RESULTS / f"{RESULTS_NAME}.jsonl")
            if same.items() <= line.items() and "counted_steps" in line
        ]
        points = {line["mbit_per_s"]: line["measured_step_s"] for line in lines}
        computed = optim_cost.Computed(lines[-1]["crowded_compute_s"])
        network = replace(cost_command.network_of(config), mbit_per_s=100.0)
        costs = optim_cost.step_costs(cost_command.build_model(config, loaded), [workers], network)
        times = network_report.step_time_points(costs, computed, network, loaded.name)
        compute_s |= times.compute_s
        curves |= times.curves
        measured[workers] = sorted(points.items())
    step_times(StepTimes(loaded.name, compute_s, curves, measured), options.picture)


def trained(
    config: CostConfig, workers: int, seeds: int, rates: Sequence[float], limit_s: float
) -> Trained:
    """Train once, for an epoch at each rate; the second half of each epoch counts."""
    # an additional epoch at the start, in which kernels are compiled and caches filled
    plan = [rates[0], *rates]
    with tempfile.TemporaryDirectory() as folder:
        run = Path(folder, "run")
        words = [
            *(
                "train",
                str(config.data),
                "--out",
                str(run),
                "--device",
                "cpu",
                "--no-tuning-profile",
            ),
            *("--hidden", str(config.hidden), "--layers", str(config.layers)),
            *("--fanouts", ",".join(map(str, config.fanouts))),
            *("--batch-size", str(config.batch_size), "--threads", str(config.threads)),
            *("--epochs", str(len(plan)), "--evaluate-every", str(len(plan))),
            *("--checkpoint-every-s", "1000", "--timeout-s", "100", "--trace", "1000000"),
        ]
        with Cluster(workers, NO_LIMIT, config.delay_ms) as cluster:
            threading.Thread(target=_change, args=(cluster, run, plan), daemon=True).start()
            ran = cluster.run(
                lambda _: [sys.executable, "-m", "gcnzc", *words],
                limit_s=limit_s,
                environment={"NUMBA_NUM_THREADS": "1"},
            )
        _check_exit_codes(ran.codes)
        sent = [line["bytes_sent"] for line in _lines(run / "workers.jsonl")[::workers]]
        events = json.loads((run / TRACE).read_text())["traceEvents"]
    steps = math.ceil(seeds / (workers * config.batch_size))
    found: dict[float, list[Step]] = {}
    for number, step in _steps(events, steps):
        found.setdefault(plan[number], []).append(step)
    last = {rate: sent[number] / steps for number, rate in enumerate(plan) if number > 0}
    return Trained(found, last)


def _steps(events: Sequence[dict[str, Any]], steps: int) -> Iterator[tuple[int, Step]]:
    """Yield the epoch and the times of each counted step of a trace.

    The first half of an epoch is not counted, since TCP adapts to the new rate.
    """
    lanes = {e["args"]["name"]: e["tid"] for e in events if e["ph"] == "M"}
    mine = [e for e in events if e["ph"] == "X" and e["tid"] == lanes["worker 0, model"]]
    spans = {
        name: sorted((e["ts"], e["ts"] + e["dur"]) for e in mine if e["name"] == name)
        for name in ("compute", "exchange")
    }
    for number in range(1, len(spans["compute"])):
        epoch, place = divmod(number + WARM_UP_STEPS, steps)
        if place >= steps / 2:
            (_, before), (begin, end) = spans["compute"][number - 1 : number + 1]
            waits = [b - a for a, b in spans["exchange"] if begin <= a < end]
            yield epoch, Step((end - before) / 1e6, sum(waits) / 1e6)


def _fast(seconds: Sequence[float]) -> float:
    """Return the first quintile; other load on the machine only makes steps slower."""
    return statistics.quantiles(seconds, n=5)[0]


def _change(cluster: Cluster, run: Path, plan: Sequence[float]) -> None:
    """Change the sending rate of all machines when an epoch with another rate begins."""
    for number in range(1, len(plan)):
        while len(_lines(run / "record.jsonl")) < number:
            time.sleep(0.02)
        if plan[number] == plan[number - 1]:
            continue
        # no machine receives from two others at once in this exchange, so limiting senders suffices
        limit = tbf("eth0", "root", plan[number])[0].replace(" add ", " change ").split()
        changed = [cluster.start(worker, limit) for worker in range(cluster.workers)]
        assert not any(process.wait() for process in changed), (
            "tc changed the rate of every machine"
        )


def _lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(text) for text in path.read_text().splitlines()] if path.exists() else []


def _check_exit_codes(codes: Sequence[int]) -> None:
    if any(codes):
        raise RuntimeError(
            f"the workers exited with {list(codes)}\n\nhint: see their output on stderr"
        )


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("data", type=Path, nargs="?", help="folder of a graph")
    parser.add_argument("--workers", type=int, nargs="+", default=[2])
    parser.add_argument("--mbit-per-s", type=float, nargs="+", default=[1000.0, 100.0, 10.0])
    parser.add_argument("--delay-ms", type=float, default=0.0)
    parser.add_argument("--message-us", type=float, default=CostConfig().message_us)
    parser.add_argument("--hidden", type=int, default=256)
    parser.add_argument("--fanouts", type=int, nargs="+", default=[10, 10])
    parser.add_argument("--seeds", type=int, default=768, help="seeds per step, of all workers")
    parser.add_argument("--cycles", type=int, default=5, help="epochs at each rate")
    parser.add_argument("--limit-s", type=float, default=600.0, help="time limit of a run")
    parser.add_argument("--picture", type=Path, help="draw the recorded results to this file")
    parser.add_argument("--message", action="store_true", help="measure the time of a message")
    options: Any = parser.parse_args()
    if options.data is None and not options.message:
        parser.error("nothing to do: give the folder of a graph, or --message")
    return options


if __name__ == "__main__":
    main()
