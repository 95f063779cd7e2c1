"""Tables, advice and figures of the predicted cost of each method."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, TypeAlias

from torch import nn

from gcnzc.cli.plots import StepTimes
from gcnzc.optim.cost import Computed, Cost, Network, gradient_bytes

Line: TypeAlias = dict[str, Any]


SHARE = 0.1  # of a step that exchange may take before its bandwidth is called too small


AS_GOOD = 0.95  # of the most seeds a second: fewer workers that reach it are as good


DRAWN = (0.1, 100.0, 31)  # rates of a picture: from and to these times the one asked for, how many


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
    """What `gcnzc.cli.plots.step_times` draws: seconds of a step by the rate of the links."""
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
