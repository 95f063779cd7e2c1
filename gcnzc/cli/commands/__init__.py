"""The commands by name."""

from collections.abc import Callable
from typing import Any

from gcnzc.cli.commands.check import CheckConfig, check_command
from gcnzc.cli.commands.data import (
    EmbedConfig,
    InfoConfig,
    MakeConfig,
    PrepareConfig,
    embed_command,
    info_command,
    make_command,
    prepare_command,
)
from gcnzc.cli.commands.embed_nodes import EmbedNodesConfig, embed_nodes_command
from gcnzc.cli.commands.export import ExportConfig, export_command
from gcnzc.cli.commands.pcie import PcieConfig, pcie_command
from gcnzc.cli.commands.plot import PlotConfig, plot_command
from gcnzc.cli.commands.predict import PredictConfig, evaluate_command, predict_command
from gcnzc.cli.commands.presets import PresetsConfig, presets_command
from gcnzc.cli.commands.train import train_command
from gcnzc.train.config import EvaluateConfig, TrainConfig
from gcnzc.train.progress import Reporter

COMMANDS: dict[type, Callable[[Any, Reporter], None]] = {
    TrainConfig: train_command,
    MakeConfig: make_command,
    PrepareConfig: prepare_command,
    EmbedConfig: embed_command,
    InfoConfig: info_command,
    EvaluateConfig: evaluate_command,
    PredictConfig: predict_command,
    EmbedNodesConfig: embed_nodes_command,
    ExportConfig: export_command,
    CheckConfig: check_command,
    PcieConfig: pcie_command,
    PlotConfig: plot_command,
    PresetsConfig: presets_command,
}
