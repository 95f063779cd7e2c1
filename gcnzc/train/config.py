"""Options of `gcnzc train` and `gcnzc evaluate`, for the command line, Python and the run folder.

A field of a group is an option; see `gcnzc.train.options`. A function takes the group that it
reads. The registries, such as `MODELS`, have the values that have options of their own.
"""

from collections.abc import Collection, Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, ClassVar, Literal, TypeAlias

from gcnzc.train.options import Exclusions, Options, check_names, option, rows
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
DEFAULT_FANOUTS = (15, 10, 5)

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
    refused=dict.fromkeys(("gcn", "gin"), ("self_loops",)),
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
        "uniform": ("gcnzc.sampling.neighbor:Sampler",),
        "last": ("gcnzc.sampling.neighbor:Sampler",),
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
    refused={"streaming-diloco": ("sharded",)},
    # by name instead of by object, which text cannot express
    defaults={"muloco": {"compress": "int2"}, "sparseloco": {"compress": "sparseloco"}},
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

    data: Path | None = option(positional=True, free=True)
    """folder of a graph, prepared or in OGB's layout, or a .npz, .toml or PyG .pt file; without it,
    a built-in graph"""
    task: Value = option("node", of=TASKS)
    """what is predicted: classes of nodes, or edges"""
    temporal: Value = option("none", of=TEMPORAL, read_with=("model", HETERO_MODELS), common=False)
    """heterogeneous graphs: sample only neighbours that are not later than the seed"""
    verify: bool = option(False, common=False, free=True)
    """first read a prepared folder in full and compare its checksums"""
    allow_nan: bool = option(False, common=False)
    """train even if features are NaN or infinite"""

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

    model: Value = option("sage", of=MODELS)
    """the GNN, with one layer for each number of --fanouts; rgcn, rgat, hgt and hetero-sage are for
    heterogeneous graphs"""
    hidden: int = option(256, least=1, most=SEED_LIMIT)
    """hidden features; of gat and gatv2, per attention head"""
    dropout: float = option(0.5, least=0, below=1)
    """dropout rate of the hidden features"""
    embeddings: Value = option(
        "adagrad", of=EMBEDDINGS, read_with=("model", HETERO_MODELS), common=False
    )
    """heterogeneous graphs: optimizer of the embeddings of node types without features"""

    @property
    def is_hetero(self) -> bool:
        """Whether the model is for graphs with several types of nodes and edges."""
        return self.model.name in HETERO_MODELS


