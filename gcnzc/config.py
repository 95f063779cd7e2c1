"""What a run is. The command line, the code and the record of a run all read these classes.

Each class is one subcommand of `gcnzc`: a field is an option, and the string under it its help.
"""

import contextlib
import dataclasses
import json
import math
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import UnionType
from typing import (
    Annotated,
    Any,
    Literal,
    TypeAlias,
    TypeVar,
    Union,
    get_args,
    get_origin,
    get_type_hints,
)

import tyro

from gcnzc.edge_split import EdgeShares
from gcnzc.optim.defaults import EAGER, FRAGMENTS, REFRESH, WARMUP

C = TypeVar("C")

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
HotBy: TypeAlias = Literal["presampled", "in-degree"]
# more would only exhaust the machine; the largest servers have some hundred cores
MOST_THREADS = MOST_WORKERS = 1024
# fan-outs are int32 in the samplers of PyG and DGL, too
MOST_NEIGHBOURS = 2**31 - 1
# thirty years; timers count nanoseconds in 64 bits
MOST_SECONDS = 10**9
PICTURES = (".png", ".svg", ".pdf")
_UNITS = {"": 1, "K": 10**3, "M": 10**6, "G": 10**9, "Ki": 2**10, "Mi": 2**20, "Gi": 2**30}


def _integers(words: Sequence[str]) -> tuple[int, ...]:
    try:
        return tuple(int(word) for word in words[0].split(","))
    except ValueError:
        raise ValueError(
            f"{words[0]!r} is not a list of whole numbers with commas between them, such as 15,10"
        ) from None


Fanouts = Annotated[
    tuple[int, ...],
    tyro.constructors.PrimitiveConstructorSpec(
        nargs=1,
        metavar="N,N,...",
        instance_from_str=_integers,
        is_instance=lambda value: isinstance(value, tuple),
        str_from_instance=lambda value: [",".join(str(number) for number in value)],
    ),
]


