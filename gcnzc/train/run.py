"""Train a model on a graph; this module combines all stages of a run.

`train` loads the graph, and builds the feature table, the model and the loader. It then trains
epoch by epoch, evaluates with all neighbours, and returns the scores of the model that was best on
the validation split. A checkpoint has everything that later steps depend on. A run that was killed
and resumed therefore gives the same result, bit for bit, as one that was not interrupted, with the
same options and on the same machine.
"""

import os
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

import torch

from gcnzc.datasets.store import is_prepared
from gcnzc.exchange import Group
from gcnzc.exchange.long_work import joint_work
from gcnzc.features.pinning import pinned
from gcnzc.features.table import FeatureTable
from gcnzc.graph.dataset import Dataset
from gcnzc.graph.load import verify
from gcnzc.loader.full_batch import FullBatchLoader
from gcnzc.sampling.full import find_layer_nodes
from gcnzc.system.malloc import freed_memory
from gcnzc.train import record
from gcnzc.train.accumulation import Accumulation
from gcnzc.train.build import build_optimizer, check_options
from gcnzc.train.callbacks import Callback, check_callback, load_callbacks
from gcnzc.train.checkpointing import Checkpoint
from gcnzc.train.config import TrainConfig
from gcnzc.train.epoch_stats import Statistics
from gcnzc.train.errors import Interrupted
from gcnzc.train.full_batch import build_evaluation_loader
from gcnzc.train.hetero.data import HeteroDataset, load_data
from gcnzc.train.hetero.embeddings import TrainedEmbeddings, build_embeddings, check_optimizer
from gcnzc.train.ineffective import ineffective_options
from gcnzc.train.listeners import Best, Board, Progress, Record
from gcnzc.train.loop import fit
from gcnzc.train.memory import check_memory, footprint_of
from gcnzc.train.mixed_seed import mixed_seed
from gcnzc.train.models import build_model
from gcnzc.train.node_outputs import Evaluated
from gcnzc.train.options import rows, unread
from gcnzc.train.precision import build_precision
from gcnzc.train.presets import describe_published_score, read_preset
from gcnzc.train.progress import NullReporter, Reporter
from gcnzc.train.results import Result, interruption
from gcnzc.train.schedules import build_schedule
from gcnzc.train.schema import schema_of
from gcnzc.train.seed_parts import find_parts
from gcnzc.train.setup import (
    build_loader,
    choose_device,
    describe_labels,
    open_features,
)
from gcnzc.train.signals import stop_requests
from gcnzc.train.state import Run
from gcnzc.train.tasks import build_task
from gcnzc.train.tasks.hetero_link import HeteroLinkTask
from gcnzc.train.tasks.hetero_node import HeteroNodeTask
from gcnzc.train.tasks.node import NodeTask
from gcnzc.train.tracing import Trace
from gcnzc.train.weight_average import build_average

# the processes that train: torch's global random generators, which initial weights and dropout use,
# belong to the process, and a fork of it may train as well
_training: set[int] = set()


@contextmanager
def only_run() -> Iterator[None]:
    """Mark this process as training within the `with`.

    Raises:
        RuntimeError: another run trains in this process.
    """
    process = os.getpid()
    if process in _training:
        raise RuntimeError(
            "train: another run is training in this process, and would draw the same random "
            "generators\n\nhint: start a process for each run, such as with "
            "multiprocessing.get_context('spawn'), or train one after the other"
        )
    _training.add(process)
    try:
        yield
    finally:
        _training.remove(process)


