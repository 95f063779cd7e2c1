"""Options of `gcnzc train` and `gcnzc evaluate`, for the command line, Python and the run folder.

A field of a group is an option; see `gcnzc.train.options`. A function takes the group that it
reads. The registries, such as `MODELS`, have the values that have options of their own.
"""

from collections.abc import Collection, Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, Literal, TypeAlias

from gcnzc.train.options import Options, check_names, option, rows
from gcnzc.train.presets import read_preset
from gcnzc.train.signatures import read
from gcnzc.train.values import Bounds, Choices, Value, not_among, shown
from gcnzc.train.writable import check_output

Metric: TypeAlias = Literal[
    "as-is", "accuracy", "rocauc", "average_precision", "f1_micro", "f1_macro"
]
Device: TypeAlias = Literal["auto", "cpu", "cuda"]

# models of graphs with several types of nodes and edges
HETERO_MODELS = ("rgcn", "rgat", "hgt", "hetero-sage")
ONE_BIT = ("onebit-adam", "onebit-lamb", "zero-one-adam")
# the only --optimizer that a strategy supports, which replaces the default
OPTIMIZER_OF = {"muloco": "muon", "fedglomo": "sgd"}
# the default of --accumulate with a strategy that drops minibatches
DROPPED_ACCUMULATE = 4
# protect the machine against a mistyped number; the largest servers have several hundred cores
MAX_THREADS = MAX_HEADS = 1024
SEED_LIMIT = 2**63 - 1
ALL_NEIGHBOURS = -1

_GNN, _HETERO, _OPTIM = "gcnzc.models.gnn:", "gcnzc.models.hetero.models:", "gcnzc.optim."
_NODE, _LINK = "gcnzc.train.tasks.node:NodeTask", "gcnzc.train.tasks.link:LinkTask"
_HETERO_NODE = "gcnzc.train.tasks.hetero_node:HeteroNodeTask"
_HETERO_LINK = "gcnzc.train.tasks.hetero_link:HeteroLinkTask"

_SHARE, _POSITIVE = Bounds(least=0, below=1), Bounds(above=0)

