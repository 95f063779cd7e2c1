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
from collections.abc import Iterable, Mapping, Sequence
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

Results = dict[tuple[str, str], list[dict[str, float]]]
"""what was measured in each round, by system and configuration"""


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
    ) -> "Rival":
        """Start the process and wait until it has loaded the graph.

        Args:
            name: of the system.
            python: the interpreter of its environment.
            folder: of the graph.
            threads: OMP_NUM_THREADS of the process; not set if None.
            work: what the process measures, the first part of the program's name.
        """
        program = ROOT / "bench" / "rivals" / f"{work}_{name}.py"
        # PYTHONPATH of this environment must not leak into the rival's environment
        env = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
        if python == sys.executable:
            env["PYTHONPATH"] = str(ROOT)
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


def measure_rounds(
    cases: Sequence[tuple[Rival, str]],
    seeds: Path,
    rounds: int,
    timed: Mapping[str, int],
    skipped: int = SKIPPED,
) -> Results:
    """Measure configurations in interleaved rounds, each on its own range of seeds.

    Args:
        cases: systems with their configurations.
        seeds: file of the shuffled seeds.
        rounds: number of measurements of each case.
        timed: number of timed batches by system.
        skipped: number of batches before them.
    """
    random, num_seeds = np.random.default_rng(), len(np.load(seeds, mmap_mode="r"))
    results: Results = {}
    for round_ in range(rounds):
        first = round_ % len(cases)
        for rival, name in [*cases[first:], *cases[:first]]:
            batches = timed[rival.name]
            begin = int(random.integers(num_seeds - (batches + skipped) * BATCH_SIZE))
            found = rival.measure(name, seeds, begin, batches, skipped)
            results.setdefault((rival.name, name), []).append(found)
    return results


def record_case(file: str, rival: Rival, name: str, results: Results, **case: str) -> list[float]:
    """Record a configuration, and return its seconds per batch in each round."""
    found = results[rival.name, name]
    seconds = [each["seconds"] / each["batches"] for each in found]
    timing = harness.timing_of(seconds)
    harness.record(
        file,
        {"system": rival.name, "way": name, **case, "batch_size": BATCH_SIZE},
        timing,
        seeds_per_s=BATCH_SIZE / timing.median_s,
        nodes=statistics.mean(each["nodes"] for each in found),
        edges=statistics.mean(each["edges"] for each in found),
        **{f"rival_{name}": version for name, version in rival.versions.items()},
    )
    return seconds


def record_ratio(
    file: str, ratio: str, ours: Iterable[list[float]], theirs: Iterable[list[float]]
) -> None:
    """Record the speed-up of the fastest configuration, the median over the rounds."""
    own, other = (min(times, key=statistics.median) for times in (ours, theirs))
    ratios = [b / a for a, b in zip(own, other, strict=True)]
    harness.record(
        file,
        {"ratio": ratio, "rounds": len(ratios)},
        times=statistics.median(ratios),
        least=min(ratios),
        greatest=max(ratios),
    )


def parser_of(doc: str | None, *, rivals: bool | None) -> argparse.ArgumentParser:
    """Return a parser of the options that benchmarks of loaders have in common.

    Args:
        doc: docstring of the benchmark.
        rivals: whether `--rivals` is required; None if there is no such option.
    """
    parser = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawTextHelpFormatter)
    if rivals is not None:
        text = "folder of make_environments.sh"
        parser.add_argument("--rivals", type=Path, required=rivals, help=text)
    parser.add_argument("--rounds", type=int, default=5)
    cache = ROOT / "data" / "bench"
    parser.add_argument("--cache", type=Path, default=cache, help="folder for the graph")
    return parser


def main() -> None:
    """Measure all systems and record their times."""
    options = parser_of(__doc__, rivals=False).parse_args()
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
    results = measure_rounds(
        [(rival, name) for rival, name, _ in cases], folder / "seeds.npy", options.rounds, TIMED
    )
    for rival, name, cores in cases:
        record_case("loader", rival, name, results, on=cores)


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


if __name__ == "__main__":
    main()
