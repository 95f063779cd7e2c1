"""SGD, Adagrad and Adam for trainable embeddings."""

from typing import Any

from torch import Tensor

from gcnzc.kernels.embedding.update import update_adagrad, update_adam, update_sgd
from gcnzc.optim.embedding.base import RowOptimizer, Tables, Values
from gcnzc.optim.embedding.row_exchange import RowGradients
from gcnzc.optim.validation import check_at_least_zero


class SparseSGD(RowOptimizer):
    """SGD on the rows of minibatches, without a state; see `RowOptimizer`.

    Args:
        tables: see `RowOptimizer`.
        lr: the learning rate.
        options: `group` and `threads` of `RowOptimizer`.

    Raises:
        TypeError, ValueError: see `RowOptimizer`.
    """

    def __init__(self, tables: Tables, lr: float = 1e-3, **options: Any) -> None:
        super().__init__(tables, {"lr": lr}, **options)

    def update(self, rows: Tensor, state: Values, mean: RowGradients, options: Values) -> None:
        """See `RowOptimizer`."""
        lr = float(options["lr"])
        update_sgd(rows, mean.ids, mean.values, lr=lr, threads=self.threads)


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
        options: `group`, `threads` and `state_folder` of `RowOptimizer`.

    Raises:
        TypeError, ValueError, RuntimeError, FileExistsError: see `RowOptimizer`.
    """

    state_names = ("sum",)

    def __init__(
        self,
        tables: Tables,
        lr: float = 1e-2,
        *,
        lr_decay: float = 0.0,
        initial_accumulator_value: float = 0.0,
        eps: float = 1e-10,
        **options: Any,
    ) -> None:
        check_at_least_zero("lr_decay", lr_decay)
        check_at_least_zero("initial_accumulator_value", initial_accumulator_value)
        defaults = {"lr": lr, "lr_decay": lr_decay, "eps": eps}
        defaults["initial_accumulator_value"] = initial_accumulator_value
        super().__init__(tables, defaults, **options)

    def initialize(self, state: Tensor) -> None:
        """See `RowOptimizer`."""
        initial = self.defaults["initial_accumulator_value"]
        # pages of zeros need no memory until a row is updated
        if initial:
            state.fill_(initial)

    def update(self, rows: Tensor, state: Values, mean: RowGradients, options: Values) -> None:
        """See `RowOptimizer`."""
        update_adagrad(
            *(rows, state["sum"], mean.ids, mean.values),
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
        options: `group`, `threads` and `state_folder` of `RowOptimizer`.

    Raises:
        TypeError, ValueError, RuntimeError, FileExistsError: see `RowOptimizer`.
    """

    state_names = ("exp_avg", "exp_avg_sq")

    def __init__(
        self,
        tables: Tables,
        lr: float = 1e-3,
        *,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        **options: Any,
    ) -> None:
        beta1, beta2 = betas
        super().__init__(tables, {"lr": lr, "betas": (beta1, beta2), "eps": eps}, **options)

    def update(self, rows: Tensor, state: Values, mean: RowGradients, options: Values) -> None:
        """See `RowOptimizer`."""
        update_adam(
            *(rows, state["exp_avg"], state["exp_avg_sq"], mean.ids, mean.values),
            lr=float(options["lr"]),
            betas=options["betas"],
            eps=options["eps"],
            step=state["step"],
            threads=self.threads,
        )
