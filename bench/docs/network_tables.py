"""Compute the documentation's tables about networks and optimizers.

They are registered in `bench/docs/result_tables.py`.
"""

import statistics

from bench.docs.result_tables import (
    Line,
    markdown,
    newest,
    read,
    significant,
    spread,
    table,
    with_caption,
)
from gcnzc.exchange.algorithms import default_algorithm
from gcnzc.exchange.collectives import COLLECTIVES
from gcnzc.exchange.collectives.broadcast import CHAIN, PIECE_BYTES
from gcnzc.exchange.requests import BUILTIN


@table
def emulated_links() -> str:
    """Return the table of measured rates and delays of emulated links."""
    lines = newest(
        [
            line | {"pairs": tuple(line["links"].items())}
            for line in read("cluster")
            if "link" in line
        ],
        "mbit_per_s",
        "delay_ms",
        "pairs",
        "link",
    )
    rows = []
    for line in lines.values():
        rate = line["mbit_per_s"]
        requested = [] if rate is None else [f"{rate:g} Mbit/s"]
        requested += [f"{line['delay_ms']:g} ms"] if line["delay_ms"] else []
        requested += [
            f"{mbit:g} Mbit/s for {'this' if pair == line['link'] else 'another'} pair"
            for pair, mbit in line["links"].items()
        ]
        shown = (significant(line[f"measured_{key}"]) for key in ("round_trip_ms", "mbit_per_s"))
        rows.append([", ".join(requested) or "no limit", *shown])
    heads = ["requested", "round trip, ms", "payload of one TCP stream, Mbit/s"]
    command = "python -m bench.network.cluster --workers 8 --measure --record"
    return with_caption(markdown(heads, rows), lines.values(), command)


@table
def validation() -> str:
    """Return the table of collectives over emulated machines and in the simulator."""
    lines = newest(
        read("validation"), "workers", "mbit_per_s", "delay_ms", "kind", "algorithm", "num_bytes"
    )
    rows = []
    for line in lines.values():
        rows.append(
            [
                line["workers"],
                f"{line['mbit_per_s']:g} Mbit/s",
                f"`{line['kind']}`",
                line["algorithm"],
                f"{line['num_bytes']:,}",
                *(significant(1e3 * line[name]) for name in ("measured_s", "least_s", "tcp_s")),
                f"{line['measured_of_tcp']:.2f}",
                f"{line['least_s'] / line['tcp_s']:.2f}",
                f"{line['measured_of_ideal']:.2f}",
                significant(1e3 * line["machine_s"]),
            ]
        )
    heads = [
        "workers",
        "links",
        "collective",
        "algorithm",
        "bytes",
        "measured, ms",
        "least, ms",
        "simulated, ms",
        "measured / simulated",
        "least / simulated",
        "measured / simulated, ideal links",
        "without limits, ms",
    ]
    return with_caption(markdown(heads, rows), lines.values(), "python -m bench.network.validate")


@table
def workers() -> str:
    """Return the tables of throughput and accuracy by number of workers."""
    speeds = newest(
        [line for line in read("workers") if line["part"] == "speed"], "workers", "nodes"
    )
    rows = [
        [
            count,
            f"{nodes:,}",
            f"{line['seeds_per_s']:,.0f}",
            f"{line['seeds_per_s_without_exchange']:,.0f}",
        ]
        for (count, nodes), line in sorted(speeds.items())
    ]
    heads = ["workers", "nodes of the graph", "seed nodes/s", "seed nodes/s without exchange"]
    first = with_caption(
        markdown(heads, rows), speeds.values(), "python -m bench.training.workers speed"
    )
    scores = newest(
        [line for line in read("workers") if line["part"] == "accuracy"], "graph", "workers"
    )
    rows = [
        [graph, count, line["total_batch"], spread(line)]
        for (graph, count), line in sorted(scores.items())
    ]
    heads = ["graph", "workers", "seeds of a step, all workers", "test, %"]
    return (
        first
        + "\n"
        + with_caption(
            markdown(heads, rows), scores.values(), "python -m bench.training.workers accuracy"
        )
    )


