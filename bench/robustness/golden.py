"""Compare what gcnzc computes with recorded checksums, to see that a change does not change it.

    python -m bench.robustness.golden record FILE [--only NAME ...]
    python -m bench.robustness.golden check FILE [--only NAME ...]

`record` writes the checksums of all entries, with the commit and the machine; the project's own are
in `bench/results/golden.json`. `check` computes the entries of FILE again, prints whether each of
them is equal, and exits with status 1 if one differs or fails. `--only` selects names by their
beginnings; `record` then keeps the others. Without the graphs of `../shared/data`, `check` skips
their entries, and `record` fails.

An entry is compared exactly: it is a checksum of the bytes of integers and of copied numbers, or of
floating-point results that are rounded to 5 decimals first. If its name ends in `(rounded)`, it has
lists of floating-point numbers, which may differ from the recorded ones by 1e-4 of the largest in
their list. Long results, such as weights, are then given by their norm and by sums with random
signs.

The entries are minibatches of the loaders and of the drop-in loaders for PyG and DGL, 60 steps of
optimizers in three simulated workers, prepared folders of all readers, runs of `gcnzc train` with
all models, tasks and strategies, predictions, inference, and exported programs.
"""

import argparse
import contextlib
import hashlib
import io
import json
import os
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any, TypeAlias
from unittest import mock

import numpy as np
import torch

import gcnzc
from bench import harness
from bench.robustness import golden_graphs, golden_runs
from bench.robustness.golden_graphs import SEED, Skipped, graph
from gcnzc import optim
from gcnzc.exchange import Group, lockstep
from gcnzc.interop.dgl import DataLoader, import_dgl
from gcnzc.interop.pyg import LinkNeighborLoader, NeighborLoader

TOLERANCE = 1e-4  # of the largest number of a list
# what a file has besides entries
ABOUT = ("seed", "machine")

Checksum: TypeAlias = str | dict[str, list[float]]


def checksum(values: Iterable[Any]) -> str:
    """Return the checksum of tensors, arrays, numbers and texts in an order.

    Floating-point numbers are rounded to 5 decimals, and integers are converted to int64.
    """
    found = hashlib.sha256()
    for value in values:
        if value is None:
            found.update(b"none")
            continue
        array = value.detach().cpu().numpy() if isinstance(value, torch.Tensor) else value
        array = np.asarray(array)
        if array.dtype.kind == "f":
            array = np.round(array.astype(np.float64), 5) + 0.0
        elif array.dtype.kind in "iub":
            array = array.astype(np.int64)
        elif array.dtype.kind in "OT":  # texts, of which there are only pointers
            array = array.astype(str)
        found.update(str(array.shape).encode())
        found.update(np.ascontiguousarray(array).tobytes())
    return found.hexdigest()[:16]


def summary(values: Any) -> list[float]:
    """Return up to 16 numbers themselves; of more, their norm and four sums with random signs."""
    numbers = np.asarray(values, dtype=np.float64).reshape(-1)
    if not np.isfinite(numbers).all():
        raise ValueError("a result is not finite")
    if numbers.size > 16:
        signs = np.random.default_rng(SEED).choice([-1.0, 1.0], (4, numbers.size))
        numbers = np.array([np.linalg.norm(numbers), *(signs @ numbers)])
    return [float(f"{number:.7g}") for number in numbers]


def loader() -> Iterator[Any]:
    """Yield the minibatches of `gcnzc.Loader`."""
    ends, features, labels = graph()
    made = gcnzc.Graph.from_edges(ends[0], ends[1], len(features))
    table = gcnzc.FeatureTable(torch.from_numpy(features))
    seeds, y = np.arange(0, 3000, 2), torch.from_numpy(labels)
    options: dict[str, Any] = {"fanouts": [7, 5, 3], "batch_size": 256, "labels": y, "seed": SEED}
    for batch in gcnzc.Loader(made, table, seeds, **options):
        yield from (batch.nodes, batch.seeds, batch.x, batch.y)
        for block in batch.blocks:
            yield from (block.indptr, block.indices)


