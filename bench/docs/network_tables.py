"""Tables of collectives, networks and optimizers."""

import statistics
from collections.abc import Iterator, Sequence

from bench.docs.table import Cells, Line, Row, Table, by_key, in_bytes, read, significant, spread
from bench.network.collectives import BUILTIN, MESSAGES
from gcnzc.exchange import collectives

LINKS = {"delay": "1 ms of delay", "slow": "100 Mbit/s", "unlimited": "no limit"}
RATES = (10.0, 100.0, 1000.0)
METHODS = {
    "none": "no exchange until the end",
    "adamw": "AdamW, float32 gradients",
    "adamw bfloat16": "AdamW, bfloat16",
    "adamw int8": "AdamW, int8",
    "onebit-adam": "1-bit Adam, 15 % warm-up",
    "onebit-lamb": "1-bit LAMB, 15 % warm-up",
    "zero-one-adam": "0/1 Adam",
    "local-sgd": "local SGD, 8 local steps",
    "diloco": "DiLoCo, 12 local steps",
    "streaming-diloco": "Streaming DiLoCo, 12 local steps",
    "streaming-diloco fp4": "Streaming DiLoCo, 12 local steps, float4_e3m0",
    "streaming-diloco auto": "Streaming DiLoCo, measured interval",
    "streaming-diloco fp4 auto": "Streaming DiLoCo, measured interval, float4_e3m0",
    "co2": "CO2, 8 local steps",
    "co2 48": "CO2, 48 local steps",
    "co2 auto": "CO2, measured interval",
}
MODELS = {
    "amazon_photo": "96 k parameters, amazon_photo",
    "planted": "19 k parameters, planted",
    "wide": "5.1 M parameters, amazon_photo",
}
# requests whose names have changed since they were recorded
RENAMED = {"Swap": "SendReceive", "Vote": "AllGatherScalar"}


def timed(line: Line) -> bool:
    """Return whether a line has times of a collective; those of local processes are excluded."""
    return line.part == "times" and line.link in LINKS


def collective(row: Row) -> dict[str, object]:
    """Return the columns that identify a collective."""
    sizes = row.of("num_bytes")
    return {
        "network": LINKS[row.link],
        "workers": row.workers,
        "collective": f"`{row.kind}`",
        "sizes": f"{in_bytes(min(sizes))} to {in_bytes(max(sizes))}",
    }


def default_algorithm(kind: str, num_bytes: int) -> str:
    """Return the algorithm of a collective that a rank waits for."""
    return BUILTIN if num_bytes > getattr(collectives, kind).small_bytes else MESSAGES[kind]


def default_lines() -> Iterator[Line]:
    """Yield times of the algorithms that gcnzc uses, relative to the fastest ones and to gloo's."""
    for line in filter(timed, read("collectives")):
        name = default_algorithm(line.kind, line.num_bytes)
        seconds = {each: times.least_s for each, times in line.ways.items()}
        own = seconds.get(name)
        if own is not None:
            of_fastest, of_builtin = own / min(seconds.values()), seconds[BUILTIN] / own
            yield Line(line, default=name, of_fastest=of_fastest, of_builtin=of_builtin)


# the largest size of each range of the table of gains, in bytes
RANGES = (8 << 10, 32 << 10, 256 << 10, 16 << 20)


def gain_lines() -> Iterator[Line]:
    """Yield the gain of each recorded algorithm over gloo's collective, with 8 workers."""
    for line in filter(timed, read("collectives")):
        for name, times in line.ways.items() if line.workers == 8 else ():
            plain, _, piece = name.partition(":")
            builtin = line.ways.get(BUILTIN)
            if name != BUILTIN and builtin is not None and piece in ("", "32768"):
                largest = next(each for each in RANGES if line.num_bytes <= each)
                gain = builtin.median_s / times.median_s
                yield Line(line, algorithm=plain, largest=largest, gain=gain)


