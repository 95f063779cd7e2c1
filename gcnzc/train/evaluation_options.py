"""Options that select for which nodes a model is computed in an evaluation."""

from dataclasses import dataclass
from typing import Literal, TypeAlias

from gcnzc.train.options import Fanouts, Options, check_layer_fanouts

Method: TypeAlias = Literal["exact", "needed", "sampled", "auto"]


@dataclass(frozen=True, kw_only=True)
class EvaluationOptions(Options):
    """How the outputs of the evaluated nodes are computed."""

    evaluate: Method = "needed"
    """nodes for which hidden layers are computed in an evaluation: those that the evaluated nodes
    depend on (needed), all nodes (exact), or sampled neighbours of the evaluated nodes (sampled);
    auto chooses the cheaper one of needed and exact, or sampled if layer outputs would take more
    than half of RAM plus swap, and prints why"""
    evaluate_fanouts: Fanouts = ()
    """--evaluate sampled or auto: neighbours sampled per node, one number per layer, input layer
    first; by default those of --fanouts"""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.evaluate_fanouts:
            check_layer_fanouts(self.evaluate_fanouts)


def check_samples(fanouts: tuple[int, ...]) -> None:
    """Raise a ValueError if fanouts, for an evaluation with sampled neighbours, sample all."""
    if set(fanouts) == {-1}:
        raise ValueError(
            f"--evaluate sampled with fanouts {','.join(map(str, fanouts))}, which sample all "
            "neighbours\n\n"
            "hint: give --evaluate-fanouts one number per layer, input layer first; --evaluate "
            "needed uses all neighbours"
        )


def check_evaluate_fanouts(fanouts: tuple[int, ...], layers: int) -> None:
    """Raise a ValueError unless there is a fanout for each layer, or none at all."""
    if fanouts and len(fanouts) != layers:
        given = ",".join(map(str, fanouts))
        raise ValueError(
            f"{len(fanouts)} --evaluate-fanouts ({given}) for {layers} layers\n\n"
            "hint: --evaluate-fanouts takes one number per layer, input layer first"
        )
