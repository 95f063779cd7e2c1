"""Train and evaluate on a graph of ogbn-papers100M's shape within a limit of memory.

    python -m bench.training.large_graph FOLDER [--scale 0.2] [--feature-dtype int8] [--gb 8]

Generates and prepares the graph in FOLDER, unless it is there, clears the page cache, and runs
`gcnzc train` for one epoch in a control group with the limit; pages of mapped files count. Needs
root, and for scale 0.2 about 25 GB of disk. The generated files are removed after the graph is
prepared. The exit status is 1 if the evaluation takes longer than the epoch.
"""

import argparse
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

from bench import harness

GROUPS = Path("/sys/fs/cgroup")
OPTIONS = "--model sage --fanouts 15,10,5 --hidden 256 --batch-size 512 --epochs 1 --evaluate auto"


def main() -> int:
    """Measure a run, and return the exit status."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("folder", type=Path)
    parser.add_argument("--scale", type=float, default=0.2)
    parser.add_argument("--feature-dtype", default="int8", choices=["int8", "float16"])
    parser.add_argument("--gb", type=float, default=8.0, help="limit of memory, in GiB")
    parser.add_argument("--options", default=OPTIONS, help="of `gcnzc train`, in one word")
    asked = parser.parse_args()
    harness.check_code_is_committed()
    graph, run = (
        asked.folder / f"papers-{asked.scale:g}-{asked.feature_dtype}",
        asked.folder / "run",
    )
    if not (graph / "meta.json").exists():
        prepare(asked, graph)
    shutil.rmtree(run, ignore_errors=True)
    os.sync()
    Path("/proc/sys/vm/drop_caches").write_text("3\n")
    group = limited_group(int(asked.gb * 2**30))
    try:
        gcnzc(["train", graph, *asked.options.split(), "--out", run], group)
    finally:
        group.rmdir()
    (line,) = (json.loads(text) for text in (run / "record.jsonl").read_text().splitlines())
    meta = json.loads((graph / "meta.json").read_text())
    is_short = line["evaluate_s"] <= line["epoch_s"]
    harness.record(
        "large_graph",
        {"graph": "ogbn-papers100M", "scale": asked.scale, "feature_dtype": asked.feature_dtype},
        limit_gib=asked.gb,
        num_nodes=meta["num_nodes"],
        num_edges=meta["num_edges"],
        graph_bytes=sum(path.stat().st_size for path in graph.rglob("*") if path.is_file()),
        command=f"gcnzc train GRAPH {asked.options}",
        is_evaluated_within_the_epoch_time=is_short,
        **{
            key: line[key]
            for key in ("epoch_s", "evaluate_s", "evaluation", "test_accuracy", "seeds")
        },
        best_possible_accuracy=line["best_possible_accuracy"],
    )
    return int(not is_short)


def prepare(asked: argparse.Namespace, graph: Path) -> None:
    """Generate the graph, prepare it, and remove the generated files."""
    raw = asked.folder / "raw"
    shutil.rmtree(raw, ignore_errors=True)
    gcnzc(["make", raw, "--like", "ogbn-papers100M", "--scale", asked.scale])
    gcnzc(["prepare", raw, graph, "--feature-dtype", asked.feature_dtype])
    shutil.rmtree(raw)


def limited_group(limit_bytes: int) -> Path:
    """Create a control group with a limit of memory, and return its folder."""
    old = GROUPS / "memory"
    folder = (old if old.is_dir() else GROUPS) / f"gcnzc-{os.getpid()}"
    folder.mkdir()
    name = "memory.limit_in_bytes" if old.is_dir() else "memory.max"
    (folder / name).write_text(str(limit_bytes))
    return folder


def gcnzc(words: list[object], group: Path | None = None) -> None:
    """Run a command, in a control group if one is given."""

    def join() -> None:
        if group is not None:
            (group / "cgroup.procs").write_text(str(os.getpid()))

    command = [sys.executable, "-m", "gcnzc", *map(str, words)]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL, preexec_fn=join)


if __name__ == "__main__":
    sys.exit(main())