@dataclass(frozen=True, kw_only=True)
class TrainConfig:
    """Train a model on one graph, and keep the model that does best on the validation nodes.

    Prints one JSON line; the run folder keeps the record, curves.png and the checkpoints.
    """

    data: tyro.conf.Positional[Path | None] = None
    """folder of a graph, prepared or in OGB's layout; without it a built-in graph"""
    model: Literal["sage", "gcn", "gat"] = "sage"
    """GraphSAGE with mean aggregation, GCN, or GAT"""
    task: Literal["node", "link"] = "node"
    """foretell the classes of nodes, or which edges there are"""
    decoder: Literal["mlp", "dot"] = "mlp"
    """of links: what makes a score of two nodes, three layers on their product, or its sum"""
    negatives: Literal["uniform", "both", "in-batch"] = "uniform"
    """of links: pairs to set beside an edge, with another destination at random, with both ends at
    random, or with the destinations of other edges of the minibatch"""
    num_negatives: int = 1
    """of links: how many for each edge"""
    strict_negatives: bool = True
    """of links: no negative is an edge of the graph, or joins a node with itself"""
    exclude: Literal["none", "self", "reverse"] = "reverse"
    """of links: what is kept out of the neighbourhoods, the minibatch's edges, and the ones back"""
    fanouts: Fanouts = (15, 10, 5)
    """neighbours kept, one number a layer, input layer first; -1 keeps all"""
    batch_size: int = 1024
    """seeds per minibatch, which are nodes or edges"""
    epochs: int = 20
    """passes over the training nodes or edges"""
    optimizer: OptimizerName = "adam"
    """torch's Adam, AdamW, or SGD with momentum 0.9, with gradients averaged over the workers at
    every step; or one whose workers exchange less: momenta in signs, or what came of steps that
    each took on its own"""
    lr: float = 0.003
    """step size"""
    weight_decay: float = 0.0
    """decay of the weights, as the optimizer applies it"""
    inner: Literal["adam", "adamw", "sgd"] = "adam"
    """of optimizers with local steps: what each worker takes them with"""
    compress: Compress = "auto"
    """what workers send for each element they exchange; auto takes signs for the onebit and
    zero-one optimizers, and float32 for the others"""
    warmup: str = f"{WARMUP.share:g}"
    """of the onebit optimizers: share of the run's steps, or how many, that exchange whole
    gradients first; auto sees when the variance has settled, and takes a quarter at most. Of
    zero-one-adam: of those in which workers agree at every step; auto makes that all"""
    refresh: int = REFRESH
    """of onebit-adam: steps from the end of the warm-up to the first time that some whole gradients
    bring the variance up to date; each next time is twice as far from there; 0 never does"""
    local_steps: str = "usual"
    """of optimizers with local steps: how many from one exchange to the next; usual takes 8 for
    local-sgd and co2, and 12 for the others; auto measures how many keep the exchange from slowing
    the steps by much"""
    outer_lr: float | None = None
    """of diloco, streaming-diloco and co2: step size of what was exchanged; usual if not given"""
    outer_momentum: float | None = None
    """of diloco, streaming-diloco and co2: momentum of what was exchanged; usual if not given"""
    eager: float = EAGER
    """of co2: the share of what its own last steps brought with which a worker goes on at once,
    until the mean of all has come; 0, with --outer-lr 1 --outer-momentum 0.2, is as published"""
    delay: str = "usual"
    """of streaming-diloco: steps beside which an exchange goes on; usual takes 1, or auto with
    --local-steps auto, which measures how many hide it"""
    fragments: str = str(FRAGMENTS)
    """of streaming-diloco: parts of the model that are exchanged at different steps, as many of the
    same size; or modules, for one of each of the model's modules; or regular expressions, with
    commas between them, for one of the parameters whose names each is the first to match"""
    hidden: int = 256
    """features between the layers; for GAT, of each head"""
    layers: int = 3
    """layers of the model, as many as fan-outs"""
    heads: int = 4
    """attention heads of GAT"""
    output_heads: int = 0
    """attention heads of GAT's last layer; 0 takes as many as of the others"""
    dropout: float = 0.5
    """share of the hidden features dropped in training"""
    input_dropout: float = 0.0
    """share of the input features dropped in training"""
    attention_dropout: float = 0.0
    """share of GAT's attention weights dropped in training"""
    batch_norm: bool = False
    """normalise the hidden features over the minibatch (SAGE and GCN)"""
    skip: bool = True
    """GAT: add a linear map of each layer's targets to its output"""
    patience: int = 0
    """stop after so many evaluations without a better one; 0 never stops early"""
    evaluate_every: int = 1
    """epochs from one evaluation with all neighbours to the next"""
    sampler: Literal["gcnzc", "dgl"] = "gcnzc"
    """which engine draws the neighbours"""
    features: Literal["host", "device", "cached"] = "host"
    """where the feature table lies; cached: on the host, and the rows needed most on the GPU too"""
    hot: str = "auto"
    """size of the hot set of cached features: a share of the rows, or bytes such as 2GB; auto
    takes that of the plan, or 0.2"""
    hot_by: HotBy = "presampled"
    """what makes a row hot: how often it is in minibatches drawn before training, or in-degree"""
    hot_split: bool = False
    """the workers of a machine, with a GPU each, split one hot set and read each other's rows; else
    each has copies of all its rows. A share in --hot is of the set, bytes are of each GPU"""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """where the model trains; auto takes CUDA where there is one"""
    threads: int = 0
    """threads that make minibatches; 0 leaves the number to the plan, or to the loader"""
    plan: bool = True
    """use what `gcnzc check --tune` measured for this machine and such rows"""
    workers: int = 1
    """processes that train together on this machine, each on its share of every minibatch; torchrun
    starts them on several machines"""
    scale_lr: Literal["none", "linear", "sqrt"] = "none"
    """multiply --lr by the number of workers, or its root, as their minibatches add up"""
    timeout_s: float = 60.0
    """seconds that workers wait for one another before they give up and start again"""
    restarts: int = 3
    """times that workers are started again, from the last checkpoint, after one was lost"""
    tune_exchange: bool = False
    """measure which collectives are fastest between these workers for messages as large as this
    model's, and keep it for later runs; sums may round differently than without"""
    seed: int = 0
    """seed of every random choice"""
    checkpoint_every_s: float = 30.0
    """seconds of training from one checkpoint to the next"""
    trace: int = 0
    """steps to draw as a timeline, after the first ten of this command; 0 draws none"""
    allow_nan: bool = False
    """train although some features are NaN or infinite"""
    verify: bool = False
    """first read all of a prepared folder and compare its checksums, as `gcnzc info --verify`"""
    out: Path | None = None
    """run folder; runs/DATA-MODEL-N if not given"""
    resume: Path | None = None
    """run folder to go on with, bit for bit, with the options it was started with"""
    config: Path | None = None
    """TOML file of these options; those on the command line win"""

    def __post_init__(self) -> None:
        _demand_numbers(self)
        _at_most(MOST_THREADS, "threads", self.threads)
        _at_most(MOST_WORKERS, "workers", self.workers)
        for name in (
            *("batch_size", "epochs", "hidden", "layers", "heads", "evaluate_every"),
            *("num_negatives", "workers"),
        ):
            _at_least(1, name, getattr(self, name))
        for name in (
            "output_heads",
            "patience",
            "threads",
            "trace",
            "seed",
            "checkpoint_every_s",
            "weight_decay",
            "restarts",
            "refresh",
        ):
            _at_least(0, name, getattr(self, name))
        for name in ("dropout", "input_dropout", "attention_dropout"):
            if not 0 <= getattr(self, name) < 1:
                raise ValueError(
                    f"{_option(name)} must be from 0 to below 1, got {getattr(self, name)}\n\n"
                    "hint: it is the share that is dropped; 0 drops nothing"
                )
        if not 0 <= self.eager < 1:
            raise ValueError(
                f"--eager must be from 0 to below 1, got {self.eager}\n\nhint: 0.5 is usual"
            )
        if not 0 < self.timeout_s <= MOST_SECONDS:
            raise ValueError(
                f"--timeout-s must be above 0 and at most {MOST_SECONDS:,}, got {self.timeout_s}"
                "\n\nhint: the default is 60"
            )
        if self.outer_lr is not None:
            _at_least(0, "outer_lr", self.outer_lr)
        if self.outer_momentum is not None and not 0 <= self.outer_momentum < 1:
            raise ValueError(
                f"--outer-momentum must be from 0 to below 1, got {self.outer_momentum}\n\n"
                "hint: leave --outer-momentum out for the default"
            )
        if not self.lr > 0:
            raise ValueError(f"--lr must be above 0, got {self.lr}\n\nhint: 0.003 is usual")
        if len(self.fanouts) != self.layers:
            given = ",".join(map(str, self.fanouts))
            raise ValueError(
                f"{len(self.fanouts)} fan-outs ({given}) for {self.layers} layers\n\n"
                "hint: --fanouts takes one number a layer, input layer first; --layers "
                f"{len(self.fanouts)} would fit"
            )
        _demand_fanouts(self.fanouts)
        if self.hot != "auto":
            hot_size(self.hot)
        _demand_number(
            "--warmup", self.warmup, ("auto",), "0.15 is a share of the steps, 500 steps"
        )
        _demand_number(
            "--local-steps", self.local_steps, ("usual", "auto"), "12 is usual", whole=True
        )
        fragments_of(self.fragments)
        _demand_number("--delay", self.delay, ("usual", "auto"), "1 is usual", whole=True)
        if self.delay == "auto" and self.local_steps != "auto":
            raise ValueError(
                f"--delay auto with --local-steps {self.local_steps}\n\n"
                "hint: both are measured together, with --local-steps auto"
            )


