"""Inject a fault into a training run at a random time, and check how the run ends.

    python -m bench.robustness.faults [--faults N] [--seed S] [--kinds KIND ...]

Each run trains on a small planted graph with four workers, or as many as the fault says:

    kill worker     SIGKILL of one worker
    kill launcher   SIGKILL of the launcher; `gcnzc train --resume` must complete the run
    pause worker    SIGSTOP of one worker, and SIGCONT two seconds later
    stop worker     SIGSTOP of one worker, without SIGCONT
    nan             one gradient of one worker is NaN
    disk full       the disk of the run folder is full for two seconds
    link down       four machines with one worker each, one of which loses its network link: the run
                    must end with an error that names the worker
    link flaps      the same, but the link is up again after two seconds
    replace agent   two torchrun launchers with one worker each: SIGKILL of one, and a new one
    fewer agents    the same without a new one: the run continues with one worker
    more agents     one torchrun launcher with one worker, and a second launcher that joins

A run passes if its record is complete, each epoch used each seed once (by their number and
checksum), and its model can be evaluated. After "link down" it passes if it ends in time with an
error that names the worker. No process, no file in /dev/shm, no temporary file and no partial file
may remain. One line is recorded for each run.

It needs root for the emulated network and for namespaces, by which the kernel ends all processes
and removes all mounts when this program ends.
"""

import argparse
import contextlib
import json
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from bench import harness
from bench.network import cluster, namespaces
from bench.network.launchers import launchers, wait_for
from gcnzc import cli, load
from gcnzc.train import checkpoint
from gcnzc.train.epoch_stats import seeds_checksum
from gcnzc.train.run_folder import last_checkpoint

ROOT = Path(__file__).parents[2]
KINDS = (
    *("kill worker", "kill launcher", "pause worker", "stop worker"),
    *("nan", "disk full", "link down", "link flaps"),
    *("replace agent", "fewer agents", "more agents"),
)
# environment variable that is set when this program runs in its namespaces
INSIDE = "GCNZC_FAULTS_INSIDE"
NAMESPACES = ("--mount", "--pid", "--fork", "--kill-child", "--mount-proc")
WORKERS, TIMEOUT_S, LIMIT_S = 4, 8, 240
OPTIONS = "--fanouts 5,5 --hidden 16 --batch-size 20 --evaluate-every 20"
ALL_OPTIONS = f"{OPTIONS} --checkpoint-every-s 0.5 --timeout-s {TIMEOUT_S}"
# a launcher takes as long to start as hundreds of epochs, and the run does not wait for it
EPOCHS, EPOCHS_WITH_JOIN = 60, 400
HANG_MESSAGE = "faults: the run did not end in time"
NAMES_WORKER = re.compile(
    r"rank \d on \S+ (has stopped sending heartbeats|is running)|rank \d never connected"
)

