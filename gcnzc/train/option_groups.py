"""Groups of the options of `gcnzc train`, as dataclasses.

The fields of a group are options, and the string below a field is its help.
`gcnzc.train.config.TrainConfig` has the options of all groups. A function that reads the options of
one group has that group as the type of its parameter, and takes a whole `TrainConfig` as well.
"""

from dataclasses import dataclass, fields
from pathlib import Path
from typing import Literal, TypeAlias, get_args

import tyro

from gcnzc.optim.defaults import EAGER, FRAGMENTS, REFRESH, WARMUP
from gcnzc.train.options import (
    Fanouts,
    Floats,
    Options,
    at_least,
    at_most,
    check_fanouts,
    check_number,
    option_name,
    parse_cache_size,
    parse_fragments,
)

OneBit: TypeAlias = Literal["onebit-adam", "onebit-lamb", "zero-one-adam"]


Local: TypeAlias = Literal["local-sgd", "diloco", "streaming-diloco", "co2"]


OptimizerName: TypeAlias = Literal["adam", "adamw", "sgd"] | OneBit | Local


ONE_BIT, LOCAL = get_args(OneBit), get_args(Local)


Compress: TypeAlias = Literal[
    "auto",
    "float32",
    "float16",
    "bfloat16",
    "float8_e4m3fn",
    "float8_e5m2",
    "int8",
    "int4",
    "float4_e3m0",
    "sign",
]


Metric: TypeAlias = Literal[
    "as-is", "accuracy", "rocauc", "average_precision", "f1_micro", "f1_macro"
]


CachePolicy: TypeAlias = Literal["presampled", "in-degree"]


# protects the machine against a mistyped number; the largest servers have several hundred cores
MAX_THREADS = MAX_WORKERS = 1024


# protect against a mistyped number: more propagations change nothing, and larger errors overflow
MAX_PROPAGATIONS, MAX_ERROR_SCALE = 10_000, 1000


# about 30 years; timers count nanoseconds in 64 bits, which overflow after 292 years
MAX_SECONDS = 10**9


@dataclass(frozen=True, kw_only=True)
class DataOptions(Options):
    """The graph, and checks of its files before the run."""

    data: tyro.conf.Positional[Path | None] = None
    """folder of a graph, prepared or in OGB's layout, or a .npz, .toml or PyG .pt file; without it,
    a built-in graph"""
    verify: bool = False
    """first read a prepared folder in full and compare its checksums, like `gcnzc info --verify`"""
    allow_nan: bool = False
    """train even if features are NaN or infinite"""


@dataclass(frozen=True, kw_only=True)
class TaskOptions(Options):
    """The training task; all options except --task and --metric are for link prediction."""

    task: Literal["node", "link"] = "node"
    """node classification, or link prediction"""
    metric: Metric = "as-is"
    """node classification: metric that selects the best model; as-is: that of the graph. With
    several columns of labels, rocauc and average_precision are means over the columns, and the F1
    scores are of predictions with a probability above 0.5"""
    decoder: Literal["mlp", "dot"] = "mlp"
    """link prediction: scores a pair from the elementwise product of its embeddings: mlp applies
    three linear layers, dot sums"""
    negatives: Literal["uniform", "both", "in-batch"] = "uniform"
    """link prediction: how negative pairs are sampled for an edge: with a random target (uniform),
    with two random nodes (both), or with the targets of other edges of the minibatch (in-batch)"""
    num_negatives: int = 1
    """link prediction: negative pairs per edge"""
    strict_negatives: bool = True
    """link prediction: permit negative pairs that are edges of the graph or self loops; by default
    they are rejected"""
    exclude: Literal["none", "self", "reverse"] = "reverse"
    """link prediction: edges excluded from the sampled neighbourhoods: none, those of the minibatch
    (self), or these and their reverse edges (reverse)"""

    def __post_init__(self) -> None:
        super().__post_init__()
        at_least(1, "num_negatives", self.num_negatives)


DEFAULT_FANOUTS = (15, 10, 5)


