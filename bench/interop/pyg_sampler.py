"""Compare the minibatches of gcnzc's loaders with those of PyG's own sampler.

    python -m bench.interop.pyg_sampler --rivals FOLDER [--sampler pyg-lib|torch-sparse]

FOLDER is that of `bench/rivals/make_environments.sh`. Its environment of PyG has torch-sparse; copy
pyg-lib into it if you have it for the same torch. Both loaders get the same graphs, without and
with types. Their edges are sorted by destination, since PyG sorts others with an unstable sort.

- With all neighbours, and for the latest neighbours of temporal sampling, nothing is random: every
  field of every minibatch must be equal, in value and dtype.
- With fan-outs, the edges of the first hop of many epochs are counted. The counts are compared with
  the exact distribution, and those of both loaders with each other, by chi-square statistics by
  edge type. Means of the numbers of nodes and edges by type are compared by their standard errors.
"""

import argparse
import math
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from scipy import stats
from torch import Tensor

from bench import harness
from bench.rivals import minibatches
from gcnzc.interop import pyg
from gcnzc.interop.pyg.importing import import_pyg

ROOT = Path(__file__).parents[2]
NODES = {"user": 80, "item": 60, "tag": 12}
EDGES = {
    ("user", "buys", "item"): 900,
    ("item", "rev_buys", "user"): 700,
    ("tag", "on", "item"): 200,
    ("item", "like", "item"): 500,
    ("user", "follows", "user"): 400,
}
LATEST, EPOCHS, FANOUT = 25, 400, 4
# fields that PyG's loaders do not set with torch-sparse
COUNTS = {"num_sampled_nodes", "num_sampled_edges"}
# a p-value below this is a difference
LEAST_P = 1e-5

Cases = dict[str, dict[str, Any]]


def typed_graph() -> Any:
    """Return a random `HeteroData` with attributes, times and weights."""
    numbers = torch.Generator().manual_seed(5)
    data = import_pyg().data.HeteroData(name="shop")
    for node_type, count in NODES.items():
        data[node_type].x = torch.randn(count, 3, generator=numbers)
        data[node_type].born = torch.randint(LATEST, (count,), generator=numbers)
    for edge_type, count in EDGES.items():
        ends = [torch.randint(NODES[each], (count,), generator=numbers) for each in edge_type[::2]]
        data[edge_type].edge_index = _sorted(torch.stack(ends))
        data[edge_type].edge_attr = torch.randn(count, 2, generator=numbers)
        data[edge_type].at = torch.randint(LATEST, (count,), generator=numbers)
        data[edge_type].weight = torch.rand(count, generator=numbers) + 0.1
    return data


def plain_graph() -> Any:
    """Return a random `Data` with attributes, times and weights."""
    numbers = torch.Generator().manual_seed(6)
    data = import_pyg().data.Data(name="graph")
    data.x = torch.randn(100, 3, generator=numbers)
    data.born = torch.randint(LATEST, (100,), generator=numbers)
    data.edge_index = _sorted(torch.randint(100, (2, 1200), generator=numbers))
    data.edge_attr = torch.randn(1200, 2, generator=numbers)
    data.at = torch.randint(LATEST, (1200,), generator=numbers)
    data.weight = torch.rand(1200, generator=numbers) + 0.1
    return data


def _sorted(edges: Tensor) -> Tensor:
    return edges[:, edges[1].argsort(stable=True)]


def exact_cases() -> Cases:
    """Return cases in which nothing is random."""
    every = [-1, -1]
    samplings: dict[str, dict[str, Any]] = {
        "all neighbours": {},
        "disjoint": {"disjoint": True},
        "time of nodes": {"time_attr": "born"},
        "time of edges": {"time_attr": "at"},
        "latest, time of nodes": {
            "time_attr": "born",
            "temporal_strategy": "last",
            "num_neighbors": [3, 2],
        },
        "latest, time of edges": {
            "time_attr": "at",
            "temporal_strategy": "last",
            "num_neighbors": [3, 2],
        },
        "bidirectional": {"subgraph_type": "bidirectional"},
        "induced": {"subgraph_type": "induced"},
    }
    cases: Cases = {}
    times = torch.randint(LATEST, (2000,), generator=torch.Generator().manual_seed(7))
    typed, plain = typed_graph(), plain_graph()
    for name, sampling in samplings.items():
        common = {"num_neighbors": every, "batch_size": 16} | sampling
        is_temporal = "time_attr" in sampling
        # `is_sorted` of PyG asserts that edges are sorted by time, too
        common["is_sorted"] = not is_temporal
        for kind, data, nodes, edges in (
            ("HeteroData", typed, "user", ("user", "buys", "item")),
            ("HeteroData, one type", typed, "item", ("item", "like", "item")),
            ("Data", plain, None, None),
        ):
            count = plain.num_nodes if nodes is None else NODES[nodes]
            store = plain if edges is None else typed[edges]
            own = {"input_nodes": nodes}
            own |= {"input_time": times[:count]} if is_temporal else {}
            cases[f"nodes, {kind}, {name}"] = _case("NeighborLoader", data, common | own)
            own = {"edge_label_index": edges, "edge_label": torch.arange(store.num_edges) + 1}
            own |= {"edge_label_time": times[: store.num_edges]} if is_temporal else {}
            cases[f"links, {kind}, {name}"] = _case("LinkNeighborLoader", data, common | own)
            if kind == "Data" and name == "bidirectional":
                # of an edge that was sampled in both directions, PyG returns either id
                for items in ("nodes", "links"):
                    ignored = {"e_id", "edge_attr", "at", "weight"}
                    cases[f"{items}, {kind}, {name}"]["ignored"] = ignored
    return cases


