"""Compute the tables about faults, invalid inputs, the tests of PyG and DGL, and versions."""

from collections import Counter
from collections.abc import Mapping
from pathlib import Path

from bench.docs.result_tables import markdown, newest, read, table, with_caption

# of a chi-square statistic, below which two distributions differ
PYG_SAMPLER_LEAST_P = 1e-5


@table
def fuzz() -> str:
    """Return the table of damaged files and invalid options."""
    line = read("fuzz")[-1]
    return with_caption(outcomes_of(line["kinds"]), [line], "python -m bench.robustness.fuzz")


def outcomes_of(kinds: Mapping[str, Mapping[str, int]]) -> str:
    """Return a table of the outcomes of each kind of input."""
    total: Counter[str] = Counter()
    for counts in kinds.values():
        total.update(counts)
    rows = [
        [kind, sum(counts.values()), *(counts[name] for name in ("rejected", "accepted", "failed"))]
        for kind, counts in [*kinds.items(), ("all", total)]
    ]
    return markdown(["inputs", "cases", "rejected", "accepted correctly", "failed"], rows)


@table
def faults() -> str:
    """Return the table of runs with a fault at a random time."""
    lines = read("faults")
    rows = []
    for fault in sorted({line["fault"] for line in lines}):
        selected = [line for line in lines if line["fault"] == fault]
        failed = [number for number, line in enumerate(selected) if not line["passed"]]
        since = len(selected) - failed[-1] - 1 if failed else len(selected)
        last = f"`{selected[failed[-1]]['commit']}`" if failed else None
        rows.append([fault, len(selected), len(failed), last, since])
    heads = ["fault", "runs of 4 workers", "failed", "last failure at", "runs since"]
    return with_caption(markdown(heads, rows), lines, "python -m bench.robustness.faults")


@table
def peer_tests() -> str:
    """Return the table of PyG's and DGL's tests of their own loaders."""
    lines = newest(read("peer_tests"), "peer", "file", "loaders")
    rows, rejected = [], {}
    for (peer, file, loaders), line in lines.items():
        if loaders != "gcnzc":
            continue
        own = lines.get((peer, file, "own"), {"passed": "not run"})
        counts = (line[name] for name in ("passed", "rejected", "failed", "skipped"))
        rows.append([f"{peer} {line['version']}, `{Path(file).name}`", *counts, own["passed"]])
        rejected.setdefault(peer, Counter()).update(line["reasons"].get("rejected", {}))
    heads = [
        "tests of",
        "passed",
        "rejected as unsupported",
        "failed",
        "skipped",
        "passed with its own loaders",
    ]
    text = markdown(heads, rows)
    for peer, reasons in rejected.items():
        features = (f"{feature} ({count})" for feature, count in sorted(reasons.items()))
        text += f"\nUnsupported features in {peer}'s tests: {'; '.join(features) or 'none'}.\n"
    return with_caption(
        text, lines.values(), "python -m bench.robustness.peer_tests --pyg FOLDER --dgl FOLDER"
    )


@table
def pyg_sampler() -> str:
    """Return the table of minibatches compared with those of PyG's own sampler."""
    lines = newest(read("pyg_sampler"), "case", "library")
    rows = []
    for library in dict.fromkeys(library for _, library in lines):
        own = [line for (_, other), line in lines.items() if other == library]
        exact = [line for line in own if "different" in line]
        sampled = [line for line in own if "p_values" in line]
        tests = [p for line in sampled for by in line["p_values"].values() for p in by.values()]
        name = f"{library} {own[0]['versions'][library.replace('-', '_')]}"
        rows += [
            [
                name,
                "nothing is random: every field is equal",
                len(exact),
                sum(line["minibatches"] for line in exact),
                sum(bool(line["different"]) for line in exact),
                None,
            ],
            [
                name,
                f"fan-outs: {len(tests)} chi-square statistics",
                len(sampled),
                None,
                sum(p < PYG_SAMPLER_LEAST_P for p in tests),
                f"{min(tests):.2g}",
            ],
        ]
    heads = ["PyG samples with", "compared", "cases", "minibatches", "different", "least p-value"]
    return with_caption(
        markdown(heads, rows),
        lines.values(),
        "python -m bench.interop.pyg_sampler --rivals FOLDER",
    )


@table
def versions() -> str:
    """Return the table of versions that were tested together."""
    lines = [line for line in read("matrix") if "passed" in line]
    for line in lines:
        line["with"] = bool(line["libraries"])
    found = newest(lines, "python", "torch", "others", "with")
    rows = []
    for python, torch, others in sorted({key[:3] for key in found}):
        pair = [found.get((python, torch, others, kind)) for kind in (True, False)]
        one = pair[0] or pair[1] or {}
        counts = [
            line and f"{line['passed']}, {line['failed']}, {line['skipped']}" for line in pair
        ]
        rows.append(
            [
                python,
                torch.split("+")[0],
                *(one[name] for name in ("triton", "numba", "numpy")),
                *counts,
            ]
        )
    heads = [
        "Python",
        "torch",
        "Triton",
        "numba",
        "numpy",
        "with DGL, PyG, Lightning: passed, failed, skipped",
        "without them",
    ]
    return with_caption(
        markdown(heads, rows), found.values(), "python -m bench.robustness.matrix FOLDER"
    )