@dataclass(frozen=True, kw_only=True)
class LoaderOptions(Options):
    """How minibatches are sampled and loaded, and the random seed."""

    fanouts: Fanouts = DEFAULT_FANOUTS
    """neighbours sampled per node, one number per layer, input layer first; -1 samples all"""
    batch_size: int | Literal["all"] = 1024
    """seed nodes or seed edges per minibatch of one worker; all: full-batch training, in which each
    step uses all training nodes and all neighbours, without sampling"""
    sampler: Literal["gcnzc", "dgl"] = "gcnzc"
    """library that samples the neighbourhoods"""
    threads: int = 0
    """threads of each worker that prepare minibatches; 0: the number in the tuning profile, or
    without a profile cores divided by workers, at most 4"""
    tuning_profile: bool = True
    """ignore the settings that `gcnzc check --tune` measured for this machine; by default they are
    used"""
    seed: int = 0
    """random seed of the model, the order of the seed nodes and the sampling"""

    def __post_init__(self) -> None:
        super().__post_init__()
        at_most(MAX_THREADS, "threads", self.threads)
        if isinstance(self.batch_size, int):
            at_least(1, "batch_size", self.batch_size)
        at_least(0, "threads", self.threads)
        at_least(0, "seed", self.seed)
        check_fanouts(self.fanouts)

    @property
    def is_full_batch(self) -> bool:
        """Whether each step uses the whole graph."""
        return self.batch_size == "all"


@dataclass(frozen=True, kw_only=True)
class FeatureOptions(Options):
    """Where the features are stored, and which rows are cached in GPU memory."""

    features: Literal["host", "device", "cached"] = "host"
    """where the feature table is stored: in host memory, in GPU memory (device), or in host memory
    with a feature cache in GPU memory (cached)"""
    cache_size: str = "auto"
    """size of the feature cache: a fraction of the rows, or bytes such as 2GB; auto uses the size
    in the tuning profile, or 0.2"""
    cache_policy: CachePolicy = "presampled"
    """rows in the feature cache: those that presampled minibatches read most often, or those of the
    highest in-degree"""
    cache_sharded: bool = False
    """shard one feature cache over the GPUs of a machine, which read each other's rows; without it,
    each GPU has a copy of all cached rows. A fraction in --cache-size refers to all GPUs together;
    bytes are per GPU"""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.cache_size != "auto":
            parse_cache_size(self.cache_size)


