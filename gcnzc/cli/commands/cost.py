"""The command that predicts the cost of methods on a network."""

import statistics
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

import torch
import tyro
from torch import nn

from gcnzc.cli import builtin_graph
from gcnzc.cli.output import print_json
from gcnzc.cli.plots import step_times
from gcnzc.cli.reports import network as reports_network
from gcnzc.cli.reports.network import Line
from gcnzc.exchange import Group
from gcnzc.graph import load
from gcnzc.graph.dataset import Dataset
from gcnzc.loader.loader import Loader
from gcnzc.optim import cost as optim_cost
from gcnzc.optim.cost import Computed, Network, Progress, gradient_bytes
from gcnzc.system.spans import Stage
from gcnzc.system.streams import clock_of
from gcnzc.train.config import MOST_THREADS, MOST_WORKERS, TrainConfig
from gcnzc.train.memory import check_memory, footprint_of
from gcnzc.train.optimizers import build_optimizer
from gcnzc.train.options import Fanouts, at_least, at_most, check_numbers, option_name
from gcnzc.train.progress import Reporter
from gcnzc.train.setup import choose_device, feature_table
from gcnzc.train.tasks import build_task


@dataclass(frozen=True, kw_only=True)
class CostConfig:
    """Predict what a step of training costs with several workers, and say how many to take.

    Every worker has a machine like this one, and minibatches of --batch-size. Prints one JSON line:
    the costs of each number of workers and method of exchange, and what to choose.
    """

    data: tyro.conf.Positional[Path | None] = None
    """folder of a graph, prepared or in OGB's layout; without it a built-in graph"""
    workers: Fanouts = (2, 4, 8)
    """numbers of workers to look at"""
    mbit_per_s: float = 1000.0
    """of each machine's link, in each direction"""
    delay_ms: float = 0.1
    """milliseconds from one machine to another"""
    message_us: float = 100.0
    """microseconds that a worker spends on each message"""
    step_s: float | None = None
    """seconds of a step of one worker, which does not exchange; measured here if not given"""
    steps: int = 20
    """steps that are measured, after three"""
    threads: int = 0
    """threads of a worker, of the model and of the loader; 0 leaves the numbers to them"""
    model: Literal["sage", "gcn", "gat"] = "sage"
    """as of `gcnzc train`, like all options below but the last"""
    task: Literal["node", "link"] = "node"
    """foretell the classes of nodes, or which edges there are"""
    fanouts: Fanouts = (15, 10, 5)
    """neighbours kept, one number a layer, input layer first; -1 keeps all"""
    batch_size: int = 1024
    """seeds per minibatch of one worker"""
    hidden: int = 256
    """features between the layers; for GAT, of each head"""
    layers: int = 3
    """layers of the model, as many as fan-outs"""
    heads: int = 4
    """attention heads of GAT"""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """where the model trains; auto takes CUDA where there is one"""
    seed: int = 0
    """seed of every random choice"""
    picture: Path | None = None
    """picture to write: seconds of a step by Mbit/s; none if not given"""

    def __post_init__(self) -> None:
        check_numbers(self)
        at_least(1, "workers", len(self.workers))
        for number in self.workers:
            at_least(2, "workers", number)
            at_most(MOST_WORKERS, "workers", number)
        at_most(MOST_THREADS, "threads", self.threads)
        at_least(1, "steps", self.steps)
        for name in ("delay_ms", "message_us", "threads", "seed"):
            at_least(0, name, getattr(self, name))
        for name in ("mbit_per_s", "step_s"):
            value = getattr(self, name)
            if value is not None and not value > 0:
                raise ValueError(
                    f"{option_name(name)} must be above 0, got {value}\n\n"
                    f"hint: leave {option_name(name)} out for the default"
                )
        # says what is wrong with the options that both have
        TrainConfig(
            **{
                name: getattr(self, name)
                for name in ("fanouts", "batch_size", "hidden", "layers", "heads")
            }
        )


WARM_UP = 3  # steps that compile, and fill the loader's memory


# what must be the same in the run that is planned
SAME = ("model", "task", "fanouts", "batch_size", "hidden", "layers", "heads", "device", "threads")


