"""Tables of the strategies of communication, most of them measured in virtual time."""

import statistics
from collections.abc import Iterator

from bench.docs.table import Cells, Line, Row, Table, read, significant

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
FEDERATED = {
    "fedavg": "federated averaging",
    "fedlomo": "local momentum only",
    "global": "global momentum only, round weight 0.5",
    "fedglomo": "FedGLOMO, round weight 0.5",
    "fedglomo 0.2": "FedGLOMO, round weight 0.2",
}
COMPARE = "bench.strategies.compare"


def compared() -> Iterator[Line]:
    """Yield the lines of all methods, with the slow rank or the slow link."""
    for line in read("strategy_comparison"):
        rank, link = line.slow_rank_factor, line.slow_link_factor
        case = "equal ranks" if rank == 1 else f"a rank {rank:g} times as slow"
        yield Line(line, case=case if link == 1 else f"a link {link:g} times as slow")


@Table(compared, "method", COMPARE, "seed", lambda x: x.case == "equal ranks", rows=USES)
def strategy_comparison(x: Row) -> Cells:
    """All methods on the same graph, links and random seeds."""
    return {
        "method": x.method,
        "test accuracy, %": x.spread("accuracy", 100),
        "virtual s": significant(x.median("simulated_s")),
        "MB sent by a rank": significant(x.median("sent_bytes", 1e-6)),
        "state, MB": significant(max(x.of("state_bytes", 1e-6))),
        "use it for": x.title,
    }


@Table(compared, "method", COMPARE, "case seed", rows=USES)
def uneven_machines(x: Row) -> Cells:
    """Virtual times with a slow rank, and with a slow link."""
    seconds: dict[str, list[float]] = {}
    for line in sorted(x.lines, key=lambda line: (line.slow_rank_factor, line.slow_link_factor)):
        seconds.setdefault(line.case, []).append(line.simulated_s)
    if len(seconds) < 3:
        return None
    medians = {case: significant(statistics.median(each)) for case, each in seconds.items()}
    return {"virtual s": x.method, **medians}


@Table(
    "a2cid2",
    "shards method",
    "bench.strategies.a2cid2",
    among="seed",
    where=lambda x: x.part == "agreement",
)
def gossip_agreement(x: Row) -> Cells:
    """Distance of ranks from their mean with A2CiD2, and their accuracy."""
    error = x.mean("consensus_error")
    plain = x.method.removesuffix(", momentum")
    without = [line for line in x.all if (line.shards, line.method) == (x.shards, plain)]
    ratio = statistics.mean(line.consensus_error for line in without) / error if error else 1
    return {
        "shards": x.shards,
        "method": x.method,
        "consensus error": None if x.method == "data parallel" else significant(error),
        "times lower": f"{ratio:.2f}" if x.method != plain else None,
        "test accuracy, %": x.spread("test_accuracy_percent"),
    }


@Table(
    "backup_workers",
    "graph slow_chance",
    "bench.strategies.backup",
    among="method",
    where=lambda x: "grace" in x,
)
def backup_rounds(x: Row) -> Cells:
    """Times of rounds with backup workers."""
    line, full = (x.at(method=method) or Line() for method in ("backup", "full"))
    return {
        "graph": x.graph,
        "slow steps": f"{100 * x.slow_chance:.0f} %",
        "time of a round / of waiting for all": f"{line.round_of_full:.2f}",
        "of a step": f"{line.step_of_full:.2f}",
        "of the run of the slowest rank": f"{line.run_of_full:.2f}",
        "loss at equal time / with waiting": f"{line.loss:.2f} / {full.loss:.2f}",
    }


@Table("fedglomo", "method", "bench.strategies.fedglomo", rows=FEDERATED)
def federated_rounds(x: Row) -> Cells:
    """FedGLOMO against federated averaging."""
    losses = {
        "loss at equal rounds": "rounds",
        "at equal gradient evaluations": "evaluations",
        "at equal bytes": "num_bytes",
    }
    return {
        "method": x.title,
        **{head: f"{x.mean(f'loss_at_equal_{name}_mean'):.3f}" for head, name in losses.items()},
    }


@Table("characters", "method steps", "bench.strategies.characters", among="seed")
def transformer(x: Row) -> Cells:
    """DiLoCo and its variants on a transformer."""
    return {
        "method": x.method,
        "steps": f"{x.steps:,}",
        "test loss": x.spread("loss"),
        "accuracy of the next character, %": x.spread("accuracy", 100),
        "kB of an exchange": significant(x.mean("bytes_per_exchange", 1e-3)),
        "MB sent by a rank": significant(x.mean("sent_bytes", 1e-6)),
    }


@Table("late_elements", "kind method lr warmup", "bench.strategies.late_elements")
def late_elements(x: Row) -> Cells:
    """Elements that begin after the warm-up of 1-bit optimizers."""
    numbers = {
        "loss": x.loss,
        "without compression": x.uncompressed_loss,
        "control": x.control_loss,
        "control after as many steps": x.control_loss_of_as_many_steps,
        "largest step": x.late_step,
        "largest step of the control": x.control_step,
    }
    return {
        "late elements": x.kind,
        "method": x.method,
        "learning rate": f"{x.lr:g}",
        "warm-up, steps": x.warmup,
        **{
            head: "diverges" if number is None else f"{number:.2g}"
            for head, number in numbers.items()
        },
        "bytes per step while they settle": f"{x.bytes_per_late_step:,.0f}",
        "at the end": f"{x.bytes_per_step:,.0f}",
    }


@Table("dropcompute", "sigma", "bench.strategies.dropcompute", among="seed", sort=lambda x: x.sigma)
def drop_compute(x: Row) -> Cells:
    """Simulated steps of DropCompute, by the spread of the times."""
    return {
        "σ of the logarithm of the times": f"{x.sigma:g}",
        "predicted speed": f"{x.mean('predicted_speed'):.2f}",
        "measured speed": f"{x.mean('measured_speed'):.2f}",
        "dropped, %": f"{x.mean('measured_dropped', 100):.1f}",
        "accuracy, %": f"{x.mean('accuracy_percent'):.2f}",
        "accuracy without drops, %": f"{x.mean('plain_accuracy_percent'):.2f}",
    }


@Table("reading", "method", "bench.network.reading")
def reading(x: Row) -> Cells:
    """The files that one step over two processes runs through."""
    return {
        "method": x.method,
        "files": x.files,
        "lines of these files": f"{x.num_lines:,}",
        "without comments and documentation": f"{x.num_code_lines:,}",
        "classes of gcnzc above the method's": x.classes_above,
    }