@Table(
    gain_lines,
    "kind algorithm largest",
    "bench.network.collectives --workers 8",
    among="link num_bytes time",
    sort=by_key,
)
def gains(x: Row) -> Cells:
    """Gains of all recorded algorithms over gloo's collectives, with 8 workers."""
    smallest = max((each for each in RANGES if each < x.largest), default=0)
    by_link: dict[str, list[float]] = {link: [] for link in LINKS}
    for line in x.lines:
        by_link[line.link].append(line.gain)
    medians = {link: statistics.median(each) for link, each in by_link.items() if each}
    kept = default_algorithm(x.kind, x.largest) == x.algorithm
    return {
        "collective": f"`{x.kind}`",
        "algorithm": x.algorithm,
        "sizes": f"{f'above {in_bytes(smallest)}, ' if smallest else ''}to {in_bytes(x.largest)}",
        **{LINKS[link]: f"{medians[link]:.2f}" if link in medians else "" for link in LINKS},
        "median of the networks": f"{statistics.median(medians.values()):.2f}",
        "used": "yes" if kept else "",
    }


@Table(
    default_lines,
    "link workers kind",
    "bench.network.collectives",
    among="num_bytes",
    sort=by_key,
)
def default_collectives(x: Row) -> Cells:
    """Default algorithms, relative to the fastest ones and to gloo's."""
    gains = x.of("of_builtin")
    slowest = max(x.lines, key=lambda line: line.of_fastest)
    size = in_bytes(slowest.num_bytes)
    return {
        **collective(x),
        "median speed-up over gloo's": f"{statistics.median(gains):.2f}",
        "range": f"{min(gains):.2f} to {max(gains):.2f}",
        "median time, relative to the fastest": f"{x.median('of_fastest'):.2f}",
        "largest": f"{slowest.of_fastest:.2f} ({slowest.default}, {size})",
    }


def least_and_median(x: Row, algorithms: Sequence[str]) -> dict[str, object]:
    """Return the least and median milliseconds of a collective by algorithm."""
    times = {name: x.ways.get(name) for name in algorithms}
    return {
        "size": in_bytes(x.num_bytes),
        **{
            name: each and f"{significant(1e3 * each.least_s)} / {significant(1e3 * each.median_s)}"
            for name, each in times.items()
        },
        "default": default_algorithm(x.kind, x.num_bytes),
    }


@Table(
    "collectives",
    "num_bytes",
    "bench.network.collectives --workers 8 --links delay --kinds Sum",
    where=lambda x: timed(x) and (x.link, x.workers, x.kind) == ("delay", 8, "Sum"),
    sort=by_key,
)
def sums_with_delay(x: Row) -> Cells:
    """Times of an all-reduce of 8 workers with delay."""
    return least_and_median(x, ("builtin", "doubling", "halving", "ring"))


@Table(
    "collectives",
    "num_bytes",
    "bench.network.collectives --workers 8 --links slow --kinds Broadcast",
    where=lambda x: timed(x) and (x.link, x.workers, x.kind) == ("slow", 8, "Broadcast"),
    sort=by_key,
)
def slow_broadcasts(x: Row) -> Cells:
    """Times of a broadcast to 8 workers over slow links."""
    chains = (f"chain:{size}" for size in (8192, 16384, 32768))
    return least_and_median(x, ("builtin", "binomial", *chains))


def small_sum_lines() -> Iterator[Line]:
    """Yield the times of small all-reduces with delay, in the last three runs of each size."""
    runs: dict[int, list[Line]] = {}
    for line in filter(timed, read("collectives")):
        case = line.link, line.workers, line.kind
        if case == ("delay", 8, "Sum") and 64 <= line.num_bytes <= 4096:
            builtin, doubling = (line.ways[name].median_s for name in ("builtin", "doubling"))
            line.update(builtin=builtin, doubling=doubling, ratio=builtin / doubling)
            runs.setdefault(line.num_bytes, []).append(line)
    for lines in runs.values():
        yield from (Line(line, run=number) for number, line in enumerate(lines[-3:]))


@Table(
    small_sum_lines,
    "num_bytes",
    "bench.network.collectives --workers 8 --links delay --kinds Sum "
    "--least-bytes 64 --most-bytes 4096",
    among="run",
    sort=by_key,
)
def small_sums(x: Row) -> Cells:
    """Small all-reduces of 8 workers with delay, in the last three runs."""
    return {
        "size": in_bytes(x.num_bytes),
        "builtin, ms": significant(x.median("builtin", 1e3)),
        "doubling, ms": significant(x.median("doubling", 1e3)),
        "ratio in each run": " / ".join(f"{each:.2f}" for each in x.of("ratio")),
        "median": f"{x.median('ratio'):.2f}",
    }


