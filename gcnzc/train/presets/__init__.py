"""Presets: the options of published recipes, in TOML files that `gcnzc train --preset` reads.

A file contains the published score, its source, and a table `options`: the options of `gcnzc train`
that differ from their defaults. The name of a preset, such as `tuned/cora-gcn`, is the path of its
file without `.toml`.
"""

import difflib
import functools
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

FOLDER = Path(__file__).parent


@dataclass(frozen=True, kw_only=True)
class Preset:
    """A published recipe.

    Attributes:
        name: that of --preset.
        data: the dataset of the published score.
        metric: metric of `score`.
        score: published test score, in [0, 1].
        deviation: published standard deviation of `score` over runs.
        source: the paper, with its year.
        repository: address of the code with the recipe.
        file: file in the repository that has the options.
        prepare: options of `gcnzc prepare` for the dataset; empty for the defaults.
        differs: differences between the published recipe and these options.
        options: options of `gcnzc train` by field name, as values of TOML.
    """

    name: str
    data: str
    metric: str
    score: float
    deviation: float
    source: str
    repository: str
    file: str
    prepare: str = ""
    differs: Sequence[str] = ()
    options: Mapping[str, Any]


def preset_names() -> list[str]:
    """Return the names of all presets, sorted."""
    paths = (path.relative_to(FOLDER).with_suffix("") for path in FOLDER.rglob("*.toml"))
    return sorted(path.as_posix() for path in paths)


@functools.cache
def read_preset(name: str) -> Preset:
    """Read a preset by its name.

    Raises:
        ValueError: there is no preset of this name; the message has the nearest names.
    """
    known = preset_names()
    if name not in known:
        near = difflib.get_close_matches(name, known, 3, 0.5)
        # a dataset or a model, without the folder of the preset
        near = near or [each for each in known if name and name in each][:3]
        suggestion = f"did you mean {' or '.join(near)}? " if near else ""
        raise ValueError(
            f"there is no preset {name!r:.100}\n\nhint: {suggestion}`gcnzc help preset` lists all; "
            "--config FILE.toml reads options of your own"
        )
    values = tomllib.loads((FOLDER / f"{name}.toml").read_text(encoding="utf-8"))
    return Preset(name=name, **values)


def describe_published_score(preset: Preset, data_name: str, changed: Sequence[str]) -> str:
    """Return one line: the published score, and how a run differs from the preset.

    Args:
        preset: the preset.
        data_name: name of the run's graph.
        changed: options of the preset that the run has with other values.
    """
    prepared = f", prepared with {preset.prepare}" if preset.prepare else ""
    text = (
        f"preset {preset.name}: published test {preset.metric} {preset.score:.4f} ± "
        f"{preset.deviation:.4f} on {preset.data}{prepared}"
    )
    if preset.differs:
        text += f" (see `gcnzc help preset {preset.name}`)"
    differs = [] if data_name == preset.data else [f"uses {data_name}"]
    if changed:
        differs.append(f"sets {', '.join(changed)} differently")
    return f"{text}; this run {' and '.join(differs)}" if differs else text


def list_presets() -> list[str]:
    """Return a table of all presets, with published scores and sources."""
    presets = [read_preset(name) for name in preset_names()]
    rows = [("preset", "metric", "published", "source")]
    rows += [(each.name, each.metric, _score(each), each.source) for each in presets]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = ["  ".join(map(str.ljust, row, widths)).rstrip() for row in rows]
    return [*lines, "", "`gcnzc help preset NAME` shows the options of one."]


def describe_preset(name: str) -> list[str]:
    """Return the options of a preset, and where they are from.

    Raises:
        ValueError: there is no preset of this name.
    """
    preset = read_preset(name)
    # names of OGB are downloaded; other sources are files of the user
    source = f"{preset.data} --download" if preset.data.startswith("ogb") else "SOURCE"
    prepare = f"gcnzc prepare {source} data/{preset.data} {preset.prepare}".rstrip()
    words = []
    for option, value in preset.options.items():
        text = ",".join(map(str, value)) if isinstance(value, list) else f"{value}"
        words.append(f"--{option.replace('_', '-')} {text}")
    return [
        f"{preset.name}: {preset.metric} {_score(preset)} on {preset.data}",
        f"{preset.source}; {preset.file} in {preset.repository}",
        f"data: {prepare}",
        f"options: {' '.join(words)}",
        *(f"differs: {each}" for each in preset.differs),
    ]


def _score(preset: Preset) -> str:
    return f"{preset.score:.4f} ± {preset.deviation:.4f}"
