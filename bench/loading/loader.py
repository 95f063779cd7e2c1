"""Measure the seeds per second of gcnzc's loader compared with DGL, PyG and GraphBolt.

    python -m bench.loading.loader [--rivals FOLDER] [--rounds 5] [--cache data/bench]

The graph has a power-law degree distribution, 1 M nodes, 20 M edges and 100 float32 features per
node. Minibatches have 1024 seeds and fan-outs 15, 10, 5. Each system runs in its own process
(`bench/rivals/`). PyG and GraphBolt also have their own environments, created by
`bench/rivals/make_environments.sh`; without `--rivals`, only gcnzc and DGL are measured.

The measurements are interleaved: in each round, every configuration loads some batches while all
other processes are idle. Each measurement takes its own range of shuffled seeds. The clock starts
when the first SKIPPED batches have been loaded, so the time to start threads and workers is not
counted. Batches that are already prefetched at that moment cost no time, which favours systems with
a deeper prefetch queue. Sampling alone is measured with one thread, in separate processes
that are limited to one thread.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from bench import harness
from gcnzc.graph.graph import Graph

ROOT = Path(__file__).parents[2]
NODES, EDGES, COLUMNS, SEED = 10**6, 2 * 10**7, 100, 0
EXPONENT = 0.6  # a node of rank r has a share of the edges' ends proportional to r**-EXPONENT
BATCH_SIZE = 1024
# batches timed per round for each system (fewer for slow systems), and untimed batches before them
TIMED, SKIPPED = {"ours": 100, "dgl": 40, "pyg": 12, "graphbolt": 16}, 6
# minimum speed-ups that the documentation promises, between the fastest configurations
PROMISED = {"dgl": 3.0, "pyg": 10.0, "graphbolt": 10.0, "dgl sampling": 2.0}


def power_law(count: int, random: np.random.Generator) -> NDArray[np.float64]:
    """Return the (count,) cumulative shares of nodes in the ends of edges, by a power law."""
    shares = np.arange(1, count + 1) ** -EXPONENT
    random.shuffle(shares)
    return np.cumsum(shares / shares.sum())


def draw_nodes(
    ends: NDArray[np.float64], count: int, random: np.random.Generator
) -> NDArray[np.int64]:
    """Return (count,) random nodes with the shares of `power_law`."""
    return np.searchsorted(ends, random.random(count)).clip(0, len(ends) - 1)


def generated_graph(cache: Path) -> Path:
    """Return the folder of the graph, which is generated if it is missing."""
    folder = cache / f"powerlaw-{NODES}-{EDGES}-{SEED}"
    if not (folder / "seeds.npy").exists():
        random = np.random.default_rng(SEED)
        ends = power_law(NODES, random)
        src, dst = (draw_nodes(ends, EDGES, random) for _ in "sd")
        graph = Graph.from_edges(torch.from_numpy(src), torch.from_numpy(dst), NODES)
        folder.mkdir(parents=True, exist_ok=True)
        np.save(folder / "indptr.npy", graph.indptr.numpy())
        np.save(folder / "indices.npy", graph.indices.numpy())
        np.save(folder / "features.npy", random.standard_normal((NODES, COLUMNS), np.float32))
        np.save(folder / "seeds.npy", random.permutation(NODES))
    return folder


@dataclass
class Rival:
    """A process that measures the configurations of one system."""

    name: str
    process: "subprocess.Popen[str]"
    configurations: list[str]
    versions: dict[str, str]

    @classmethod
    def start(
        cls,
        name: str,
        python: str,
        folder: Path,
        threads: int | None = None,
        *,
        work: str = "load",
        root: Path = ROOT,
    ) -> "Rival":
        """Start the process and wait until it has loaded the graph.

        Args:
            name: of the system.
            python: the interpreter of its environment.
            folder: of the graph.
            threads: OMP_NUM_THREADS of the process; not set if None.
            work: what the process measures, the first part of the program's name.
            root: checkout of gcnzc that the process imports in this environment.
        """
        program = ROOT / "bench" / "rivals" / f"{work}_{name}.py"
        # PYTHONPATH of this environment must not leak into the rival's environment
        env = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
        if python == sys.executable:
            env["PYTHONPATH"] = str(root)
        if threads is not None:
            env["OMP_NUM_THREADS"] = str(threads)
        process = subprocess.Popen(
            [python, "-W", "ignore", str(program), str(folder)],
            env=env,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        rival = cls(name, process, [], {})
        response = rival._read_response()
        rival.configurations, rival.versions = response["configurations"], response["versions"]
        return rival

    def measure(
        self, configuration: str, seeds: Path, begin: int, batches: int, skipped: int = SKIPPED
    ) -> dict[str, float]:
        """Time `batches` batches after the skipped ones, starting at seed number `begin`."""
        num_seeds = (batches + skipped) * BATCH_SIZE
        request = {
            "configuration": configuration,
            "seeds": str(seeds),
            "begin": begin,
            "end": begin + num_seeds,
            "skip": skipped,
        }
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps(request) + "\n")
        self.process.stdin.flush()
        return self._read_response()

    def _read_response(self) -> dict[str, Any]:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        if not line:
            raise RuntimeError(
                f"the process of {self.name} ended with exit status {self.process.wait()}"
            )
        return json.loads(line)


def main() -> None:
    """Measure all systems and record their times."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--rivals", type=Path, help="folder of make_environments.sh")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument(
        "--cache", type=Path, default=ROOT / "data" / "bench", help="folder for the graph"
    )
    options = parser.parse_args()
    harness.check_code_is_committed()
    folder = generated_graph(options.cache)

    rivals = [Rival.start(name, sys.executable, folder) for name in ("ours", "dgl")]
    if options.rivals:
        rivals += [
            Rival.start(name, str(options.rivals / name / "bin" / "python"), folder)
            for name in ("pyg", "graphbolt")
        ]
    cases = [
        (rival, configuration, "2 cores")
        for rival in rivals
        for configuration in rival.configurations
        if configuration != "sampling"
    ]
    single = [Rival.start(name, sys.executable, folder, threads=1) for name in ("ours", "dgl")]
    cases += [(rival, "sampling", "1 thread") for rival in single]

    check_sizes(cases, folder)
    results: dict[tuple[str, str], list[dict[str, float]]] = {}
    random = np.random.default_rng()
    for round_ in range(options.rounds):
        first = round_ % len(cases)
        for rival, configuration, _ in cases[first:] + cases[:first]:
            batches = TIMED[rival.name]
            begin = int(random.integers(NODES - (batches + SKIPPED) * BATCH_SIZE))
            result = rival.measure(configuration, folder / "seeds.npy", begin, batches)
            results.setdefault((rival.name, configuration), []).append(result)
    record(cases, results)