@dataclass(frozen=True, kw_only=True)
class MakeConfig:
    """Write a synthetic graph, or a small real one, in OGB's layout."""

    path: tyro.conf.Positional[Path]
    """folder to make"""
    kind: Literal["planted", "rmat", "digits"] = "planted"
    """communities with a known best accuracy; a power-law graph for scale; handwritten digits"""
    like: Literal["ogbn-arxiv", "ogbn-products", "ogbn-papers100M", "reddit"] | None = None
    """take the numbers of nodes, edges, features and classes from this graph"""
    scale: float = 1.0
    """with --like: the share of its nodes and edges"""
    nodes: int = 100_000
    """number of nodes"""
    edges: int = 1_000_000
    """number of edges, each stored once"""
    num_features: int = 100
    """features of a node"""
    classes: int = 10
    """number of classes"""
    seed: int = 0
    """seed of every random choice"""

    def __post_init__(self) -> None:
        _demand_numbers(self)
        for name in ("nodes", "edges", "num_features", "classes"):
            _at_least(1, name, getattr(self, name))
        _at_least(0, "seed", self.seed)
        if not self.scale > 0:
            raise ValueError(f"--scale must be above 0, got {self.scale}\n\nhint: 0.1 is a tenth")


@dataclass(frozen=True, kw_only=True)
class PrepareConfig:
    """Turn a graph into a prepared folder, which opens at once and is shared between workers.

    SOURCE is a folder in OGB's layout, a .npz archive, a prepared folder, or the name of an OGB
    dataset together with --download.
    """

    source: tyro.conf.Positional[str]
    """what to prepare"""
    dest: tyro.conf.Positional[Path]
    """folder to make"""
    download: bool = False
    """fetch the OGB dataset SOURCE first, into the folder `downloads` beside DEST"""
    features: Path | None = None
    """a .npy of (nodes, columns) to use as the features"""
    feature_dtype: Literal[
        "as-is", "float32", "float16", "bfloat16", "float8_e4m3fn", "float8_e5m2", "int8"
    ] = "as-is"
    """type of the stored features; those of one byte have scales, which a gather multiplies by"""
    scales: Literal["row", "columns"] = "row"
    """of features of one byte: a scale for each row, or for each 16 columns"""
    normalize_features: bool = False
    """scale each row of features to the sum 1, as is usual for bags of words"""
    sparse_features: bool = False
    """keep features that are stored sparse as they are"""
    pitch_bytes: int | None = None
    """distance from one row of features to the next; 0 is side by side; chosen if not given"""
    bidirected: Literal["as-usual", "yes", "no"] = "as-usual"
    """add the reverse of every edge; as usual for this dataset if not said"""
    self_loops: Literal["keep", "add", "remove"] = "keep"
    """what to do with edges from a node to itself"""
    duplicates: Literal["as-usual", "keep", "remove"] = "as-usual"
    """what to do with edges stored more than once"""
    split: str | None = None
    """which of several splits: its name or number"""
    task: Literal["as-is", "link"] = "as-is"
    """link: take edges out for validation and test, if they are not split already"""
    valid_edges: float = 0.05
    """with --task link: the share of the edges for validation"""
    test_edges: float = 0.1
    """with --task link: the share of the edges for test"""
    seed: int = 0
    """with --task link: the seed that says which edges"""
    allow_nan: bool = False
    """accept features that are NaN or infinite"""

    def __post_init__(self) -> None:
        _demand_numbers(self)
        _at_least(0, "seed", self.seed)
        # says what is wrong with them
        EdgeShares(self.valid_edges, self.test_edges)


