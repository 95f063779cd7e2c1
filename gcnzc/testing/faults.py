"""Exceptions of the PTX executor: faults of a program, and instructions that it does not have."""


class Fault(Exception):
    """A program does what is an error, or has an undefined result, on a GPU."""


class UnsupportedInstruction(NotImplementedError):
    """PTX has an instruction, or a form of one, that the executor does not implement."""


def in_kernel(error: UnsupportedInstruction, kernel: str) -> UnsupportedInstruction:
    """Return an exception whose message begins with the name of the kernel."""
    return UnsupportedInstruction(f"{kernel}: {error}")


def unsupported(text: str, reason: str = "", where: str = "") -> UnsupportedInstruction:
    """Return the exception for an instruction that is not implemented.

    Args:
        text: the instruction.
        reason: what is not implemented, unless it is the whole instruction.
        where: the place in the source, such as " at kernel.py:12".
    """
    because = f": {reason}" if reason else ""
    return UnsupportedInstruction(
        f"the PTX executor does not implement `{text}`{where}{because}\n\n"
        "hint: compile the kernel so that it does not use this instruction, or add it to "
        "gcnzc/testing/"
    )