def loader_of_ranks() -> Iterator[Any]:
    """Yield the nodes of the minibatches of three ranks."""
    ends, features, _ = graph()
    made = gcnzc.Graph.from_edges(ends[0], ends[1], len(features))
    options: dict[str, Any] = {"fanouts": [-1, 4], "batch_size": 100, "seed": SEED, "world_size": 3}
    for rank in range(3):
        for batch in gcnzc.Loader(made, None, np.arange(1000), rank=rank, **options):
            yield batch.nodes


def pyg(fanouts: list[int], links: int = 0, **options: Any) -> Iterator[Any]:
    """Yield the minibatches of the drop-in loaders for PyG on one node type.

    Args:
        fanouts: neighbours per hop.
        links: number of seed edges; 0 for seed nodes.
        options: of the loader.
    """
    from torch_geometric.data import Data

    ends, features, labels = (torch.from_numpy(each) for each in graph())
    values = torch.arange(ends.shape[1], dtype=torch.float32)
    data = Data(x=features, edge_index=ends, y=labels, edge_attr=values)
    torch.manual_seed(SEED)
    if links > 0:
        options["edge_label_index"] = ends[:, :links]
    loader = (LinkNeighborLoader if links > 0 else NeighborLoader)(data, fanouts, **options)
    keys = "n_id e_id edge_index x y edge_attr input_id edge_label edge_label_index batch"
    for batch in loader:
        yield from (batch[key] for key in keys.split() if torch.is_tensor(batch.get(key)))


def pyg_typed(**options: Any) -> Iterator[Any]:
    """Yield the minibatches of the drop-in loaders for PyG on several node types."""
    from torch_geometric.data import HeteroData

    random = torch.Generator().manual_seed(SEED)
    data, sizes = HeteroData(), {"user": 900, "item": 1500, "shop": 40}
    for name, count in sizes.items():
        data[name].x = torch.randn(count, 6, generator=random)
        data[name].time = torch.randint(0, 100, (count,), generator=random)
    relations = ("user buys item", "item bought_by user", "shop sells item", "user knows user")
    for source, relation, target in map(str.split, relations):
        own = data[source, relation, target]
        ends = [torch.randint(sizes[end], (9000,), generator=random) for end in (source, target)]
        own.edge_index, own.edge_attr = torch.stack(ends), torch.arange(9000)
    if "time_attr" in options:
        options["input_time"] = data["user"].time
    made: Any = LinkNeighborLoader if "neg_sampling" in options else NeighborLoader
    torch.manual_seed(SEED)
    for batch in made(data, {key: [4, 3] for key in data.edge_types}, **options):
        for store in batch.stores:
            yield from (store[key] for key in sorted(store.keys()) if torch.is_tensor(store[key]))


def dgl_nodes() -> Iterator[Any]:
    """Yield the minibatches of the drop-in loader for DGL."""
    dgl = import_dgl()
    ends, features, _ = (torch.from_numpy(each) for each in graph())
    made = dgl.graph((ends[0], ends[1]), num_nodes=len(features))
    made.ndata["x"], made.edata["w"] = features, torch.arange(ends.shape[1])
    torch.manual_seed(SEED)
    sampler = dgl.dataloading.NeighborSampler([6, 4])
    options: dict[str, Any] = {"batch_size": 200, "shuffle": True, "drop_last": False}
    for inputs, outputs, blocks in DataLoader(made, torch.arange(0, 3000, 3), sampler, **options):
        yield from (inputs, outputs, blocks[0].srcdata["x"])
        for block in blocks:
            yield from (*block.edges(), block.edata["w"])


def optimizer(name: str) -> Iterator[Any]:
    """Yield the parameters of three simulated workers after 60 steps of an optimizer."""

    def build(rank: int) -> tuple[torch.nn.Module, Any]:
        torch.manual_seed(SEED)
        layers = torch.nn.Linear(12, 33), torch.nn.Tanh(), torch.nn.Linear(33, 5)
        model = torch.nn.Sequential(*layers)
        return model, OPTIMIZERS[name](model.parameters(), Group(rank, 3))

    models, optimizers = zip(*map(build, range(3)), strict=True)
    random = torch.Generator().manual_seed(SEED + 7)
    parameters = [parameter for model in models for parameter in model.parameters()]
    for _ in range(60):
        for parameter in parameters:
            parameter.grad = torch.randn(parameter.shape, generator=random)
        lockstep([each.algorithm() for each in optimizers])
    yield from parameters