@dataclass(frozen=True, kw_only=True)
class EmbedConfig:
    """Give a graph features made from its edges alone, as a prepared folder."""

    source: tyro.conf.Positional[Path]
    """folder of a graph, prepared or in OGB's layout, or a .npz archive"""
    dest: tyro.conf.Positional[Path]
    """folder to make"""
    dims: int = 128
    """columns of the embedding"""
    seed: int = 0
    """seed of every random choice"""


@dataclass(frozen=True, kw_only=True)
class InfoConfig:
    """Say what a graph is: sizes, types, options and origin, as JSON."""

    data: tyro.conf.Positional[Path]
    """folder of a graph"""
    verify: bool = False
    """read everything and compare the checksums"""


@dataclass(frozen=True, kw_only=True)
class EvaluateConfig:
    """Evaluate the best model of a run with all neighbours, and print one JSON line."""

    run: tyro.conf.Positional[Path]
    """folder that `gcnzc train` wrote"""
    data: Path | None = None
    """another graph than the run's"""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """where to evaluate"""
    predictions: Path | None = None
    """also write the logits of every node to this .npy"""


@dataclass(frozen=True, kw_only=True)
class CheckConfig:
    """Say what this machine can do, and what to mend; with --tune, how it gathers fastest.

    Prints one JSON line. What --tune finds is kept, and `gcnzc train` uses it.
    """

    data: tyro.conf.Positional[Path | None] = None
    """folder of a graph to tune for, prepared or in OGB's layout; without it one at random"""
    tune: bool = False
    """measure which settings gather fastest, and keep them as the plan for this machine"""
    fanouts: Fanouts = (15, 10, 5)
    """neighbours kept in the minibatches of --tune, as of `gcnzc train`"""
    batch_size: int = 1024
    """seeds of a minibatch of --tune"""
    row_bytes: int = 512
    """bytes of a row, where there is no DATA"""
    hot_memory: str = "0.5"
    """of the GPU, for hot rows: a share of what is free, or bytes such as 8GB"""
    compute_ms: float = 0.0
    """milliseconds that the model takes for a minibatch, if known: hot rows then hide the rest"""
    megabytes: int = 512
    """size of the table whose reading is measured"""

    def __post_init__(self) -> None:
        _demand_numbers(self)
        for name in ("batch_size", "row_bytes", "megabytes"):
            _at_least(1, name, getattr(self, name))
        _at_least(0, "compute_ms", self.compute_ms)
        _demand_fanouts(self.fanouts)
        hot_size(self.hot_memory, "--hot-memory", "of the GPU's free memory")


