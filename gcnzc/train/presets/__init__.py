"""Presets: the options of published recipes, in TOML files that `gcnzc train --preset` reads.

A file contains the published score, its source, and a table `options`: the options of `gcnzc train`
that differ from their defaults. The name of a preset, such as `tuned/cora-gcn`, is the path of its
file without `.toml`.
"""

import difflib
import functools
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from functools import wraps
from pathlib import Path
from typing import Any, TypeVar

from gcnzc.train.options import option_name

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

C = TypeVar("C")

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
            f"there is no preset {name!r:.100}\n\nhint: {suggestion}`gcnzc presets` lists all; "
            "--config FILE.toml reads options of your own"
        )
    values = tomllib.loads((FOLDER / f"{name}.toml").read_text(encoding="utf-8"))
    return Preset(name=name, **values)


def describe_published_score(preset: Preset, data_name: str, options: Mapping[str, Any]) -> str:
    """Return one line: the published score, and how a run differs from the preset.

    Args:
        preset: the preset.
        data_name: name of the run's graph.
        options: the run's options, by field name.
    """
    prepared = f", prepared with {preset.prepare}" if preset.prepare else ""
    text = (
        f"preset {preset.name}: published test {preset.metric} {preset.score:.4f} ± "
        f"{preset.deviation:.4f} on {preset.data}{prepared}"
    )
    if preset.differs:
        text += f" (see `gcnzc presets {preset.name}`)"
    differs = [] if data_name == preset.data else [f"uses {data_name}"]
    changed = [
        option_name(name)
        for name, value in preset.options.items()
        if name in options and _as_toml(options[name]) != _as_toml(value)
    ]
    if changed:
        differs.append(f"sets {', '.join(changed)} differently")
    return f"{text}; this run {' and '.join(differs)}" if differs else text


def _as_toml(value: Any) -> Any:
    """Return an option's value with lists in place of tuples, and numbers as floats."""
    if isinstance(value, tuple | list):
        return [_as_toml(each) for each in value]
    return float(value) if isinstance(value, int) and not isinstance(value, bool) else value


def accept_preset(kind: type[C]) -> type[C]:
    """Decorate the dataclass of the options, so that a preset sets those that are not given."""
    initialize: Callable[..., None] = kind.__init__
    names = {field.name for field in fields(kind)}  # type: ignore[arg-type]

    @wraps(initialize)
    def initialize_from_preset(self: C, **options: Any) -> None:
        preset = options.get("preset")
        # a config that is copied, or read from a run folder, has all options
        if isinstance(preset, str) and names - options.keys():
            options = {**read_preset(preset).options, **options}
        initialize(self, **options)

    kind.__init__ = initialize_from_preset  # type: ignore[method-assign,assignment]
    return kind