def sampled_cases() -> Cases:
    """Return cases with fan-outs; each epoch has one minibatch of all seeds."""
    samplings: dict[str, dict[str, Any]] = {
        "uniform": {},
        "with replacement": {"replace": True},
        "disjoint": {"disjoint": True},
        "by weight": {"weight_attr": "weight", "num_neighbors": [1, 1]},
        "by weight, with replacement": {"weight_attr": "weight", "replace": True},
        "time of nodes": {"time_attr": "born"},
        "time of edges": {"time_attr": "at"},
    }
    cases: Cases = {}
    typed, plain = typed_graph(), plain_graph()
    for name, sampling in samplings.items():
        common = {"num_neighbors": [FANOUT, 2], "batch_size": 1000} | sampling
        for kind, data, nodes in (("HeteroData", typed, "item"), ("Data", plain, None)):
            own: dict[str, Any] = {"input_nodes": nodes}
            if "time_attr" in sampling:
                count = plain.num_nodes if nodes is None else NODES[nodes]
                own["input_time"] = torch.full((count,), LATEST * 3 // 4)
            case = _case("NeighborLoader", data, common | own)
            cases[f"{kind}, {name}"] = case | {"epochs": EPOCHS, "sampled": True}
    return cases


def _case(loader: str, data: Any, arguments: Mapping[str, Any]) -> dict[str, Any]:
    arguments = {name: value for name, value in arguments.items() if value is not None}
    case = {"loader": loader, "data": data, "arguments": arguments}
    return case | {"epochs": 1, "sampled": False, "ignored": set()}


def differences(mine: Any, theirs: Any, ignored: set[str]) -> list[str]:
    """Return the fields in which two minibatches differ, with their types."""
    if not hasattr(theirs, "node_types"):
        return _different_fields("", mine, theirs, ignored)
    if mine.metadata() != theirs.metadata():
        return ["metadata"]
    found = []
    for store in (theirs._global_store, *theirs.node_stores, *theirs.edge_stores):
        own = mine[store._key] if store._key is not None else mine._global_store
        found += _different_fields(f"{store._key}.", own, store, ignored)
    return found


def _different_fields(prefix: str, mine: Any, theirs: Any, ignored: set[str]) -> list[str]:
    names = {*mine.keys(), *theirs.keys()} - ignored
    found = []
    for name in sorted(names):
        own, other = (store.get(name) for store in (mine, theirs))
        if isinstance(own, Tensor) and isinstance(other, Tensor):
            is_same = own.dtype == other.dtype and torch.equal(own, other)
        else:
            is_same = type(own) is type(other) and own == other
        if not is_same:
            found.append(f"{prefix}{name}")
    return found


def compare_exactly(mine: Any, theirs: Any, ignored: set[str]) -> dict[str, Any]:
    """Return the number of minibatches compared, and the fields that differ in some of them."""
    found: dict[str, None] = {}
    (mine,), (theirs,) = mine, theirs
    for own, other in zip(mine, theirs, strict=True):
        found |= dict.fromkeys(differences(own, other, ignored))
    return {"minibatches": len(theirs), "different": list(found)}


def compare_counts(case: Mapping[str, Any], mine: Any, theirs: Any) -> dict[str, Any]:
    """Return p-values of chi-square statistics, and the largest difference of means of sizes.

    The statistics are of each loader against the exact distribution (for fan-outs that are not
    by weight or by time of the edges that are eligible), and of both against each other.
    """
    arguments, data = case["arguments"], case["data"]
    p_values: dict[str, dict[str, float]] = {}
    for edge_type in theirs[0][0]:
        store = data if edge_type == "" else data[edge_type]
        probability, deviates = _inclusion(store, data, edge_type, arguments)
        counts = [
            torch.bincount(
                torch.cat([edges[edge_type] for edges, _ in epochs]), minlength=store.num_edges
            ).double()
            for epochs in (mine, theirs)
        ]
        label = "__".join(edge_type) or "edges"
        p_values[label] = {
            name: _p_value(difference, probability, store.edge_index[1], deviates, factor)
            for name, difference, factor in (
                ("gcnzc", counts[0] - EPOCHS * probability, 1),
                ("pyg", counts[1] - EPOCHS * probability, 1),
                ("both", counts[0] - counts[1], 2),
            )
        }
        for own in counts:
            # what has no chance never occurs
            assert not own[probability == 0].any(), f"{label}: an edge was sampled that cannot be"
    sizes = {}
    for kind in theirs[0][1]:
        samples = [
            torch.tensor([float(found[kind]) for _, found in epochs]) for epochs in (mine, theirs)
        ]
        error = math.sqrt(sum(float(own.var()) for own in samples) / EPOCHS)
        difference = abs(float(samples[0].mean() - samples[1].mean()))
        sizes[str(kind)] = (
            difference / error if error else difference * math.inf if difference else 0
        )
    least = min(p for by_test in p_values.values() for p in by_test.values())
    return {"p_values": p_values, "least_p": least, "largest_z": max(sizes.values())}


def _inclusion(
    store: Any, data: Any, edge_type: Any, arguments: Mapping[str, Any]
) -> tuple[Tensor, Tensor]:
    """Return for each edge the expected number of times in an epoch, and for each destination
    whether the choice is without replacement.
    """
    src, dst = store.edge_index
    weight = torch.ones(len(src), dtype=torch.float64)
    if "time_attr" in arguments:
        limit = int(arguments["input_time"][0])
        name = arguments["time_attr"]
        times = (
            store.at
            if name == "at"
            else (store if edge_type == "" else data[edge_type[0]]).born[src]
        )
        weight = (times <= limit).double()
    elif "weight_attr" in arguments:
        weight = store.weight.double()
    num_nodes = int(dst.max()) + 1
    totals = torch.zeros(num_nodes, dtype=torch.float64).index_add_(0, dst, weight)
    fanout = arguments["num_neighbors"][0]
    expected = fanout * weight / totals[dst].clamp(min=1e-300)
    is_replaced = arguments.get("replace", False)
    if not is_replaced:
        expected = expected.clamp(max=1.0)
    return expected, torch.tensor(is_replaced or fanout == 1)


def _p_value(
    difference: Tensor, expected: Tensor, dst: Tensor, is_multinomial: Tensor, factor: int
) -> float:
    """Return the p-value of the statistic of differences of counts.

    The counts of a destination are multinomial. If k of d edges are chosen without replacement,
    they have the variance p (1 - p) and the covariance -p (1 - p) / (d - 1), with p = k / d.

    Args:
        difference: of counts of edges from their expectation, or of two counts.
        expected: number of times that an edge is chosen in an epoch.
        dst: destinations of the edges.
        is_multinomial: whether the choice is with replacement.
        factor: 2 for the difference of two counts.
    """
    is_possible = expected > 0
    num_nodes = int(dst.max()) + 1
    degree = torch.bincount(dst[is_possible], minlength=num_nodes).double()[dst]
    if bool(is_multinomial):
        use = is_possible & (degree > 1)
        terms = difference**2 / (factor * EPOCHS * expected)
    else:
        use = is_possible & (expected < 1)
        variance = EPOCHS * expected * (1 - expected)
        terms = difference**2 / (factor * variance) * (degree - 1) / degree
    freedom = int(use.sum()) - len(dst[use].unique())
    # edges whose number is certain
    certain = is_possible & ~use
    if not bool(is_multinomial) and bool(difference[certain].any()):
        return 0.0
    return float(stats.chi2.sf(float(terms[use].sum()), freedom))


def main() -> None:
    """Compare all cases, and record a line for each."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rivals", type=Path, required=True, help="folder of make_environments.sh")
    parser.add_argument("--sampler", choices=minibatches.LIBRARIES, default="pyg-lib")
    options = parser.parse_args()
    harness.check_code_is_committed()
    cases = exact_cases() | sampled_cases()
    with tempfile.TemporaryDirectory() as folder:
        given, out = Path(folder) / "cases.pt", Path(folder) / "out.pt"
        torch.save(cases, given)
        python = options.rivals.resolve() / "pyg" / "bin" / "python"
        program = ROOT / "bench" / "rivals" / "minibatches.py"
        command = [python, program, given, out, "--sampler", options.sampler]
        # With several threads, pyg-lib samples edge types in parallel with correlated random
        # numbers: on 2 cores, its counts differ from the distribution in five cases (p below 1e-5).
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        subprocess.run([str(part) for part in command], check=True, cwd=folder, env=environment)
        found = torch.load(out, weights_only=False)
    failed = []
    missing = COUNTS if options.sampler == "torch-sparse" else set()
    for name, case in cases.items():
        collect = minibatches.first_hop if case["sampled"] else list
        theirs = found["results"][name]
        seeded = case | {"arguments": case["arguments"] | {"seed": 0}}
        if isinstance(theirs, str):
            outcome: dict[str, Any] = {"unsupported_by_pyg": theirs}
        else:
            mine = minibatches.load(seeded, pyg, collect)
            assert not isinstance(mine, str), mine
            if case["sampled"]:
                outcome = compare_counts(case, mine, theirs)
                is_equal = outcome["least_p"] > LEAST_P and outcome["largest_z"] < 5
            else:
                outcome = compare_exactly(mine, theirs, case["ignored"] | missing)
                is_equal = not outcome["different"]
            if not is_equal:
                failed.append(name)
        harness.record(
            "pyg_sampler",
            {"case": name, "library": options.sampler, "sampled": case["sampled"]},
            **outcome,
            versions=found["versions"],
        )
    if failed:
        sys.exit("different: " + "; ".join(failed))


if __name__ == "__main__":
    main()