TASKS = Choices(
    "--task",
    {"node": (_NODE, _HETERO_NODE), "link": (_LINK, _HETERO_LINK)},
    bounds={
        "label_smoothing": _SHARE,
        "label_inputs": _SHARE,
        "num_negatives": Bounds(least=1),
        "valid_edges": _SHARE,
        "test_edges": _SHARE,
        "evaluate_negatives": Bounds(least=1),
    },
)
# by task and whether the graph is typed: the class
TASK_CLASSES = {
    ("node", False): _NODE,
    ("node", True): _HETERO_NODE,
    ("link", False): _LINK,
    ("link", True): _HETERO_LINK,
}
MODELS = Choices(
    "--model",
    {
        "sage": (f"{_GNN}SAGE",),
        "gcn": (f"{_GNN}GCN",),
        "gin": (f"{_GNN}GIN",),
        "gat": (f"{_GNN}GAT",),
        "gatv2": (f"{_GNN}GATv2",),
        "rgcn": (f"{_HETERO}RGCN",),
        "rgat": (f"{_HETERO}RGAT",),
        "hgt": (f"{_HETERO}HGT",),
        "hetero-sage": (f"{_HETERO}HeteroSAGE",),
    },
    supplied=("num_layers", "dropout"),
    bounds=dict.fromkeys(("heads", "output_heads", "num_bases"), Bounds(most=MAX_HEADS)),
)
EMBEDDINGS = Choices(
    "--embeddings",
    {
        "adagrad": ("gcnzc.train.hetero.embeddings:adagrad",),
        "adam": ("gcnzc.train.hetero.embeddings:lazy_adam",),
    },
    bounds={"dim": Bounds(least=1), "lr": Bounds(least=0)},
)
TEMPORAL = Choices(
    "--temporal",
    {
        "none": (),
        "uniform": ("gcnzc.sampling.hetero:HeteroSampler",),
        "last": ("gcnzc.sampling.hetero:HeteroSampler",),
    },
    supplied=(
        *("seed", "replace", "weighted", "disjoint", "temporal"),
        *("subgraph_type", "once", "edge_ids"),
    ),
    summaries={
        "none": "Any neighbours.",
        "uniform": "Random neighbours that are not later than the seed node, or earlier than the "
        "seed edge.",
        "last": "The latest of these neighbours.",
    },
)
FEATURES = Choices(
    "--features",
    {"host": (), "device": (), "cached": ("gcnzc.train.setup:cached_table",)},
    summaries={
        "host": "In host memory, which the GPU reads in place.",
        "device": "In GPU memory.",
        "cached": "In host memory, with a cache of the most frequent rows in GPU memory.",
    },
)
OPTIMIZERS = Choices(
    "--optimizer",
    {
        "adam": ("torch.optim.adam:Adam",),
        "adamw": ("torch.optim.adamw:AdamW",),
        "sgd": ("torch.optim.sgd:SGD",),
        "muon": (f"{_OPTIM}muon:Muon",),
        "onebit-adam": (f"{_OPTIM}one_bit_adam:OneBitAdam",),
        "onebit-lamb": (f"{_OPTIM}one_bit_lamb:OneBitLamb",),
        "zero-one-adam": (
            f"{_OPTIM}zero_one_adam:ZeroOneAdam",
            "gcnzc.train.build:zero_one_schedule",
        ),
    },
    supplied=(
        *("lr", "module", "group", "signals", "clip_norm", "total_steps"),
        *("foreach", "maximize", "capturable", "differentiable", "fused"),
    ),
    summaries={
        "adam": "Adam of torch.",
        "adamw": "AdamW of torch: Adam with decoupled weight decay.",
        "sgd": "SGD of torch: stochastic gradient descent with momentum.",
    },
    defaults={
        "sgd": {"momentum": 0.9},
        "adamw": {"weight_decay": 0.0},
        "muon": {"weight_decay": 0.0},
        **{name: {"weight_decay": 0.0} for name in ONE_BIT},
    },
)
STRATEGIES = Choices(
    "--strategy",
    {
        "average": (f"{_OPTIM}averaged:Averaged",),
        "dropcompute": (f"{_OPTIM}drop_compute:DropCompute",),
        "local-sgd": (f"{_OPTIM}local_sgd:LocalSGD",),
        "diloco": (f"{_OPTIM}diloco:DiLoCo",),
        "decoupled-diloco": (f"{_OPTIM}decoupled_diloco:DecoupledDiLoCo",),
        "streaming-diloco": (f"{_OPTIM}streaming_diloco:StreamingDiLoCo",),
        "muloco": (f"{_OPTIM}muloco:MuLoCo",),
        "sparseloco": (f"{_OPTIM}sparse_loco:SparseLoCo",),
        "co2": (f"{_OPTIM}co2:CO2",),
        "selsync": (f"{_OPTIM}selsync:SelSync",),
        "saps": (f"{_OPTIM}saps:SAPS",),
        "a2cid2": (f"{_OPTIM}a2cid2:A2CiD2",),
        "backup": (f"{_OPTIM}backup_workers:BackupWorkers",),
        "fedglomo": (f"{_OPTIM}fedglomo:FedGLOMO",),
    },
    supplied=(
        *("group", "signals", "module", "micro_batches", "clip_norm", "total_steps"),
        *("alone", "clock", "clocks", "delay_steps", "seed"),
    ),
    bounds={"target": Bounds(above=0, most=1)},
)
SCHEDULES = Choices(
    "--schedule",
    {name: (f"gcnzc.train.schedules:{name}",) for name in ("constant", "cosine", "linear", "step")},
    bounds={"epochs": _POSITIVE, "factor": Bounds(above=0, below=1)},
)
AVERAGES = Choices(
    "--average",
    {
        "none": (),
        "ema": ("gcnzc.train.weight_average:ema",),
        "swa": ("gcnzc.train.weight_average:swa",),
    },
    summaries={"none": "The weights themselves."},
    bounds={"decay": Bounds(above=0, below=1), "start": _SHARE},
)
EVALUATIONS = Choices(
    "--evaluate",
    {name: (f"gcnzc.train.evaluator:{name}",) for name in ("needed", "exact", "sampled", "auto")},
)
POSTPROCESSING = Choices(
    "--postprocess",
    {
        "none": (),
        "correct-and-smooth": ("gcnzc.train.correct_and_smooth:correct_and_smooth",),
    },
    summaries={
        "none": "The outputs of the model.",
        "correct-and-smooth": "Propagate the errors on the training nodes, and then the labels.",
    },
    # more propagations change nothing, and larger errors overflow
    bounds={
        **dict.fromkeys(("correct_steps", "smooth_steps"), Bounds(least=0, most=10_000)),
        **dict.fromkeys(("correct_alpha", "smooth_alpha"), Bounds(least=0, most=1)),
        "error_scale": Bounds(above=0, most=1000),
    },
)


