"""The default number of threads."""

import os

# Each thread holds a batch of up to hundreds of megabytes. Without a model two threads on two cores
# make 1.6 times as many batches as one, and three no more; beside a model any number does.
MOST_THREADS = 4


def default_threads(world_size: int = 1) -> int:
    """Worker threads of a loader that is told no number: one per core, but four at most.

    Workers on one machine share its cores. How many there are is what LOCAL_WORLD_SIZE says in the
    environment, as torchrun sets it; without it, all `world_size`.
    """
    workers = int(os.environ.get("LOCAL_WORLD_SIZE", world_size))
    return max(1, min((os.cpu_count() or 1) // workers, MOST_THREADS))
