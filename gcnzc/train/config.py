"""The options of a run, shared by the command line, Python and the run folder.

Each class is one subcommand of `gcnzc`: a field is an option, and the string under it its help.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Literal, TypeAlias, get_args

import tyro

from gcnzc.optim.defaults import EAGER, FRAGMENTS, REFRESH, WARMUP
from gcnzc.train.options import (
    Fanouts,
    at_least,
    at_most,
    cache_size,
    check_fanouts,
    check_number,
    check_numbers,
    fragments_of,
    option_name,
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


HotBy: TypeAlias = Literal["presampled", "in-degree"]


# more would only exhaust the machine; the largest servers have some hundred cores
MOST_THREADS = MOST_WORKERS = 1024


# thirty years; timers count nanoseconds in 64 bits
MOST_SECONDS = 10**9


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
    """of links: no negative is an edge of the graph, or joins a node with itself;
    --no-strict-negatives takes such pairs too"""
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
    """GAT: add a linear map of each layer's targets to its output;
    --no-skip adds nothing"""
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
    """use what `gcnzc check --tune` measured for this machine and such rows;
    --no-plan ignores it"""
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
        check_numbers(self)
        at_most(MOST_THREADS, "threads", self.threads)
        at_most(MOST_WORKERS, "workers", self.workers)
        for name in (
            *("batch_size", "epochs", "hidden", "layers", "heads", "evaluate_every"),
            *("num_negatives", "workers"),
        ):
            at_least(1, name, getattr(self, name))
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
            at_least(0, name, getattr(self, name))
        for name in ("dropout", "input_dropout", "attention_dropout"):
            if not 0 <= getattr(self, name) < 1:
                raise ValueError(
                    f"{option_name(name)} must be from 0 to below 1, got {getattr(self, name)}\n\n"
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
            at_least(0, "outer_lr", self.outer_lr)
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
        check_fanouts(self.fanouts)
        if self.hot != "auto":
            cache_size(self.hot)
        check_number("--warmup", self.warmup, ("auto",), "0.15 is a share of the steps, 500 steps")
        check_number(
            "--local-steps", self.local_steps, ("usual", "auto"), "12 is usual", whole=True
        )
        fragments_of(self.fragments)
        check_number("--delay", self.delay, ("usual", "auto"), "1 is usual", whole=True)
        if self.delay == "auto" and self.local_steps != "auto":
            raise ValueError(
                f"--delay auto with --local-steps {self.local_steps}\n\n"
                "hint: both are measured together, with --local-steps auto"
            )


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