@dataclass(frozen=True, kw_only=True)
class GraphOptions(Options):
    """Graph and task"""

    data: Path | None = option(
        "folder of a graph, prepared or in OGB's layout, or a .npz, .toml or PyG .pt file; without "
        "it, a built-in graph",
        positional=True,
        free=True,
    )
    task: Value = option("what is predicted: classes of nodes, or edges", "node", of=TASKS)
    temporal: Value = option(
        "heterogeneous graphs: sample only neighbours that are not later than the seed",
        "none",
        of=TEMPORAL,
        read_with=("model", HETERO_MODELS),
        common=False,
    )
    verify: bool = option(
        "first read a prepared folder in full and compare its checksums",
        False,
        common=False,
        free=True,
    )
    allow_nan: bool = option("train even if features are NaN or infinite", False, common=False)

    @property
    def label_inputs(self) -> float:
        """Fraction of the training nodes whose labels are input features in a training step."""
        return float(self.task["label_inputs"]) if "label_inputs" in self.task.options else 0.0

    @property
    def is_temporal(self) -> bool:
        """Whether only earlier neighbours are sampled."""
        return self.temporal.name != "none"

    @property
    def time_kind(self) -> Literal["both", "edge", "node"]:
        """The times that count: those of edges, of nodes, or the later of these."""
        kind: Literal["both", "edge", "node"] = "both"
        return self.temporal["time"] if self.is_temporal else kind


@dataclass(frozen=True, kw_only=True)
class ModelOptions(Options):
    """Model"""

    model: Value = option(
        "the GNN, with one layer for each number of --fanouts; rgcn, rgat, hgt and hetero-sage are "
        "for heterogeneous graphs",
        "sage",
        of=MODELS,
    )
    hidden: int = option(
        "hidden features; of gat and gatv2, per attention head", 256, least=1, most=SEED_LIMIT
    )
    dropout: float = option("dropout rate of the hidden features", 0.5, least=0, below=1)
    embeddings: Value = option(
        "heterogeneous graphs: optimizer of the embeddings of node types without features",
        "adagrad",
        of=EMBEDDINGS,
        read_with=("model", HETERO_MODELS),
        common=False,
    )

    @property
    def is_hetero(self) -> bool:
        """Whether the model is for graphs with several types of nodes and edges."""
        return self.model.name in HETERO_MODELS


DEFAULT_FANOUTS = (15, 10, 5)


@dataclass(frozen=True, kw_only=True)
class LoadingOptions(Options):
    """Minibatches"""

    fanouts: tuple[int, ...] = option(
        "neighbours sampled per node, one number per layer, input layer first; -1 samples all",
        DEFAULT_FANOUTS,
        least=-1,
    )
    batch_size: int | Literal["all"] = option(
        "seed nodes or edges per minibatch of one worker; all: full-batch training, without "
        "sampling",
        1024,
        least=1,
    )
    features: Value = option("where the feature table is stored", "host", of=FEATURES)
    seed: int = option(
        "random seed of the model, the order of the seeds and the sampling",
        0,
        least=0,
        most=SEED_LIMIT,
    )
    seed_order: Literal["shuffled", "rotating", "local"] = option(
        "seeds of each worker in an epoch: random ones; one of as many random chunks as there are "
        "workers, another in each epoch; or those of its part of the partitioned graph",
        "shuffled",
        common=False,
    )
    sampler: Literal["gcnzc", "dgl"] = option(
        "library that samples the neighbourhoods", "gcnzc", common=False
    )
    threads: int = option(
        "threads of each worker that prepare minibatches; 0: those of the tuning profile, or cores "
        "divided by workers, at most 4",
        0,
        least=0,
        most=MAX_THREADS,
        common=False,
        free=True,
    )
    tuning_profile: bool = option(
        "use the settings that `gcnzc check --tune` measured for this machine",
        True,
        common=False,
        free=True,
    )

    @property
    def is_full_batch(self) -> bool:
        """Whether each step uses the whole graph."""
        return self.batch_size == "all"

    def check(self) -> None:
        """See `Options`."""
        check_fanouts(self.fanouts, "--fanouts")


