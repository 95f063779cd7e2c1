"""Options of `gcnzc train` for the optimizer, and for what workers exchange."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal, TypeAlias, get_args

from gcnzc.optim.defaults import (
    EAGER,
    FRAGMENTS,
    MAX_GOSSIP_RATE,
    MAX_SYNC_WINDOW,
    REFRESH,
    WARMUP_SHARE,
)
from gcnzc.train.options import (
    Options,
    at_most,
    check_compress,
    check_least,
    check_number_or_word,
    check_range,
    option_name,
    parse_fragments,
)

UpdateRule: TypeAlias = Literal["adam", "adamw", "sgd", "muon"]

OneBit: TypeAlias = Literal["onebit-adam", "onebit-lamb", "zero-one-adam"]

OptimizerName: TypeAlias = UpdateRule | OneBit

# the keys of `gcnzc.train.strategies.STRATEGIES`
StrategyName: TypeAlias = Literal[
    "average",
    "local-sgd",
    "diloco",
    "muloco",
    "streaming-diloco",
    "co2",
    "selsync",
    "dropcompute",
    "topk",
    "randomk",
    "dct",
    "sparseloco",
    "saps",
    "a2cid2",
    "backup",
    "fedglomo",
]

Topology: TypeAlias = Literal["ring", "exponential", "complete"]

# learning rates that are used without --lr: of SGD, and of the other optimizers, whose steps do not
# grow with the gradients
SGD_LR, LR = 0.1, 0.003

UPDATE_RULES, ONE_BIT = get_args(UpdateRule), get_args(OneBit)


# by option, which numbers are valid, for the error message too, and its hint
RANGES: Sequence[tuple[str, Callable[[float], bool], str, str]] = (
    ("lr", lambda value: value > 0, "above 0", "omit --lr for the default"),
    (
        "clip_gradients",
        lambda value: value > 0,
        "above 0",
        "1 is common; omit --clip-gradients to turn clipping off",
    ),
    ("eager_weight", lambda value: 0 <= value < 1, "in [0, 1)", "the default is 0.5"),
    (
        "outer_momentum",
        lambda value: 0 <= value < 1,
        "in [0, 1)",
        "omit --outer-momentum for the default",
    ),
    (
        "max_dropped",
        lambda value: 0 < value < 1,
        "above 0 and below 1",
        "the default is 0.1; --compute-threshold none drops nothing",
    ),
    ("gossip_rate", lambda value: value > 0, "above 0", "the default is 1"),
    (
        "local_momentum",
        lambda value: 0 <= value <= 1,
        "from 0 and at most 1",
        "omit --local-momentum for the default",
    ),
    *(
        (
            name,
            lambda value: 0 < value <= 1,
            "above 0 and at most 1",
            f"omit {option_name(name)} for the default",
        )
        for name in ("density", "round_weight")
    ),
)


@dataclass(frozen=True, kw_only=True)
class OptimizerOptions(Options):
    """The optimizer, and what workers exchange."""

    optimizer: OptimizerName = "adam"
    """update rule: adam, adamw, sgd (momentum 0.9) or muon (adamw for all parameters but weight
    matrices), with any --strategy; onebit-adam, onebit-lamb and zero-one-adam compress the updates
    that workers exchange, and support no other --strategy than average"""
    strategy: StrategyName = "average"
    """what workers exchange, and when: average averages their gradients in every step; local-sgd,
    diloco, streaming-diloco and co2 exchange updates after several local steps of --optimizer;
    muloco is diloco with --optimizer muon and --compress int2; selsync averages parameters in the
    steps in which gradients change significantly; dropcompute is average with --accumulate, but
    slow workers drop their last minibatches; topk, randomk and dct send a fraction of the
    gradients, and sparseloco a fraction of the updates of diloco; saps averages a fraction of the
    parameters with one other worker at a time; a2cid2 averages all parameters with one neighbour
    in --topology at a time; backup averages parameters with the neighbours in --topology, and does
    not wait for slow workers; fedglomo exchanges updates after several local steps, with momentum
    in these steps and in the mean update"""
    lr: float | None = None
    """learning rate; default: 0.1 for --optimizer sgd, which fedglomo always uses, and 0.003 for
    the others"""
    scale_lr: Literal["none", "linear", "sqrt"] = "none"
    """multiply --lr by the number of workers, or its square root, because the global batch grows
    with the workers"""
    weight_decay: float = 0.0
    """weight decay, as the optimizer defines it"""
    decay: Literal["all", "weights"] = "all"
    """parameters with weight decay: all; or weights, which excludes biases and the scales and
    shifts of normalization layers"""
    accumulate: int = 1
    """minibatches of one worker whose gradients are accumulated for each optimizer step, so that
    the global batch is --accumulate times as large, with the memory of one minibatch; with
    --strategy dropcompute, 1 is replaced by 4"""
    clip_gradients: float | None = None
    """maximum L2 norm of the gradient of all parameters together; a larger gradient is scaled down
    to it. Several workers clip the mean gradient, or in local steps their own gradients"""
    compress: str = "auto"
    """compression of the exchanged values: a number format, float32, float16, bfloat16,
    float8_e4m3fn, float8_e5m2, int8, int4, int2, float4_e3m0 or sign; or topk, randomk, block,
    threshold or sparseloco, which send a fraction of the values, such as topk:0.01; auto: sign for
    the onebit and zero-one optimizers, and else the default of --strategy: int2 for muloco, int8
    with stochastic rounding for fedglomo, and float32 for the others"""
    warmup: str = f"{WARMUP_SHARE:g}"
    """onebit optimizers: length of the warm-up with uncompressed gradients, as a fraction of the
    run's steps or a number of steps; auto ends it when the variance is stable, after a quarter of
    the run at most. zero-one-adam: length of the phase without local steps; auto: the whole run"""
    refresh: int = REFRESH
    """onebit-adam: steps from the end of the warm-up to the first update of the variance, with
    uncompressed gradients; the interval then doubles; 0 never updates it"""
    local_steps: str = "default"
    """strategies with local steps: steps from one exchange to the next; default: 8 for local-sgd,
    co2 and fedglomo, 1 for saps, and 12 for the others; auto measures the smallest number of steps
    with which exchanges take a small fraction of the time or, with co2 and streaming-diloco, that
    overlaps with the whole exchange"""
    outer_lr: float | None = None
    """diloco, muloco, streaming-diloco, co2 and sparseloco: learning rate of the outer optimizer;
    if not given, the default of --strategy"""
    outer_momentum: float | None = None
    """diloco, muloco, streaming-diloco, co2 and sparseloco: momentum of the outer optimizer; if not
    given, the default of --strategy"""
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

    sync_threshold: float | None = None
    """selsync: relative change of the squared gradient norm of a worker, smoothed over
    --sync-window steps, from which all workers average their parameters; default: 0.3"""
    sync_window: int | None = None
    """selsync: number of steps over which the gradient norm is smoothed, at most 10000; in as many
    steps at the start of the run, all workers average their parameters; default: 25"""

    density: float | None = None
    """topk, randomk, dct, sparseloco and saps: fraction of the values that a worker sends; default:
    0.05 for randomk, 1/64 for sparseloco and 0.01 for the others"""
    compute_threshold: str = "auto"
    """dropcompute: time limit of a step in seconds, after which a worker begins no other minibatch;
    auto selects it by measured times, and none drops nothing"""
    max_dropped: float | None = None
    """dropcompute: largest fraction of the minibatches that an automatic --compute-threshold drops;
    default: 0.1"""
    topology: Topology | None = None
    """a2cid2 and backup: graph of the workers that exchange with one another; default: ring"""
    gossip_rate: float | None = None
    """a2cid2: exchanges of a worker per step, at most 1000; default: 1"""
    asynchronous: bool = False
    """a2cid2: overlap the exchanges with the steps, so that no worker waits for another one within
    an epoch; the run is not reproducible then"""
    quorum: int | None = None
    """diloco: workers, more than half of them, that an outer step needs, so that it does not wait
    for slower ones; if not given, all workers"""
    grace_s: float | None = None
    """diloco with --quorum: seconds for which an outer step waits for further workers; default:
    0"""
    grace: float | None = None
    """backup: how long a worker that can close a round waits for others, as a fraction of the
    shortest of its last step times; default: 0.1"""
    probe_interval: int | None = None
    """saps: exchanges from one measurement of the bandwidths between workers to the next; if not
    given, all bandwidths count as equal"""
    participants: int | None = None
    """fedglomo: workers that take part in a round, chosen at random; default: all"""
    local_momentum: float | None = None
    """fedglomo: momentum of the local steps, from 0 to 1; default: 0.8"""
    round_weight: float | None = None
    """fedglomo: weight of the current round in the global momentum, above 0 and at most 1; 1 turns
    global momentum off; default: 0.5"""

    def __post_init__(self) -> None:
        super().__post_init__()
        check_least(
            self,
            weight_decay=0,
            accumulate=1,
            refresh=0,
            outer_lr=0,
            sync_threshold=0,
            sync_window=1,
            grace=0,
            grace_s=0,
            quorum=1,
            probe_interval=1,
            participants=1,
        )
        if self.decay != "all" and not self.weight_decay:
            raise ValueError(
                f"--decay {self.decay} has no effect with --weight-decay 0\n\n"
                "hint: also choose a --weight-decay, such as 0.01"
            )
        for name, most in (("sync_window", MAX_SYNC_WINDOW), ("gossip_rate", MAX_GOSSIP_RATE)):
            at_most(most, name, getattr(self, name) or 0)
        for name, is_valid, valid, hint in RANGES:
            check_range(self, name, is_valid, valid, hint)
        check_number_or_word(
            "--compute-threshold",
            self.compute_threshold,
            ("auto", "none"),
            "a number of seconds, such as 0.5",
        )
        self._check_number_or_keyword()

    def _check_number_or_keyword(self) -> None:
        """Check the options that are a number or a keyword."""
        check_compress(self.compress)
        check_number_or_word(
            "--warmup", self.warmup, ("auto",), "0.15 means 15 % of the steps; 500 means 500 steps"
        )
        if self.warmup != "auto" and float(self.warmup) > 1 and float(self.warmup) % 1:
            raise ValueError(
                f"--warmup {self.warmup} is neither a fraction of the steps nor a number of steps"
                "\n\nhint: 0.15 means 15 % of the steps; 500 means 500 steps"
            )
        check_number_or_word(
            "--local-steps",
            self.local_steps,
            ("default", "auto"),
            "12 is a common number",
            whole=True,
        )
        parse_fragments(self.fragments)
        check_number_or_word(
            "--delay", self.delay, ("default", "auto"), "the default is 1", whole=True
        )
        if self.delay == "auto" and self.local_steps != "auto":
            raise ValueError(
                f"--delay auto with --local-steps {self.local_steps}\n\n"
                "hint: auto needs --local-steps auto; both are measured together"
            )
