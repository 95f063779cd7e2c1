"""Tables of faults, invalid inputs, the tests of PyG and DGL, and versions; and the summary."""

from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path

from bench.docs.network_tables import default_lines
from bench.docs.table import (
    TABLES,
    Cells,
    Line,
    Row,
    Table,
    by_key,
    find,
    newest,
    read,
    significant,
    spread,
    uncaptioned,
)

# of a chi-square statistic, below which two distributions differ
PYG_SAMPLER_LEAST_P = 1e-5
OUTCOMES = {"rejected": "rejected", "accepted correctly": "accepted", "failed": "failed"}


def fuzz_lines() -> Iterator[Line]:
    """Yield the outcomes of each kind of input of the newest run, and of all."""
    run = read("fuzz")[-1]
    total: Counter[str] = Counter()
    for kind, counts in run.kinds.items():
        total.update(counts)
        yield Line(run, kind=kind, counts=Counter(counts))
    yield Line(run, kind="all", counts=total)


@Table(fuzz_lines, "kind", "bench.robustness.fuzz")
def fuzz(x: Row) -> Cells:
    """Damaged files and invalid options."""
    counts = {head: x.counts[name] for head, name in OUTCOMES.items()}
    return {"inputs": x.kind, "cases": x.counts.total(), **counts}


@Table(
    lambda: [Line(line, run=run) for run, line in enumerate(read("faults"))],
    "fault",
    "bench.robustness.faults",
    among="run",
    sort=by_key,
)
def faults(x: Row) -> Cells:
    """Runs with a fault at a random time."""
    failed = [number for number, line in enumerate(x.lines) if not line.passed]
    return {
        "fault": x.fault,
        "runs of 4 workers": len(x.lines),
        "failed": len(failed),
        "last failure at": f"`{x.lines[failed[-1]].commit}`" if failed else None,
        "runs since": len(x.lines) - (failed[-1] + 1 if failed else 0),
    }


@Table("coverage", "arguments", "bench.robustness.mutants cover FOLDER")
def coverage(x: Row) -> Cells:
    """Statements of functions that the tests run, without compiled functions."""
    return {"statements": x.statements, "run": x.run, "share": f"{x.share:.1%}"}


@Table("mutants", "group", "bench.robustness.mutants run FOLDER")
def mutants(x: Row) -> Cells:
    """Mutants of each group of packages, and what the tests say of them."""
    return {
        "group": x.group,
        "mutants": x.mutants,
        "detected": x.detected,
        "survived": len(x.survivors),
        "more than 60 s": len(x.too_slow),
        "no test runs the line": len(x.without_tests),
        "share": f"{x.share:.0%}",
    }


def test_lines() -> Iterator[Line]:
    """Yield the ten longest tests of the newest run."""
    run = read("test_durations")[-1]
    for test, seconds in list(run.longest.items())[:10]:
        file, _, name = test.partition("::")
        yield Line(run, file=file, test=name, seconds=seconds)


@Table(test_lines, "file test", "bench.robustness.durations")
def test_durations(x: Row) -> Cells:
    """The longest tests."""
    return {"file": f"`{x.file}`", "test": f"`{x.test}`", "seconds": f"{x.seconds:.0f}"}


def unsupported(lines: Sequence[Line]) -> str:
    """Return the features that tests of other libraries need and gcnzc lacks."""
    counts: dict[str, Counter[str]] = {}
    for line in lines:
        if line.loaders == "gcnzc":
            counts.setdefault(line.peer, Counter()).update(line.reasons.get("rejected", {}))
    text = ""
    for peer, features in counts.items():
        found = (f"{feature} ({count})" for feature, count in sorted(features.items()))
        text += f"\nUnsupported features in {peer}'s tests: {'; '.join(found) or 'none'}.\n"
    return text


@Table(
    "peer_tests",
    "peer file",
    "bench.robustness.peer_tests --pyg FOLDER --dgl FOLDER",
    among="loaders",
    notes=unsupported,
)
def peer_tests(x: Row) -> Cells:
    """PyG's and DGL's tests of their own loaders."""
    line, own = x.at(loaders="gcnzc"), x.at(loaders="own")
    if line is None:
        return None
    return {
        "tests of": f"{x.peer} {line.version}, `{Path(x.file).name}`",
        "passed": line.passed,
        "rejected as unsupported": line.rejected,
        "failed": line.failed,
        "skipped": line.skipped,
        "passed with its own loaders": own.passed if own else "not run",
    }


