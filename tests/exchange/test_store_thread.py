import queue
import subprocess
import sys
import threading

from limits import HANG_S

from gcnzc.exchange import AllGatherScalar
from gcnzc.exchange.agreement import CurrentWait, Need, RequestLog, StallMonitor
from gcnzc.exchange.store import StoreThread

REQUEST = """
import threading, time
from gcnzc.exchange.store import StoreThread

stopped = threading.Event()

def work():
    while not stopped.is_set():
        print("request", flush=True)
        time.sleep(0.2)
        print("answer", flush=True)

StoreThread("requests", work, stopped.set)
"""


class SlowStore:
    """A store whose requests take some time."""

    def __init__(self):
        self.began, self.allowed = threading.Event(), threading.Event()

    def check(self, keys):
        self.began.set()
        self.allowed.wait()
        return False

    def set(self, key, value):
        pass


def test_no_request_is_pending_when_the_interpreter_ends():
    ended = subprocess.run([sys.executable, "-c", REQUEST], capture_output=True, text=True)
    lines = ended.stdout.split()
    assert ended.returncode == 0, ended.stderr
    assert len(lines) > 0
    assert lines.count("request") == lines.count("answer")


def test_a_closed_monitor_makes_no_more_requests():
    store = SlowStore()
    monitor = StallMonitor(store, RequestLog(0), lambda: [], lambda: None)
    # a wait that began long ago
    monitor.wait = CurrentWait(0.0, AllGatherScalar(0), lambda: Need(1, "", 1))
    assert store.began.wait(HANG_S)
    closing = threading.Thread(target=monitor.close)
    closing.start()
    closing.join(0.1)
    assert closing.is_alive()
    store.allowed.set()
    closing.join(HANG_S)
    assert not closing.is_alive()
    assert "gcnzc-stalls" not in {each.name for each in threading.enumerate()}


def test_a_thread_may_end_itself():
    threads, ended = queue.SimpleQueue(), threading.Event()

    def work():
        threads.get().end()
        ended.set()

    threads.put(StoreThread("requests", work, lambda: None))
    assert ended.wait(HANG_S)
