"""Runs of `gcnzc train` one after the other in this worker, for bench/network/strategies.py.

    torchrun ... -m bench.network.strategies_worker RUNS.json

RUNS.json is a list of the words of commands, the run folder last. What starting Python and
compiling kernels takes, which is more than such a run itself, is spent once.
"""

import gc
import json
import os
import sys
from pathlib import Path

from gcnzc import cli


def main(runs: Path) -> int:
    """Take all runs; the first that fails ends this worker."""
    for words in json.loads(runs.read_text()):
        status = cli.main(words)
        if status:
            return status
        if os.environ["RANK"] == "0":
            found = json.loads((Path(words[-1]) / "result.json").read_text())
            rate = f"{100 * found['test_accuracy']:.2f} %, {found['seeds_per_s']:.1f} seeds/s"
            print(Path(words[-1]).name, rate, file=sys.stderr, flush=True)
        # memory of one run, such as its loader's, must not weigh on the next
        gc.collect()
    return 0


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
