"""Tables of the strategies of communication that were measured in virtual time."""

import statistics

from bench.docs.result_tables import Line, markdown, newest, read, significant, table, with_caption

# when to use each method of bench/strategies/compare.py
USES = {
    "average": "fast networks; the reference",
    "average, bfloat16": "half the bytes, with the convergence of the reference",
    "average, int8": "a quarter of the bytes",
    "average, sign": "large models on slow networks, if no warm-up is wanted",
    "1-bit Adam": "large models on slow networks",
    "1-bit LAMB": "as 1-bit Adam, with large batches",
    "0/1 Adam": "as 1-bit Adam, also on networks of high latency",
    "local SGD": "slow networks of any kind; simple",
    "DiLoCo": "slow networks; accepts many local steps",
    "Streaming DiLoCo": "as DiLoCo, with exchanges that overlap with steps",
    "Streaming DiLoCo, float4": "the fewest bytes of the methods that overlap",
    "CO2": "exchanges that take as long as many steps",
    "MuLoCo": "as DiLoCo, in an eighth of the bytes",
    "SparseLoCo": "the fewest bytes of the methods that synchronize",
    "SelSync": "gradients that change in phases, and networks of low latency",
    "top-k, 1 %": "few ranks on slow networks",
    "random-k, 5 %": "many ranks on slow networks",
    "DCT, 1 %": "as top-k, with less computation",
    "SAPS, 1 %": "networks with few fast links",
    "SAPS, 10 %": "the same",
    "A2CiD2": "ranks that communicate with neighbours only",
    "A2CiD2, overlapped": "ranks of different speeds",
    "backup workers": "ranks that are slow from time to time",
    "FedGLOMO": "ranks with different data, few of which take part in a round",
}


def comparison_lines() -> dict[str, list[Line]]:
    """Return by method the newest line of each random seed."""
    even = [
        line
        for line in read("strategy_comparison")
        if line["slow_rank_factor"] == line["slow_link_factor"] == 1
    ]
    lines = newest(even, "method", "seed")
    methods = dict.fromkeys(method for method, _ in lines)
    return {
        name: [line for (method, _), line in lines.items() if method == name] for name in methods
    }


@table
def strategy_comparison() -> str:
    """Return the table of all methods on the same graph, links and random seeds."""
    found = comparison_lines()
    rows = []
    for method, use in USES.items():
        if method not in found:
            continue
        lines = found[method]
        scores = [100 * line["accuracy"] for line in lines]
        spread = f" ± {statistics.stdev(scores):.2f}" if len(scores) > 1 else ""
        rows.append(
            [
                method,
                f"{statistics.mean(scores):.2f}{spread}",
                significant(statistics.median(line["simulated_s"] for line in lines)),
                significant(statistics.median(line["sent_bytes"] for line in lines) / 1e6),
                significant(statistics.median(line["state_bytes"] for line in lines) / 1e6),
                use,
            ]
        )
    heads = [
        "method",
        "test accuracy, %",
        "virtual s",
        "MB sent by a rank",
        "state, MB",
        "use it for",
    ]
    lines = [line for each in found.values() for line in each]
    return with_caption(markdown(heads, rows), lines, "python -m bench.strategies.compare")


@table
def uneven_machines() -> str:
    """Return the table of the virtual times with a slow rank, and with a slow link."""
    found = newest(
        read("strategy_comparison"), "method", "slow_rank_factor", "slow_link_factor", "seed"
    )
    cases = sorted({(rank, link) for _, rank, link, _ in found})
    names = {
        (rank, link): "equal ranks"
        if rank == link == 1
        else f"a rank {rank:g} times as slow"
        if link == 1
        else f"a link {link:g} times as slow"
        for rank, link in cases
    }
    rows = []
    for method in USES:
        cells = []
        for rank, link in cases:
            lines = [line for (*case, _), line in found.items() if case == [method, rank, link]]
            seconds = [line["simulated_s"] for line in lines]
            cells.append(significant(statistics.median(seconds)) if seconds else None)
        if all(cells):
            rows.append([method, *cells])
    heads = ["virtual s", *names.values()]
    return with_caption(markdown(heads, rows), found.values(), "python -m bench.strategies.compare")
