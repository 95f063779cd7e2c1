"""What a step of training costs when several workers take it together, and how many should.

A step is what a worker computes, which is measured or given, and then the exchange. The algorithms
of the exchange run here for all workers, on gradients as large as the model's, under the virtual
clock of `lockstep`; so messages, bytes and who waits for whom are counted, not guessed.

This is about the network between workers; `gcnzc.plan` is about how a device gathers rows.

Letters: W workers.
"""

import copy
import math
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, TypeAlias

import torch
from torch import nn

from gcnzc.compress import Place, compression
from gcnzc.compress.two_stage import Codes
from gcnzc.config import PlanConfig, TrainConfig
from gcnzc.data import Dataset
from gcnzc.exchange import Choices, Group, Link, Outcome, lockstep
from gcnzc.exchange.choices import ALGORITHMS
from gcnzc.flat import by_kind
from gcnzc.loader import Loader
from gcnzc.memory import check_memory, footprint_of
from gcnzc.optim.averaged import Gradients
from gcnzc.optim.defaults import LOCAL
from gcnzc.picture import StepTimes
from gcnzc.stages import build_optimizer, choose_device, feature_table
from gcnzc.streams import clock_of
from gcnzc.tasks import build_task
from gcnzc.timeline import Stage

Line: TypeAlias = dict[str, Any]
Progress: TypeAlias = Callable[[int, int], object]
# one step's exchange of models that are alike, over a link
Method: TypeAlias = Callable[[Sequence[nn.Module], Link], Outcome]

# What TCP with time stamps leaves for the payload of full Ethernet frames, where as much comes as
# goes: every second frame that comes is acknowledged, by 66 B.
PAYLOAD = 1448 / (1514 + 66 / 2)
SHARE = 0.1  # of a step that exchange may take before its bandwidth is called too small
AS_GOOD = 0.95  # of the most seeds a second: fewer workers that reach it are as good
SIGNALS = 2  # that `gcnzc train` sends with its gradients: to stop, and to save
WARM_UP = 3  # steps that compile, and fill the loader's memory
CODED = 5  # times that codes are made to be timed
DRAWN = (0.1, 100.0, 31)  # rates of a picture: from and to these times the one asked for, how many
# what must be the same in the run that is planned
SAME = ("model", "task", "fanouts", "batch_size", "hidden", "layers", "heads", "device", "threads")


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
            size, Place(rank, len(models), torch.device("cpu"), torch.float32)
        )
        for rank, size in enumerate(sizes)
    ]
    notes = 1 + SIGNALS
    vectors = [torch.zeros(size + notes) for size in sizes]
    return lockstep(
        [each.mean(vector, notes) for each, vector in zip(reducers, vectors, strict=True)], link
    )


@dataclass(frozen=True)
class Way:
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