@dataclass(frozen=True, kw_only=True)
class OptimizerOptions(Options):
    """The optimizer, and how it exchanges updates between workers."""

    optimizer: OptimizerName = "adam"
    """adam, adamw and sgd (momentum 0.9) average the gradients of all workers in every step; the
    others exchange compressed updates, or update after several local steps"""
    lr: float = 0.003
    """learning rate"""
    scale_lr: Literal["none", "linear", "sqrt"] = "none"
    """multiply --lr by the number of workers, or its square root, because the global batch grows
    with the workers"""
    weight_decay: float = 0.0
    """weight decay, as the optimizer defines it"""
    decay: Literal["all", "weights"] = "all"
    """parameters with weight decay: all; or weights, which excludes biases and the scales and
    shifts of normalization layers"""
    clip_gradients: float | None = None
    """maximum L2 norm of the gradient of all parameters together; a larger gradient is scaled down
    to it. Several workers clip the mean gradient, or in local steps their own gradients"""
    inner_optimizer: Literal["adam", "adamw", "sgd"] = "adam"
    """optimizers with local steps: the optimizer that takes the local steps"""
    compress: Compress = "auto"
    """number format of the exchanged values; auto: sign for the onebit and zero-one optimizers, and
    float32 for the others"""
    warmup: str = f"{WARMUP.share:g}"
    """onebit optimizers: length of the warm-up with uncompressed gradients, as a fraction of the
    run's steps or a number of steps; auto ends it when the variance is stable, after a quarter of
    the run at most. zero-one-adam: length of the phase without local steps; auto: the whole run"""
    refresh: int = REFRESH
    """onebit-adam: steps from the end of the warm-up to the first update of the variance, with
    uncompressed gradients; the interval then doubles; 0 never updates it"""
    local_steps: str = "default"
    """optimizers with local steps: steps between two exchanges; default: 8 for local-sgd and co2,
    and 12 for the others; auto measures the smallest number of steps that overlaps with the whole
    exchange"""
    outer_lr: float | None = None
    """diloco, streaming-diloco and co2: learning rate of the outer optimizer; the method's default
    if not given"""
    outer_momentum: float | None = None
    """diloco, streaming-diloco and co2: momentum of the outer optimizer; the method's default if
    not given"""
    eager_weight: float = EAGER
    """co2: fraction of a worker's own last update applied before the all-reduce of the mean
    finishes; 0 with --outer-lr 1 --outer-momentum 0.2 is the published method"""
    delay: str = "default"
    """streaming-diloco: steps that overlap with an exchange; default: 1, or auto with --local-steps
    auto; auto measures the smallest number of steps that overlaps with the whole exchange"""
    fragments: str = str(FRAGMENTS)
    """streaming-diloco: parts of the model that are exchanged at different steps: a number of parts
    of equal size; or modules, for one part per module; or regular expressions separated by
    commas; a parameter belongs to the first expression that matches its name"""

    def __post_init__(self) -> None:
        super().__post_init__()
        at_least(0, "weight_decay", self.weight_decay)
        if self.decay != "all" and not self.weight_decay:
            raise ValueError(
                f"--decay {self.decay} has no effect with --weight-decay 0\n\n"
                "hint: also choose a --weight-decay, such as 0.01"
            )
        if self.clip_gradients is not None and not self.clip_gradients > 0:
            raise ValueError(
                f"--clip-gradients must be above 0, got {self.clip_gradients}\n\n"
                "hint: 1 is common; omit --clip-gradients to turn clipping off"
            )
        at_least(0, "refresh", self.refresh)
        if not 0 <= self.eager_weight < 1:
            raise ValueError(
                f"--eager-weight must be in [0, 1), got {self.eager_weight}\n\n"
                "hint: the default is 0.5"
            )
        if self.outer_lr is not None:
            at_least(0, "outer_lr", self.outer_lr)
        if self.outer_momentum is not None and not 0 <= self.outer_momentum < 1:
            raise ValueError(
                f"--outer-momentum must be in [0, 1), got {self.outer_momentum}\n\n"
                "hint: omit --outer-momentum for the default"
            )
        if not self.lr > 0:
            raise ValueError(f"--lr must be above 0, got {self.lr}\n\nhint: the default is 0.003")
        self._check_number_or_keyword()

    def _check_number_or_keyword(self) -> None:
        """Check the options that are a number or a keyword."""
        check_number(
            "--warmup", self.warmup, ("auto",), "0.15 means 15 % of the steps; 500 means 500 steps"
        )
        if self.warmup != "auto" and float(self.warmup) > 1 and float(self.warmup) % 1:
            raise ValueError(
                f"--warmup {self.warmup} is neither a fraction of the steps nor a number of steps"
                "\n\nhint: 0.15 means 15 % of the steps; 500 means 500 steps"
            )
        check_number(
            "--local-steps",
            self.local_steps,
            ("default", "auto"),
            "12 is a common number",
            whole=True,
        )
        parse_fragments(self.fragments)
        check_number("--delay", self.delay, ("default", "auto"), "the default is 1", whole=True)
        if self.delay == "auto" and self.local_steps != "auto":
            raise ValueError(
                f"--delay auto with --local-steps {self.local_steps}\n\n"
                "hint: auto needs --local-steps auto; both are measured together"
            )


@dataclass(frozen=True, kw_only=True)
class ScheduleOptions(Options):
    """How long a run trains, how often it evaluates the model, and how often it is repeated."""

    epochs: int = 20
    """passes over the training nodes or edges"""
    patience: int = 0
    """stop after this many evaluations without improvement; 0 never stops early"""
    evaluate_every: int = 1
    """epochs from one evaluation to the next"""
    runs: int = 1
    """train this many times, with the random seeds --seed, --seed + 1, ..., and report the mean and
    the standard deviation of the scores, like OGB's examples; --out has a run folder for each"""

    def __post_init__(self) -> None:
        super().__post_init__()
        at_least(1, "epochs", self.epochs)
        at_least(1, "evaluate_every", self.evaluate_every)
        at_least(1, "runs", self.runs)
        at_least(0, "patience", self.patience)


