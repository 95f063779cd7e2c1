"""The command that predicts the cost of training with several workers."""

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
from gcnzc.optim import cost as optim_cost
from gcnzc.optim.cost import Computed, Network, Progress, gradient_bytes
from gcnzc.system.spans import Stage
from gcnzc.system.streams import clock_of
from gcnzc.train.config import TrainConfig
from gcnzc.train.memory import check_memory, footprint_of
from gcnzc.train.optimizers import build_optimizer
from gcnzc.train.option_groups import MAX_THREADS, MAX_WORKERS
from gcnzc.train.options import Fanouts, at_least, at_most, check_options, option_name
from gcnzc.train.progress import Reporter
from gcnzc.train.setup import build_loader, choose_device, feature_table
from gcnzc.train.tasks import build_task


@dataclass(frozen=True, kw_only=True)
class CostConfig:
    """Predict the time of a training step with several workers, and recommend how many to use.

    Each worker has a machine like this one, and minibatches of --batch-size. Prints one JSON line:
    the cost of each optimizer for each number of workers, and the recommendation.
    """

    data: tyro.conf.Positional[Path | None] = None
    """folder of a graph, prepared or in OGB's layout, or a .npz, .toml or PyG .pt file;
    without it, a built-in graph"""
    workers: Fanouts = (2, 4, 8)
    """numbers of workers to predict for"""
    mbit_per_s: float = 1000.0
    """bandwidth of each machine's network link, in each direction, in Mbit/s"""
    delay_ms: float = 0.1
    """latency from one machine to another, in milliseconds"""
    message_us: float = 100.0
    """overhead of each message for a worker, in microseconds"""
    step_s: float | None = None
    """seconds of a step on one worker, without an exchange; measured on this machine if not
    given"""
    steps: int = 20
    """steps to measure, after three steps of warm-up"""
    threads: int = 0
    """threads of torch and of the loader in each worker; 0: the defaults"""
    model: Literal["sage", "gcn", "gat", "gatv2"] = "sage"
    """GraphSAGE with mean aggregation, GCN, GAT, or GATv2"""
    task: Literal["node", "link"] = "node"
    """node classification, or link prediction"""
    fanouts: Fanouts = (15, 10, 5)
    """neighbours sampled per node, one number per layer, input layer first; -1 samples all"""
    batch_size: int = 1024
    """seed nodes or seed edges per minibatch of one worker"""
    hidden: int = 256
    """hidden features; for GAT and GATv2, per attention head"""
    layers: int = 3
    """layers of the model, as many as fanouts"""
    heads: int = 4
    """GAT and GATv2: attention heads"""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """where the model trains; auto uses CUDA if there is a GPU"""
    seed: int = 0
    """random seed"""
    out: Path | None = None
    """image to write: seconds per step by bandwidth; none if not given"""

    def __post_init__(self) -> None:
        check_options(self)
        at_least(1, "workers", len(self.workers))
        for number in self.workers:
            at_least(2, "workers", number)
            at_most(MAX_WORKERS, "workers", number)
        at_most(MAX_THREADS, "threads", self.threads)
        at_least(1, "steps", self.steps)
        for name in ("delay_ms", "message_us", "threads", "seed"):
            at_least(0, name, getattr(self, name))
        for name in ("mbit_per_s", "step_s"):
            value = getattr(self, name)
            if value is not None and not value > 0:
                raise ValueError(
                    f"{option_name(name)} must be above 0, got {value}\n\n"
                    f"hint: omit {option_name(name)} for the default"
                )
        # checks the options that both commands have
        TrainConfig(
            **{
                name: getattr(self, name)
                for name in ("fanouts", "batch_size", "hidden", "layers", "heads")
            }
        )


WARM_UP = 3  # steps that compile kernels and fill the loader's buffers


# options with the same meaning in `gcnzc train`
SAME = ("model", "task", "fanouts", "batch_size", "hidden", "layers", "heads", "device", "threads")


def measure_step(config: CostConfig, data: Dataset, advance: Progress | None = None) -> Computed:
    """Train for some steps on one worker, and return the median time of a step.

    Args:
        config: the options of the command.
        data: the graph.
        advance: called with the progress.

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
        loader = build_loader(options, data, task, table, device)
        num_steps = WARM_UP + config.steps
        model.train()
        while len(stages) < num_steps:
            # a step begins at the end of the previous one, and so includes the wait for its batch
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
                    advance(len(stages), num_steps)
                if len(stages) == num_steps:
                    break
        seconds = [stage.seconds() for stage in stages[WARM_UP:]]
    return Computed(statistics.median(seconds), len(seconds))


def run_config(config: CostConfig) -> TrainConfig:
    """Return the options of the training run whose cost is predicted."""
    same = {name: getattr(config, name) for name in SAME}
    return TrainConfig(data=config.data, seed=config.seed, **same)


def build_model(config: CostConfig, data: Dataset) -> nn.Module:
    """Build the model of the run on the CPU, without a change to torch's random generators.

    Raises:
        ValueError: the graph has no features, or no labels or edges for the task.
    """
    with (
        feature_table(data, "host", torch.device("cpu"), Group()) as table,
        torch.random.fork_rng([]),
    ):
        options = run_config(config)
        task = build_task(options, data)
        sizes = (data.graph.num_nodes, table.num_columns, len(task.seeds))
        check_memory(footprint_of(options, task.model, *sizes), torch.device("cpu"), Group())
        return task.model()


def network_of(config: CostConfig) -> Network:
    """Return the network that the options describe."""
    return Network(config.mbit_per_s, config.delay_ms / 1e3, config.message_us / 1e6)


def describe_run(config: CostConfig, computed: Computed, model: nn.Module) -> Line:
    """Return the entries of the JSON line that describe the run."""
    return {
        "data": str(config.data),
        **{name: getattr(config, name) for name in SAME},
        "parameters": sum(p.numel() for p in model.parameters()),
        "gradient_bytes": gradient_bytes(model),
        "measured_steps": computed.steps,
    }


@contextmanager
def _threads(count: int) -> Iterator[None]:
    """Set torch's number of threads for the duration of a `with`; 0 does not change it."""
    before = torch.get_num_threads()
    torch.set_num_threads(count or before)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def cost_command(config: CostConfig, reporter: Reporter) -> None:
    """`gcnzc cost`."""
    if config.data is None:
        config = replace(config, data=builtin_graph.prepared(reporter))
    assert config.data is not None, "set above"
    loaded = load.load(config.data)
    model, network = build_model(config, loaded), network_of(config)
    computed = optim_cost.Computed(config.step_s or 0.0)
    if config.step_s is None:
        with reporter.task("measure steps") as advance:
            computed = measure_step(config, loaded, advance)
    with reporter.task("simulate exchanges") as advance:
        costs = optim_cost.step_costs(model, config.workers, network, advance)
    lines = [reports_network.line_of(cost, computed, network) for cost in costs]
    defaults = {number: optim_cost.default_method(model, number) for number in config.workers}
    chosen = reports_network.advice(lines, defaults)
    reporter.say(f"{loaded.name}, {config.model}:")
    report = reports_network.describe_inputs(model, computed, network)
    report += reports_network.format_table(lines, defaults)
    for text in [*report, "* the default of `gcnzc train`", chosen["why"]]:
        reporter.say(text)
    if config.out is not None:
        points = reports_network.step_time_points(costs, computed, network, loaded.name)
        step_times(points, config.out)
        reporter.say(f"wrote {config.out}")
    print_json(describe_run(config, computed, model) | {"costs": lines, "choice": chosen})
