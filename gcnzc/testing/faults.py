"""Exceptions of the PTX executor: faults of a program, and instructions that it does not have."""


class Fault(Exception):
    """A program does what is an error, or has an undefined result, on a GPU."""


class UnsupportedInstruction(NotImplementedError):
    """PTX has an instruction, or a form of one, that the executor does not implement."""


def unsupported(text: str, reason: str = "") -> UnsupportedInstruction:
    """Return the exception for an instruction that is not implemented."""
    because = f": {reason}" if reason else ""
    return UnsupportedInstruction(
        f"the PTX executor does not implement `{text}`{because}\n\n"
        "hint: compile the kernel so that it does not use this instruction, or add it to "
        "gcnzc/testing/"
    )