@dataclass(frozen=True, kw_only=True)
class TrainingOptions(Options):
    """Training and evaluation"""

    epochs: int = option("passes over the training nodes or edges", 20, least=1, free=True)
    optimizer: Value = option("the update rule", "adam", of=OPTIMIZERS)
    lr: float | None = option("learning rate; default: 0.1 for sgd, 0.003 for the others", above=0)
    schedule: Value = option("the learning rate over the run", "constant", of=SCHEDULES)
    warmup_epochs: float = option(
        "epochs in which the learning rate increases to --lr", 0.0, least=0, common=False
    )
    scale_lr: Literal["none", "linear", "sqrt"] = option(
        "multiply --lr by the number of workers or its root, as the global batch grows with them",
        "none",
        common=False,
    )
    decay: Literal["all", "weights"] = option(
        "parameters with weight decay: all, or weights without biases and normalization layers",
        "all",
        common=False,
    )
    accumulate: int = option(
        "minibatches of a worker per optimizer step; with dropcompute, the default is "
        f"{DROPPED_ACCUMULATE}",
        1,
        least=1,
    )
    clip_gradients: float | None = option(
        "largest L2 norm of the gradient of all parameters together", above=0, common=False
    )
    precision: Literal["float32", "tf32", "bf16", "fp16"] = option(
        "precision of training steps; weights, losses and evaluations are float32", "float32"
    )
    average: Value = option(
        "evaluate and keep an average of the weights", "none", of=AVERAGES, common=False
    )
    evaluate: Value = option(
        "nodes for which hidden layers are computed in an evaluation",
        "needed",
        of=EVALUATIONS,
        common=False,
    )
    evaluate_every: int = option("epochs from one evaluation to the next", 1, least=1)
    patience: int = option(
        "stop after so many evaluations without improvement; 0: never", 0, least=0
    )
    runs: int = option(
        "train so many times, with the seeds --seed, --seed + 1, ..., and report mean and standard "
        "deviation of the scores",
        1,
        least=1,
        common=False,
    )

    @property
    def learning_rate(self) -> float:
        """--lr, or the default of --optimizer."""
        return self.lr or (0.1 if self.optimizer.name == "sgd" else 0.003)


@dataclass(frozen=True, kw_only=True)
class RunOptions(Options):
    """Workers and run folder"""

    device: Device = option("where the model trains; auto: CUDA if there is a GPU", "auto")
    workers: int = option(
        "processes that train together on this machine, each on minibatches of its own; for "
        "several machines, use torchrun",
        1,
        least=1,
        most=MAX_THREADS,
        free=True,
    )
    strategy: Value = option("what workers exchange, and when", "average", of=STRATEGIES)
    timeout_s: float = option(
        "seconds to wait for another worker, after which all are restarted",
        60.0,
        above=0,
        common=False,
        free=True,
    )
    restarts: int = option(
        "how often the workers are restarted from the last checkpoint after one is lost",
        3,
        least=0,
        common=False,
        free=True,
    )
    out: Path | None = option("run folder; default: runs/DATA-MODEL-N", free=True)
    resume: Path | None = option(
        "run folder to resume, with the options that it was started with", free=True
    )
    config: Path | None = option(
        "TOML file with these options, or config.json of a run; the command line overrides it",
        free=True,
    )
    preset: str | None = option(
        "options of a published recipe, such as tuned/cora-gcn, which the others override; `gcnzc "
        "help preset` lists all",
    )
    checkpoint_every_s: float = option(
        "seconds between checkpoints", 30.0, least=0, common=False, free=True
    )
    callback: tuple[str, ...] = option(
        "classes of callbacks, as module:name separated by commas; see `gcnzc.train.Callback`",
        (),
        common=False,
        free=True,
    )
    trace: int = option(
        "steps after the first ten to show in a timeline; 0: no timeline",
        0,
        least=0,
        common=False,
        free=True,
    )