@dataclass(frozen=True, kw_only=True)
class WorkerOptions(Options):
    """The processes that train together, and their device."""

    device: Literal["auto", "cpu", "cuda"] = "auto"
    """where the model trains; auto uses CUDA if there is a GPU"""
    workers: int = 1
    """processes that train together on this machine, each on its own minibatches, so that the
    global batch is --workers times --batch-size; for several machines, use torchrun. The number of
    loading threads is --threads"""
    timeout_s: float = 60.0
    """time limit in seconds for a response of another worker, after which all workers are
    restarted"""
    restarts: int = 3
    """how often the workers are restarted from the last checkpoint after one is lost"""
    tune_exchange: bool = False
    """measure which collective algorithms are fastest between these workers, and keep the result
    for later runs; sums may round differently than without"""

    def __post_init__(self) -> None:
        super().__post_init__()
        at_most(MAX_WORKERS, "workers", self.workers)
        at_least(1, "workers", self.workers)
        at_least(0, "restarts", self.restarts)
        if not 0 < self.timeout_s <= MAX_SECONDS:
            raise ValueError(
                f"--timeout-s must be above 0 and at most {MAX_SECONDS:g}, got {self.timeout_s:g}"
                "\n\nhint: the default is 60"
            )


@dataclass(frozen=True, kw_only=True)
class OutputOptions(Options):
    """The run folder, and what is written to it."""

    checkpoint_every_s: float = 30.0
    """seconds between checkpoints"""
    trace: int = 0
    """how many steps after the first ten to show in a timeline (0 for no timeline)"""
    out: Path | None = None
    """run folder; runs/DATA-MODEL-N if not given"""
    resume: Path | None = None
    """run folder to resume, with the options that it was started with; on the same machine the
    result is bit-identical, unless DATA, --epochs or --workers is changed. --threads, --trace,
    --checkpoint-every-s, --timeout-s and --restarts may be changed too"""
    config: Path | None = None
    """TOML file with these options; those on the command line override it"""
    preset: str | None = None
    """options of a published recipe, such as tuned/cora-gcn; --config and the options on the
    command line override it. `gcnzc presets` lists all presets, with their scores and sources"""

    def __post_init__(self) -> None:
        super().__post_init__()
        at_least(0, "checkpoint_every_s", self.checkpoint_every_s)
        at_least(0, "trace", self.trace)


@dataclass(frozen=True, kw_only=True)
class CorrectAndSmoothOptions(Options):
    """Correct & Smooth after the evaluation of a model; see `gcnzc.train.correct_and_smooth`."""

    correct_and_smooth: bool = False
    """propagate the errors on the training nodes, and then the labels, along the edges (Correct &
    Smooth); the result replaces the model's outputs if its validation score is better"""
    correct_steps: int = 50
    """--correct-and-smooth: propagations of the errors; 0 does not correct"""
    correct_alpha: Floats = (0.5, 0.8, 0.95)
    """--correct-and-smooth: weight of the neighbours in a propagation of the errors; with several
    values, all combinations with --smooth-alpha are tried, and the best validation score wins"""
    smooth_steps: int = 50
    """--correct-and-smooth: propagations of the labels; 0 does not smooth"""
    smooth_alpha: Floats = (0.5, 0.8, 0.95)
    """--correct-and-smooth: weight of the neighbours in a propagation of the labels; with several
    values, all combinations with --correct-alpha are tried, and the best validation score wins"""
    error_scale: float | None = None
    """--correct-and-smooth: factor of the propagated errors, which are then exact on the training
    nodes; without it, they are scaled to the mean error of the training nodes (autoscale)"""

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("correct_steps", "smooth_steps"):
            at_least(0, name, getattr(self, name))
            at_most(MAX_PROPAGATIONS, name, getattr(self, name))
        for name in ("correct_alpha", "smooth_alpha"):
            values = getattr(self, name)
            if not values or not all(0 <= value <= 1 for value in values):
                raise ValueError(
                    f"{option_name(name)} must be numbers in [0, 1], got "
                    f"{','.join(map(str, values))}\n\n"
                    "hint: the default is 0.5,0.8,0.95; larger values propagate farther"
                )
        if self.error_scale is not None and not 0 < self.error_scale <= MAX_ERROR_SCALE:
            raise ValueError(
                f"--error-scale must be above 0 and at most {MAX_ERROR_SCALE}, got "
                f"{self.error_scale}\n\n"
                "hint: omit --error-scale to choose it automatically"
            )
        if not self.correct_and_smooth:
            for field in fields(CorrectAndSmoothOptions):
                if getattr(self, field.name) != field.default:
                    raise ValueError(
                        f"{option_name(field.name)} has no effect without --correct-and-smooth\n\n"
                        "hint: add --correct-and-smooth"
                    )