LINKS = {"delay": "1 ms of delay", "slow": "100 Mbit/s", "unlimited": "no limit"}


def timed_collectives() -> dict[tuple[str, int, str, int], Line]:
    """Return the newest times by link, number of workers, collective and size.

    Times of local processes (`--links here`) are excluded.
    """
    lines = [
        line for line in read("collectives") if line["part"] == "times" and line["link"] in LINKS
    ]
    return newest(lines, "link", "workers", "kind", "num_bytes")


@table
def collectives() -> str:
    """Return the table of the speed-ups of tuned algorithms over gloo's."""
    lines = timed_collectives()
    rows = []
    for link, count, kind in sorted({key[:3] for key in lines}):
        selected = {key[3]: line for key, line in lines.items() if key[:3] == (link, count, kind)}
        gains = {
            num_bytes: (1 / line["tuned_of_builtin"], line["tuned"])
            for num_bytes, line in selected.items()
        }
        low, high = (
            min(gains, key=lambda size: gains[size][0]),
            max(gains, key=lambda size: gains[size][0]),
        )
        shown = (
            f"{gains[size][0]:.2f} ({gains[size][1]}, {in_bytes(size)})" for size in (high, low)
        )
        middle = sorted(gain for gain, _ in gains.values())[len(gains) // 2]
        rows.append(
            [
                LINKS[link],
                count,
                f"`{kind}`",
                f"{in_bytes(min(selected))} to {in_bytes(max(selected))}",
                *shown,
                f"{middle:.2f}",
            ]
        )
    heads = [
        "network",
        "workers",
        "collective",
        "sizes",
        "largest speed-up",
        "smallest speed-up",
        "median speed-up",
    ]
    return with_caption(
        markdown(heads, rows), lines.values(), "python -m bench.network.collectives"
    )


@table
def default_collectives() -> str:
    """Return the table of the default algorithms, relative to the fastest ones and to gloo's."""
    lines = timed_collectives()
    rows, used = [], []
    for link, count, kind in sorted({key[:3] for key in lines}):
        if not COLLECTIVES[kind].critical_paths(1, count):
            continue
        of_fastest, of_builtin = {}, {}
        for (*group, num_bytes), line in lines.items():
            seconds = {name: times["least_s"] for name, times in line["ways"].items()}
            name = default_algorithm(kind, num_bytes, count)
            name = f"{CHAIN}:{PIECE_BYTES}" if name == CHAIN else name
            if group == [link, count, kind] and name in seconds:
                of_fastest[num_bytes] = seconds[name] / min(seconds.values())
                of_builtin[num_bytes] = seconds[BUILTIN] / seconds[name]
                used.append(line)
        slowest = max(of_fastest, key=of_fastest.__getitem__)
        name = default_algorithm(kind, slowest, count)
        rows.append(
            [
                LINKS[link],
                count,
                f"`{kind}`",
                f"{in_bytes(min(of_fastest))} to {in_bytes(max(of_fastest))}",
                f"{statistics.median(of_builtin.values()):.2f}",
                f"{min(of_builtin.values()):.2f} to {max(of_builtin.values()):.2f}",
                f"{statistics.median(of_fastest.values()):.2f}",
                f"{of_fastest[slowest]:.2f} ({name}, {in_bytes(slowest)})",
            ]
        )
    heads = [
        "network",
        "workers",
        "collective",
        "sizes",
        "median speed-up over gloo's",
        "range",
        "median time, relative to the fastest",
        "largest",
    ]
    return with_caption(markdown(heads, rows), used, "python -m bench.network.collectives")


@table
def sums_with_delay() -> str:
    """Return the table of times of an all-reduce of 8 workers with delay."""
    return times_by_size("delay", "Sum", ["builtin", "doubling", "halving", "ring"])


@table
def small_sums() -> str:
    """Return the table of small all-reduces of 8 workers with delay, in the last three runs."""
    runs: dict[int, list[Line]] = {}
    for line in read("collectives"):
        case = line["part"], line.get("link"), line.get("workers"), line.get("kind")
        if case == ("times", "delay", 8, "Sum") and 64 <= line["num_bytes"] <= 4096:
            runs.setdefault(line["num_bytes"], []).append(line)
    rows, shown = [], []
    for num_bytes, lines in sorted(runs.items()):
        last = lines[-3:]
        shown += last
        medians = [
            [line["ways"][name]["median_s"] for line in last] for name in ("builtin", "doubling")
        ]
        ratios = [one / other for one, other in zip(*medians, strict=True)]
        rows.append(
            [
                in_bytes(num_bytes),
                *(significant(1e3 * statistics.median(each)) for each in medians),
                " / ".join(f"{each:.2f}" for each in ratios),
                f"{statistics.median(ratios):.2f}",
            ]
        )
    heads = ["size", "builtin, ms", "doubling, ms", "ratio in each run", "median"]
    sizes = "--least-bytes 64 --most-bytes 4096"
    command = f"python -m bench.network.collectives --workers 8 --links delay --kinds Sum {sizes}"
    return with_caption(markdown(heads, rows), shown, command)


@table
def message_cpu() -> str:
    """Return the table of the CPU time of a message, before and after a change."""
    lines = [line for line in read("collectives") if line["part"] == "cpu"]
    rows = []
    for commit in dict.fromkeys(line["gcnzc_commit"].removesuffix("-dirty") for line in lines):
        for num_bytes in sorted({line["num_bytes"] for line in lines}):
            found = [
                line
                for line in lines
                if line["num_bytes"] == num_bytes and line["gcnzc_commit"].startswith(commit)
            ]
            shown = [
                significant(statistics.median(line[key] for line in found))
                for key in ("torch_us", "gcnzc_us", "share_us", "least_share_us")
            ]
            rows.append([f"`{commit}`", in_bytes(num_bytes), len(found), *shown])
    heads = [
        *("gcnzc", "size", "runs", "torch, µs", "gcnzc, µs", "difference, µs"),
        "difference of least times, µs",
    ]
    command = "python -m bench.network.message_cpu --workers 4 --before FOLDER"
    return with_caption(markdown(heads, rows), lines, command)


@table
def slow_broadcasts() -> str:
    """Return the table of times of a broadcast to 8 workers over slow links."""
    return times_by_size(
        "slow", "Broadcast", ["builtin", "binomial", "chain:8192", "chain:16384", "chain:32768"]
    )


def times_by_size(link: str, kind: str, algorithms: list[str]) -> str:
    """Return the least and median milliseconds of a collective, by size and algorithm."""
    found = {
        key[3]: line for key, line in timed_collectives().items() if key[:3] == (link, 8, kind)
    }
    rows = []
    for num_bytes, line in sorted(found.items()):
        cells: list[object] = [in_bytes(num_bytes)]
        for algorithm in algorithms:
            times = line["ways"].get(algorithm)
            cells.append(
                times
                and " / ".join(significant(1e3 * times[name]) for name in ("least_s", "median_s"))
            )
        rows.append([*cells, line["tuned"]])
    text = markdown(["size", *algorithms, "tuned choice"], rows)
    command = f"python -m bench.network.collectives --workers 8 --links {link} --kinds {kind}"
    return with_caption(text, found.values(), command)


@table
def counted_bytes() -> str:
    """Return the table of bytes sent, counted by the ledger and by network interfaces."""
    lines = newest(
        [line for line in read("collectives") if line["part"] == "bytes" and line["workers"] == 8],
        "request",
        "algorithm",
    )
    rows = [
        [
            f"`{RENAMED.get(request, request)}`",
            algorithm,
            f"{line['ledger_bytes']:,.0f}",
            "yes"
            if line["ledger_bytes"] == line["formula_bytes"] and line["same_on_each"]
            else "no",
            f"{100 * (line['wire_of_ledger'] - 1):+.1f} %",
            f"{100 * (line['tcp_payload_of_ledger'] - 1):+.2f} %",
        ]
        for (request, algorithm), line in lines.items()
    ]
    heads = [
        "request",
        "algorithm",
        "ledger, bytes",
        "equal to the formula",
        "interfaces",
        "without frame headers",
    ]
    return with_caption(
        markdown(heads, rows), lines.values(), "python -m bench.network.collectives --bytes"
    )


def in_bytes(number: int) -> str:
    """Format a size with a binary unit."""
    for unit, size in (("MiB", 2**20), ("KiB", 2**10)):
        if number >= size:
            return f"{number / size:g} {unit}"
    return f"{number} B"


# requests whose names have changed since they were recorded
RENAMED = {"Swap": "SendReceive", "Vote": "AllGatherScalar"}
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


@table
def optimizer_speed() -> str:
    """Return the tables of the throughput of each method over links of three rates."""
    lines = [line for line in read("strategies") if line["part"] == "speed"]
    found = newest(lines, "case", "method", "mbit_per_s")
    parts = []
    for case, title in MODELS.items():
        rows = []
        for method, name in METHODS.items():
            cells = [found.get((case, method, rate)) for rate in RATES]
            if any(cells):
                rows.append(
                    [name, *(line and significant(line["seeds_per_s"], 4) for line in cells)]
                )
        heads = [f"seed nodes/s, {title}", *(f"{rate:g} Mbit/s" for rate in RATES)]
        parts.append(markdown(heads, rows))
    return with_caption(
        "\n".join(parts), found.values(), "python -m bench.network.strategies speed"
    )


@table
def optimizer_accuracy() -> str:
    """Return the table of the test accuracy of each method, and the bytes that a worker sent."""
    found = newest(
        [line for line in read("strategies") if line["part"] == "accuracy"], "case", "method"
    )
    rows = []
    for method, name in METHODS.items():
        cells: list[object] = []
        for case in MODELS:
            line = found.get((case, method))
            cells += (
                [None, None]
                if line is None
                else [spread(line), significant(line["bytes_sent"][-1] / 1e6)]
            )
        if any(cells):
            rows.append([name, *cells])
    heads = ["method"]
    for title in MODELS.values():
        heads += [f"{title}: test, %", "MB sent by a worker"]
    return with_caption(
        markdown(heads, rows), found.values(), "python -m bench.network.strategies accuracy"
    )


@table
def defaults() -> str:
    """Return the table of short runs with the default options."""
    lines = newest(read("defaults"), "task", "method", "defaults")
    tasks = {
        "digits": "digits, %",
        "characters": "characters, bits (lower is better)",
        "planted": "planted, %",
    }
    rows = []
    for method in dict.fromkeys(method for _, method, _ in lines):
        for options, title in (("now", "not given"), ("now, length given", "given")):
            cells = [lines.get((task, method, options)) for task in tasks]
            if None in cells:
                continue
            shares = []
            for task, line in zip(tasks, cells, strict=True):
                of_adamw = lines[task, "adamw", "now"]["last_bytes_sent"]
                shares.append(f"{100 * (line or {})['last_bytes_sent'] / of_adamw:.0f}")
            shown = (spread(line or {}, "score", "spread") for line in cells)
            rows.append([METHODS[method].split(",")[0], title, *shown, " / ".join(shares)])
    first = next(iter(lines.values()))
    heads = [
        "method",
        "`total_steps`",
        *tasks.values(),
        f"bytes in the last {first['last_steps']} steps, % of AdamW's",
    ]
    return with_caption(markdown(heads, rows), lines.values(), first["command"])


@table
def traffic() -> str:
    """Return the table of the factors by which methods reduce the bytes sent."""
    titles = {
        "stage": "a step after the warm-up, compared with float32 gradients",
        "run": "100 steps, 15 of them warm-up in float16, compared with float16 gradients",
        "streaming": "100 local steps, float4_e3m0, compared with bfloat16 gradients",
    }
    lines = [
        line for line in read("traffic") if line["times_fewer"] != 1 and line["part"] != "methods"
    ]
    sizes = sorted({line["elements"] for line in lines})
    for line in lines:
        line["fragments"] = line.get("fragments")
    found = newest(lines, "part", "way", "fragments", "elements")
    rows = []
    for part, method, fragments in dict.fromkeys(key[:3] for key in found):
        cells = [found.get((part, method, fragments, size)) for size in sizes]
        shown = [
            line and f"{line['times_fewer']:.3g} ({line['times_fewer_by_ledger']:.3g})"
            for line in cells
        ]
        more = f", {fragments} fragment{'s' * (fragments > 1)}" if fragments else ""
        rows.append([method, titles[part] + more, *shown])
    heads = ["method", "exchange", *(f"{size:,} parameters" for size in sizes)]
    return with_caption(markdown(heads, rows), found.values(), "python -m bench.network.traffic")


@table
def bytes_of_methods() -> str:
    """Return the table of the bytes of all methods, by their ledgers and their interfaces."""
    lines = [line for line in read("traffic") if line["part"] == "methods"]
    found = newest(lines, "way")
    rows = [
        [
            method,
            significant(line["ledger_bytes"] / line["steps"] / line["workers"] / 1e3),
            significant(line["wire_bytes_per_step"] / 1e3),
            f"{line['wire_of_ledger']:.2f}",
            significant(line["times_fewer_by_ledger"]),
            significant(line["times_fewer"]),
        ]
        for method, line in found.items()
    ]
    heads = [
        "method",
        "kB per step, ledger",
        "kB per step, interface",
        "interface / ledger",
        "times fewer than average, ledger",
        "times fewer, interface",
    ]
    command = "python -m bench.network.traffic --parts methods --elements 50000"
    return with_caption(markdown(heads, rows), found.values(), command)


@table
def packing() -> str:
    """Return the table of times of operations on packed signs, in units of the time of a copy."""
    lines = newest(read("pack"), "way", "n", "block")
    sizes = sorted({n for _, n, _ in lines})
    rows = []
    for operation, block in dict.fromkeys((operation, block) for operation, _, block in lines):
        cells = [lines.get((operation, n, block)) for n in sizes]
        if operation != "copy":
            rows.append(
                [
                    operation.replace("settle", "update the error"),
                    block,
                    *(line and f"{line['copies']:.2f}" for line in cells),
                ]
            )
    heads = [
        "operation",
        "elements per scale",
        *(f"{n / 2**20:g} Mi elements, copies" for n in sizes),
    ]
    return with_caption(markdown(heads, rows), lines.values(), "python -m bench.network.pack")


@table
def deepspeed() -> str:
    """Return the table of differences from DeepSpeed's optimizers."""
    lines = newest(read("deepspeed_peer"), "optimizer", "seed")
    rows = [
        [
            f"`{name}`",
            seed,
            f"{line['equal_steps']} of {line['steps']}",
            f"{line['largest_difference']:.2g}",
        ]
        for (name, seed), line in sorted(lines.items())
    ]
    versions = ", ".join(sorted({line["deepspeed"] for line in lines.values()}))
    heads = [
        f"optimizer of DeepSpeed {versions}",
        "seed",
        "bit-identical steps",
        "largest difference of a parameter",
    ]
    return with_caption(
        markdown(heads, rows),
        lines.values(),
        "python -m bench.network.deepspeed_peer --peer FOLDER",
    )
