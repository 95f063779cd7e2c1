"""Measure the memory of preparing and training with features that are larger than that memory.

    python -m bench.data.memory [--gigabytes 4] [--folder data/memory]

It generates a graph whose features take the given number of gigabytes on disk, prepares it, and
trains one epoch on the prepared folder, by the commands that a user would run.
`unshared_peak_bytes` is the peak of the memory that the kernel cannot drop: anonymous pages and
shared memory (RssAnon + RssShmem of /proc/PID/status, read every 20 ms). `mapped_peak_bytes` is the
peak of pages of memory-mapped files (RssFile), which the kernel can drop.
"""

import argparse
import json
import shutil
import subprocess
import sys
import time
from pathlib import Path

from bench.harness import Timing, record

NUM_FEATURES = 512
LIMITS_GB = {"make": None, "prepare": 1.0, "train": 1.5}


def main() -> None:
    """Measure the three commands, and record each."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--gigabytes", type=float, default=4.0)
    parser.add_argument("--folder", type=Path, default=Path("data/memory"))
    options = parser.parse_args()
    nodes = int(options.gigabytes * 1e9 / (4 * NUM_FEATURES))
    raw, prepared, run = (options.folder / name for name in ("raw", "prepared", "run"))
    shutil.rmtree(options.folder, ignore_errors=True)
    sizes = ["--nodes", nodes, "--edges", 5 * nodes, "--num-features", NUM_FEATURES]
    model = ["--fanouts", "10,10", "--hidden", 64]
    commands = {
        "make": ["make", raw, "--kind", "rmat", *sizes, "--classes", 10],
        "prepare": ["prepare", raw, prepared],
        "train": ["train", prepared, "--epochs", 1, "--out", run, *model],
    }
    for name, words in commands.items():
        seconds, peak, mapped = run_and_measure([sys.executable, "-m", "gcnzc", *map(str, words)])
        limit = LIMITS_GB[name]
        record(
            "memory",
            {"command": name, "feature_bytes": nodes * NUM_FEATURES * 4, "nodes": nodes},
            Timing(seconds, seconds, seconds, 1),
            unshared_peak_bytes=peak,
            mapped_peak_bytes=mapped,
        )
        if limit is not None and peak > limit * 1e9:
            print(f"{name}: the peak of {peak / 1e9:.2f} GB exceeds {limit} GB")
    shutil.rmtree(options.folder)


def run_and_measure(command: list[str]) -> tuple[float, int, int]:
    """Run a command; return its seconds, and the peaks of its unshared and mapped bytes."""
    begin = time.monotonic()
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    peak = mapped = 0
    while process.poll() is None:
        status = Path(f"/proc/{process.pid}/status").read_text()
        fields = dict(line.split(":", 1) for line in status.splitlines() if ":" in line)
        kilobytes = {k: int(v.split()[0]) for k, v in fields.items() if k.startswith("Rss")}
        peak = max(peak, 1024 * (kilobytes.get("RssAnon", 0) + kilobytes.get("RssShmem", 0)))
        mapped = max(mapped, 1024 * kilobytes.get("RssFile", 0))
        time.sleep(0.02)
    out, _ = process.communicate()
    if process.returncode:
        sys.exit(f"{' '.join(command)} failed")
    json.loads(out)
    return time.monotonic() - begin, peak, mapped


if __name__ == "__main__":
    main()
