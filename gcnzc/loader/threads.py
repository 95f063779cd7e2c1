"""The default number of threads."""

import os

# Each thread holds a batch of up to hundreds of megabytes. On two cores without a model, two
# threads prepare 1.6 times as many batches as one, and three threads as many as two. With a model,
# one thread is enough.
MAX_DEFAULT_THREADS = 4


def default_threads(world_size: int = 1) -> int:
    """Return the default number of a loader's threads: one per core, at most four.

    Ranks on one machine share its cores. Their number is the environment variable LOCAL_WORLD_SIZE,
    which torchrun sets, or else `world_size`.
    """
    ranks = int(os.environ.get("LOCAL_WORLD_SIZE", world_size))
    return max(1, min((os.cpu_count() or 1) // ranks, MAX_DEFAULT_THREADS))