@dataclass(frozen=True, kw_only=True)
class LoadingOptions(Options):
    """Minibatches"""

    fanouts: tuple[int, ...] = option(DEFAULT_FANOUTS, least=-1)
    """neighbours sampled per node, one number per layer, input layer first; -1 samples all"""
    batch_size: int | Literal["all"] = option(1024, least=1)
    """seed nodes or edges per minibatch of one worker; all: full-batch training, without
    sampling"""
    features: Value = option("host", of=FEATURES)
    """where the feature table is stored"""
    seed: int = option(0, least=0, most=SEED_LIMIT)
    """random seed of the model, the order of the seeds and the sampling"""
    seed_order: Literal["shuffled", "rotating", "local"] = option("shuffled", common=False)
    """seeds of each worker in an epoch: random ones; one of as many random chunks as there are
    workers, another in each epoch; or those of its part of the partitioned graph"""
    sampler: Literal["gcnzc", "dgl"] = option("gcnzc", common=False)
    """library that samples the neighbourhoods"""
    threads: int = option(0, least=0, most=MAX_THREADS, common=False, free=True)
    """threads of each worker that prepare minibatches; 0: those of the tuning profile, or cores
    divided by workers, at most 4"""
    tuning_profile: bool = option(True, common=False, free=True)
    """use the settings that `gcnzc check --tune` measured for this machine"""

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

    epochs: int = option(20, least=1, free=True)
    """passes over the training nodes or edges"""
    optimizer: Value = option("adam", of=OPTIMIZERS)
    """the update rule"""
    lr: float | None = option(above=0)
    """learning rate; default: 0.1 for sgd, 0.003 for the others"""
    schedule: Value = option("constant", of=SCHEDULES)
    """the learning rate over the run"""
    warmup_epochs: float = option(0.0, least=0, common=False)
    """epochs in which the learning rate increases to --lr"""
    scale_lr: Literal["none", "linear", "sqrt"] = option("none", common=False)
    """multiply --lr by the number of workers or its root, as the global batch grows with them"""
    decay: Literal["all", "weights"] = option("all", common=False)
    """parameters with weight decay: all, or weights without biases and normalization layers"""
    accumulate: int = option(1, least=1)
    """minibatches of a worker per optimizer step; with dropcompute, the default is 4"""
    clip_gradients: float | None = option(above=0, common=False)
    """largest L2 norm of the gradient of all parameters together"""
    precision: Literal["float32", "tf32", "bf16", "fp16"] = option("float32")
    """precision of training steps; weights, losses and evaluations are float32"""
    average: Value = option("none", of=AVERAGES, common=False)
    """evaluate and keep an average of the weights"""
    evaluate: Value = option("needed", of=EVALUATIONS, common=False)
    """nodes for which hidden layers are computed in an evaluation"""
    evaluate_every: int = option(1, least=1)
    """epochs from one evaluation to the next"""
    patience: int = option(0, least=0)
    """stop after so many evaluations without improvement; 0: never"""
    runs: int = option(1, least=1, common=False)
    """train so many times, with the seeds --seed, --seed + 1, ..., and report mean and standard
    deviation of the scores"""

    @property
    def learning_rate(self) -> float:
        """--lr, or the default of --optimizer."""
        return self.lr or (0.1 if self.optimizer.name == "sgd" else 0.003)


@dataclass(frozen=True, kw_only=True)
class RunOptions(Options):
    """Workers and run folder"""

    device: Device = option("auto")
    """where the model trains; auto: CUDA if there is a GPU"""
    workers: int = option(1, least=1, most=MAX_THREADS, free=True)
    """processes that train together on this machine, each on minibatches of its own; for several
    machines, use torchrun"""
    strategy: Value = option("average", of=STRATEGIES)
    """what workers exchange, and when"""
    timeout_s: float = option(60.0, above=0, common=False, free=True)
    """seconds to wait for another worker, after which all are restarted"""
    restarts: int = option(3, least=0, common=False, free=True)
    """how often the workers are restarted from the last checkpoint after one is lost"""
    out: Path | None = option(free=True)
    """run folder; default: runs/DATA-MODEL-N"""
    resume: Path | None = option(free=True)
    """run folder to resume, with the options that it was started with"""
    config: Path | None = option(free=True)
    """TOML file with these options, or config.json of a run; the command line overrides it"""
    preset: str | None = option()
    """options of a published recipe, such as tuned/cora-gcn, which the others override; `gcnzc help
    preset` lists all"""
    checkpoint_every_s: float = option(30.0, least=0, common=False, free=True)
    """seconds between checkpoints"""
    keep: int = option(1, least=1, common=False, free=True)
    """number of the last checkpoints to keep, from each of which the run can be resumed"""
    callback: tuple[str, ...] = option((), common=False, free=True)
    """classes of callbacks, as module:name, such as watch:Early of watch.py in this folder; see
    docs/howto/callbacks.md"""
    trace: int = option(0, least=0, common=False, free=True)
    """steps after the first ten to show in a timeline; 0: no timeline"""


def _others(choices: Choices, name: str) -> tuple[str, ...]:
    return tuple(each for each in choices.targets if each != name)


def _are_sampled(fanouts: Collection[int]) -> bool:
    return set(fanouts) != {ALL_NEIGHBOURS}


