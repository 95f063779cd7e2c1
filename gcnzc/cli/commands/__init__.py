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
from gcnzc.cli.commands.evaluate import evaluate_command
from gcnzc.cli.commands.link import LinkConfig, link_command
from gcnzc.cli.commands.plan import PlanConfig, plan_command
from gcnzc.cli.commands.plan_cache import PlanCacheConfig, plan_cache_command
from gcnzc.cli.commands.plot import PlotConfig, plot_command
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
    CheckConfig: check_command,
    LinkConfig: link_command,
    PlanCacheConfig: plan_cache_command,
    PlanConfig: plan_command,
    PlotConfig: plot_command,
}
