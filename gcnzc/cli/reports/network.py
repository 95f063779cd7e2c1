"""Format the predicted cost of each method: a table, a recommendation, and points to draw."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, TypeAlias

from torch import nn

from gcnzc.cli.plots import StepTimes
from gcnzc.cli.reports.tables import align_columns
from gcnzc.optim.cost import Computed, Cost, Network, gradient_bytes

Line: TypeAlias = dict[str, Any]


SHARE = 0.1  # the largest fraction of a step that the exchange takes with enough bandwidth


AS_GOOD = 0.95  # share of the highest throughput that counts as equal to it


DRAWN = (0.1, 100.0, 31)  # rates to draw: first and last, as factors of --mbit-per-s; their number


def line_of(cost: Cost, computed: Computed, network: Network) -> Line:
    """Return the figures of one method as an entry of the JSON line.

    `speed_up` is the throughput of all workers, in seeds per second, divided by that of one worker
    with minibatches of the same size. `even_mbit_per_s` is the bandwidth at which both are equal,
    `easy_mbit_per_s` the one at which the exchange takes `SHARE` of a step; they are None if
    latency alone takes longer.
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


def advice(lines: Sequence[Line], defaults: Mapping[int, str]) -> Line:
    """Recommend a number of workers and a method, as an entry of the JSON line.

    It is the one with the highest throughput. Fewer workers, and then the default method, are
    preferred if they reach `AS_GOOD` of it; one worker is preferred if no others are faster.

    Args:
        lines: from `line_of`, at least one.
        defaults: by number of workers, the method that `gcnzc train` uses by default.
    """
    most = max(lines, key=lambda line: line["speed_up"])
    if most["speed_up"] <= 1:
        rate = most["even_mbit_per_s"]
        needs = "no bandwidth is enough, because latency and message overhead take longer"
        if rate is not None:
            needs = f"links of more than {format_number(rate)} Mbit/s would change that"
        why = (
            f"one worker is faster: {most['workers']} workers reach {most['speed_up']:.2f} times "
            f"its seeds per second, since {most['exchange_share']:.0%} of a step is exchange; "
            f"{needs}"
        )
        return {"choose_workers": 1, "choose_method": None, "speed_up": 1.0, "why": why}
    good = [line for line in lines if line["speed_up"] >= AS_GOOD * most["speed_up"]]
    fewest = min(line["workers"] for line in good)
    candidates = [line for line in good if line["workers"] == fewest]
    best = max(candidates, key=lambda line: line["speed_up"])
    chosen = next((line for line in candidates if line["method"] == defaults[fewest]), best)
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
        " per second of one worker"
    )
    if chosen["workers"] != most["workers"]:
        words += f", and {most['workers']} workers reach no more than {most['speed_up']:.2f} times"
    words += f"; {chosen['exchange_share']:.0%} of a step is exchange"
    if chosen["exchange_share"] <= SHARE:
        return f"{words}, so more bandwidth would help little"
    if latency_s > exchange_s / 2:
        return f"{words}, most of it latency and message overhead, which bandwidth does not reduce"
    easy = chosen["easy_mbit_per_s"]
    if easy is None:
        return f"{words}, most of it transfer"
    rate = format_number(easy)
    return f"{words}, most of it transfer: {rate} Mbit/s would reduce it to {SHARE:.0%}"


def format_table(lines: Sequence[Line], defaults: Mapping[int, str]) -> list[str]:
    """Format the figures of all methods as a table, with * for the default methods."""
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
                line["method"] + (" *" if line["method"] == defaults[line["workers"]] else ""),
                format_seconds(line["exchange_s"]),
                format_seconds(line["step_s"]),
                f"{line['exchange_share']:.0%}",
                f"{format_number(line['sent_bytes'] / 1e6)} MB",
                f"{line['speed_up']:.2f}",
                "no rate" if easy is None else f"{format_number(easy)} Mbit/s",
            ]
        )
    return align_columns(rows, left=(1,))


def format_seconds(seconds: float) -> str:
    """Format a time in seconds, or in milliseconds below one second."""
    return f"{format_number(seconds)} s" if seconds >= 1 else f"{format_number(seconds * 1e3)} ms"


def format_number(value: float) -> str:
    """Format a number with three significant digits."""
    return f"{float(f'{value:.3g}'):,g}"


def step_time_points(
    costs: Sequence[Cost], computed: Computed, network: Network, name: str
) -> StepTimes:
    """Compute what `gcnzc.cli.plots.step_times` draws: seconds per step by bandwidth."""
    first, last, count = DRAWN
    step = (last / first) ** (1 / (count - 1))
    rates = [network.mbit_per_s * first * step**index for index in range(count)]
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


def describe_inputs(model: nn.Module, computed: Computed, network: Network) -> list[str]:
    """Describe the model, the step and the network that the table is for."""
    sizes = gradient_bytes(model)
    parts = " and ".join(
        f"{format_number(size / 1e6)} MB of {dtype}" for dtype, size in sizes.items()
    )
    how = f"the median of {computed.steps} measured steps" if computed.steps else "from --step-s"
    return [
        f"{sum(p.numel() for p in model.parameters()):,} parameters; the gradients are {parts}",
        f"a step without exchange takes {format_seconds(computed.seconds)}, {how}",
        f"network: {network.mbit_per_s:g} Mbit/s, {format_seconds(network.delay_s)} of latency, "
        f"{format_seconds(network.message_s)} of overhead per message",
    ]