# sitecustomize.py that sets a gradient of rank 1 to NaN in one step
NAN_HOOK = """
import os
if os.environ.get("RANK") == "1":
    from gcnzc.optim import Averaged
    original_step, steps = Averaged.step, 0
    def step(self, closure=None):
        global steps
        steps += 1
        if steps == int(os.environ["NAN_STEP"]):
            self.param_groups[0]["params"][0].grad.fill_(float("nan"))
        original_step(self, closure)
    Averaged.step = step
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the faults of the command line; return the exit status."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--faults", type=int, default=50)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=list(KINDS))
    arguments = parser.parse_args(argv)
    if INSIDE not in os.environ:
        return run_in_namespaces(sys.argv[1:] if argv is None else argv)
    rng = random.Random(arguments.seed)
    failed = 0
    with tempfile.TemporaryDirectory(prefix="faults-") as folder:
        graph = make_graph(Path(folder))
        for number in range(arguments.faults):
            kind = arguments.kinds[number % len(arguments.kinds)]
            after_s = rng.uniform(0.0, 4.0)
            result = Fault(graph, Path(folder) / f"run-{number}", kind, after_s, rng).run()
            harness.record(
                "faults",
                {"fault": kind, "number": number, "seed": arguments.seed, "workers": WORKERS},
                after_s=after_s,
                **result,
            )
            failed += not result["passed"]
    print(f"{arguments.faults - failed} of {arguments.faults} runs passed", flush=True)
    return 1 if failed else 0


def run_in_namespaces(words: Sequence[str]) -> int:
    """Run this program in namespaces that end with this process; return its exit status."""
    command = ["unshare", *NAMESPACES, sys.executable, "-m", "bench.robustness.faults", *words]
    # `unshare` ignores SIGTERM, by which `timeout` would end this program
    with subprocess.Popen(
        command, env=os.environ | {INSIDE: "1"}, preexec_fn=namespaces.die_with_parent
    ) as process:
        return process.wait()


def make_graph(folder: Path) -> Path:
    """Prepare a small graph, and return its folder."""
    raw, graph = folder / "raw", folder / "graph"
    sizes = ["--nodes", "2000", "--edges", "12000", "--num-features", "24", "--classes", "4"]
    assert cli.main(["make", str(raw), "--kind", "planted", *sizes]) == 0
    assert cli.main(["prepare", str(raw), str(graph)]) == 0
    return graph


class Fault:
    """A training run with one fault.

    Args:
        graph: prepared folder of the graph.
        folder: run folder, which is created.
        kind: one of `KINDS`.
        after_s: seconds from the first recorded epoch to the fault.
        rng: chooses the worker and, for "nan", the step.
    """

    def __init__(
        self, graph: Path, folder: Path, kind: str, after_s: float, rng: random.Random
    ) -> None:
        self.graph, self.folder, self.kind, self.after_s = graph, folder, kind, after_s
        self.victim, self.nan_step = rng.randrange(1, WORKERS), rng.randrange(1, 400)
        self.has_agents = kind.split()[-1] in ("agent", "agents")
        self.num_epochs = EPOCHS_WITH_JOIN if kind == "more agents" else EPOCHS
        self.options = [*ALL_OPTIONS.split(), "--epochs", str(self.num_epochs)]
        self.shared_before = set(os.listdir("/dev/shm"))
        self.temporary = folder.with_suffix(".temporary")
        self.temporary.mkdir()
        seeds = load(graph).split["train"]
        self.seeds = len(seeds), f"{seeds_checksum(seeds):016x}"

    def run(self) -> dict[str, Any]:
        """Train, inject the fault, and return the fields of the record."""
        begin = time.monotonic()
        disk = self.mount_small_disk() if self.kind == "disk full" else contextlib.nullcontext()
        with disk:
            if self.kind.startswith("link"):
                code, output = self.run_on_machines()
            elif self.has_agents:
                code, output = self.run_with_agents()
            else:
                code, output = self.run_locally()
            error = self.check_result(code, output)
        leftovers = self.find_leftovers()
        return {
            "passed": not error and not leftovers,
            "wrong": error,
            "left": leftovers,
            "exit": code,
            "named": bool(NAMES_WORKER.search(output)),
            "run_s": time.monotonic() - begin,
        }

    def command(self, *words: str) -> list[str]:
        """Return the command line of `gcnzc train`."""
        return [sys.executable, "-m", "gcnzc", "train", *words]

    def environment(self) -> dict[str, str]:
        """Return the environment variables to add to those of this process."""
        paths = {"PYTHONPATH": str(ROOT), "TMPDIR": str(self.temporary)}
        return paths | {"OMP_NUM_THREADS": "1"}

    def run_locally(self) -> tuple[int, str]:
        """Train with local workers; return the exit status and the output."""
        words = [str(self.graph), "--out", str(self.folder), *self.options]
        command = self.command(*words, "--workers", str(WORKERS))
        code, output = self.run_command(command, inject=True)
        if self.kind == "kill launcher":
            self.wait(lambda: not self.processes(), 20)
            command = self.command("--resume", str(self.folder), "--workers", str(WORKERS))
            code, resumed_output = self.run_command(command, inject=False)
            output += resumed_output
        return code, output

    def run_command(self, command: Sequence[str], *, inject: bool) -> tuple[int, str]:
        """Run a command, with the fault if `inject`; return its exit status and output."""
        environment = os.environ | self.environment()
        hook = self.folder.with_suffix(".hook")
        if self.kind == "nan":
            hook.mkdir()
            (hook / "sitecustomize.py").write_text(NAN_HOOK)
            environment |= {"PYTHONPATH": f"{hook}:{ROOT}", "NAN_STEP": str(self.nan_step)}
        with subprocess.Popen(
            command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        ) as process:
            if inject:
                threading.Thread(target=self.inject, args=(process,), daemon=True).start()
            try:
                output, _ = process.communicate(timeout=LIMIT_S)
            except subprocess.TimeoutExpired:
                for each in self.processes():
                    with contextlib.suppress(ProcessLookupError):
                        os.kill(each, signal.SIGKILL)
                process.kill()
                output = f"{process.communicate()[0]}\n{HANG_MESSAGE}"
            if hook.exists():
                shutil.rmtree(hook)
            return process.returncode, output

    def inject(self, process: subprocess.Popen) -> None:
        """Inject the fault `after_s` seconds after the first epoch."""
        self.wait(lambda: self.epochs() >= 1, LIMIT_S)
        time.sleep(self.after_s)
        workers = [each for each in self.processes() if each != process.pid]
        if process.poll() is not None or len(workers) < WORKERS:
            return
        worker = workers[self.victim]
        if self.kind == "kill worker":
            os.kill(worker, signal.SIGKILL)
        elif self.kind == "kill launcher":
            process.kill()
        elif self.kind in ("pause worker", "stop worker"):
            os.kill(worker, signal.SIGSTOP)
            if self.kind == "pause worker":
                time.sleep(2.0)
                os.kill(worker, signal.SIGCONT)
        elif self.kind == "disk full":
            filler = self.folder.parent / "filler"
            with contextlib.suppress(OSError), filler.open("wb") as file:
                while True:
                    file.write(bytes(1 << 16))
            time.sleep(2.0)
            filler.unlink()

    def run_with_agents(self) -> tuple[int, str]:
        """Train with two launchers; return the first one's exit status and the output of both."""
        machines = "2" if self.kind == "replace agent" else "1:2"
        with launchers(
            self.graph, self.folder, machines, self.options, self.environment()
        ) as agents:
            first = agents.start()
            second = None if self.kind == "more agents" else agents.start()
            wait_for(lambda: self.epochs() >= 1 or first.poll() is not None, LIMIT_S)
            time.sleep(self.after_s)
            if second is not None:
                second.kill()
                second.wait()
            if self.kind != "fewer agents":
                agents.start()
            code = agents.wait(first)
            if code is None:
                return 1, f"{agents.output()}\n{HANG_MESSAGE}"
            return code, agents.output()

    def run_on_machines(self) -> tuple[int, str]:
        """Train on four machines; return the first one's exit status and the output of all."""
        # `Cluster.run` returns stdout, and errors are printed to stderr
        launcher = ["sh", "-c", 'exec "$@" 2>&1', "sh", sys.executable]
        launcher += ["-m", "torch.distributed.run", "--nnodes", str(WORKERS)]
        launcher += ["--rdzv-id", "7", "--rdzv-backend", "c10d", "--max-restarts", "3"]
        launcher += ["--rdzv-endpoint", "machine0:29400"]
        launcher += ["--rdzv-conf", "join_timeout=30,read_timeout=10"]
        launcher += ["--log-dir", str(self.folder / "logs")]
        launcher += ["-m", "gcnzc", "train", str(self.graph), "--out", str(self.folder)]
        with cluster.Cluster(workers=WORKERS, mbit_per_s=200) as machines:
            results: list[Any] = []
            thread = threading.Thread(
                target=lambda: results.append(
                    machines.run(
                        lambda rank: [*launcher, *self.options],
                        limit_s=LIMIT_S,
                        environment=self.environment()
                        | {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"},
                    )
                )
            )
            thread.start()
            self.wait(lambda: self.epochs() >= 1 or not thread.is_alive(), LIMIT_S)
            time.sleep(self.after_s)
            machines.link_down(self.victim)
            if self.kind == "link flaps":
                time.sleep(2.0)
                machines.link_up(self.victim)
            thread.join()
            output = "\n".join(results[0].output)
            if not results[0].in_time:
                output += f"\n{HANG_MESSAGE}"
            return results[0].codes[0], output

    def check_result(self, code: int, output: str) -> str:
        """Return what is wrong with the result of the run; an empty string if it is correct."""
        if HANG_MESSAGE in output:
            return "the run did not end in time"
        if code:
            if self.kind == "link down" and NAMES_WORKER.search(output):
                return ""
            return f"exit status {code}: {output[-1500:]}"
        record = (self.folder / "record.jsonl").read_text()
        lines = [json.loads(line) for line in record.splitlines()]
        if [line["epoch"] for line in lines] != list(range(self.num_epochs)):
            return "epochs are missing in the record"
        # a skipped step counts its seeds, too
        used = [(line["seeds"], line["seeds_checksum"]) for line in lines]
        if any(each != self.seeds for each in used):
            return f"seeds {used}, not {self.seeds}"
        if cli.main(["evaluate", str(self.folder)]) != 0:
            return "the model cannot be evaluated"
        result = json.loads((self.folder / "result.json").read_text())
        if result["test_accuracy"] < 0.5:
            return f"the test accuracy is only {result['test_accuracy']}"
        checkpoint.load(last_checkpoint(self.folder))
        if self.kind == "nan" and "was skipped on all workers" not in output:
            return "the step was not skipped"
        return ""

    def find_leftovers(self) -> list[str]:
        """Return the processes and files that the run should have removed."""
        self.wait(lambda: not self.processes(), 10)
        leftovers = [f"process {each}" for each in self.processes()]
        leftovers += [
            f"/dev/shm/{name}" for name in set(os.listdir("/dev/shm")) - self.shared_before
        ]
        # torch always creates the cache folder of its compiler
        temporary = [name for name in os.listdir(self.temporary) if "inductor" not in name]
        leftovers += [f"temporary {name}" for name in temporary]
        return leftovers + [path.name for path in self.folder.glob("*.partial*")]

    def epochs(self) -> int:
        """Return the number of recorded epochs."""
        path = self.folder / "record.jsonl"
        return len(path.read_text().splitlines()) if path.exists() else 0

    def processes(self) -> list[int]:
        """Return the ids of the run's processes, in ascending order."""
        found = []
        for entry in Path("/proc").iterdir():
            with contextlib.suppress(OSError):
                if entry.name.isdigit() and str(self.folder) in (entry / "cmdline").read_text():
                    found.append(int(entry.name))
        return sorted(found)

    def wait(self, condition: Any, seconds: float) -> None:
        """Wait until `condition` holds, at most `seconds`."""
        end = time.monotonic() + seconds
        while not condition() and time.monotonic() < end:
            time.sleep(0.1)

    @contextlib.contextmanager
    def mount_small_disk(self) -> Iterator[None]:
        """Put the run folder on a disk of 8 MB."""
        disk = self.folder.with_suffix(".disk")
        disk.mkdir()
        subprocess.run(["mount", "-t", "tmpfs", "-o", "size=8m", "tmpfs", disk], check=True)
        self.folder = disk / "run"
        try:
            yield
        finally:
            subprocess.run(["umount", "-l", disk], check=True)


if __name__ == "__main__":
    sys.exit(main())