@Table(
    "collectives",
    "request algorithm",
    "bench.network.collectives --bytes",
    where=lambda x: x.part == "bytes" and x.workers == 8,
)
def counted_bytes(x: Row) -> Cells:
    """Bytes sent, counted by the ledger and by network interfaces."""
    is_equal = x.ledger_bytes == x.formula_bytes and x.same_on_each
    return {
        "request": f"`{RENAMED.get(x.request, x.request)}`",
        "algorithm": x.algorithm,
        "ledger, bytes": f"{x.ledger_bytes:,.0f}",
        "equal to the formula": "yes" if is_equal else "no",
        "interfaces": f"{100 * (x.wire_of_ledger - 1):+.1f} %",
        "without frame headers": f"{100 * (x.tcp_payload_of_ledger - 1):+.2f} %",
    }


@Table(
    lambda: [Line(x, pairs=tuple(x.links.items())) for x in read("cluster") if "link" in x],
    "mbit_per_s delay_ms pairs link",
    "bench.network.cluster --workers 8 --measure --record",
)
def emulated_links(x: Row) -> Cells:
    """Measured rates and delays of emulated links."""
    requested = [] if x.mbit_per_s is None else [f"{x.mbit_per_s:g} Mbit/s"]
    requested += [f"{x.delay_ms:g} ms"] if x.delay_ms else []
    requested += [
        f"{mbit:g} Mbit/s for {'this' if pair == x.link else 'another'} pair"
        for pair, mbit in x.pairs
    ]
    return {
        "requested": ", ".join(requested) or "no limit",
        "round trip, ms": significant(x.measured_round_trip_ms),
        "payload of one TCP stream, Mbit/s": significant(x.measured_mbit_per_s),
    }


@Table(
    "validation",
    "workers mbit_per_s delay_ms kind algorithm num_bytes",
    "bench.network.validate",
)
def validation(x: Row) -> Cells:
    """Collectives over emulated machines and in the simulator."""
    return {
        "workers": x.workers,
        "links": f"{x.mbit_per_s:g} Mbit/s",
        "collective": f"`{x.kind}`",
        "algorithm": x.algorithm,
        "bytes": f"{x.num_bytes:,}",
        "measured, ms": significant(1e3 * x.measured_s),
        "least, ms": significant(1e3 * x.least_s),
        "simulated, ms": significant(1e3 * x.tcp_s),
        "measured / simulated": f"{x.measured_of_tcp:.2f}",
        "least / simulated": f"{x.least_s / x.tcp_s:.2f}",
        "measured / simulated, ideal links": f"{x.measured_of_ideal:.2f}",
        "without limits, ms": significant(1e3 * x.machine_s),
    }


@Table(
    "strategies",
    "case method",
    "bench.network.strategies speed",
    among="mbit_per_s",
    where=lambda x: x.part == "speed",
    rows={(case, method): name for case in MODELS for method, name in METHODS.items()},
)
def optimizer_speed(x: Row) -> Cells:
    """Throughput of each method over links of three rates."""
    return {
        "model": MODELS[x.case],
        "method": x.title,
        **x.across(
            "mbit_per_s",
            "seed nodes/s at {:g} Mbit/s",
            lambda x: significant(x.seeds_per_s, 4),
            RATES,
        ),
    }


@Table(
    "strategies",
    "method",
    "bench.network.strategies accuracy",
    among="case",
    where=lambda x: x.part == "accuracy",
    rows=METHODS,
)
def optimizer_accuracy(x: Row) -> Cells:
    """Test accuracy of each method, and the bytes that a worker sent."""
    cells: dict[str, object] = {"method": x.title}
    for case, model in MODELS.items():
        line = x.at(case=case)
        cells[f"{model}: test, %"] = line and spread(line)
        cells[f"{model}: MB sent by a worker"] = line and significant(line.bytes_sent[-1] / 1e6)
    return cells


@Table(
    "deepspeed_peer",
    "optimizer seed",
    "bench.network.deepspeed_peer --peer FOLDER",
    sort=by_key,
)
def deepspeed(x: Row) -> Cells:
    """Differences from DeepSpeed's optimizers."""
    return {
        f"optimizer of DeepSpeed {x.deepspeed}": f"`{x.optimizer}`",
        "seed": x.seed,
        "bit-identical steps": f"{x.equal_steps} of {x.steps}",
        "largest difference of a parameter": f"{x.largest_difference:.2g}",
    }
