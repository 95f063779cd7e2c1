"""Cost model: the bytes and seconds that each optimizer's exchange takes on a given network."""

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
from gcnzc.exchange.algorithms import ALGORITHMS
from gcnzc.exchange.layout import group_by_dtype
from gcnzc.optim.defaults import FRAGMENTS, LOCAL
from gcnzc.optim.defaults import WARMUP as WARMUP_DEFAULTS
from gcnzc.optim.synchronous.averaged import Gradients

Progress: TypeAlias = Callable[[int, int], object]

# runs the exchange of one step between replicas of a model, over an emulated link
Method: TypeAlias = Callable[[Sequence[nn.Module], Link], Outcome]

# share of the payload in the bytes of a link: full Ethernet frames of TCP with timestamps, and one
# acknowledgement of 66 B for every second frame of the opposite direction
PAYLOAD = 1448 / (1514 + 66 / 2)
# `gcnzc train` sends two signals with its gradients: to stop, and to save
SIGNALS = 2
# number of timed repetitions of the codec, of which the fastest counts
CODEC_REPEATS = 5


def exchange_averaged(models: Sequence[nn.Module], link: Link, name: str) -> Outcome:
    """Run the exchange of one step of `gcnzc.optim.Averaged` with the all-reduce `name`."""
    gradients = [Gradients(model.named_parameters()) for model in models]
    # happens once per run, so it is not part of a step's cost
    lockstep([each.determine_layout(SIGNALS) for each in gradients])
    signals = [False] * SIGNALS
    choices = Choices.always(Sum=name)
    return lockstep(
        [each.exchange_gradients(1.0, signals) for each in gradients], link, choices=choices
    )


def exchange_compressed(models: Sequence[nn.Module], link: Link, name: str) -> Outcome:
    """Run a mean of all trained elements with a compression of `gcnzc.compress`.

    Args:
        models: one replica for each rank.
        link: the emulated link.
        name: the name of the compression, as `gcnzc.compress.compression` takes it.
    """
    sizes = [sum(p.numel() for p in model.parameters() if p.requires_grad) for model in models]
    reducers = [
        compression(name).reducer(
            size, WorkerInfo(rank, len(models), torch.device("cpu"), torch.float32)
        )
        for rank, size in enumerate(sizes)
    ]
    extras = 1 + SIGNALS
    vectors = [torch.zeros(size + extras) for size in sizes]
    return lockstep(
        [each.mean(vector, extras) for each, vector in zip(reducers, vectors, strict=True)], link
    )


@dataclass(frozen=True)
class MethodTraffic:
    """The exchanges of a method, averaged over its steps."""

    parts: tuple[tuple[float, Method], ...]
    """pairs of a fraction of the steps, and the exchange of these steps"""
    compression: str = ""
    """name of the compression of the last of `parts`; empty if it is not compressed"""
    overlap_share: float = 0.0
    """share of the compute time of all steps that overlaps with exchanges"""


def _dense(name: str) -> Method:
    # the same all-reduce as `gcnzc train` uses by default
    return partial(exchange_compressed, name=name)


def _every(method: str) -> float:
    return 1 / LOCAL[method].local_steps


WARMUP = WARMUP_DEFAULTS.share  # share of the steps of a run


# by the names of `gcnzc train --optimizer` and `--strategy`, with their default options
METHODS: dict[str, MethodTraffic] = {
    **{
        f"averaged, {name}": MethodTraffic(((1.0, partial(exchange_averaged, name=name)),))
        for name in ALGORITHMS["Sum"]
    },
    **{
        name: MethodTraffic(((WARMUP, _dense("float32")), (1 - WARMUP, _dense("sign"))), "sign")
        for name in ("onebit-adam", "onebit-lamb")
    },
    "local-sgd": MethodTraffic(((_every("local-sgd"), _dense("float32")),)),
    "diloco": MethodTraffic(((_every("diloco"), _dense("float32")),)),
    "muloco": MethodTraffic(((_every("muloco"), _dense("int2")),), "int2"),
    "co2": MethodTraffic(((_every("co2"), _dense("float32")),), overlap_share=1.0),
    # the exchange of each fragment overlaps with one step
    "streaming-diloco": MethodTraffic(
        ((_every("streaming-diloco"), _dense("float32")),),
        overlap_share=FRAGMENTS * _every("streaming-diloco"),
    ),
}


@dataclass(frozen=True)
class Network:
    """The network links between machines, with their nominal rate.

    Raises:
        ValueError: a value is out of range.
    """

    mbit_per_s: float
    """rate of each machine's link in each direction, including headers, in Mbit/s"""
    delay_s: float = 0.0
    """one-way latency between two machines, in seconds"""
    message_s: float = 0.0
    """time that a sender spends on each message, in seconds"""

    def __post_init__(self) -> None:
        if not 0 < self.mbit_per_s < math.inf:
            raise ValueError(
                f"a link of {self.mbit_per_s} Mbit/s is invalid\n\n"
                "hint: give a finite rate above 0, such as 1000 for gigabit Ethernet"
            )
        for name, seconds in (("delay", self.delay_s), ("time of a message", self.message_s)):
            if not 0 <= seconds < math.inf:
                raise ValueError(f"a {name} of {seconds} s\n\nhint: give at least 0 s")

    @property
    def bytes_per_s(self) -> float:
        """Payload rate in bytes per second."""
        return self.mbit_per_s * 1e6 / 8 * PAYLOAD

    @property
    def link(self) -> Link:
        """The emulated link for `lockstep`."""
        return Link(self.bytes_per_s, self.delay_s, self.message_s)


