"""Groups of the options of `gcnzc train`, as dataclasses.

The fields of a group are options, and the string below a field is its help.
`gcnzc.train.config.TrainConfig` has the options of all groups. A function that reads the options of
one group has that group as the type of its parameter, and takes a whole `TrainConfig` as well.
"""

from dataclasses import dataclass, fields
from pathlib import Path
from typing import Literal, TypeAlias

import tyro

from gcnzc.train.options import (
    Fanouts,
    Floats,
    Options,
    at_most,
    check_layer_fanouts,
    check_least,
    check_range,
    option_name,
    parse_cache_size,
)

# Groups of the options of `gcnzc train` for the loss, learning rate, precision and averages.


@dataclass(frozen=True, kw_only=True)
class LossOptions(Options):
    """The loss of node classification."""

    label_smoothing: float = 0.0
    """node classification: fraction of the target probability that is spread evenly over all
    classes"""
    class_weights: Literal["none", "balanced"] = "none"
    """node classification: weights of the classes in the loss; balanced: inversely proportional to
    their numbers of training nodes, or with several columns of labels, the weight of the label 1 is
    the number of zeros divided by that of ones"""

    def __post_init__(self) -> None:
        super().__post_init__()
        hint = "0.1 is common; 0 turns label smoothing off"
        check_range(self, "label_smoothing", lambda value: 0 <= value < 1, "in [0, 1)", hint)


@dataclass(frozen=True, kw_only=True)
class LearningRateOptions(Options):
    """How the learning rate changes during a run."""

    schedule: Literal["constant", "cosine", "linear", "step"] = "constant"
    """learning rate after the warm-up: constant; decay to 0 at the end of the run along a cosine,
    or linearly; or multiplied by --step-factor every --step-epochs, counted from the start of the
    run (step)"""
    warmup_epochs: float = 0.0
    """epochs at the start of the run in which the learning rate increases linearly to --lr"""
    step_epochs: float = 10.0
    """--schedule step: epochs between two reductions of the learning rate"""
    step_factor: float = 0.1
    """--schedule step: factor by which each reduction multiplies the learning rate"""

    def __post_init__(self) -> None:
        super().__post_init__()
        check_least(self, warmup_epochs=0)
        check_range(self, "step_epochs", lambda value: value > 0, "above 0", "the default is 10")
        check_range(
            self, "step_factor", lambda value: 0 < value < 1, "in (0, 1)", "the default is 0.1"
        )


@dataclass(frozen=True, kw_only=True)
class PrecisionOptions(Options):
    """The precision of training steps."""

    precision: Literal["float32", "tf32", "bf16", "fp16"] = "float32"
    """precision of training steps: float32; TF32 for matrix products (tf32, on a GPU); or mixed
    precision, whose layers compute with bfloat16 (bf16) or float16 (fp16) and sum in float32.
    Weights, losses and evaluations are float32"""


@dataclass(frozen=True, kw_only=True)
class AverageOptions(Options):
    """The average of the weights, which is evaluated instead of the weights themselves."""

    average: Literal["none", "ema", "swa"] = "none"
    """evaluate and keep an average of the weights: the exponential moving average over the steps
    (ema), or the mean over the ends of the last epochs (swa, stochastic weight averaging)"""
    average_decay: float = 0.99
    """--average ema: factor of the previous average in each step, smaller in the first ones; the
    average is over about 1 / (1 - decay) steps"""
    average_start: float = 0.75
    """--average swa: fraction of --epochs after which the weights are averaged"""

    def __post_init__(self) -> None:
        super().__post_init__()
        hint = "0.99 averages about 100 steps, 0.999 about 1000"
        check_range(self, "average_decay", lambda value: 0 < value < 1, "in (0, 1)", hint)
        hint = "the default is 0.75, the last quarter of the epochs"
        check_range(self, "average_start", lambda value: 0 <= value < 1, "in [0, 1)", hint)


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
        check_least(self, num_negatives=1)


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
    seed_order: Literal["shuffled", "rotating", "local"] = "shuffled"
    """seed nodes or seed edges of each worker in an epoch: random ones; one of as many random
    chunks as there are workers, another chunk in each epoch (rotating); or those of its part of the
    graph, which is partitioned into parts with few edges between them (local). In each case an
    epoch uses every seed once"""
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
        check_least(self, batch_size=1, threads=0, seed=0)
        check_layer_fanouts(self.fanouts)

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
        check_least(self, epochs=1, evaluate_every=1, runs=1, patience=0)


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

    def __post_init__(self) -> None:
        super().__post_init__()
        at_most(MAX_WORKERS, "workers", self.workers)
        check_least(self, workers=1, restarts=0)
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
        check_least(self, checkpoint_every_s=0, trace=0)


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
            check_least(self, **{name: 0})
            at_most(MAX_PROPAGATIONS, name, getattr(self, name))
        for name in ("correct_alpha", "smooth_alpha"):
            values = getattr(self, name)
            if not values or not all(0 <= value <= 1 for value in values):
                raise ValueError(
                    f"{option_name(name)} must be numbers in [0, 1], got "
                    f"{','.join(map(str, values))}\n\n"
                    "hint: the default is 0.5,0.8,0.95; larger values propagate farther"
                )
        check_range(
            self,
            "error_scale",
            lambda value: 0 < value <= MAX_ERROR_SCALE,
            f"above 0 and at most {MAX_ERROR_SCALE}",
            "omit --error-scale to choose it automatically",
        )
        if not self.correct_and_smooth:
            for field in fields(CorrectAndSmoothOptions):
                if getattr(self, field.name) != field.default:
                    raise ValueError(
                        f"{option_name(field.name)} has no effect without --correct-and-smooth\n\n"
                        "hint: add --correct-and-smooth"
                    )
