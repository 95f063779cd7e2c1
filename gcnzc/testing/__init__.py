"""Execution of compiled Triton kernels on a CPU, with checked accesses and counted requests."""
