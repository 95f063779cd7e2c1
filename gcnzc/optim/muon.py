"""Muon for weight matrices, and AdamW for all other parameters, as one optimizer.

Muon (Jordan et al., 2024, https://kellerjordan.github.io/posts/muon/) replaces the momentum of a
matrix by an approximation of the nearest matrix with orthonormal rows or columns.
`torch.optim.Muon` computes it, for matrices only. The factor 0.2 sqrt(max(rows, columns)) of its
updates gives them the size of AdamW's, so that both rules have one learning rate (Liu et al., 2025,
https://arxiv.org/abs/2502.16982).
"""

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.optimizer import ParamsT

from gcnzc.optim.validation import check_count, check_fraction, check_options
from gcnzc.system.arguments import check_choice

EMBEDDINGS = (nn.Embedding, nn.EmbeddingBag)
# added to the norm of a matrix, as in torch.optim.Muon; AdamW's eps is added to each element
MUON_EPS = 1e-7
# limits of torch.optim.Muon
MAX_NS_STEPS, ADJUSTMENTS = 99, ("match_rms_adamw", "original")


class Muon(Optimizer):
    """Takes a step of Muon for weight matrices, and a step of AdamW for all other parameters.

    Each parameter group has an option `use_muon`. A group without it is split into two groups: its
    matrices, and its other parameters. Without `module`, matrices are all parameters of two
    dimensions. With `module`, they are those of two dimensions whose name contains "weight", such
    as `weight` of `Linear` and `in_proj_weight` of `MultiheadAttention`, except the weights of
    embeddings. Learning rate schedulers see the split groups.

    A step is the same as one of `torch.optim.Muon` and one of `torch.optim.AdamW`, bit for bit.

    Args:
        params: parameters, or parameter groups with their own options, as torch's optimizers take
            them.
        lr: learning rate of both rules.
        weight_decay: decoupled weight decay of both rules.
        momentum: momentum of Muon.
        nesterov: whether Muon's momentum is Nesterov momentum.
        ns_steps: number of Newton-Schulz iterations, from 1 to 99; they compute in bfloat16.
        adjust_lr_fn: factor of Muon's updates: "match_rms_adamw" as described above, or "original",
            sqrt(max(1, rows / columns)), which needs a larger learning rate than AdamW.
        betas: decay rates of AdamW's means.
        eps: added to the denominator of AdamW; Muon has an eps of its own.
        module: the model, to recognize its weights and embeddings; None to use dimensions only.

    Raises:
        ValueError: an option is out of range, or a group with `use_muon=True` has a parameter that
            is not a matrix.
        RuntimeError: torch is older than 2.9, and has no Muon.
    """

    def __init__(
        self,
        params: ParamsT,
        lr: float = 1e-3,
        *,
        weight_decay: float = 0.01,
        momentum: float = 0.95,
        nesterov: bool = True,
        ns_steps: int = 5,
        adjust_lr_fn: str = "match_rms_adamw",
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        module: nn.Module | None = None,
    ) -> None:
        if not hasattr(torch.optim, "Muon"):
            raise RuntimeError(
                f"torch {torch.__version__} has no Muon\n\nhint: install torch 2.9 or newer"
            )
        defaults = {
            "lr": lr,
            "weight_decay": weight_decay,
            "momentum": momentum,
            "nesterov": nesterov,
            "ns_steps": ns_steps,
            "adjust_lr_fn": adjust_lr_fn,
            "betas": betas,
            "eps": eps,
        }
        check_options(defaults, defaults)
        check_fraction("momentum", momentum)
        check_count("ns_steps", ns_steps, 1, MAX_NS_STEPS)
        check_choice("adjust_lr_fn", adjust_lr_fn, ADJUSTMENTS)
        weights = None if module is None else _weight_ids(module)
        super().__init__(_split_groups(params, weights), defaults)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a parameter group; without `use_muon`, it has only matrices, or none.

        Here, matrices are all parameters of two dimensions.

        Raises:
            ValueError: it has matrices and other parameters, or it has `use_muon=True` and a
                parameter that is not a matrix.
        """
        parameters = _list_tensors(param_group["params"])
        param_group["params"] = parameters
        if "use_muon" not in param_group:
            found = {each.ndim == 2 for each in parameters}
            if len(found) > 1:
                raise ValueError(
                    "a parameter group has matrices and other parameters\n\nhint: add a group for "
                    "each of them, or set use_muon=False to use AdamW for all"
                )
            param_group["use_muon"] = found == {True}
        if param_group["use_muon"]:
            param_group.setdefault("eps", MUON_EPS)
        for name, value in self.defaults.items():
            param_group.setdefault(name, value)
        # torch's optimizer of the rule adds its other options to the group, and checks all
        self._rule(param_group["use_muon"], [param_group])
        super().add_param_group(param_group)

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """Take a step.

        Args:
            closure: computes the loss, and the gradients; None if they are computed already.

        Returns:
            The result of `closure`.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for use_muon in (True, False):
            groups = [group for group in self.param_groups if group["use_muon"] == use_muon]
            if groups:
                self._rule(use_muon, groups).step()
        return loss

    def _rule(self, use_muon: bool, groups: list[dict[str, Any]]) -> Optimizer:
        """Return torch's optimizer of a rule, which has these groups and the state of this one."""
        rule = torch.optim.Muon(groups) if use_muon else torch.optim.AdamW(groups)
        rule.state = self.state
        return rule


def _split_groups(params: ParamsT, weights: set[int] | None) -> list[dict[str, Any]]:
    """Return parameter groups, each of which has one rule.

    Args:
        params: parameters or parameter groups.
        weights: ids of parameters that may be matrices; None for all.
    """
    given: list[Any] = list(params)
    if not any(isinstance(each, dict) for each in given):
        given = [{"params": given}]
    groups = []
    for group in given:
        parameters = _list_tensors(group["params"])
        if "use_muon" in group or not parameters:
            groups.append(group)
            continue
        parts: dict[bool, list[Tensor]] = {True: [], False: []}
        for each in parameters:
            parts[each.ndim == 2 and (weights is None or id(each) in weights)].append(each)
        groups += [
            {**group, "params": part, "use_muon": rule} for rule, part in parts.items() if part
        ]
    return groups


def _list_tensors(parameters: Tensor | Iterable[Any]) -> list[Tensor]:
    """Return parameters, or the parameters of pairs of names and parameters, as a list."""
    if isinstance(parameters, Tensor):
        return [parameters]
    return [each[1] if isinstance(each, tuple) else each for each in parameters]


def _weight_ids(module: nn.Module) -> set[int]:
    """Return the ids of the weights of a model, except those of embeddings."""
    found = set()
    for owner in module.modules():
        if not isinstance(owner, EMBEDDINGS):
            named = owner.named_parameters(recurse=False)
            found |= {id(parameter) for name, parameter in named if "weight" in name}
    return found