@only_run()
def train(
    config: TrainConfig,
    folder: Path,
    reporter: Reporter | None = None,
    group: Group | None = None,
    launch: record.Launch | None = None,
    callbacks: Sequence[Callback] = (),
) -> dict[str, Any]:
    """Train a model with the options of `config`, and return the result of the run.

    Initial weights and dropout use torch's global random generators, so that one process can train
    one model at a time: runs in several threads would share these generators, and not be
    reproducible. Train several models side by side in several processes.

    Args:
        config: the options; `data` must be set.
        folder: the run folder, created if needed. With the option `resume` it has the run to
            resume. Worker 0 reads and writes it; every worker also reads and writes its own state
            in the folder `checkpoints`.
        reporter: shows the progress; None shows nothing.
        group: the workers that train together; only this process if None.
        launch: identifies the launch of these workers, for example by torchrun; the same on all
            workers. If the same launch started the run in `folder`, the launcher has restarted the
            workers, and they resume that run.
        callbacks: called on each worker, after those that each run has and those of the option
            `callback`; see `Callback`.

    Returns:
        The result that `gcnzc train` prints, such as scores, seconds per epoch, and bytes gathered
        and sent. `unsaved` has the cause for each file that could not be written.

    Raises:
        ValueError: an option or the data is invalid, the checkpoint does not match them, or
            training has diverged.
        RuntimeError: the run needs more memory than the machine has, or another run trains in this
            process.
        Interrupted: a worker received SIGINT or SIGTERM. The run was saved, except for files that
            the message names.
        WorkerLost: another worker has ended or does not respond; the run can be resumed.
        PeerFailed: another worker failed, and raises the error.
    """
    began, alone = time.perf_counter(), group is None
    reporter, group = reporter or NullReporter(), group or Group()
    _check(config, group, alone)
    for each in callbacks:
        check_callback(each, "train: one of `callbacks`")
    own = [*load_callbacks(config.run.callback), *callbacks]
    for message in unread(config, rows(TrainConfig)):
        reporter.say(f"warning: {message}".replace("\n\nhint: ", "; "))
    with ExitStack() as stack:
        run = stack.enter_context(built(config, Path(folder), group, reporter, began))
        statistics, best = Statistics(), Best()
        records = Record(statistics)
        saving = Checkpoint(run, statistics, best, [records, best, *own])
        saving.begin(run, launch, stack)
        run.received_signal = stack.enter_context(stop_requests())
        standard = [statistics, best, records, Board(), Progress(statistics, stack)]
        standard += [Trace()] * (config.run.trace > 0)
        # the checkpoint is written after all others have seen an event
        fit(run, [*standard, *own, saving, Result()])
        if isinstance(run.stopped, Interrupted):
            raise interruption(run)
    return run.result


@contextmanager
def built(
    config: TrainConfig, folder: Path, group: Group, reporter: Reporter, began: float
) -> Iterator[Run]:
    """Load the graph and build the parts of a run; the order of random draws is fixed here."""
    loading, training = config.loading, config.training
    device = choose_device(config.run.device, group.local_rank)
    run = Run(config, folder, group, device, reporter, began)
    if config.graph.verify:
        _verify(run)
    data = run.data = load_data(config, group)
    _describe(run)
    run.precision = build_precision(training.precision, device, reporter.say)
    task = run.task = build_task(config, data)
    _check_memory(run)
    with ExitStack() as stack:
        table, settings = open_features(run, stack)
        # dropout and initial weights use torch's global generators: restore the caller's states
        cuda_devices = [torch.cuda.current_device()] if device.type == "cuda" else []
        stack.enter_context(torch.random.fork_rng(cuda_devices))
        if device.type == "cpu" and not config.is_full_batch:
            # with full batches the process would grow, since a step has few, large arrays
            stack.enter_context(freed_memory(kept=True))
        torch.manual_seed(loading.seed)
        model = build_model(config, data, schema_of(data)).to(device)
        if group.rank:  # each worker has its own dropout masks
            torch.manual_seed(mixed_seed(loading.seed, group.rank))
        parts, cut = find_parts(config, data, task, group.world_size, group)
        if parts is not None and group.world_size > 1:
            reporter.say(f"partition: {cut:.1%} of the edges connect parts of different workers")
        loader = build_loader(config, data, task, table, device, group, settings, parts)
        if isinstance(loader, FullBatchLoader) and isinstance(task, NodeTask):
            assert isinstance(data, Dataset), "full batches are of graphs of one node type"
            assert isinstance(table, FeatureTable), "full batches are of graphs of one node type"
            task.whole_graph = build_evaluation_loader(config, data, table, model, loader)
        task.choose_evaluation(Evaluated(model, table, device, group=group), reporter.say)
        steps = training.epochs * len(Accumulation(loader.shares, training.accumulate))
        for message in ineffective_options(config, data, len(task.seeds), group.world_size, steps):
            reporter.say(f"warning: {message}")
        run.table, run.model, run.loader = table, model, loader
        # the two flags that each exchange sends: a request to stop, and a checkpoint that is due
        run.optimizer = build_optimizer(config, model, group, steps, signals=2)
        run.schedule = build_schedule(training, run.optimizer)
        run.average = build_average(training, model)
        run.embeddings = open_embeddings(run, stack)
        yield run


