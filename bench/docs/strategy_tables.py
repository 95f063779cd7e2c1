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
    "MuLoCo": "as DiLoCo, in a tenth of the bytes",
    "SparseLoCo": "the fewest bytes of the methods that synchronize",
    "SelSync": "gradients that change in phases, and networks of low latency",
    "top-k, 1 %": "few ranks on slow networks",
    "random-k, 5 %": "many ranks on slow networks",
    "DCT, 1 %": "as top-k, with less computation",
    "DCT, 0.5 %": "the same, in half the bytes",
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
                significant(max(line["state_bytes"] for line in lines) / 1e6),
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


@table
def uneven_clocks() -> str:
    """Return the table of wall-clock and virtual times with a slow worker, and a slow link."""
    lines = [line for line in read("cluster") if line.get("part") == "uneven"]
    lines = [line | {"case": _unevenness(line)} for line in lines]
    found = newest(lines, "case", "method", "clock")
    rows = []
    for case, method in dict.fromkeys((case, method) for case, method, _ in found):
        wall, virtual = (found.get((case, method, clock)) for clock in ("wall", "virtual"))
        if wall is None or virtual is None:
            continue
        cells = []
        for name in ("slowest_s", "median_s"):
            cells += [significant(wall[name]), significant(virtual[name])]
            cells.append(f"{wall[name] / virtual[name]:.2f}")
        rows.append([case, method, *cells])
    heads = ["workers", "method"]
    for worker in ("slowest worker", "median worker"):
        heads += [f"{worker}: wall clock, s", "virtual, s", "ratio"]
    return with_caption(
        markdown(heads, rows), found.values(), "python -m bench.network.uneven_strategies --record"
    )


def _unevenness(line: Line) -> str:
    """Return the slow workers and links of a run in words."""
    slow = [f"worker {name} {each:g} times as slow" for name, each in line["slow_workers"].items()]
    slow += [f"link {name} {each:g} times as slow" for name, each in line["slow_links"].items()]
    return ", ".join(slow) or "equal"


@table
def pairs_of_ranks() -> str:
    """Return the table of the pairs that SAPS-PSGD chooses, and the time of a round."""
    lines = [line for line in read("saps") if line["part"] == "pairs"]
    found = newest(lines, "pairs", "window", "keep")
    rows = []
    for pairs, window in dict.fromkeys((pairs, window) for pairs, window, _ in found):
        full = found[pairs, window, 1.0]
        part = found.get((pairs, window, 0.01))
        rows.append(
            [
                pairs if window is None else f"{pairs}, window {window}",
                significant(full["bottleneck_mbit_per_s"])
                if "bottleneck_mbit_per_s" in full
                else None,
                f"{full['second_eigenvalue']:.2f}" if "second_eigenvalue" in full else None,
                significant(full["round_ms"]),
                part and significant(part["round_ms"]),
            ]
        )
    heads = [
        "pairs",
        "slowest link of a round, Mbit/s",
        "second eigenvalue (lower mixes faster)",
        "ms per round, all parameters",
        "1 % of them",
    ]
    return with_caption(markdown(heads, rows), lines, "python -m bench.strategies.saps pairs")


@table
def gossip_agreement() -> str:
    """Return the table of the distance of ranks from their mean with A2CiD2, and their accuracy."""
    lines = [line for line in read("a2cid2") if line["part"] == "agreement"]
    found = newest(lines, "shards", "method", "seed")
    rows = []
    for shards, method in dict.fromkeys((shards, method) for shards, method, _ in found):
        chosen = [line for (*case, _), line in found.items() if case == [shards, method]]
        errors = [line["consensus_error"] for line in chosen]
        scores = [line["test_accuracy_percent"] for line in chosen]
        without = [
            found[shards, method.removesuffix(", momentum"), line["seed"]]["consensus_error"]
            for line in chosen
        ]
        ratio = statistics.mean(without) / statistics.mean(errors)
        rows.append(
            [
                shards,
                method,
                significant(statistics.mean(errors)) if method != "data parallel" else None,
                f"{ratio:.2f}" if method.endswith("momentum") else None,
                f"{statistics.mean(scores):.2f} ± {statistics.stdev(scores):.2f}",
            ]
        )
    heads = ["shards", "method", "consensus error", "times lower", "test accuracy, %"]
    return with_caption(markdown(heads, rows), lines, "python -m bench.strategies.a2cid2")


@table
def slow_rank() -> str:
    """Return the table of the speed of the other ranks if one rank is three times as slow."""
    found = newest([line for line in read("a2cid2") if line["part"] == "slow"], "method")
    rows = [[method, f"{100 * line['ratio']:.0f} %"] for method, line in found.items()]
    heads = ["method", "steps per second of the other ranks, compared with equal ranks"]
    return with_caption(markdown(heads, rows), found.values(), "python -m bench.strategies.a2cid2")


