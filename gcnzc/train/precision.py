"""The precision of training steps: float32, TF32, or mixed with bfloat16 or float16.

In mixed precision, `torch.autocast` computes the model in bfloat16 or float16; weights, gradients,
losses and optimizer states stay float32. Float16 has a small range, so `torch.amp.GradScaler`
multiplies the loss by the loss scale.
Only training steps are affected: evaluations, predictions and exports compute in float32.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, Literal, TypeAlias

import torch
from torch import Tensor

from gcnzc.optim import DistributedOptimizer
from gcnzc.system.machine import cpu_flags

PrecisionName: TypeAlias = Literal["float32", "tf32", "bf16", "fp16"]

# the values of --precision that use `torch.autocast`: TF32 is a setting of float32 products instead
AUTOCAST_DTYPES: dict[str, torch.dtype] = {"bf16": torch.bfloat16, "fp16": torch.float16}

# processor flags of /proc/cpuinfo, for x86 and ARM; any of them indicates native support
FAST_FLAGS = {
    "bf16": {"avx512_bf16", "amx_bf16", "bf16"},
    "fp16": {"avx512_fp16", "amx_fp16", "asimdhp"},
}

# skipped steps in which the loss scale falls from its initial value, 65536, to 1
SCALE_STEPS = 16

# compute capability of NVIDIA's first GPUs (Ampere) with TF32 and bfloat16
AMPERE = (8, 0)


class Precision:
    """Computes training steps in the precision of a run.

    Args:
        name: the option --precision.
        device: device of the model.

    Raises:
        ValueError: the device does not have this precision.
    """

    def __init__(self, name: PrecisionName, device: torch.device) -> None:
        check_precision(name, device)
        self.name, self.device = name, device
        self.dtype = AUTOCAST_DTYPES.get(name)
        """dtype of the model's rows; None without autocast"""
        self.scaler: torch.amp.GradScaler | None = None
        if name == "fp16":
            self.scaler = torch.amp.GradScaler(device.type)
            # creates the tensor of the loss scale, which otherwise the first loss does: a worker
            # may have no seeds in its first step
            self.scaler.scale(torch.zeros((), device=device))

    @contextmanager
    def enable_tf32(self) -> Iterator[None]:
        """Enable TF32 for matrix products inside the `with`, if the precision is "tf32"."""
        if self.name != "tf32":
            yield
            return
        matmul = torch.backends.cuda.matmul
        # torch before 2.9 does not have `fp32_precision`; later versions reject a mix of both
        is_new = hasattr(matmul, "fp32_precision")
        setting, value = ("fp32_precision", "tf32") if is_new else ("allow_tf32", True)
        before = getattr(matmul, setting)
        setattr(matmul, setting, value)
        try:
            yield
        finally:
            setattr(matmul, setting, before)

    def autocast(self) -> AbstractContextManager[object]:
        """Return the context for the forward pass; the backward pass and the loss are outside."""
        if self.dtype is None:
            return nullcontext()
        return torch.autocast(self.device.type, self.dtype)

    def widen(self, logits: Tensor) -> Tensor:
        """Return logits of mixed precision in float32, for the loss."""
        return logits if self.dtype is None else logits.float()

    def scale(self, loss: Tensor) -> Tensor:
        """Return a loss multiplied by the loss scale if there is one, for the backward pass."""
        return loss if self.scaler is None else self.scaler.scale(loss)

    def step(
        self, optimizer: DistributedOptimizer, closure: Callable[[], float] | None = None
    ) -> None:
        """Take an optimizer step; the optimizer divides the gradients by the loss scale.

        If gradients overflow, all workers skip the step and halve their loss scales, except in a
        local step, which only the worker with the overflow skips.

        Args:
            optimizer: of the run.
            closure: computes the gradients if the optimizer needs a closure; None if they are
                computed already.

        Raises:
            ValueError: there are a closure and a loss scale.
        """
        if self.scaler is None:
            if closure is None:
                optimizer.step()
            else:
                optimizer.step(closure)
            return
        if closure is not None:
            raise ValueError(
                f"--precision fp16 with {optimizer.name}, which computes several gradients in a "
                "step, and torch's GradScaler supports one\n\nhint: use --precision bf16"
            )
        ignored = optimizer.num_ignored_gradients
        self.scaler.step(optimizer)
        found: dict[Any, Tensor] = self.scaler._found_inf_per_device(optimizer)
        if not found:
            # without seeds there are no gradients, so GradScaler has no overflow flag
            has_ignored = float(optimizer.num_ignored_gradients > ignored)
            found[self.device] = torch.full((), has_ignored, device=self.device)
        self.scaler.update()

    @property
    def loss_scale(self) -> float | None:
        """The current loss scale; None if there is none. It is read from the device."""
        return None if self.scaler is None else self.scaler.get_scale()

    @property
    def scale_steps(self) -> int:
        """Number of consecutive skipped steps that can be due to the initial loss scale."""
        return 0 if self.scaler is None else SCALE_STEPS

    def state_dict(self) -> dict[str, Any]:
        """Return the state of GradScaler on this worker; empty if there is none."""
        return {} if self.scaler is None else self.scaler.state_dict()

    def load_state_dicts(self, states: Sequence[Mapping[str, Any]]) -> None:
        """Load the state of one worker, or of several that with the smallest loss scale."""
        if self.scaler is not None:
            self.scaler.load_state_dict(dict(min(states, key=lambda state: state["scale"])))


def check_precision(name: PrecisionName, device: torch.device) -> None:
    """Check that a device supports a precision.

    A CPU also computes bf16 and fp16 without instructions for them, see `slow_reason`.

    Raises:
        ValueError: the device does not support the precision.
    """
    if name == "tf32" and device.type != "cuda":
        raise ValueError(
            f"--precision tf32 on {device.type}: TF32 is a format of the tensor cores of NVIDIA's "
            "GPUs\n\nhint: use --precision bf16, or --precision float32 for full precision"
        )
    if device.type != "cuda" or name not in ("tf32", "bf16"):
        return
    if torch.version.hip is not None:
        is_supported = name == "bf16"
    else:
        is_supported = torch.cuda.get_device_capability(device) >= AMPERE
    if not is_supported:
        raise ValueError(
            f"--precision {name} on {torch.cuda.get_device_name(device)}: this GPU has no "
            f"{name}\n\nhint: use --precision fp16, or --precision float32 for full precision"
        )


def slow_reason(name: PrecisionName, device: torch.device) -> str:
    """Return why a precision is slower than float32 on a device; empty if it is not."""
    if device.type != "cpu" or name not in FAST_FLAGS or FAST_FLAGS[name] & cpu_flags():
        return ""
    other = "; bf16 is faster on this processor" if FAST_FLAGS["bf16"] & cpu_flags() else ""
    return (
        f"this processor has no {name} instructions, so --precision {name} saves memory, but is "
        f"slower than float32{other}"
    )


def build_precision(
    name: PrecisionName, device: torch.device, say: Callable[[str], object]
) -> Precision:
    """Build the precision of a run, and call `say` with a warning if it is slow on the device.

    Raises:
        ValueError: the device does not have this precision.
    """
    precision = Precision(name, device)
    if reason := slow_reason(name, device):
        say(f"warning: {reason}")
    return precision