def _is_several(number: int) -> bool:
    return number > 1


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

    exclusions: ClassVar[Exclusions] = {
        ("model", HETERO_MODELS, "use a --model for graphs of one node type"): (
            ("batch_size", ("all",), "heterogeneous graphs are trained in minibatches"),
            ("sampler", ("dgl",), "DGL's sampler is for graphs of one node type"),
            ("seed_order", ("local",), "only graphs of one node type can be partitioned"),
            ("features", ("device", "cached"), "features of several node types remain on the host"),
            ("evaluate", ("exact", "auto"), "outputs are computed in minibatches of these nodes"),
        ),
        ("batch_size", ("all",), "give --batch-size a number, such as 1024"): (
            ("fanouts", _are_sampled, "a full-batch step uses all neighbours, -1 for each layer"),
            ("task", ("link",), "link prediction samples edges and negatives in minibatches"),
            ("sampler", ("dgl",), "nothing is sampled"),
            ("seed_order", ("rotating", "local"), "each step uses all seeds"),
            ("features", ("cached",), "features are gathered only once"),
            ("strategy", ("dropcompute",), "an epoch is one step, without minibatches to drop"),
            ("accumulate", _is_several, "an epoch is a single step"),
            ("workers", _is_several, "one process computes the whole graph, on all cores or a GPU"),
        ),
        ("strategy", ("fedglomo",), "use another --strategy"): (
            ("optimizer", _others(OPTIMIZERS, "sgd"), "fedglomo is a strategy for sgd"),
            ("precision", ("fp16",), "fedglomo computes several gradients; GradScaler needs one"),
            ("clip_gradients", bool, "fedglomo computes several gradients, and clips none"),
        ),
        ("strategy", ("muloco",), "use another --strategy"): (
            ("optimizer", _others(OPTIMIZERS, "muon"), "muloco is a strategy for muon"),
        ),
        ("strategy", ("dropcompute",), "use another --strategy"): (
            ("accumulate", (1,), "dropcompute needs several minibatches"),
        ),
        ("strategy", _others(STRATEGIES, "average"), "use --strategy average"): (
            ("optimizer", ONE_BIT, "the optimizer has an exchange of its own"),
        ),
    }

    def __init__(self, **given: Any) -> None:
        given = check_names(TrainConfig, given.items())
        given = {**_preset_options(given), **given}
        given = {**_determined(given), **given}
        for each in fields(self):
            kind: Any = each.type
            own = {name: given[name] for name in rows(kind) if name in given}
            object.__setattr__(self, each.name, kind(**own))
        self.__post_init__()

    def replace(self, **given: Any) -> "TrainConfig":
        """Return a copy with other options, and with the defaults that these determine."""
        own = {name: self[name] for name in rows(TrainConfig)}
        before, after = _determined(own), _determined(own | given)
        kept = {name: value for name, value in before.items() if str(own[name]) == str(value)}
        return TrainConfig(**(own | {name: after[name] for name in kept} | given))

    @property
    def layers(self) -> int:
        """The layers of the model."""
        return len(self.loading.fanouts)

    @property
    def is_full_batch(self) -> bool:
        """Whether each step uses the whole graph."""
        return self.loading.is_full_batch

    def check(self) -> None:
        """See `Options`."""
        training, task, evaluate = self.training, self.graph.task, self.training.evaluate
        if training.decay != "all" and not training.optimizer["weight_decay"]:
            raise ValueError(
                f"--decay {training.decay} has no effect without weight decay\n\n"
                f"hint: --optimizer {training.optimizer.name}:weight_decay=0.01"
            )
        if training.warmup_epochs and training.warmup_epochs >= training.epochs:
            raise ValueError(
                f"--warmup-epochs {training.warmup_epochs:g} with --epochs {training.epochs}: the "
                "warm-up would be the whole run\n\nhint: use a smaller --warmup-epochs"
            )
        fanouts = check_evaluation(evaluate) or self.loading.fanouts
        if len(fanouts) != self.layers:
            raise ValueError(
                f"--evaluate {evaluate}: {len(fanouts)} fanouts for {self.layers} layers\n\n"
                "hint: give one number per layer, input layer first"
            )
        if evaluate.name == "sampled" and not evaluate.options and not _are_sampled(fanouts):
            raise ValueError(
                f"--evaluate {evaluate} with --fanouts {shown(fanouts)}, which sample all "
                "neighbours\n\nhint: --evaluate sampled:fanouts=15,10,5, with one number per "
                "layer; --evaluate needed uses all neighbours"
            )
        own = read(TASKS.targets[task.name][self.model.is_hetero]).arguments
        for name in task.options.keys() - own.keys():
            graphs = "heterogeneous graphs" if self.model.is_hetero else "graphs of one node type"
            raise ValueError(
                f"{not_among(f'option of --task {task.name}', name, own)}; with --model "
                f"{self.model.model.name}, which is for {graphs}"
            )
        if not self.model.is_hetero or task.name != "link":
            return
        if task["valid_edges"] + task["test_edges"] >= 1:
            raise ValueError(
                f"--task {task} leaves no edges to train on\n\n"
                "hint: the sum of valid_edges and test_edges is below 1"
            )
        if self.graph.is_temporal and task.options.get("split") == "random":
            raise ValueError(
                f"--task {task} with --temporal {self.graph.temporal}: held-out edges would be in "
                "the neighbourhoods of later training edges\n\nhint: use split=time"
            )