@dataclass(frozen=True, kw_only=True)
class LinkConfig:
    """Say how well gathers use the link between the host's memory and a GPU.

    Prints one JSON line: the model's figures for the features of DATA, or for those of public
    graphs, by layout; with a GPU what it measures as well.
    """

    data: tyro.conf.Positional[Path | None] = None
    """folder of a graph, prepared or in OGB's layout; without it public ones"""
    out: Path | None = None
    """picture to write: efficiency by the width of a row; none if not given"""
    split_bytes: Literal[64, 128] = 128
    """where the host cuts its answers into packets: 64 for root complexes that do so there"""
    megabytes: int = 1024
    """size of the page-locked memory that a GPU reads from"""

    def __post_init__(self) -> None:
        _at_least(16, "megabytes", self.megabytes)


@dataclass(frozen=True, kw_only=True)
class PlanCacheConfig:
    """Predict, before training, how many rows of a minibatch a hot set on the GPU would have.

    Prints one JSON line: for hot sets of several sizes, ranked by in-degree and by pre-sampling,
    the predicted hit rate and the bytes that a minibatch still brings over the bus.
    """

    data: tyro.conf.Positional[Path]
    """folder of a graph, prepared or in OGB's layout"""
    fanouts: Fanouts = (15, 10, 5)
    """neighbours kept, one number a layer, input layer first; -1 keeps all"""
    batch_size: int = 1024
    """seeds per minibatch"""
    batches: int = 100
    """minibatches that are drawn to predict from, in two halves"""
    gpus: int = 1
    """that split the hot set; with 1 each GPU has all of it"""
    measure: bool = False
    """also draw as many fresh minibatches, as training would, and count the hits"""
    threads: int = 0
    """threads that draw minibatches; 0 leaves the number to the loader"""
    seed: int = 0
    """seed of the run that is planned"""
    out: Path | None = None
    """picture to write: hit rate by size of the hot set; none if not given"""

    def __post_init__(self) -> None:
        _at_least(1, "batch_size", self.batch_size)
        _at_least(4, "batches", self.batches)
        _at_least(1, "gpus", self.gpus)
        for name in ("threads", "seed"):
            _at_least(0, name, getattr(self, name))
        _at_most(MOST_THREADS, "threads", self.threads)
        _demand_fanouts(self.fanouts)