def open_embeddings(run: Run, stack: ExitStack) -> TrainedEmbeddings | None:
    """Build the embeddings of the node types without features that the model reads, if any.

    Args:
        run: the run.
        stack: for a GPU, their rows are page-locked until it is closed. The GPU has read the rows
            of a step before the optimizer, which needs their gradients, updates them.

    Raises:
        ValueError: an option does not support them.
        RuntimeError: the memory is too small.
    """
    if not isinstance(run.data, HeteroDataset):
        return None
    assert isinstance(run.task, HeteroNodeTask | HeteroLinkTask), "`build_task` has built it"
    tables = build_embeddings(run.config, run.data, run.model)
    check_optimizer(run.config, run.optimizer, tables)
    run.task.embeddings = tables
    if not tables:
        return None
    if run.device.type == "cuda":
        for table in tables.values():
            stack.enter_context(pinned(table.rows))
    names = ", ".join(f"{name} ({len(table):,} rows)" for name, table in tables.items())
    columns = run.config.model.embeddings["dim"]
    run.reporter.say(f"embeddings of {columns} columns are trained for {names}")
    return TrainedEmbeddings(run.config, tables, run.group)


def _check(config: TrainConfig, group: Group, alone: bool) -> None:
    """Check that this process and its group can train with the options.

    Raises:
        ValueError: they cannot.
    """
    if config.graph.data is None:
        raise ValueError("train: no data\n\nhint: give the folder of a graph")
    if config.run.workers > 1 and alone:
        raise ValueError(
            f"train: workers is {config.run.workers}, and this is one process\n\n"
            "hint: `gcnzc train --workers N` starts the processes; a script that torchrun starts "
            "gives `train` the group of gcnzc.exchange.init_group"
        )
    if config.is_full_batch and group.world_size > 1:
        raise ValueError(
            f"train: a group of {group.world_size} workers with --batch-size all: one process "
            "computes the whole graph, on all cores or a GPU\n\nhint: use one worker, or give "
            "--batch-size a number, such as 1024"
        )
    if config.training.runs > 1:
        raise ValueError(
            f"train: runs is {config.training.runs}, but `train` trains one\n\n"
            "hint: gcnzc.train.train_runs trains with several random seeds"
        )
    check_options(config, group.world_size)


def _describe(run: Run) -> None:
    """Say what the user may not expect of the labels, and the published score of a preset."""
    config, data = run.config, run.data
    if run.is_first and config.graph.task.name != "link":
        for message in describe_labels(data, is_prepared(data.folder)):
            run.reporter.say(message)
    if config.run.preset:
        # a run has all options, also of a preset that a later version does not have any more
        with suppress(ValueError):
            preset = read_preset(config.run.preset)
            own = TrainConfig(preset=preset.name)
            changed = [
                row.flag
                for name, row in rows(TrainConfig).items()
                if name in preset.options and config[name] != own[name]
            ]
            run.reporter.say(describe_published_score(preset, data.name, changed))


def _verify(run: Run) -> None:
    """Verify a prepared folder on one worker of each machine.

    Other formats are not verified here, because they are validated when they are loaded.

    Raises:
        FileNotFoundError, ValueError: on all workers, if a file is missing or damaged.
    """
    path: Any = run.config.graph.data
    with joint_work(run.group) as work:
        if run.group.local_rank == 0 and is_prepared(path):
            with run.reporter.stages(f"verify {path}") as progress:
                work.run_in_thread(lambda: verify(path, progress))


def _check_memory(run: Run) -> None:
    data, config = run.data, run.config
    if not isinstance(data, Dataset) or data.table is None or data.table.num_columns == 0:
        return
    seeds, layer_nodes, schema = run.task.seeds, None, schema_of(data)
    if config.is_full_batch:
        layer_nodes = find_layer_nodes(data.graph, seeds, config.layers).counts
    sizes = data.graph.num_nodes, data.table.num_columns, len(seeds)
    footprint = footprint_of(config, lambda: build_model(config, data, schema), *sizes, layer_nodes)
    check_memory(footprint, run.device, run.group)
