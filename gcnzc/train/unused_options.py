"""Options that the chosen model, task, optimizer or features do not read."""

from collections.abc import Mapping
from dataclasses import fields
from typing import Any

from gcnzc.train.config import TrainConfig
from gcnzc.train.hetero_options import HETERO_MODELS
from gcnzc.train.optimizer_options import ONE_BIT
from gcnzc.train.options import option_name
from gcnzc.train.strategies import STRATEGIES

Choices = Mapping[str, tuple[str | bool, ...]]

_LINK: Choices = {"task": ("link",)}
_NODE: Choices = {"task": ("node",)}
_HETERO: Choices = {"model": HETERO_MODELS}
_NOT_HGT: Choices = {"model": ("sage", "gcn", "gin", "gat", "gatv2", "rgcn", "rgat", "hetero-sage")}
_GAT: Choices = {"model": ("gat", "gatv2")}
_CACHED: Choices = {"features": ("cached",)}
_STEP: Choices = {"schedule": ("step",)}


def _strategy_options() -> dict[str, Choices]:
    """Return the options that only some strategies read."""
    names = dict.fromkeys(name for each in STRATEGIES.values() for name in each.options)
    readers = {
        name: tuple(key for key, each in STRATEGIES.items() if name in each.options)
        for name in names
    }
    return {name: {"strategy": found} for name, found in readers.items() if found != (*STRATEGIES,)}


_OF_STRATEGIES = _strategy_options()

# options, and the choices under which a run reads them; every run reads the others
READ_WITH: Mapping[str, Choices] = {
    "target": {**_HETERO, **_NODE},
    "edge_type": {**_HETERO, **_LINK},
    "edge_split": {**_HETERO, **_LINK},
    "reverse_types": {**_HETERO, **_LINK},
    "valid_edges": {**_HETERO, **_LINK},
    "test_edges": {**_HETERO, **_LINK},
    "evaluate_negatives": {**_HETERO, **_LINK},
    "temporal": _HETERO,
    "times": {"temporal": ("uniform", "last")},
    "embedding_dim": _HETERO,
    "embedding_optimizer": _HETERO,
    "embedding_lr": _HETERO,
    "metric": _NODE,
    "label_inputs": _NODE,
    "decoder": _LINK,
    "negatives": _LINK,
    "num_negatives": _LINK,
    "strict_negatives": _LINK,
    "exclude": _LINK,
    "warmup": {"optimizer": ONE_BIT},
    "refresh": {"optimizer": ("onebit-adam",)},
    **_OF_STRATEGIES,
    "max_dropped": {**_OF_STRATEGIES["max_dropped"], "compute_threshold": ("auto",)},
    "heads": {"model": ("gat", "gatv2", "rgat", "hgt")},
    "output_heads": _GAT,
    "attention_dropout": {"model": ("gat", "gatv2", "rgat")},
    "residual": _NOT_HGT,
    "output_linear": _NOT_HGT,
    "activation": _NOT_HGT,
    "skip": {**_GAT, "residual": (False,)},
    "self_loops": {"model": ("sage",)},
    "cache_size": _CACHED,
    "cache_policy": _CACHED,
    "cache_sharded": _CACHED,
    "label_smoothing": _NODE,
    "class_weights": _NODE,
    "evaluate_fanouts": {"evaluate": ("sampled", "auto")},
    "step_epochs": _STEP,
    "step_factor": _STEP,
    "average_decay": {"average": ("ema",)},
    "average_start": {"average": ("swa",)},
}


def unused_options(config: TrainConfig) -> dict[str, str]:
    """Return the options that differ from their defaults and have no effect in this run.

    Returns:
        By name, a message that names the option, the choice that ignores it, and after an empty
        line the choices that read it.
    """
    found = {}
    for field in fields(config):
        value = getattr(config, field.name)
        for choice, readers in READ_WITH.get(field.name, {}).items():
            chosen = getattr(config, choice)
            if value != field.default and chosen not in readers:
                option = option_name(choice)
                remedy = f"only {option} {' or '.join(map(str, readers))} uses it"
                if isinstance(chosen, bool):
                    remedy = f"omit {_words_of(choice, chosen)}"
                found[field.name] = (
                    f"{_words_of(field.name, value)} has no effect with "
                    f"{_words_of(choice, chosen)}\n\nhint: {remedy}"
                )
                break
    return found


def _words_of(name: str, value: Any) -> str:
    """Return an option with its value, as on the command line."""
    if isinstance(value, bool):
        return option_name(name if value else f"no_{name}")
    if isinstance(value, tuple):
        return f"{option_name(name)} {','.join(map(str, value))}"
    return f"{option_name(name)} {value}"
