"""Measure the accuracy of presets of `gcnzc train` on real graphs, compared with published scores.

    python -m bench.training.presets PRESET [PRESET ...] [--seeds N] [--options "OPTIONS"]
                                     [--archives FOLDER ...] [--splits FOLDER]

A folder of --archives contains NAME/NAME.npz, the graph of a preset, for `gcnzc prepare`, which has
the options that the preset names. --splits contains NAME.npz with the arrays train, valid and test:
the split of the source, used instead of that of the archive. OPTIONS override those of the presets
and are recorded with the result, such as a smaller number of epochs. Only the seed differs between
runs; the model with the best validation score is tested.
"""

import argparse
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from bench import harness
from bench.training.accuracy import ARCHIVES, gcnzc, scores_of, train_each_seed
from gcnzc.train.presets import Preset, preset_names, read_preset

PARTS = ("train", "valid", "test")


def main(argv: Sequence[str] | None = None) -> int:
    """Measure each preset, and return 0."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("presets", nargs="+", metavar="PRESET", choices=preset_names())
    parser.add_argument("--seeds", type=int, default=3, help="number of seeds, at least 2")
    parser.add_argument("--options", default="", help="options of `gcnzc train`, in one word")
    parser.add_argument("--archives", type=Path, nargs="+", default=[ARCHIVES])
    parser.add_argument("--splits", type=Path, help="folder of NAME.npz")
    asked = parser.parse_args(argv)
    if asked.seeds < 2:
        parser.error("a standard deviation needs at least two seeds")
    for name in asked.presets:
        preset = read_preset(name)
        with tempfile.TemporaryDirectory() as folder:
            archive, split = with_split(preset, asked.archives, asked.splits, Path(folder))
            prepared = Path(folder, "graph")
            gcnzc(["prepare", str(archive), str(prepared), *preset.prepare.split()])
            measure(preset, prepared, split, asked.options, asked.seeds)
    return 0


def with_split(
    preset: Preset, archives: Sequence[Path], splits: Path | None, scratch: Path
) -> tuple[Path, str]:
    """Return the archive of a preset's graph, and the name of its split.

    If there is a split of the source, the archive is copied to `scratch` with that split.
    """
    paths = [folder / preset.data / f"{preset.data}.npz" for folder in archives]
    archive = next((path for path in paths if path.exists()), None)
    if archive is None:
        raise SystemExit(f"no archive of {preset.data}: {', '.join(map(str, paths))}")
    arrays = dict(np.load(archive))
    split = None if splits is None else splits / f"{preset.data}.npz"
    if split is None or not split.exists():
        return archive, "made" if "made_train_idx" in arrays else "standard"
    given = np.load(split)
    for part in PARTS:
        arrays.pop(f"made_{part}_idx", None)
        arrays[f"{part}_idx"] = given[part]
    copy = scratch / archive.name
    np.savez(copy, **arrays)
    return copy, "of the source"


def measure(preset: Preset, prepared: Path, split: str, options: str, seeds: int) -> dict[str, Any]:
    """Train a preset once per seed, and record the mean and standard deviation of its scores."""
    words = ["train", str(prepared), "--preset", preset.name, *options.split()]
    return harness.record(
        "presets",
        {"preset": preset.name, "graph": preset.data, "split": split, "options": options},
        **scores_of(train_each_seed(words, seeds)),
        published_percent=100 * preset.score,
        made_by=f"gcnzc prepare ARCHIVE GRAPH {preset.prepare}".rstrip(),
        command=f"gcnzc train GRAPH --preset {preset.name} {options}".rstrip(),
    )


if __name__ == "__main__":
    sys.exit(main())