def adamw(parameters: Any) -> torch.optim.Optimizer:
    """Return the update rule of most strategies."""
    return torch.optim.AdamW(parameters, 0.01)


# by name: builds an optimizer of parameters and a group
OPTIMIZERS: Mapping[str, Callable[[Any, Any], Any]] = {
    "averaged": lambda p, g: optim.Averaged(adamw(p), group=g),
    "1-bit Adam": lambda p, g: optim.OneBitAdam(p, lr=0.01, warmup=4, group=g),
    "1-bit LAMB": lambda p, g: optim.OneBitLamb(p, lr=0.01, warmup=4, group=g),
    "0/1 Adam": lambda p, g: optim.ZeroOneAdam(p, lr=0.01, group=g),
    "local SGD": lambda p, g: optim.LocalSGD(torch.optim.SGD(p, 0.05), local_steps=3, group=g),
    "DiLoCo": lambda p, g: optim.DiLoCo(adamw(p), local_steps=3, group=g),
    "Streaming DiLoCo": lambda p, g: optim.StreamingDiLoCo(adamw(p), local_steps=4, group=g),
    "CO2": lambda p, g: optim.CO2(adamw(p), local_steps=3, group=g),
    "SparseLoCo": lambda p, g: optim.SparseLoCo(adamw(p), local_steps=3, group=g),
    "MuLoCo": lambda p, g: optim.MuLoCo(optim.Muon(p, lr=0.01), local_steps=3, group=g),
    "SelSync": lambda p, g: optim.SelSync(adamw(p), g, threshold=0.3, window=4),
    "SAPS": lambda p, g: optim.SAPS(adamw(p), g, density=0.3, bandwidth=torch.ones(3, 3)),
}

# by name: returns values for `checksum`
EXACT: Mapping[str, Callable[[], Iterable[Any]]] = {
    "loader": loader,
    "loader of 3 ranks": loader_of_ranks,
    "pyg nodes": partial(pyg, [5, 3], batch_size=300, shuffle=True),
    "pyg nodes with replacement": partial(pyg, [5, 3], batch_size=300, replace=True),
    "pyg nodes, disjoint": partial(pyg, [5, 3], batch_size=300, disjoint=True),
    "pyg links": partial(pyg, [5, 3], 2000, neg_sampling="binary", batch_size=250, shuffle=True),
    "pyg triplets": partial(
        pyg, [4, 2], 1000, neg_sampling={"mode": "triplet", "amount": 2}, batch_size=250
    ),
    "pyg typed": partial(pyg_typed, input_nodes="user", batch_size=100, shuffle=True),
    "pyg typed and temporal": partial(
        pyg_typed,
        input_nodes="user",
        time_attr="time",
        temporal_strategy="last",
        disjoint=True,
        batch_size=100,
    ),
    "pyg typed links": partial(
        pyg_typed,
        edge_label_index=(("user", "buys", "item"), None),
        neg_sampling="triplet",
        batch_size=400,
    ),
    "dgl nodes": dgl_nodes,
    **{f"optim {name}": partial(optimizer, name) for name in OPTIMIZERS},
    **{f"prepare {name}": make for name, make in golden_graphs.ENTRIES.items()},
}
# by name: returns numbers for `summary`
ROUNDED: Mapping[str, Callable[[], Mapping[str, Any]]] = {
    f"{name} (rounded)": compute for name, compute in golden_runs.ENTRIES.items()
}
NAMES = (*EXACT, *ROUNDED)


def compute(name: str) -> Checksum:
    """Compute an entry.

    Raises:
        KeyError: there is none of this name.
        Skipped: its graph is not on this machine.
    """
    if name in EXACT:
        return checksum(EXACT[name]())
    return {key: summary(values) for key, values in ROUNDED[name]().items()}