@dataclass(frozen=True)
class Computed:
    """The compute time of a worker's step, without the exchange."""

    seconds: float
    steps: int = 0
    """number of steps that were timed; 0 if the seconds were given"""


@dataclass(frozen=True)
class Cost:
    """The mean cost of a step's exchange with one method, as a function of the link rate.

    The time is `code_s + latency_s + serial_bytes / rate`. This is exact if the critical path of
    messages does not depend on the rate, as in all collectives of `gcnzc.exchange`.
    """

    workers: int
    method: str
    sent_bytes: int
    """bytes sent by the worker that sends most"""
    latency_s: float
    """the part of the time that does not depend on the rate: latency and time of messages"""
    serial_bytes: float
    """bytes on the critical path, which are transferred one after another"""
    code_s: float = 0.0
    """time that a worker compresses and decompresses"""
    overlap_share: float = 0.0
    """share of the compute time that overlaps with the exchange"""

    def seconds(self, bytes_per_s: float) -> float:
        """Return the time of the exchange at a payload rate, whether it overlaps or not."""
        return self.code_s + self.latency_s + self.serial_bytes / bytes_per_s

    def waited_s(self, bytes_per_s: float, compute_s: float) -> float:
        """Return the time of the exchange that does not overlap with `compute_s` per step."""
        return max(0.0, self.seconds(bytes_per_s) - self.overlap_share * compute_s)

    def mbit_per_s(self, seconds: float, compute_s: float = 0.0) -> float | None:
        """Return the link rate, in Mbit/s, at which the step waits `seconds` for the exchange.

        Args:
            seconds: the waiting time per step, above 0.
            compute_s: the compute time per step, which may overlap with the exchange.

        Returns:
            The rate including headers; None if latency and compression alone take longer.
        """
        left_s = seconds + self.overlap_share * compute_s - self.latency_s - self.code_s
        return self.serial_bytes / left_s * 8 / 1e6 / PAYLOAD if left_s > 0 else None


def step_cost(model: nn.Module, workers: int, network: Network, name: str) -> Cost:
    """Return the cost of a step's exchange, by running it over emulated links.

    Args:
        model: a model on the host; all its trained parameters have gradients.
        workers: the number of workers, at least 2.
        network: the network between the workers.
        name: the method, a key of `METHODS`.
    """
    models = [_with_gradients(model) for _ in range(workers)]
    link, traffic = network.link, METHODS[name]
    sent = latency_s = serial_bytes = 0.0
    for share, method in traffic.parts:
        whole = method(models, link)
        least_s = max(method(models, replace(link, bytes_per_s=math.inf)).seconds)
        latency_s += share * least_s
        serial_bytes += share * (max(whole.seconds) - least_s) * link.bytes_per_s
        sent += share * max(ledger.bytes_sent for ledger in whole.ledgers)
    code_s = (
        traffic.parts[-1][0] * measure_codec_s(model, workers, traffic.compression)
        if traffic.compression
        else 0.0
    )
    return Cost(workers, name, round(sent), latency_s, serial_bytes, code_s, traffic.overlap_share)


def measure_codec_s(model: nn.Module, workers: int, name: str) -> float:
    """Measure the time that a worker compresses and decompresses all elements, in seconds.

    It is the minimum of several repetitions on this machine.
    """
    codes = compression(name)
    assert isinstance(codes, Codec), f"{name} is a codec"
    values = torch.randn(sum(p.numel() for p in model.parameters() if p.requires_grad))
    error, layout = torch.zeros_like(values), codes.block_layout(len(values), workers)
    rows = torch.zeros(workers, layout.row_bytes, dtype=torch.uint8)
    own = layout.part_layout(0)
    seconds = []
    for step in range(CODEC_REPEATS):
        begin = time.perf_counter()
        codes.encode(values, error, None, layout, rows, (step, 0))
        codes.update_error(values, error, None, layout, rows)
        codes.decode_mean(rows, own, values[: own.num_elements])
        codes.encode(values[: own.num_elements], None, None, own, rows[:1], (step, workers))
        codes.decode(rows, layout, None, values)
        seconds.append(time.perf_counter() - begin)
    return min(seconds)


def step_costs(
    model: nn.Module, workers: Sequence[int], network: Network, advance: Progress | None = None
) -> list[Cost]:
    """Return the cost of every method for each number of workers, ordered by number.

    Args:
        model: see `step_cost`.
        workers: the numbers of workers.
        network: the network between the workers.
        advance: called with the number of finished cases and their total number.
    """
    cases = [(number, name) for number in workers for name in METHODS]
    found = []
    for done, (number, name) in enumerate(cases):
        if advance is not None:
            advance(done, len(cases))
        found.append(step_cost(model, number, network, name))
    return found


def default_method(model: nn.Module, workers: int) -> str:
    """Return the method that `gcnzc train` uses for a model and a number of workers by default."""
    largest = max(gradient_bytes(model).values())
    return f"averaged, {Choices().find_for_size('Sum', largest, workers)}"


def gradient_bytes(model: nn.Module) -> dict[str, int]:
    """Return the bytes of a worker's gradients for each dtype, such as "float32"."""
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