def check_sizes(cases: list[tuple[Rival, str, str]], folder: Path) -> None:
    """Raise an error unless all configurations sample about as many nodes from the same seeds."""
    nodes = {
        (rival.name, configuration): rival.measure(configuration, folder / "seeds.npy", 0, 2)[
            "nodes"
        ]
        for rival, configuration, _ in cases
    }
    ours = nodes["ours", "sampling"]
    for (name, configuration), count in nodes.items():
        # PyG samples neighbours only of nodes that the last hop added, not again of earlier ones
        least = 0.85 if name == "pyg" else 0.99
        if not least < count / ours < 1.01:
            raise RuntimeError(
                f"{name}, {configuration}: {count:.0f} nodes per batch, but gcnzc has {ours:.0f}"
            )


def record(
    cases: list[tuple[Rival, str, str]], results: dict[tuple[str, str], list[dict[str, float]]]
) -> None:
    """Record a line for each configuration, and one for each promised speed-up."""
    rates: dict[str, float] = {}
    for rival, configuration, cores in cases:
        measured = results[rival.name, configuration]
        seconds = [result["seconds"] / result["batches"] for result in measured]
        fifths = statistics.quantiles(seconds, n=5)
        timing = harness.Timing(statistics.median(seconds), fifths[0], fifths[3], len(seconds))
        versions = {f"rival_{name}": version for name, version in rival.versions.items()}
        seeds_per_s = BATCH_SIZE / timing.median_s
        harness.record(
            "loader",
            {"system": rival.name, "way": configuration, "on": cores, "batch_size": BATCH_SIZE},
            timing,
            seeds_per_s=seeds_per_s,
            nodes=statistics.mean(result["nodes"] for result in measured),
            edges=statistics.mean(result["edges"] for result in measured),
            **versions,
        )
        if "without features" not in configuration:
            kind = f"{rival.name} sampling" if configuration == "sampling" else rival.name
            rates[kind] = max(rates.get(kind, 0.0), seeds_per_s)
    for kind, least in PROMISED.items():
        if kind in rates:
            ours = rates["ours sampling" if "sampling" in kind else "ours"]
            case = {"ratio": f"ours / {kind}", "promised": least}
            harness.record("loader", case, times=ours / rates[kind])


if __name__ == "__main__":
    main()