def compare(recorded: Checksum, found: Checksum) -> str:
    """Return how an entry differs from the recorded one; an empty string if it is equal."""
    if isinstance(recorded, str) or isinstance(found, str):
        return "" if recorded == found else f"recorded {recorded}, found {found}"
    if recorded.keys() != found.keys():
        return f"recorded {', '.join(recorded)}, found {', '.join(found)}"
    for key, old in recorded.items():
        new = found[key]
        limit = TOLERANCE * max(map(abs, old), default=0.0)
        if len(old) != len(new) or any(abs(a - b) > limit for a, b in zip(old, new, strict=True)):
            return f"{key}: recorded {old}, found {new}"
    return ""


@contextlib.contextmanager
def work_folder() -> Iterator[None]:
    """Enter a temporary folder, with one thread of torch and without settings of the user."""
    before, threads = Path.cwd(), torch.get_num_threads()
    with tempfile.TemporaryDirectory(prefix="golden-") as folder:
        own = {"GCNZC_CACHE": f"{folder}/cache", "MPLBACKEND": "Agg", "OMP_NUM_THREADS": "1"}
        try:
            os.chdir(folder)
            torch.set_num_threads(1)
            # warnings and progress
            with mock.patch.dict(os.environ, own), contextlib.redirect_stderr(io.StringIO()):
                yield
        finally:
            golden_runs.stop_workers()
            os.chdir(before)
            torch.set_num_threads(threads)


def computed(names: Iterable[str]) -> Iterator[tuple[str, Checksum | None, str, str]]:
    """Compute entries, and yield for each its name, its value, and the outcome if it has none."""
    with work_folder():
        for name in names:
            try:
                yield name, compute(name), "", ""
            except Exception as error:
                outcome = "skipped" if isinstance(error, Skipped) else "failed"
                reason = " ".join(f"{type(error).__name__}: {error}".split())[:400]
                yield name, None, outcome, reason


def record(file: Path, only: tuple[str, ...]) -> int:
    """Record entries; return the exit status, which is 1 if one of them failed."""
    if file.parent == harness.OWN_RESULTS:
        harness.check_code_is_committed()
    old = json.loads(file.read_text()) if file.exists() else {}
    status, found = 0, {}
    for name, value, outcome, reason in computed(name for name in NAMES if name.startswith(only)):
        print(f"{outcome or 'recorded':9}{name}{reason and ': '}{reason}", flush=True)
        if value is None:
            status = 1
        else:
            found[name] = value
    kept = {name: value for name, value in old.items() if not name.startswith(only)} | found
    results = {"seed": SEED, "machine": harness.machine()}
    results |= {name: kept[name] for name in NAMES if name in kept}
    lines = (f" {json.dumps(name)}: {json.dumps(value)}" for name, value in results.items())
    file.write_text("{\n" + ",\n".join(lines) + "\n}\n")
    return status


def check(recorded: Mapping[str, Any]) -> int:
    """Compare entries with the recorded ones; return the exit status."""
    counts = dict.fromkeys(("equal", "differs", "failed", "skipped"), 0)
    for name, value, outcome, reason in computed(recorded):
        if value is not None:
            reason = compare(recorded[name], value)
            outcome = "differs" if reason else "equal"
        counts[outcome] += 1
        print(f"{outcome:8}{name}{reason and ': '}{reason}", flush=True)
    print(", ".join(f"{count} {outcome}" for outcome, count in counts.items()))
    return int(counts["differs"] + counts["failed"] > 0)


def main(words: list[str] | None = None) -> int:
    """Run a command line and return the exit status."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("command", choices=["record", "check"])
    parser.add_argument("file", type=Path)
    parser.add_argument("--only", nargs="+", default=[""], metavar="NAME", help="names begin so")
    options = parser.parse_args(words)
    only = tuple(options.only)
    if options.command == "record":
        return record(options.file.resolve(), only)
    recorded = json.loads(options.file.read_text())
    chosen = {
        name: value
        for name, value in recorded.items()
        if name not in ABOUT and name.startswith(only)
    }
    if not chosen:
        parser.error(f"no name in {options.file} begins with {', '.join(options.only)}")
    return check(chosen)


if __name__ == "__main__":
    sys.exit(main())
