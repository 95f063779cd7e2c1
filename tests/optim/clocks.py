"""Clocks of ranks that a test sets forward."""

from gcnzc.optim.sync_interval import Clocks


class Handed(Clocks):
    """The clocks of a rank."""

    def __init__(self):
        self.wall_s = self.cpu_s = 0.0
        super().__init__(lambda: self.wall_s, lambda: self.cpu_s)

    # so that a test may
    __setattr__ = object.__setattr__


def slow_down(optimizer, clocks, wall_s, cpu_s=0.0):
    """Let each exchange of an optimizer take so long by its clocks."""
    for reducer in optimizer.reducers.values():

        def slower(values, extras=0, mean=reducer.mean):
            clocks.wall_s += wall_s
            clocks.cpu_s += cpu_s
            return (yield from mean(values, extras))

        reducer.mean = slower