@dataclass(frozen=True, init=False)
class TrainConfig(Options):
    """Train a model on a graph, and keep the weights with the best validation metric.

    Prints one JSON line; the run folder has the records, curves.png and the checkpoints.

    Args:
        given: options by name, such as `epochs=3, strategy="diloco:local_steps=12"`.

    Raises:
        ValueError: an option is unknown or not valid, or options contradict each other.
    """

    graph: GraphOptions
    model: ModelOptions
    loading: LoadingOptions
    training: TrainingOptions
    run: RunOptions

    def __init__(self, **given: Any) -> None:
        given = {**_preset_options(given), **check_names(TrainConfig, given)}
        for each in fields(self):
            kind = GROUPS[each.name]
            own = {name: given[name] for name in rows(kind) if name in given}
            object.__setattr__(self, each.name, kind(**own))
        self._complete(given)
        self.check()

    def replace(self, **given: Any) -> "TrainConfig":
        """Return a copy with other options; what the strategy determines changes with it."""
        kept = {name: self[name] for name in rows(TrainConfig)} | given
        strategy = self.run.strategy.name
        determined = {
            "optimizer": OPTIMIZER_OF.get(strategy, "adam"),
            "accumulate": DROPPED_ACCUMULATE if strategy == "dropcompute" else 1,
        }
        for name, value in determined.items() if "strategy" in given else ():
            if name not in given and str(kept[name]) == str(value):
                del kept[name]
        return TrainConfig(**kept)

    def _complete(self, given: Collection[str]) -> None:
        """Replace the defaults of options that others determine."""
        strategy = self.run.strategy.name
        changed: dict[str, Any] = {}
        if "optimizer" not in given and strategy in OPTIMIZER_OF:
            changed = {"optimizer": OPTIMIZER_OF[strategy]}
        if "accumulate" not in given and strategy == "dropcompute":
            changed = {"accumulate": DROPPED_ACCUMULATE}
        if changed:
            object.__setattr__(self, "training", self.training.replace(**changed))
        if "fanouts" not in given and self.loading.is_full_batch:
            all_neighbours = (ALL_NEIGHBOURS,) * len(DEFAULT_FANOUTS)
            object.__setattr__(self, "loading", self.loading.replace(fanouts=all_neighbours))

    @property
    def layers(self) -> int:
        """The layers of the model."""
        return len(self.loading.fanouts)

    def check(self) -> None:
        """See `Options`."""
        training, optimizer = self.training, self.training.optimizer.name
        strategy = self.run.strategy.name
        if optimizer in ONE_BIT and strategy != "average":
            raise ValueError(
                f"--optimizer {optimizer} with --strategy {strategy}: {optimizer} has an exchange "
                "of its own\n\nhint: omit one of them"
            )
        required = OPTIMIZER_OF.get(strategy, optimizer)
        if optimizer != required:
            raise ValueError(
                f"--optimizer {optimizer} with --strategy {strategy}, which is a strategy for "
                f"{required}\n\nhint: use --optimizer {required}, or another --strategy"
            )
        if strategy == "dropcompute" and training.accumulate == 1 and not self.is_full_batch:
            raise ValueError(
                "--accumulate 1 with --strategy dropcompute, which needs several minibatches in a "
                f"step\n\nhint: give at least 2, or omit it for {DROPPED_ACCUMULATE}"
            )
        if strategy == "fedglomo" and training.precision == "fp16":
            raise ValueError(
                "--precision fp16 with --strategy fedglomo, which computes several gradients in a "
                "step, and torch's GradScaler supports one\n\nhint: use --precision bf16"
            )
        if strategy == "fedglomo" and training.clip_gradients is not None:
            raise ValueError(
                "--strategy fedglomo does not support --clip-gradients\n\n"
                "hint: omit --clip-gradients, and reduce --lr if training diverges"
            )
        if training.decay != "all" and not training.optimizer["weight_decay"]:
            raise ValueError(
                f"--decay {training.decay} has no effect without weight decay\n\n"
                f"hint: --optimizer {optimizer}:weight_decay=0.01"
            )
        if training.warmup_epochs and training.warmup_epochs >= training.epochs:
            raise ValueError(
                f"--warmup-epochs {training.warmup_epochs:g} with --epochs {training.epochs}: the "
                "warm-up would be the whole run\n\nhint: use a smaller --warmup-epochs"
            )
        _check_evaluation(training.evaluate, self.loading.fanouts)
        _check_task(self)
        if self.model.is_hetero:
            _check_hetero(self)
        if self.is_full_batch:
            _check_full_batch(self)

    @property
    def is_full_batch(self) -> bool:
        """Whether each step uses the whole graph."""
        return self.loading.is_full_batch


