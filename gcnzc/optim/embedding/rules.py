"""SGD, Adagrad and Adam for trainable embeddings."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from gcnzc.exchange import Group
from gcnzc.kernels.embedding.update import update_adagrad, update_adam, update_sgd
from gcnzc.optim.embedding.base import RowOptimizer, RowTable
from gcnzc.optim.embedding.row_exchange import RowGradients
from gcnzc.optim.validation import check_at_least_zero


class SparseSGD(RowOptimizer):
    """SGD on the rows of minibatches, without a state; see `RowOptimizer`.

    Args:
        tables: see `RowOptimizer`.
        lr: the learning rate.
        group: see `RowOptimizer`.
        threads: see `RowOptimizer`.

    Raises:
        TypeError, ValueError: see `RowOptimizer`.
    """

    def __init__(
        self,
        tables: RowTable | Mapping[str, RowTable],
        lr: float = 1e-3,
        *,
        group: Group | None = None,
        threads: int | None = None,
    ) -> None:
        super().__init__(tables, {"lr": lr}, group, threads, None)

    def update(
        self,
        rows: Tensor,
        state: Mapping[str, Any],
        gradients: RowGradients,
        options: Mapping[str, Any],
    ) -> None:
        """See `RowOptimizer`."""
        lr = float(options["lr"])
        update_sgd(rows, gradients.ids, gradients.values, lr=lr, threads=self.threads)


class SparseAdagrad(RowOptimizer):
    """Adagrad on the rows of minibatches; see `RowOptimizer`.

    The step is that of `torch.optim.Adagrad` with sparse gradients. Source: Duchi, Hazan and
    Singer, JMLR 2011, https://jmlr.org/papers/v12/duchi11a.html.

    Args:
        tables: see `RowOptimizer`.
        lr: the learning rate.
        lr_decay: step k of a table uses lr / (1 + (k - 1) lr_decay).
        initial_accumulator_value: the initial value of the sums of squares.
        eps: is added to the root of the sums.
        group: see `RowOptimizer`.
        threads: see `RowOptimizer`.
        state_folder: see `RowOptimizer`.

    Raises:
        TypeError, ValueError, RuntimeError, FileExistsError: see `RowOptimizer`.
    """

    state_names = ("sum",)

    def __init__(
        self,
        tables: RowTable | Mapping[str, RowTable],
        lr: float = 1e-2,
        *,
        lr_decay: float = 0.0,
        initial_accumulator_value: float = 0.0,
        eps: float = 1e-10,
        group: Group | None = None,
        threads: int | None = None,
        state_folder: str | Path | None = None,
    ) -> None:
        check_at_least_zero("lr_decay", lr_decay)
        check_at_least_zero("initial_accumulator_value", initial_accumulator_value)
        options = {
            "lr": lr,
            "lr_decay": lr_decay,
            "eps": eps,
            "initial_accumulator_value": initial_accumulator_value,
        }
        super().__init__(tables, options, group, threads, state_folder)

    def initialize(self, state: Tensor) -> None:
        """See `RowOptimizer`."""
        initial = self.defaults["initial_accumulator_value"]
        # pages of zeros need no memory until a row is updated
        if initial:
            state.fill_(initial)

    def update(
        self,
        rows: Tensor,
        state: Mapping[str, Any],
        gradients: RowGradients,
        options: Mapping[str, Any],
    ) -> None:
        """See `RowOptimizer`."""
        update_adagrad(
            *(rows, state["sum"], gradients.ids, gradients.values),
            lr=float(options["lr"]) / (1 + (state["step"] - 1) * options["lr_decay"]),
            eps=options["eps"],
            threads=self.threads,
        )


class SparseAdam(RowOptimizer):
    """Adam on the rows of minibatches; see `RowOptimizer`.

    The step is that of `torch.optim.SparseAdam`: the moments of a row decay only in steps in which
    the row has a gradient. Source: Kingma and Ba, https://arxiv.org/abs/1412.6980.

    Args:
        tables: see `RowOptimizer`.
        lr: the learning rate.
        betas: the decay rates of the first and the second moments.
        eps: is added to the root of the second moments.
        group: see `RowOptimizer`.
        threads: see `RowOptimizer`.
        state_folder: see `RowOptimizer`.

    Raises:
        TypeError, ValueError, RuntimeError, FileExistsError: see `RowOptimizer`.
    """

    state_names = ("exp_avg", "exp_avg_sq")

    def __init__(
        self,
        tables: RowTable | Mapping[str, RowTable],
        lr: float = 1e-3,
        *,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        group: Group | None = None,
        threads: int | None = None,
        state_folder: str | Path | None = None,
    ) -> None:
        if not isinstance(betas, tuple | list) or len(betas) != 2:
            raise ValueError(f"betas is {betas!r}\n\nhint: give two numbers, such as (0.9, 0.999)")
        betas = (betas[0], betas[1])
        options = {"lr": lr, "betas": betas, "eps": eps}
        super().__init__(tables, options, group, threads, state_folder)

    def update(
        self,
        rows: Tensor,
        state: Mapping[str, Any],
        gradients: RowGradients,
        options: Mapping[str, Any],
    ) -> None:
        """See `RowOptimizer`."""
        update_adam(
            *(rows, state["exp_avg"], state["exp_avg_sq"], gradients.ids, gradients.values),
            lr=float(options["lr"]),
            betas=options["betas"],
            eps=options["eps"],
            step=state["step"],
            threads=self.threads,
        )
