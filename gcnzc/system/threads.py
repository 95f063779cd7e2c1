"""Run threads at background priority beside a model on the same cores.

It does not interrupt the model when it wakes up, and starts no threads of OpenMP. A core that the
model's threads wait for stops all of them: OpenMP's meet at the end of every loop.

Sources: sched(7), for SCHED_BATCH; omp_set_num_threads of the OpenMP specification, which is for
the thread that calls it.
"""

import os
from contextlib import suppress
from functools import lru_cache

import torch
from threadpoolctl import ThreadpoolController


def lower_priority() -> None:
    """Let the calling thread, from now on, make way for others. Nothing that it computes changes.

    Where the system knows no SCHED_BATCH, or has given the thread another class than the usual
    one, its class stays.
    """
    if hasattr(os, "SCHED_BATCH") and os.sched_getscheduler(0) == os.SCHED_OTHER:
        # a sandbox may refuse
        with suppress(OSError):
            os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))
    # a thread's first question makes torch set its number, which would come after ours
    torch.get_num_threads()
    _openmp().limit(limits=1)


@lru_cache(maxsize=1)
def _openmp() -> ThreadpoolController:
    # looking for libraries takes some milliseconds
    return ThreadpoolController().select(user_api="openmp")