GROUPS: Mapping[str, Any] = {
    "graph": GraphOptions,
    "model": ModelOptions,
    "loading": LoadingOptions,
    "training": TrainingOptions,
    "run": RunOptions,
}


def _preset_options(given: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the options of a preset; a config that is copied, or read from a run, has them all."""
    name = given.get("preset")
    if name is None or rows(TrainConfig).keys() <= given.keys():
        return {}
    return read_preset(name).options


def check_fanouts(fanouts: Collection[int], flag: str) -> None:
    """Raise a ValueError if there is no fanout, or one is out of range."""
    if not fanouts:
        raise ValueError(f"{flag}: no number is given\n\nhint: one per layer, such as 15,10,5")
    for fanout in fanouts:
        if fanout != ALL_NEIGHBOURS and fanout < 1:
            raise ValueError(
                f"{flag} must be at least 1, or -1 for all neighbours, got {fanout}"
                "\n\nhint: one number per layer, input layer first, such as 15,10,5"
            )


def _check_evaluation(evaluate: Value, fanouts: Collection[int]) -> None:
    """Check the fanouts of an evaluation against those of training."""
    if evaluate.name not in ("sampled", "auto"):
        return
    own = evaluate["fanouts"]
    if own:
        check_fanouts(own, "fanouts of --evaluate")
        if len(own) != len(fanouts):
            raise ValueError(
                f"--evaluate {evaluate}: {len(own)} fanouts for {len(fanouts)} layers\n\n"
                "hint: give one number per layer, input layer first"
            )
    if evaluate.name == "sampled" and not own and set(fanouts) == {ALL_NEIGHBOURS}:
        raise ValueError(
            f"--evaluate {evaluate} with --fanouts {shown(tuple(fanouts))}, which sample all "
            "neighbours\n\nhint: --evaluate sampled:fanouts=15,10,5, with one number per layer; "
            "--evaluate needed uses all neighbours"
        )


def _check_task(config: TrainConfig) -> None:
    """Check that the options of the task are for the graphs of the model."""
    task, model = config.graph.task, config.model
    own = read(TASK_CLASSES[task.name, model.is_hetero]).arguments
    for name in task.options:
        if name not in own:
            raise ValueError(
                f"{not_among(f'option of --task {task.name}', name, own)}; with --model "
                f"{model.model.name}, which is for "
                f"{'heterogeneous graphs' if model.is_hetero else 'graphs of one node type'}"
            )
    if task.name == "link" and model.is_hetero and task["valid_edges"] + task["test_edges"] >= 1:
        raise ValueError(
            f"--task {task} leaves no edges to train on\n\n"
            "hint: the sum of valid_edges and test_edges is below 1"
        )


def _check_hetero(config: TrainConfig) -> None:
    """Raise a ValueError if an option does not apply to heterogeneous graphs."""
    for name, accepted, reason in (
        ("sampler", ("gcnzc",), "DGL's sampler is for graphs of one node type"),
        ("seed_order", ("shuffled", "rotating"), "graphs of one node type can be partitioned"),
        ("features", ("host",), "features of several node types remain in host memory"),
        ("evaluate", ("needed", "sampled"), "outputs are computed in minibatches of these nodes"),
        ("batch_size", None, "heterogeneous graphs are trained in minibatches"),
    ):
        value = config[name]
        chosen = value.name if isinstance(value, Value) else value
        if chosen == "all" if accepted is None else chosen not in accepted:
            remedy = "a number, such as 1024" if accepted is None else " or ".join(accepted)
            flag = rows(TrainConfig)[name].flag
            raise ValueError(
                f"{flag} {shown(value)} with --model {config.model.model.name}: {reason}\n\n"
                f"hint: use {flag} {remedy}"
            )
    if config.graph.temporal.name != "none" and config.graph.task.options.get("split") == "random":
        raise ValueError(
            f"--task {config.graph.task} with --temporal {config.graph.temporal}: held-out edges "
            "would be in the neighbourhoods of later training edges\n\nhint: use split=time"
        )


def _check_full_batch(config: TrainConfig) -> None:
    """Raise a ValueError if an option does not support --batch-size all."""
    number = "give --batch-size a number, such as 1024"
    if set(config.loading.fanouts) != {ALL_NEIGHBOURS}:
        raise ValueError(
            f"--fanouts {shown(config.loading.fanouts)} with --batch-size all: a full-batch step "
            f"uses all neighbours\n\nhint: give -1 for each layer, or {number}"
        )
    for name, given, reason in (
        ("task", "link", "link prediction samples edges and negatives in minibatches"),
        ("sampler", "dgl", "nothing is sampled"),
        ("seed_order", "rotating", "each step uses all seeds"),
        ("seed_order", "local", "each step uses all seeds"),
        ("features", "cached", "features are gathered only once"),
        ("strategy", "dropcompute", "an epoch is a single step, without minibatches to drop"),
    ):
        value = config[name]
        if (value.name if isinstance(value, Value) else value) == given:
            flag = rows(TrainConfig)[name].flag
            raise ValueError(
                f"{flag} {given} with --batch-size all: {reason}\n\nhint: omit {flag}, or {number}"
            )
    if config.training.accumulate > 1:
        raise ValueError(
            f"--accumulate {config.training.accumulate} with --batch-size all: an epoch is a "
            f"single step\n\nhint: omit --accumulate, or {number}"
        )
    if config.run.workers > 1:
        raise ValueError(workers_message(f"--workers {config.run.workers}"))


def workers_message(given: str) -> str:
    """Return the message that `given`, such as "--workers 2", does not fit --batch-size all."""
    return (
        f"{given} with --batch-size all: one process computes the whole graph, on all cores or on "
        "one GPU\n\nhint: use one worker, or give --batch-size a number, such as 1024"
    )


@dataclass(frozen=True, kw_only=True)
class EvaluateConfig(Options):
    """Evaluate the best model of a run, and print one JSON line."""

    run: Path = option("run folder that `gcnzc train` wrote", ..., positional=True)
    data: Path | None = option(
        "folder of a graph with the same features and classes; default: the graph of the run",
        positional=True,
    )
    device: Device = option("where to evaluate; auto: CUDA if there is a GPU", "auto")
    predictions: Path | None = option(
        "also write the logits of all nodes to this .npy file; with --postprocess, class "
        "probabilities, and in link prediction, the embeddings of all nodes"
    )
    metric: Metric = option(
        "node classification: metric to compute; as-is: that of the run", "as-is"
    )
    evaluate: Value = option("nodes for which hidden layers are computed", "exact", of=EVALUATIONS)
    evaluate_negatives: int | Literal["all"] | None = option(
        "link prediction in heterogeneous graphs: random destinations with which each held-out "
        "edge is ranked, or all; default: as in the run",
        least=1,
    )
    postprocess: Value = option(
        "node classification: propagate errors and labels along the edges; the result replaces the "
        "outputs if its validation score is better",
        "none",
        of=POSTPROCESSING,
    )

    def check(self) -> None:
        """See `Options`."""
        if self.evaluate.name in ("sampled", "auto") and self.evaluate["fanouts"]:
            check_fanouts(self.evaluate["fanouts"], "fanouts of --evaluate")
        check_output("--predictions", self.predictions, (".npy",), "`gcnzc predict` writes others")
        for name, is_given in (
            ("predictions", self.predictions is not None),
            ("postprocess", self.postprocess.name != "none"),
        ):
            if is_given and self.evaluate.name != "exact":
                raise ValueError(
                    f"--{name} with --evaluate {self.evaluate}: it needs the outputs of all nodes"
                    "\n\nhint: use --evaluate exact"
                )