@dataclass(frozen=True, kw_only=True)
class PlanConfig:
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
        _demand_numbers(self)
        for number in self.workers:
            _at_least(2, "workers", number)
            _at_most(MOST_WORKERS, "workers", number)
        _at_most(MOST_THREADS, "threads", self.threads)
        _at_least(1, "steps", self.steps)
        for name in ("delay_ms", "message_us", "threads", "seed"):
            _at_least(0, name, getattr(self, name))
        for name in ("mbit_per_s", "step_s"):
            value = getattr(self, name)
            if value is not None and not value > 0:
                raise ValueError(
                    f"{_option(name)} must be above 0, got {value}\n\n"
                    f"hint: leave {_option(name)} out for the usual value"
                )
        # says what is wrong with the options that both have
        TrainConfig(
            **{
                name: getattr(self, name)
                for name in ("fanouts", "batch_size", "hidden", "layers", "heads")
            }
        )


@dataclass(frozen=True, kw_only=True)
class PlotConfig:
    """Draw the curves of one run, or of several in one picture."""

    runs: tyro.conf.Positional[tuple[Path, ...]]
    """folders that `gcnzc train` wrote"""
    out: Path | None = None
    """picture to write; curves.png in the first run if not given"""


def _demand_number(
    option: str, words: str, others: Sequence[str], hint: str, *, whole: bool = False
) -> None:
    """Raise a ValueError unless `words` are a number above 0, or one of some others."""
    is_number = re.fullmatch(r"\d+" if whole else r"\d+\.?\d*|\.\d+", words) is not None
    if words not in others and not (is_number and float(words) > 0):
        raise ValueError(
            f"{option} must be a {'whole ' * whole}number above 0 or {' or '.join(others)}, got "
            f"{words!r}\n\nhint: {hint}"
        )


def fragments_of(words: str) -> int | str | list[str]:
    """The fragments of a model that `words` say: how many, "modules", or regular expressions.

    Raises:
        ValueError: they say none of these.
    """
    if words == "modules":
        return words
    if re.fullmatch(r"[-+.\d]*", words):
        _demand_number("--fragments", words, ("modules",), "4 is usual", whole=True)
        return int(words)
    patterns = words.split(",")
    for pattern in patterns:
        try:
            re.compile(pattern)
        except re.error as error:
            raise ValueError(
                f"--fragments: {pattern!r} is no regular expression: {error}\n\n"
                "hint: a number, modules, or expressions such as layers.0,layers.1"
            ) from None
    return patterns


def hot_size(words: str, option: str = "--hot", whole: str = "of the rows") -> float:
    """The size of a hot set that `words` say: a float is a share of the rows, an int is bytes.

    Args:
        words: of the command line.
        option: that they are of.
        whole: what a share is of.

    Raises:
        ValueError: they say neither.
    """
    told = re.fullmatch(r"(\d+\.?\d*|\.\d+)\s*(?:([KMG]i?)?(B))?", words.strip())
    if told is not None:
        number, unit, is_bytes = told.groups()
        if is_bytes and (size := int(float(number) * _UNITS[unit or ""])) > 0:
            return size
        if not is_bytes and 0 < float(number) <= 1:
            return float(number)
    raise ValueError(
        f"{option} must be a share {whole} above 0, or bytes, got {words!r}\n\n"
        f"hint: 0.2 is a fifth {whole}, 1 all; 2GB and 512MiB are bytes"
    )


def from_words(kind: type[C], values: Mapping[str, Any], source: str) -> C:
    """The config that a TOML or JSON table spells, with the defaults for what it leaves out.

    Args:
        kind: a class of this module.
        values: option names, with - or _, and their values.
        source: where the table came from, for messages.

    Raises:
        ValueError: an option is unknown or a value is of the wrong type.
    """
    hints, given = get_type_hints(kind), {}
    for key, value in values.items():
        name = key.replace("-", "_")
        if name not in hints:
            raise ValueError(
                f"{source}: no option named {key}\n\nhint: `gcnzc train --help` lists the options"
            )
        try:
            given[name] = _converted(hints[name], value)
        except (TypeError, OverflowError):
            raise ValueError(
                f"{source}: {key} cannot be {value!r:.100}\n\n"
                f"hint: the default is {getattr(kind, name, None)!r}"
            ) from None
    return kind(**given)


