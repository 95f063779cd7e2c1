"""Run a loader's threads with Linux's scheduling policy SCHED_BATCH and one OpenMP thread each.

Loader threads share the cores with the model's threads. A SCHED_BATCH thread does not preempt other
threads when it becomes runnable; its priority and its cores stay as they are. If one of the model's
OpenMP threads were preempted, all of them would wait for it at the barrier at the end of each loop.

Sources: sched(7) for SCHED_BATCH; omp_set_num_threads in the OpenMP specification, which applies to
the calling thread.
"""

import os
from contextlib import suppress
from functools import lru_cache

import torch
from threadpoolctl import ThreadpoolController


def use_batch_scheduling() -> None:
    """Switch the calling thread to SCHED_BATCH and one OpenMP thread; results do not change.

    The policy stays if the system has no SCHED_BATCH, or if it is not the default one, SCHED_OTHER.
    """
    if hasattr(os, "SCHED_BATCH") and os.sched_getscheduler(0) == os.SCHED_OTHER:
        # a sandbox may forbid it
        with suppress(OSError):
            os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))
    # torch sets the number of threads on its first use in a thread, which would override the limit
    torch.get_num_threads()
    _openmp().limit(limits=1)


@lru_cache(maxsize=1)
def _openmp() -> ThreadpoolController:
    # finding the loaded libraries takes milliseconds
    return ThreadpoolController().select(user_api="openmp")
