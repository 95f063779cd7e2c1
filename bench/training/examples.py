"""Measure the accuracy and speed of the scripts of examples/ before and after replacing the loader.

    python -m bench.training.examples [SCRIPT ...] [--rivals FOLDER] [--archive FILE] [--seeds N]

The original and the changed script run once per seed, interleaved. Their output is recorded: the
accuracy or ROC AUC, the median time of an epoch, and the part of it spent waiting for minibatches.
The original PyG scripts run in the environment FOLDER/pyg, created by
bench/rivals/make_environments.sh, since PyG's own loader needs torch-sparse. All other scripts run
in the current environment.
"""

import argparse
import os
import statistics
import subprocess
import sys
from pathlib import Path

from bench.harness import record

ROOT = Path(__file__).parents[2]
ARCHIVE = ROOT.parent / "shared/data/amazon_photo/amazon_photo.npz"
SCRIPTS = ("dgl_node", "dgl_link", "dgl_multi", "pyg_node", "pyg_link", "pyg_multi")
# DGL fails to import with this version of torch unless it is imported by `import_dgl`
WITH_DGL = "import runpy, sys; from gcnzc.interop.dgl import import_dgl; import_dgl(); " + (
    "sys.argv = sys.argv[1:]; runpy.run_path(sys.argv[0], run_name='__main__')"
)


def command_of(script: str, *, changed: bool, rivals: Path) -> list[str]:
    """Return the command that runs a script."""
    ours = changed or script.startswith("dgl")
    python = sys.executable if ours else str(rivals / "pyg/bin/python")
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    path = str(ROOT / "examples" / f"{script}{'_gcnzc' if changed else ''}.py")
    if script.endswith("multi"):
        if script.startswith("dgl") and not changed:
            return [python, *torchrun, "--no-python", python, "-c", WITH_DGL, path]
        return [python, *torchrun, path]
    if script.startswith("dgl") and not changed:
        return [python, "-c", WITH_DGL, path]
    return [python, path]


def run(command: list[str], archive: Path, seed: int) -> tuple[str, float, float, float]:
    """Run a script once.

    Returns:
        Name and value of its metric, the median seconds of an epoch, and the seconds of waiting.
    """
    paths = f"{ROOT}{os.pathsep}{ROOT / 'examples'}"
    done = subprocess.run(
        [*command, str(archive), "--seed", str(seed)],
        env={**os.environ, "PYTHONPATH": paths},
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)} failed:\n{done.stderr}")
    words = done.stdout.split()
    return words[0], float(words[1]), float(words[3]), float(words[5])


def main() -> None:
    """Run each requested script, unchanged and changed."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("scripts", nargs="*", choices=[*SCRIPTS, []], metavar="SCRIPT")
    parser.add_argument("--rivals", type=Path, default=Path("rivals"))
    parser.add_argument("--archive", type=Path, default=ARCHIVE)
    parser.add_argument("--seeds", type=int, default=3)
    options = parser.parse_args()
    for script in options.scripts or SCRIPTS:
        commands = {
            name: command_of(script, changed=name == "changed", rivals=options.rivals)
            for name in ("unchanged", "changed")
        }
        # compile and cache the kernels before the measured runs
        run(commands["changed"], options.archive, 0)
        values: dict[str, list[float]] = {name: [] for name in commands}
        waits: dict[str, list[float]] = {name: [] for name in commands}
        epochs: dict[str, list[float]] = {name: [] for name in commands}
        for seed in range(options.seeds):
            for name, command in commands.items():
                measure, value, epoch_s, waited_s = run(command, options.archive, seed)
                values[name].append(100 * value)
                epochs[name].append(epoch_s)
                waits[name].append(waited_s)
        waited = {name: statistics.median(seconds) for name, seconds in waits.items()}
        whole = {name: statistics.median(seconds) for name, seconds in epochs.items()}
        for name in commands:
            spread = statistics.stdev(values[name]) if options.seeds > 1 else None
            record(
                "examples",
                {"script": script, "way": name, "graph": options.archive.stem, "measure": measure},
                mean_percent=statistics.mean(values[name]),
                spread_percent=spread,
                values_percent=values[name],
                epoch_s=whole[name],
                waited_s=waited[name],
                waits_s=waits[name],
                epoch_times_faster=whole["unchanged"] / whole[name],
                waits_times_less=waited["unchanged"] / waited[name],
            )


if __name__ == "__main__":
    main()