WARMUP = float(TrainConfig.warmup)  # share of the steps of a run
# by the names of `gcnzc train --optimizer`, with the options that are usual
METHODS: dict[str, Way] = {
    **{
        f"averaged, {name}": Way(((1.0, partial(averaged, name=name)),))
        for name in ALGORITHMS["Sum"]
    },
    **{
        name: Way(((WARMUP, _usual("float32")), (1 - WARMUP, _usual("sign"))), "sign")
        for name in ("onebit-adam", "onebit-lamb")
    },
    "local-sgd": Way(((_every("local-sgd"), _usual("float32")),)),
    "diloco": Way(((_every("diloco"), _usual("float32")),)),
    "co2": Way(((_every("co2"), _usual("float32")),), behind=1.0),
    # each fragment hides behind one step
    "streaming-diloco": Way(
        ((_every("streaming-diloco"), _usual("float32")),),
        behind=int(TrainConfig.fragments) * _every("streaming-diloco"),
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
    assert isinstance(codes, Codes), f"{words} are codes"
    values = torch.randn(sum(p.numel() for p in model.parameters() if p.requires_grad))
    error, cut = torch.zeros_like(values), codes.cut(len(values), workers)
    rows = torch.zeros(workers, cut.row_bytes, dtype=torch.uint8)
    own = cut.of_part(0)
    seconds = []
    for step in range(CODED):
        begin = time.perf_counter()
        codes.encode(values, error, None, cut, rows, (step, 0))
        codes.settle(values, error, None, cut, rows)
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


def line_of(cost: Cost, computed: Computed, network: Network) -> Line:
    """The figures of one method, as they are printed; JSON can hold them.

    `speed_up` is how many times the seeds of one worker all take in the same time, each with
    minibatches as large as that one's. Rates are None where latency alone takes too long.
    """
    exchange_s = cost.seconds(network.bytes_per_s)
    waited_s = cost.waited_s(network.bytes_per_s, computed.seconds)
    step_s = computed.seconds + waited_s
    easy_s = computed.seconds * SHARE / (1 - SHARE)
    return {
        "workers": cost.workers,
        "method": cost.method,
        "mbit_per_s": network.mbit_per_s,
        "delay_s": network.delay_s,
        "message_s": network.message_s,
        "compute_s": computed.seconds,
        "exchange_s": exchange_s,
        "latency_s": cost.latency_s,
        "code_s": cost.code_s,
        "waited_s": waited_s,
        "step_s": step_s,
        "exchange_share": waited_s / step_s,
        "sent_bytes": cost.sent_bytes,
        "speed_up": cost.workers * computed.seconds / step_s,
        "even_mbit_per_s": cost.mbit_per_s((cost.workers - 1) * computed.seconds, computed.seconds),
        "easy_mbit_per_s": cost.mbit_per_s(easy_s, computed.seconds),
    }


def advice(lines: Sequence[Line], usual: str) -> Line:
    """Which of the lines to choose, and why, as it is printed.

    The most seeds a second win. Fewer workers that reach `AS_GOOD` of that are as good, and so is
    the usual method; one worker wins if no others take more seeds than it does.

    Args:
        lines: of `line_of`, at least one.
        usual: the method that training takes unless it is told another.
    """
    most = max(lines, key=lambda line: line["speed_up"])
    if most["speed_up"] <= 1:
        rate = most["even_mbit_per_s"]
        needs = "no bandwidth helps, as delays and messages take longer"
        if rate is not None:
            needs = f"links of more than {rounded(rate)} Mbit/s would change that"
        why = (
            f"one worker is faster: {most['workers']} workers reach {most['speed_up']:.2f} times "
            f"its seeds a second, since {most['exchange_share']:.0%} of a step is exchange; {needs}"
        )
        return {"choose_workers": 1, "choose_method": None, "speed_up": 1.0, "why": why}
    good = [line for line in lines if line["speed_up"] >= AS_GOOD * most["speed_up"]]
    fewest = min(line["workers"] for line in good)
    mine = [line for line in good if line["workers"] == fewest]
    best = max(mine, key=lambda line: line["speed_up"])
    chosen = next((line for line in mine if line["method"] == usual), best)
    return {
        "choose_workers": chosen["workers"],
        "choose_method": chosen["method"],
        "speed_up": chosen["speed_up"],
        "why": _why(chosen, most),
    }


def _why(chosen: Line, most: Line) -> str:
    exchange_s, latency_s = chosen["exchange_s"], chosen["latency_s"]
    words = (
        f"{chosen['workers']} workers, {chosen['method']}: {chosen['speed_up']:.2f} times the seeds"
        " a second of one worker"
    )
    if chosen["workers"] != most["workers"]:
        words += f", and {most['workers']} workers reach no more than {most['speed_up']:.2f} times"
    words += f"; {chosen['exchange_share']:.0%} of a step is exchange"
    if chosen["exchange_share"] <= SHARE:
        return f"{words}, so more bandwidth would bring little"
    if latency_s > exchange_s / 2:
        return f"{words}, most of it for delays and messages, which no bandwidth makes shorter"
    easy = chosen["easy_mbit_per_s"]
    if easy is None:
        return f"{words}, most of it for bytes"
    return f"{words}, most of it for bytes: {rounded(easy)} Mbit/s would bring it to {SHARE:.0%}"


def measured(config: PlanConfig, data: Dataset, advance: Progress | None = None) -> Computed:
    """Train for some steps as one worker would, and return what a step takes; the median counts.

    Args:
        config: of the plan.
        data: its graph.
        advance: told how far it is.

    Raises:
        ValueError: the graph does not fit the options.
    """
    options = run_config(config)
    device = choose_device(config.device)
    task = build_task(options, data)
    now = clock_of(device)
    stages: list[Stage] = []
    with (
        _threads(config.threads),
        torch.random.fork_rng(range(torch.cuda.device_count())),
        feature_table(data, options.features, device, Group()) as table,
    ):
        torch.manual_seed(config.seed)
        model = task.model().to(device)
        optimizer = build_optimizer(options, model)
        loader = Loader(
            data.graph,
            table,
            task.seeds,
            list(config.fanouts),
            config.batch_size,
            labels=task.labels,
            device=device,
            seed=config.seed,
            sampler=task.sampler,
            threads=config.threads or None,
            in_degrees=config.model == "gcn",
        )
        most = WARM_UP + config.steps
        model.train()
        while len(stages) < most:
            # from the end of one step to that of the next: waiting for a batch is part of it
            began = now()
            for batch in loader:
                assert batch.y is not None, "the loader or its sampler has labels"
                optimizer.zero_grad(set_to_none=True)
                task.loss(task.logits(model, batch), batch.y).backward()
                optimizer.step()
                ended = now()
                stages.append(Stage("step", "model", began, ended))
                began = ended
                if advance is not None:
                    advance(len(stages), most)
                if len(stages) == most:
                    break
        seconds = [stage.seconds() for stage in stages[WARM_UP:]]
    return Computed(statistics.median(seconds), len(seconds))


def run_config(config: PlanConfig) -> TrainConfig:
    """The options of the run that is planned."""
    same = {name: getattr(config, name) for name in SAME}
    return TrainConfig(data=config.data, seed=config.seed, **same)


def model_of(config: PlanConfig, data: Dataset) -> nn.Module:
    """The model of the run, on the host; torch's generators are left alone.

    Raises:
        ValueError: the graph has no features, or nothing to learn.
    """
    with (
        feature_table(data, "host", torch.device("cpu"), Group()) as table,
        torch.random.fork_rng([]),
    ):
        planned = run_config(config)
        task = build_task(planned, data)
        sizes = (data.graph.num_nodes, table.num_columns, len(task.seeds))
        check_memory(footprint_of(planned, task.model, *sizes), torch.device("cpu"), Group())
        return task.model()


def network_of(config: PlanConfig) -> Network:
    """The links that the options tell."""
    return Network(config.mbit_per_s, config.delay_ms / 1e3, config.message_us / 1e6)


def usual_method(model: nn.Module) -> str:
    """The method that `gcnzc train` takes for a model, unless it is told another."""
    largest = max(gradient_bytes(model).values())
    return f"averaged, {Choices().name_of('Sum', largest)}"


def gradient_bytes(model: nn.Module) -> dict[str, int]:
    """The bytes of a worker's gradient, by dtype."""
    named = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
    sizes: dict[str, int] = {}
    for kind in by_kind(named):
        dtype = str(kind[0][1].dtype).removeprefix("torch.")
        sizes[dtype] = sizes.get(dtype, 0) + sum(p.numel() * p.element_size() for _, p in kind)
    return sizes


def table_of(lines: Sequence[Line], usual: str) -> list[str]:
    """The lines for people: a heading, and a row for each."""
    heads = [
        "workers",
        "method",
        "exchange",
        "step",
        "share",
        "sent",
        "speed-up",
        f"{SHARE:.0%} at",
    ]
    rows = [heads]
    for line in lines:
        easy = line["easy_mbit_per_s"]
        rows.append(
            [
                str(line["workers"]),
                line["method"] + (" *" if line["method"] == usual else ""),
                told(line["exchange_s"]),
                told(line["step_s"]),
                f"{line['exchange_share']:.0%}",
                f"{rounded(line['sent_bytes'] / 1e6)} MB",
                f"{line['speed_up']:.2f}",
                "no rate" if easy is None else f"{rounded(easy)} Mbit/s",
            ]
        )
    widths = [max(len(row[place]) for row in rows) for place in range(len(heads))]
    # words to the left, figures to the right
    return [
        "  ".join(
            cell.ljust(width) if place == 1 else cell.rjust(width)
            for place, (cell, width) in enumerate(zip(row, widths, strict=True))
        )
        for row in rows
    ]


def told(seconds: float) -> str:
    """Seconds for people."""
    return f"{rounded(seconds)} s" if seconds >= 1 else f"{rounded(seconds * 1e3)} ms"


def rounded(value: float) -> str:
    """Three digits for people."""
    return f"{float(f'{value:.3g}'):,g}"


def drawn(costs: Sequence[Cost], computed: Computed, network: Network, name: str) -> StepTimes:
    """What `gcnzc.picture.step_times` draws: seconds of a step by the rate of the links."""
    first, last, count = DRAWN
    step = (last / first) ** (1 / (count - 1))
    rates = [network.mbit_per_s * first * step**number for number in range(count)]
    curves: dict[int, dict[str, list[tuple[float, float]]]] = {}
    for cost in costs:
        points = [
            (
                rate,
                computed.seconds
                + cost.waited_s(replace(network, mbit_per_s=rate).bytes_per_s, computed.seconds),
            )
            for rate in rates
        ]
        curves.setdefault(cost.workers, {})[cost.method] = points
    return StepTimes(name, dict.fromkeys(curves, computed.seconds), curves, {}, network.mbit_per_s)


def sums(model: nn.Module, computed: Computed, network: Network) -> list[str]:
    """What the table rests on, in sentences."""
    sizes = gradient_bytes(model)
    parts = " and ".join(f"{rounded(size / 1e6)} MB of {dtype}" for dtype, size in sizes.items())
    how = f"the median of {computed.steps} that were measured" if computed.steps else "as given"
    return [
        f"{sum(p.numel() for p in model.parameters()):,} parameters; a gradient is {parts}",
        f"a step without exchange takes {told(computed.seconds)}, {how}",
        f"links of {network.mbit_per_s:g} Mbit/s with {told(network.delay_s)} of delay and "
        f"{told(network.message_s)} a message",
    ]


def found_by(config: PlanConfig, computed: Computed, model: nn.Module) -> Line:
    """What all lines have in common."""
    return {
        "data": str(config.data),
        **{name: getattr(config, name) for name in SAME},
        "parameters": sum(p.numel() for p in model.parameters()),
        "gradient_bytes": gradient_bytes(model),
        "measured_steps": computed.steps,
    }


def _with_gradients(model: nn.Module) -> nn.Module:
    copied = copy.deepcopy(model)
    for parameter in copied.parameters():
        if parameter.requires_grad:
            parameter.grad = torch.zeros_like(parameter)
    return copied


@contextmanager
def _threads(number: int) -> Iterator[None]:
    """So many threads of torch, for the length of a `with`; 0 leaves them."""
    before = torch.get_num_threads()
    torch.set_num_threads(number or before)
    try:
        yield
    finally:
        torch.set_num_threads(before)