@table
def backup_rounds() -> str:
    """Return the table of the times of rounds with backup workers."""
    lines = [line for line in read("backup_workers") if "grace" in line]
    found = newest(lines, "graph", "slow_chance", "method")
    rows = []
    for (graph, chance, method), line in found.items():
        if method != "backup":
            continue
        full = found[graph, chance, "full"]
        rows.append(
            [
                graph,
                f"{100 * chance:.0f} %",
                f"{line['round_of_full']:.2f}",
                f"{line['step_of_full']:.2f}",
                f"{line['run_of_full']:.2f}",
                f"{line['loss']:.2f} / {full['loss']:.2f}",
            ]
        )
    heads = [
        "graph",
        "slow steps",
        "time of a round / of waiting for all",
        "of a step",
        "of the run of the slowest rank",
        "loss at equal time / with waiting",
    ]
    return with_caption(markdown(heads, rows), lines, "python -m bench.strategies.backup")


@table
def federated_rounds() -> str:
    """Return the table of FedGLOMO against federated averaging."""
    found = newest([line for line in read("fedglomo") if line["part"] == "train"], "method")
    spreads = newest([line for line in read("fedglomo") if line["part"] == "variance"], "method")
    rows = []
    names = {
        "fedavg": "federated averaging",
        "fedlomo": "local momentum only",
        "global": "global momentum only, round weight 0.5",
        "fedglomo": "FedGLOMO, round weight 0.5",
        "fedglomo 0.2": "FedGLOMO, round weight 0.2",
    }
    for method, name in names.items():
        line, spread = found[method], spreads.get(method)
        rows.append(
            [
                name,
                *(
                    f"{line[f'loss_at_equal_{name}_mean']:.3f}"
                    for name in ("rounds", "evaluations", "num_bytes")
                ),
                *(
                    spread and f"{spread[f'variance_of_{name}_mean']:.3f}"
                    for name in ("fedavgs", "fedavgs_at_equal_cost")
                ),
            ]
        )
    heads = [
        "method",
        "loss at equal rounds",
        "at equal gradient evaluations",
        "at equal bytes",
        "variance of the update / of federated averaging",
        "/ of federated averaging with twice the participants",
    ]
    return with_caption(
        markdown(heads, rows),
        [*found.values(), *spreads.values()],
        "python -m bench.strategies.fedglomo",
    )


@table
def sparse_exchanges() -> str:
    """Return the table of sparse compressions in short runs."""
    found = newest(read("sparse"), "method")
    # the density before that of the publication became the default
    found.pop("sparseloco 1/128", None)
    rows = [
        [
            method,
            f"{100 * line['accuracy']:.1f} ± {100 * line['accuracy_std']:.1f}",
            significant(line["bytes_per_exchange"] / 1e3),
            significant(line["times_fewer_bytes"]),
            significant(1e3 * line["exchange_s"]),
        ]
        for method, line in found.items()
    ]
    heads = ["method", "accuracy, %", "kB of an exchange", "times fewer", "ms of an exchange"]
    return with_caption(markdown(heads, rows), found.values(), "python -m bench.strategies.sparse")


@table
def transformer() -> str:
    """Return the table of DiLoCo and its variants on a transformer."""
    lines = newest(read("characters"), "method", "seed", "steps")
    rows = []
    for method, steps in dict.fromkeys((method, steps) for method, _, steps in lines):
        runs = [line for key, line in lines.items() if (key[0], key[2]) == (method, steps)]
        scores = {
            name: [factor * line[name] for line in runs]
            for name, factor in {"loss": 1, "accuracy": 100}.items()
        }
        spreads = {
            name: f" ± {statistics.stdev(each):.2f}" if len(each) > 1 else ""
            for name, each in scores.items()
        }
        rows.append(
            [
                method,
                f"{steps:,}",
                *(f"{statistics.mean(scores[name]):.2f}{spreads[name]}" for name in scores),
                significant(statistics.mean(line["bytes_per_exchange"] for line in runs) / 1e3),
                significant(statistics.mean(line["sent_bytes"] for line in runs) / 1e6),
            ]
        )
    heads = [
        "method",
        "steps",
        "test loss",
        "accuracy of the next character, %",
        "kB of an exchange",
        "MB sent by a rank",
    ]
    return with_caption(
        markdown(heads, rows), lines.values(), "python -m bench.strategies.characters"
    )


@table
def late_elements() -> str:
    """Return the table of elements that begin after the warm-up of 1-bit optimizers."""
    lines = newest(read("late_elements"), "kind", "method", "lr", "warmup")
    rows = [
        [
            *(kind, method, f"{lr:g}", warmup),
            *(
                "diverges" if line[name] is None else f"{line[name]:.2g}"
                for name in (
                    *("loss", "uncompressed_loss", "control_loss"),
                    *("control_loss_of_as_many_steps", "late_step", "control_step"),
                )
            ),
            *(f"{line[name]:,.0f}" for name in ("bytes_per_late_step", "bytes_per_step")),
        ]
        for (kind, method, lr, warmup), line in lines.items()
    ]
    heads = ["late elements", "method", "learning rate", "warm-up, steps", "loss"]
    heads += ["without compression", "control", "control after as many steps"]
    heads += ["largest step", "control"]
    heads += ["bytes per step while they settle", "at the end"]
    command = "python -m bench.strategies.late_elements"
    return with_caption(markdown(heads, rows), lines.values(), command)