def to_words(config: Any) -> dict[str, Any]:
    """The options of `config` as what JSON can hold; `from_words` reads it back."""
    return json.loads(json.dumps(dataclasses.asdict(config), default=str))


def _converted(hint: Any, value: Any) -> Any:
    """A value of TOML or JSON as an option of type `hint` holds it.

    Raises:
        TypeError: it is of another type, or not one of the choices.
        OverflowError: it is too large for a float.
    """
    origin, choices = get_origin(hint), get_args(hint)
    if origin in (Union, UnionType):
        for choice in choices:
            with contextlib.suppress(TypeError):
                return _converted(choice, value)
    elif origin is Literal:
        # 1 and True are equal
        if any(value == choice and type(value) is type(choice) for choice in choices):
            return value
    elif origin is tuple and isinstance(value, list):
        return tuple(_converted(choices[0], item) for item in value)
    elif hint is Path and isinstance(value, str):
        return Path(value)
    elif hint is float and type(value) in (int, float):
        return float(value)
    elif type(value) is hint:
        return value
    raise TypeError(f"{value!r} is not of type {hint}")


def _option(name: str) -> str:
    return "--" + name.replace("_", "-")


def _at_least(least: int, name: str, value: float) -> None:
    if not value >= least:
        raise ValueError(
            f"{_option(name)} must be at least {least}, got {value}\n\n"
            f"hint: leave {_option(name)} out for the usual value"
        )


def _at_most(most: int, name: str, value: int) -> None:
    if value > most:
        raise ValueError(
            f"{_option(name)} must be at most {most}, got {value}\n\n"
            f"hint: leave {_option(name)} out for the default"
        )


def _demand_numbers(config: Any) -> None:
    """Raise a ValueError if a number among the options is NaN, infinite or above 64 bits."""
    for field in dataclasses.fields(config):
        value = getattr(config, field.name)
        if isinstance(value, float) and not math.isfinite(value):
            raise ValueError(
                f"{_option(field.name)} must be finite, got {value}\n\n"
                f"hint: leave {_option(field.name)} out for the default"
            )
        if isinstance(value, int):
            _at_most(2**63 - 1, field.name, value)


def demand_writable(name: str, path: Path | None) -> None:
    """Raise a ValueError unless a file can be written to `path`, or there is none to write."""
    if path is None:
        return
    if path.is_dir():
        raise ValueError(
            f"{_option(name)}: {path} is a folder\n\nhint: name a file, such as {path / 'x'}"
        )
    folder = path.parent
    if not folder.is_dir():
        raise ValueError(
            f"{_option(name)}: there is no folder {folder}\n\nhint: mkdir -p {folder} makes it"
        )
    if not os.access(folder, os.W_OK):
        raise ValueError(
            f"{_option(name)}: this user may not write to {folder}\n\nhint: choose another folder"
        )


def demand_picture(name: str, path: Path | None) -> None:
    """Raise a ValueError unless a picture can be written to `path`, or there is none to write."""
    if path is not None and not path.is_dir() and path.suffix.lower() not in PICTURES:
        raise ValueError(
            f"{_option(name)}: no picture can be written as {path.name!r}\n\n"
            f"hint: a name that ends in {', '.join(PICTURES)}"
        )
    demand_writable(name, path)


def _demand_fanouts(fanouts: Sequence[int]) -> None:
    for number in fanouts:
        if number > MOST_NEIGHBOURS:
            raise ValueError(
                f"a fan-out must be at most {MOST_NEIGHBOURS}, got {number}\n\n"
                "hint: -1 keeps all neighbours"
            )
        if number < 1 and number != -1:
            raise ValueError(
                f"a fan-out must be at least 1, or -1 for all neighbours, got {number}\n\n"
                "hint: --fanouts 15,10,5 is usual for three layers"
            )
