"""Execution of compiled Triton kernels on a CPU, with checked accesses and counted requests."""

from gcnzc.testing.counters import AccessCounters
from gcnzc.testing.executor import Executor
from gcnzc.testing.faults import Fault, UnsupportedInstruction
from gcnzc.testing.resources import KernelResources, record_resources
from gcnzc.testing.triton_driver import execute_on_cpu

__all__ = [
    "AccessCounters",
    "Executor",
    "Fault",
    "KernelResources",
    "UnsupportedInstruction",
    "execute_on_cpu",
    "record_resources",
]
