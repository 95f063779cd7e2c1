"""What a step of each method costs on a network: bytes, messages and seconds."""

import copy
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TypeAlias

import torch
from torch import nn

from gcnzc.compress import WorkerInfo, compression
from gcnzc.compress.two_stage import Codec
from gcnzc.exchange import Choices, Link, Outcome, lockstep
from gcnzc.exchange.choices import ALGORITHMS
from gcnzc.exchange.layout import group_by_dtype
from gcnzc.optim.defaults import FRAGMENTS, LOCAL
from gcnzc.optim.defaults import WARMUP as WARMUP_DEFAULTS
from gcnzc.optim.synchronous.averaged import Gradients

Progress: TypeAlias = Callable[[int, int], object]


# one step's exchange of models that are alike, over a link
Method: TypeAlias = Callable[[Sequence[nn.Module], Link], Outcome]


# What TCP with time stamps leaves for the payload of full Ethernet frames, where as much comes as
# goes: every second frame that comes is acknowledged, by 66 B.
PAYLOAD = 1448 / (1514 + 66 / 2)


SIGNALS = 2  # that `gcnzc train` sends with its gradients: to stop, and to save


CODED = 5  # times that codes are made to be timed


def averaged(models: Sequence[nn.Module], link: Link, name: str) -> Outcome:
    """A step of `gcnzc.optim.Averaged`, which sums all gradients by the algorithm `name`."""
    gradients = [Gradients(model.named_parameters()) for model in models]
    # once in a run, so it counts in no step
    lockstep([each.agree(SIGNALS) for each in gradients])
    asks = [False] * SIGNALS
    choices = Choices.always(Sum=name)
    return lockstep([each.exchanged(1.0, asks) for each in gradients], link, choices=choices)


def in_codes(models: Sequence[nn.Module], link: Link, words: str) -> Outcome:
    """A mean of all elements by `gcnzc.compress`, in codes that `words` name."""
    sizes = [sum(p.numel() for p in model.parameters() if p.requires_grad) for model in models]
    reducers = [
        compression(words).reducer(
            size, WorkerInfo(rank, len(models), torch.device("cpu"), torch.float32)
        )
        for rank, size in enumerate(sizes)
    ]
    notes = 1 + SIGNALS
    vectors = [torch.zeros(size + notes) for size in sizes]
    return lockstep(
        [each.mean(vector, notes) for each, vector in zip(reducers, vectors, strict=True)], link
    )


@dataclass(frozen=True)
class MethodTraffic:
    """What a method exchanges."""

    parts: tuple[tuple[float, Method], ...]
    """the share of the steps in which something is exchanged, and what"""
    codes: str = ""
    """what turns elements into codes in the last part's steps, if anything does"""
    behind: float = 0.0
    """share of the computing of all steps behind which exchanges hide"""


def _usual(name: str) -> Method:
    # whatever sums as `gcnzc train` does unless it is told otherwise
    return partial(in_codes, words=name)


def _every(method: str) -> float:
    return 1 / LOCAL[method].local_steps


WARMUP = WARMUP_DEFAULTS.share  # share of the steps of a run


# by the names of `gcnzc train --optimizer`, with the options that are usual
METHODS: dict[str, MethodTraffic] = {
    **{
        f"averaged, {name}": MethodTraffic(((1.0, partial(averaged, name=name)),))
        for name in ALGORITHMS["Sum"]
    },
    **{
        name: MethodTraffic(((WARMUP, _usual("float32")), (1 - WARMUP, _usual("sign"))), "sign")
        for name in ("onebit-adam", "onebit-lamb")
    },
    "local-sgd": MethodTraffic(((_every("local-sgd"), _usual("float32")),)),
    "diloco": MethodTraffic(((_every("diloco"), _usual("float32")),)),
    "co2": MethodTraffic(((_every("co2"), _usual("float32")),), behind=1.0),
    # each fragment hides behind one step
    "streaming-diloco": MethodTraffic(
        ((_every("streaming-diloco"), _usual("float32")),),
        behind=FRAGMENTS * _every("streaming-diloco"),
    ),
}


@dataclass(frozen=True)
class Network:
    """The links between machines, as they are named by who sells them.

    Raises:
        ValueError: there is no such link.
    """

    mbit_per_s: float
    """of each machine's link, headers included, in each direction"""
    delay_s: float = 0.0
    """from one machine to another"""
    message_s: float = 0.0
    """of a sender's time, for each message"""

    def __post_init__(self) -> None:
        if not 0 < self.mbit_per_s < math.inf:
            raise ValueError(
                f"a link of {self.mbit_per_s} Mbit/s\n\nhint: 1000 is usual in a building"
            )
        for name, seconds in (("delay", self.delay_s), ("time of a message", self.message_s)):
            if not 0 <= seconds < math.inf:
                raise ValueError(f"a {name} of {seconds} s\n\nhint: it is 0 s or more")

    @property
    def bytes_per_s(self) -> float:
        """Of payload."""
        return self.mbit_per_s * 1e6 / 8 * PAYLOAD

    @property
    def link(self) -> Link:
        """For `lockstep`."""
        return Link(self.bytes_per_s, self.delay_s, self.message_s)


