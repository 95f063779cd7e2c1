"""Options of commands that may store layer outputs in a scratch folder."""

from dataclasses import dataclass
from pathlib import Path

from gcnzc.train.inference import MIN_MEMORY
from gcnzc.train.options import check_options, parse_bytes


@dataclass(frozen=True, kw_only=True)
class ScratchOptions:
    """Where layer outputs are stored while a model is computed for many nodes."""

    scratch: Path | None = None
    """folder for layer outputs that do not fit into memory; rerun the same command to resume after
    an interruption. The folder is deleted on success"""
    memory: str = "auto"
    """with --scratch: memory for layer outputs, such as 2GB; auto uses an eighth of the available
    memory"""

    def __post_init__(self) -> None:
        check_options(self)
        if self.memory != "auto" and self.scratch is None:
            raise ValueError(
                f"--memory {self.memory} has no effect without --scratch\n\n"
                "hint: --scratch DIR names a folder for layer outputs that exceed the memory"
            )
        if self.memory_bytes is not None and self.memory_bytes < MIN_MEMORY:
            raise ValueError(
                f"--memory must be at least 1MiB, got {self.memory}\n\nhint: such as 2GB"
            )

    @property
    def memory_bytes(self) -> int | None:
        """The memory in bytes; None for the default."""
        return None if self.memory == "auto" else parse_bytes(self.memory, "--memory")
