import subprocess
import sys

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


def test_no_request_is_pending_when_the_interpreter_ends():
    ended = subprocess.run([sys.executable, "-c", REQUEST], capture_output=True, text=True)
    lines = ended.stdout.split()
    assert ended.returncode == 0, ended.stderr
    assert len(lines) > 0
    assert lines.count("request") == lines.count("answer")
