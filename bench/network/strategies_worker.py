"""Execute several runs of `gcnzc train` in one process, for bench/network/strategies.py.

    torchrun ... -m bench.network.strategies_worker RUNS.json

RUNS.json is a list of commands, each a list of arguments that ends with the run folder. Starting
Python and compiling kernels takes longer than such a run, and is done only once.
"""

import gc
import json
import os
import sys
from pathlib import Path

from gcnzc import cli

# between the ports of two runs, so that those of the cluster's other commands are not among them
PORT_STRIDE = 100


def main(runs: Path) -> int:
    """Execute all runs, and return the exit status of the first that fails, or 0."""
    port = int(os.environ["MASTER_PORT"])
    for number, words in enumerate(json.loads(runs.read_text())):
        # rank 0's store of the run before may still listen on its port
        os.environ["MASTER_PORT"] = str(port + PORT_STRIDE * number)
        status = cli.main(words)
        if status:
            return status
        if os.environ["RANK"] == "0":
            found = json.loads((Path(words[-1]) / "result.json").read_text())
            rate = f"{100 * found['test_accuracy']:.2f} %, {found['seeds_per_s']:.1f} seeds/s"
            print(Path(words[-1]).name, rate, file=sys.stderr, flush=True)
        # free the memory of this run, such as its loader's, before the next
        gc.collect()
    return 0


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
