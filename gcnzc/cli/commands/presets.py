"""The command that lists the presets of `gcnzc train`."""

from dataclasses import asdict, dataclass

import tyro

from gcnzc.cli.output import align_columns, print_json
from gcnzc.train.options import check_options, option_name
from gcnzc.train.presets import Preset, preset_names, read_preset
from gcnzc.train.progress import Reporter


@dataclass(frozen=True, kw_only=True)
class PresetsConfig:
    """List the presets of `gcnzc train --preset`, with published scores and sources."""

    name: tyro.conf.Positional[str | None] = None
    """preset to show in full, such as tuned/cora-gcn; without it, all are listed"""

    def __post_init__(self) -> None:
        check_options(self)
        if self.name is not None:
            read_preset(self.name)


def presets_command(config: PresetsConfig, reporter: Reporter) -> None:
    """`gcnzc presets`."""
    names = preset_names() if config.name is None else [config.name]
    presets = [read_preset(name) for name in names]
    for line in _list(presets) if config.name is None else _describe(presets[0]):
        reporter.say(line)
    print_json({"presets": [asdict(preset) for preset in presets]})


def _list(presets: list[Preset]) -> list[str]:
    rows = [("preset", "metric", "published", "source")]
    rows += [
        (preset.name, preset.metric, _format_score(preset), preset.source) for preset in presets
    ]
    return [*align_columns(rows, left=(0, 1, 3)), "`gcnzc presets NAME` shows the options of one"]


def _describe(preset: Preset) -> list[str]:
    # names of OGB are downloaded; other sources are files of the user
    source = f"{preset.data} --download" if preset.data.startswith("ogb") else "SOURCE"
    prepare = f"gcnzc prepare {source} data/{preset.data} {preset.prepare}".rstrip()
    words = []
    for name, value in preset.options.items():
        if isinstance(value, bool):
            words.append(option_name(name if value else f"no_{name}"))
        else:
            text = ",".join(map(str, value)) if isinstance(value, list) else f"{value}"
            words.append(f"{option_name(name)} {text}")
    return [
        f"{preset.name}: {preset.metric} {_format_score(preset)} on {preset.data}",
        f"{preset.source}; {preset.file} in {preset.repository}",
        f"data: {prepare}",
        f"options: {' '.join(words)}",
        *(f"differs: {each}" for each in preset.differs),
    ]


def _format_score(preset: Preset) -> str:
    return f"{preset.score:.4f} ± {preset.deviation:.4f}"