@dataclass(frozen=True)
class Computed:
    """What a worker does in a step apart from the exchange."""

    seconds: float
    steps: int = 0
    """that were timed; 0 if the seconds were given"""


@dataclass(frozen=True)
class Cost:
    """What the exchange of a step costs by one method, on links of any rate; of all steps the mean.

    Its time is `code_s + latency_s + serial_bytes / rate`: exactly so where every message waits for
    bytes and for messages alike, as in all collectives of `gcnzc.exchange`.
    """

    workers: int
    method: str
    sent_bytes: int
    """of the worker that sends most"""
    latency_s: float
    """of delays and messages, whatever the rate"""
    serial_bytes: float
    """that cross the links one after another"""
    code_s: float = 0.0
    """of a worker, for codes"""
    behind: float = 0.0
    """share of the computing behind which the exchange hides"""

    def seconds(self, bytes_per_s: float) -> float:
        """Of the exchange, over links of that rate, hidden or not."""
        return self.code_s + self.latency_s + self.serial_bytes / bytes_per_s

    def waited_s(self, bytes_per_s: float, compute_s: float) -> float:
        """What of the exchange is not hidden behind that much computing a step."""
        return max(0.0, self.seconds(bytes_per_s) - self.behind * compute_s)

    def mbit_per_s(self, seconds: float, compute_s: float = 0.0) -> float | None:
        """The rate of links over which the exchange is waited for that long; None if there is none.

        That is where latency alone takes more.

        Args:
            seconds: above 0.
            compute_s: of a step, behind which some of it may hide.
        """
        left_s = seconds + self.behind * compute_s - self.latency_s - self.code_s
        return self.serial_bytes / left_s * 8 / 1e6 / PAYLOAD if left_s > 0 else None


def cost_of(model: nn.Module, workers: int, network: Network, name: str) -> Cost:
    """What a step's exchange costs, by running it.

    Args:
        model: on the host, whose parameters all get gradients.
        workers: how many; at least 2.
        network: between them.
        name: of the method, in `METHODS`.
    """
    models = [_with_gradients(model) for _ in range(workers)]
    link, way = network.link, METHODS[name]
    sent = latency_s = serial_bytes = 0.0
    for share, method in way.parts:
        whole = method(models, link)
        least_s = max(method(models, replace(link, bytes_per_s=math.inf)).seconds)
        latency_s += share * least_s
        serial_bytes += share * (max(whole.seconds) - least_s) * link.bytes_per_s
        sent += share * max(ledger.bytes_sent for ledger in whole.ledgers)
    code_s = way.parts[-1][0] * coding_s(model, workers, way.codes) if way.codes else 0.0
    return Cost(workers, name, round(sent), latency_s, serial_bytes, code_s, way.behind)


def coding_s(model: nn.Module, workers: int, words: str) -> float:
    """What one of so many workers takes for the codes of all elements, measured here: the least."""
    codes = compression(words)
    assert isinstance(codes, Codec), f"{words} are codes"
    values = torch.randn(sum(p.numel() for p in model.parameters() if p.requires_grad))
    error, cut = torch.zeros_like(values), codes.cut(len(values), workers)
    rows = torch.zeros(workers, cut.row_bytes, dtype=torch.uint8)
    own = cut.part_layout(0)
    seconds = []
    for step in range(CODED):
        begin = time.perf_counter()
        codes.encode(values, error, None, cut, rows, (step, 0))
        codes.update_error(values, error, None, cut, rows)
        codes.mean_of(rows, own, values[: own.num_elements])
        codes.encode(values[: own.num_elements], None, None, own, rows[:1], (step, workers))
        codes.decode(rows, cut, None, values)
        seconds.append(time.perf_counter() - begin)
    return min(seconds)


def costs_of(
    model: nn.Module, workers: Sequence[int], network: Network, advance: Progress | None = None
) -> list[Cost]:
    """What each method costs with each number of workers, in that order.

    Args:
        model: see `cost_of`.
        workers: numbers of them.
        network: between them.
        advance: told how far it is.
    """
    cases = [(number, name) for number in workers for name in METHODS]
    found = []
    for done, (number, name) in enumerate(cases):
        if advance is not None:
            advance(done, len(cases))
        found.append(cost_of(model, number, network, name))
    return found


def default_method(model: nn.Module) -> str:
    """The method that `gcnzc train` takes for a model, unless it is told another."""
    largest = max(gradient_bytes(model).values())
    return f"averaged, {Choices().name_of('Sum', largest)}"


def gradient_bytes(model: nn.Module) -> dict[str, int]:
    """The bytes of a worker's gradient, by dtype."""
    named = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
    sizes: dict[str, int] = {}
    for kind in group_by_dtype(named):
        dtype = str(kind[0][1].dtype).removeprefix("torch.")
        sizes[dtype] = sizes.get(dtype, 0) + sum(p.numel() * p.element_size() for _, p in kind)
    return sizes


def _with_gradients(model: nn.Module) -> nn.Module:
    copied = copy.deepcopy(model)
    for parameter in copied.parameters():
        if parameter.requires_grad:
            parameter.grad = torch.zeros_like(parameter)
    return copied