def _determined(given: Mapping[str, Any]) -> dict[str, Any]:
    """Return the defaults that the strategy and the batch size determine."""
    strategy = str(given.get("strategy")).partition(":")[0]
    is_full_batch = str(given.get("batch_size")) == "all"
    return {
        "optimizer": OPTIMIZER_OF.get(strategy, "adam"),
        "accumulate": DROPPED_ACCUMULATE if strategy == "dropcompute" else 1,
        "fanouts": (ALL_NEIGHBOURS,) * len(DEFAULT_FANOUTS) if is_full_batch else DEFAULT_FANOUTS,
    }


def _preset_options(given: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the options of a preset; a config that is copied, or read from a run, has them all."""
    name = given.get("preset")
    if name is None or rows(TrainConfig).keys() <= given.keys() | {"out", "resume", "config"}:
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


def check_evaluation(evaluate: Value) -> tuple[int, ...]:
    """Check and return the fanouts of an evaluation; () if it has none of its own.

    Raises:
        ValueError: one is out of range.
    """
    fanouts: tuple[int, ...] = evaluate.options.get("fanouts", ())
    if fanouts:
        check_fanouts(fanouts, "fanouts of --evaluate")
    return fanouts


@dataclass(frozen=True, kw_only=True)
class EvaluateConfig(Options):
    """Evaluate the best model of a run, and print one JSON line."""

    run: Path = option(..., positional=True)
    """run folder that `gcnzc train` wrote"""
    data: Path | None = option(positional=True)
    """folder of a graph with the same features and classes; default: the graph of the run"""
    device: Device = option("auto")
    """where to evaluate; auto: CUDA if there is a GPU"""
    predictions: Path | None = option()
    """also write the logits of all nodes to this .npy file; with --postprocess, class
    probabilities, and in link prediction, the embeddings of all nodes"""
    metric: Metric = option("as-is")
    """node classification: metric to compute; as-is: that of the run"""
    evaluate: Value = option("exact", of=EVALUATIONS)
    """nodes for which hidden layers are computed"""
    evaluate_negatives: int | Literal["all"] | None = option(least=1)
    """link prediction in heterogeneous graphs: random destinations with which each held-out edge is
    ranked, or all; default: as in the run"""
    postprocess: Value = option("none", of=POSTPROCESSING)
    """node classification: propagate errors and labels along the edges; the result replaces the
    outputs if its validation score is better"""

    exclusions: ClassVar[Exclusions] = {
        ("evaluate", _others(EVALUATIONS, "exact"), "use --evaluate exact"): (
            ("predictions", bool, "it needs the outputs of all nodes"),
            ("postprocess", _others(POSTPROCESSING, "none"), "it needs the outputs of all nodes"),
        ),
    }

    def check(self) -> None:
        """See `Options`."""
        check_evaluation(self.evaluate)
        check_output("--predictions", self.predictions, (".npy",), "`gcnzc predict` writes others")
