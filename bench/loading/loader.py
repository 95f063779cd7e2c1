"""Compare the seeds per second of gcnzc's loader with DGL, PyG and GraphBolt, in one run.

A power-law graph of 1 M nodes and 20 M edges, 100 float32 features, fan-outs 15,10,5 and batches of
1024 seeds. Every system is a process of its own (`rivals/`), PyG and GraphBolt in environments of
their own (`rivals/make_environments.sh`). The ways take turns: each is asked for some batches in
every round, while all others are still, and every round takes other seeds. A way's time begins when
its first batches have arrived, so that starting threads and workers is not counted; the batches
that wait by then are not counted either, which favours whoever works further ahead, by a batch or
four of those timed. Sampling alone is timed with one thread, by processes that have no more.

usage: python -m bench.loading.loader [--rivals FOLDER] [--rounds 5] [--cache data/bench]
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

from bench import harness
from gcnzc.graph.graph import Graph

ROOT = Path(__file__).parents[2]
NODES, EDGES, COLUMNS, SEED = 10**6, 2 * 10**7, 100, 0
EXPONENT = 0.6  # a node of rank r has a share of the edges' ends proportional to r**-EXPONENT
BATCH_SIZE = 1024
# batches a way is timed for in a round, and others before them; slow ways get fewer
TIMED, SKIPPED = {"ours": 100, "dgl": 40, "pyg": 12, "graphbolt": 16}, 6
# least ratios of the best ways' medians that are promised
PROMISED = {"dgl": 3.0, "pyg": 10.0, "graphbolt": 10.0, "dgl sampling": 2.0}


def made(cache: Path) -> Path:
    """Return the folder of the graph, which is generated if it is missing."""
    folder = cache / f"powerlaw-{NODES}-{EDGES}-{SEED}"
    if not (folder / "seeds.npy").exists():
        random = np.random.default_rng(SEED)
        shares = np.arange(1, NODES + 1) ** -EXPONENT
        random.shuffle(shares)
        ends = np.cumsum(shares / shares.sum())
        src, dst = (np.searchsorted(ends, random.random(EDGES)).clip(0, NODES - 1) for _ in "sd")
        graph = Graph.from_edges(torch.from_numpy(src), torch.from_numpy(dst), NODES)
        folder.mkdir(parents=True, exist_ok=True)
        np.save(folder / "indptr.npy", graph.indptr.numpy())
        np.save(folder / "indices.npy", graph.indices.numpy())
        np.save(folder / "features.npy", random.standard_normal((NODES, COLUMNS), np.float32))
        np.save(folder / "seeds.npy", random.permutation(NODES))
    return folder


@dataclass
class Rival:
    """A process that times its own ways."""

    name: str
    process: "subprocess.Popen[str]"
    ways: list[str]
    versions: dict[str, str]

    @classmethod
    def start(cls, name: str, python: str, folder: Path, threads: int | None = None) -> "Rival":
        """Start the process, and wait until it has the graph; on all cores if `threads` is None."""
        program = ROOT / "bench" / "rivals" / ("ours.py" if name == "ours" else f"{name}_rival.py")
        # nothing of this environment may reach the rival's
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
        answer = rival._answer()
        rival.ways, rival.versions = answer["ways"], answer["versions"]
        return rival

    def ask(self, way: str, seeds: Path, begin: int, batches: int) -> dict[str, float]:
        """Time `batches` batches after the skipped ones, of seeds from `begin` on."""
        num_seeds = (batches + SKIPPED) * BATCH_SIZE
        request = {
            "way": way,
            "seeds": str(seeds),
            "begin": begin,
            "end": begin + num_seeds,
            "skip": SKIPPED,
        }
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps(request) + "\n")
        self.process.stdin.flush()
        return self._answer()

    def _answer(self) -> dict[str, Any]:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        if not line:
            raise RuntimeError(f"the process of {self.name} ended: {self.process.wait()}")
        return json.loads(line)


def main() -> None:
    """Run all systems and record their times."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--rivals", type=Path, help="made by rivals/make_environments.sh")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--cache", type=Path, default=ROOT / "data" / "bench")
    options = parser.parse_args()
    folder = made(options.cache)

    rivals = [Rival.start(name, sys.executable, folder) for name in ("ours", "dgl")]
    if options.rivals:
        rivals += [
            Rival.start(name, str(options.rivals / name / "bin" / "python"), folder)
            for name in ("pyg", "graphbolt")
        ]
    asked = [(rival, way, "2 cores") for rival in rivals for way in rival.ways if way != "sampling"]
    single = [Rival.start(name, sys.executable, folder, threads=1) for name in ("ours", "dgl")]
    asked += [(rival, "sampling", "1 thread") for rival in single]

    check_sizes(asked, folder)
    answers: dict[tuple[str, str], list[dict[str, float]]] = {}
    random = np.random.default_rng()
    for round_ in range(options.rounds):
        for rival, way, _ in asked[round_ % len(asked) :] + asked[: round_ % len(asked)]:
            batches = TIMED[rival.name]
            begin = int(random.integers(NODES - (batches + SKIPPED) * BATCH_SIZE))
            answer = rival.ask(way, folder / "seeds.npy", begin, batches)
            answers.setdefault((rival.name, way), []).append(answer)
    record(asked, answers)


def check_sizes(asked: list[tuple[Rival, str, str]], folder: Path) -> None:
    """Refuse to time what does not do the same work, on the same seeds."""
    nodes = {
        (rival.name, way): rival.ask(way, folder / "seeds.npy", 0, 2)["nodes"]
        for rival, way, _ in asked
    }
    ours = nodes["ours", "sampling"]
    for (name, way), count in nodes.items():
        # PyG draws again only for the nodes of the last hop, not for those before them
        least = 0.85 if name == "pyg" else 0.99
        if not least < count / ours < 1.01:
            raise RuntimeError(f"{name}, {way}: {count:.0f} nodes a batch, but ours has {ours:.0f}")


def record(
    asked: list[tuple[Rival, str, str]], answers: dict[tuple[str, str], list[dict[str, float]]]
) -> None:
    """Record one line for each way, and one for each ratio."""
    rates: dict[str, float] = {}
    for rival, way, cores in asked:
        told = answers[rival.name, way]
        seconds = [answer["seconds"] / answer["batches"] for answer in told]
        fifths = statistics.quantiles(seconds, n=5)
        timing = harness.Timing(statistics.median(seconds), fifths[0], fifths[3], len(seconds))
        versions = {f"rival_{name}": version for name, version in rival.versions.items()}
        seeds_per_s = BATCH_SIZE / timing.median_s
        harness.record(
            "loader",
            {"system": rival.name, "way": way, "on": cores, "batch_size": BATCH_SIZE},
            timing,
            seeds_per_s=seeds_per_s,
            nodes=statistics.mean(answer["nodes"] for answer in told),
            edges=statistics.mean(answer["edges"] for answer in told),
            **versions,
        )
        if "without features" not in way:
            kind = f"{rival.name} sampling" if way == "sampling" else rival.name
            rates[kind] = max(rates.get(kind, 0.0), seeds_per_s)
    for kind, least in PROMISED.items():
        if kind in rates:
            ours = rates["ours sampling" if "sampling" in kind else "ours"]
            case = {"ratio": f"ours / {kind}", "promised": least}
            harness.record("loader", case, times=ours / rates[kind])


if __name__ == "__main__":
    main()