def sampler_lines() -> Iterator[Line]:
    """Yield the cases of PyG's sampler with the differences or p-values that they found."""
    for line in read("pyg_sampler"):
        if "different" in line:
            yield Line(line, p_values=None)
        elif "p_values" in line:
            values = [p for by in line.p_values.values() for p in by.values()]
            yield Line(line, p_values=values)


@Table(
    lambda: [Line(line, exact=line.p_values is None) for line in sampler_lines()],
    "library exact",
    "bench.interop.pyg_sampler --rivals FOLDER",
    among="case",
)
def pyg_sampler(x: Row) -> Cells:
    """Minibatches compared with those of PyG's own sampler."""
    name, is_exact = x.key
    cells = {"PyG samples with": f"{name} {x.versions[name.replace('-', '_')]}"}
    if is_exact:
        return cells | {
            "compared": "nothing is random: every field is equal",
            "cases": len(x.lines),
            "minibatches": sum(x.of("minibatches")),
            "different": sum(map(bool, x.of("different"))),
            "least p-value": None,
        }
    values = [p for line in x.lines for p in line.p_values]
    return cells | {
        "compared": f"fan-outs: {len(values)} chi-square statistics",
        "cases": len(x.lines),
        "minibatches": None,
        "different": sum(p < PYG_SAMPLER_LEAST_P for p in values),
        "least p-value": f"{min(values):.2g}",
    }


@Table(
    lambda: [Line(x, peers=bool(x.libraries)) for x in read("matrix") if "passed" in x],
    "python torch others",
    "bench.robustness.matrix FOLDER",
    among="peers",
    sort=by_key,
)
def versions(x: Row) -> Cells:
    """Versions that were tested together."""
    heads = {True: "with DGL, PyG, Lightning: passed, failed, skipped", False: "without them"}
    return {
        "Python": x.python,
        "torch": x.torch.split("+")[0],
        "Triton": x.triton,
        "numba": x.numba,
        "numpy": x.numpy,
        **x.across("peers", heads, lambda x: f"{x.passed}, {x.failed}, {x.skipped}"),
    }


def main_results() -> Iterator[Line]:
    """Yield the main results, each with its line."""
    ours, *others = (row.lines[0] for row in TABLES["loader"].grouped())
    names = {"dgl": "DGL", "graphbolt": "GraphBolt", "pyg": "PyG with torch-sparse"}
    if others[-1].get("rival_pyg_lib", "none") != "none":
        names["pyg"] = "PyG with pyg-lib"
    gains = [
        f"{ours.seeds_per_s / each.seeds_per_s:.1f} times {names[each.system]}" for each in others
    ]
    measurement = "loading: seed nodes per second, compared with other libraries"
    yield Line(ours, measurement=measurement, result=", ".join(gains))

    line = newest(read("memory"), "command")["train"]
    measurement = "memory of a training run, not counting its 4 GB of memory-mapped features"
    result = f"{line.unshared_peak_bytes / 1e9:.2f} GB"
    yield Line(line, measurement=measurement, result=result)

    lines = [line for line in read("accuracy") if "test_percent" in line]
    case = {"graph": "ogbn_arxiv_structure", "model": "sage, label inputs", "sampler": "gcnzc"}
    line = find(lines, **case) or Line()
    measurement = "test accuracy of GraphSAGE on ogbn-arxiv, with labels of training nodes and "
    measurement += "features computed from the edges instead of the dataset's"
    yield Line(line, measurement=measurement, result=f"{spread(line)} %")

    # runs that also measured AdamW
    lines = [line for line in read("strategies") if "of_adamw" in line]
    names = {"onebit-adam": "1-bit Adam", "streaming-diloco fp4": "Streaming DiLoCo with 4 bits"}
    for method, name in names.items():
        line = find(lines, case="amazon_photo", method=method, mbit_per_s=10.0) or Line()
        measurement = f"4 workers at 10 Mbit/s: {name}, compared with AdamW on averaged gradients"
        result = f"{significant(line.of_adamw, 2)} times the seed nodes/s"
        yield Line(line, measurement=measurement, result=result)

    lines = list(default_lines())
    line = find(lines, link="delay", workers=8, kind="Sum", num_bytes=64) or Line()
    measurement = "all-reduce of 64 bytes, 8 workers, 1 ms of delay, compared with gloo"
    result = f"{line.of_builtin:.1f} times faster"
    yield Line(line, measurement=measurement, result=result)


@Table(main_results, "measurement", "", caption=uncaptioned)
def summary(x: Row) -> Cells:
    """The main results, each with its machine and commit."""
    cpu = x.cpu.replace("(R)", "").replace(" Processor", "")
    return {
        "measurement": x.measurement,
        "result": x.result,
        "machine, commit": f"{x.cores} cores, {cpu}, `{x.commit}`",
    }
