"""A clock that only sleeping threads advance, so that no load of the machine changes a result."""

import threading


class VirtualTime:
    """Replaces the module `time` in a module under test.

    Virtual time passes only while all threads of `run` sleep; without them, each sleep of the
    caller takes no time.
    """

    def __init__(self):
        self.now_s = 0.0
        self.changed = threading.Condition()
        self.threads, self.ends = 1, []

    def monotonic(self):
        return self.now_s

    perf_counter = monotonic

    def sleep(self, seconds):
        with self.changed:
            end_s = self.now_s + seconds
            self.ends.append(end_s)
            self._advance()
            self.changed.wait_for(lambda: self.now_s >= end_s)

    def run(self, functions):
        """Run functions in threads that sleep in virtual time, and raise their first error."""
        errors = []

        def work(function):
            try:
                function()
            except BaseException as error:
                errors.append(error)
            with self.changed:
                self.threads -= 1
                self._advance()

        self.threads = len(functions)
        threads = [threading.Thread(target=work, args=(each,)) for each in functions]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        self.threads = 1
        if errors:
            raise errors[0]

    def _advance(self):
        if self.ends and len(self.ends) == self.threads:
            self.now_s = min(self.ends)
            self.ends = [end_s for end_s in self.ends if end_s > self.now_s]
            self.changed.notify_all()
