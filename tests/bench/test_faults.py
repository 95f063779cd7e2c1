"""The benchmark of faults leaves nothing behind, even if it is killed."""

import os
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

import pytest
from limits import HANG_S
from virtual_time import VirtualTime

from bench.network import cluster, launchers

ROOT = Path(__file__).parents[2]
REASON = cluster.can_make()


def mounted_under(folder, process):
    """Whether a process sees a mount in `folder`."""
    with suppress(OSError):
        return str(folder) in Path(f"/proc/{process}/mounts").read_text()
    return False


def processes_of(folder):
    """The processes with `folder` in their command line."""
    found = []
    for entry in Path("/proc").iterdir():
        with suppress(OSError):
            if entry.name.isdigit() and str(folder) in (entry / "cmdline").read_text():
                found.append(entry.name)
    return found


@pytest.mark.slow
@pytest.mark.skipif(REASON is not None, reason=str(REASON))
@pytest.mark.parametrize("how", [signal.SIGTERM, signal.SIGKILL])
def test_no_mount_and_no_process_remains_when_the_bench_is_terminated(how, tmp_path):
    command = [sys.executable, "-m", "bench.robustness.faults", "--faults", "1"]
    environment = os.environ | {"TMPDIR": str(tmp_path), "PYTHONPATH": str(ROOT)}
    with subprocess.Popen([*command, "--kinds", "disk full"], env=environment) as process:
        end = time.monotonic() + HANG_S
        # until a run has begun on the small disk
        while not any(mounted_under(tmp_path, each) for each in processes_of(tmp_path)):
            assert time.monotonic() < end
            assert process.poll() is None
            time.sleep(0.1)
        # as a time limit does
        process.send_signal(how)
    try:
        end = time.monotonic() + HANG_S
        while processes_of(tmp_path) and time.monotonic() < end:
            time.sleep(0.1)
        assert not processes_of(tmp_path)
        assert not mounted_under(tmp_path, "self")
    finally:
        for each in processes_of(tmp_path):
            os.kill(int(each), signal.SIGKILL)
        for line in Path("/proc/self/mounts").read_text().splitlines():
            if str(tmp_path) in line:
                subprocess.run(["umount", "-l", line.split()[1]], check=False)


@pytest.mark.parametrize(("grows", "code"), [(True, 0), (False, None)])
def test_a_run_hangs_if_its_record_does_not_grow_however_long_it_takes(
    grows, code, tmp_path, monkeypatch
):
    monkeypatch.setattr(launchers, "time", VirtualTime())

    class Launcher:
        returncode = polls = 0

        def poll(self):
            self.polls += 1
            if grows:
                with (tmp_path / "record.jsonl").open("a") as file:
                    file.write("\n")
            return 0 if self.polls == 50 else None

    found = launchers.Launchers(tmp_path, tmp_path, "2", [], {})
    assert found.wait(Launcher(), stall_s=1.0) == code