def measured(config: CostConfig, data: Dataset, advance: Progress | None = None) -> Computed:
    """Train for some steps as one worker would, and return what a step takes; the median counts.

    Args:
        config: of the plan.
        data: its graph.
        advance: told how far it is.

    Raises:
        ValueError: the graph does not fit the options.
    """
    options = run_config(config)
    device = choose_device(config.device)
    task = build_task(options, data)
    now = clock_of(device)
    stages: list[Stage] = []
    with (
        _threads(config.threads),
        torch.random.fork_rng(range(torch.cuda.device_count())),
        feature_table(data, options.features, device, Group()) as table,
    ):
        torch.manual_seed(config.seed)
        model = task.model().to(device)
        optimizer = build_optimizer(options, model)
        loader = Loader(
            data.graph,
            table,
            task.seeds,
            list(config.fanouts),
            config.batch_size,
            labels=task.labels,
            device=device,
            seed=config.seed,
            sampler=task.sampler,
            threads=config.threads or None,
            in_degrees=config.model == "gcn",
        )
        most = WARM_UP + config.steps
        model.train()
        while len(stages) < most:
            # from the end of one step to that of the next: waiting for a batch is part of it
            began = now()
            for batch in loader:
                assert batch.y is not None, "the loader or its sampler has labels"
                optimizer.zero_grad(set_to_none=True)
                task.loss(task.logits(model, batch), batch.y).backward()
                optimizer.step()
                ended = now()
                stages.append(Stage("step", "model", began, ended))
                began = ended
                if advance is not None:
                    advance(len(stages), most)
                if len(stages) == most:
                    break
        seconds = [stage.seconds() for stage in stages[WARM_UP:]]
    return Computed(statistics.median(seconds), len(seconds))


def run_config(config: CostConfig) -> TrainConfig:
    """The options of the run that is planned."""
    same = {name: getattr(config, name) for name in SAME}
    return TrainConfig(data=config.data, seed=config.seed, **same)


def model_of(config: CostConfig, data: Dataset) -> nn.Module:
    """The model of the run, on the host; torch's generators are left alone.

    Raises:
        ValueError: the graph has no features, or nothing to learn.
    """
    with (
        feature_table(data, "host", torch.device("cpu"), Group()) as table,
        torch.random.fork_rng([]),
    ):
        planned = run_config(config)
        task = build_task(planned, data)
        sizes = (data.graph.num_nodes, table.num_columns, len(task.seeds))
        check_memory(footprint_of(planned, task.model, *sizes), torch.device("cpu"), Group())
        return task.model()


def network_of(config: CostConfig) -> Network:
    """The links that the options tell."""
    return Network(config.mbit_per_s, config.delay_ms / 1e3, config.message_us / 1e6)


def found_by(config: CostConfig, computed: Computed, model: nn.Module) -> Line:
    """What all lines have in common."""
    return {
        "data": str(config.data),
        **{name: getattr(config, name) for name in SAME},
        "parameters": sum(p.numel() for p in model.parameters()),
        "gradient_bytes": gradient_bytes(model),
        "measured_steps": computed.steps,
    }


@contextmanager
def _threads(number: int) -> Iterator[None]:
    """So many threads of torch, for the length of a `with`; 0 leaves them."""
    before = torch.get_num_threads()
    torch.set_num_threads(number or before)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def cost_command(config: CostConfig, reporter: Reporter) -> None:
    """`gcnzc cost`."""
    if config.data is None:
        config = replace(config, data=builtin_graph.prepared(reporter))
    assert config.data is not None, "just filled in"
    loaded = load.load(config.data)
    model, network = model_of(config, loaded), network_of(config)
    computed = optim_cost.Computed(config.step_s or 0.0)
    if config.step_s is None:
        with reporter.task("measure steps") as advance:
            computed = measured(config, loaded, advance)
    with reporter.task("run exchanges") as advance:
        costs = optim_cost.step_costs(model, config.workers, network, advance)
    lines = [reports_network.line_of(cost, computed, network) for cost in costs]
    usual = optim_cost.default_method(model)
    chosen = reports_network.advice(lines, usual)
    reporter.say(f"{loaded.name}, {config.model}:")
    talk = reports_network.sums(model, computed, network) + reports_network.table_of(lines, usual)
    for text in [*talk, "* what `gcnzc train` takes", chosen["why"]]:
        reporter.say(text)
    if config.picture is not None:
        step_times(reports_network.drawn(costs, computed, network, loaded.name), config.picture)
        reporter.say(f"wrote {config.picture}")
    print_json(found_by(config, computed, model) | {"costs": lines, "choice": chosen})
