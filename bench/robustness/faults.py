"""Run four workers with a fault at a random moment, and check how the run ends.

    python -m bench.robustness.faults [--faults N] [--seed S] [--kinds KIND ...]

Each run trains on a small planted graph, and one thing happens to it at a moment drawn at random:

    kill worker     SIGKILL of one worker
    kill launcher   SIGKILL of the launcher; `gcnzc train --resume` must end the run
    pause worker    SIGSTOP of one worker, and SIGCONT two seconds later
    stop worker     SIGSTOP of one worker for ever
    nan             a gradient of one worker is not a number, in one step
    disk full       the disk of the run folder is full for two seconds
    link down       four machines of one worker each, and one's cable is pulled for ever: the run
                    must end with an error that names it
    link flaps      the same, plugged in again after two seconds
    replace agent   SIGKILL of one of two launchers (torchrun) of a worker each, and a new one
    fewer agents    the same, and no new one: the run goes on with one worker
    more agents     one launcher with a worker, and a second one that joins

A run passes if it ends with a whole record, in which every epoch used every seed once (by number
and by checksum), and with the model that it tells of; or, where the machine does not come back,
with an error in time that names the worker. Nothing may remain: no process, no file in /dev/shm,
none in the temporary folder, no partial file. One line is recorded for each run.

Needs root: for the network, and for namespaces of its own, with which the kernel ends all processes
and mounts however this program ends.
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

ROOT = Path(__file__).parents[2]
KINDS = (
    *("kill worker", "kill launcher", "pause worker", "stop worker"),
    *("nan", "disk full", "link down", "link flaps"),
    *("replace agent", "fewer agents", "more agents"),
)
# set in the environment of the program inside of its namespaces
INSIDE = "GCNZC_FAULTS_INSIDE"
NAMESPACES = ("--mount", "--pid", "--fork", "--kill-child", "--mount-proc")
WORKERS, TIMEOUT_S, LIMIT_S = 4, 8, 240
OPTIONS = "--layers 2 --fanouts 5,5 --hidden 16 --batch-size 20 --evaluate-every 20"
EVERYWHERE = f"{OPTIONS} --checkpoint-every-s 0.5 --timeout-s {TIMEOUT_S}"
# a launcher needs as long as hundreds of epochs to start, and those that are there do not wait
EPOCHS, EPOCHS_UNTIL_JOINED = 60, 400
NAMED = re.compile(
    r"rank \d on \S+ (has stopped sending heartbeats|is running)|rank \d never connected"
)

# one step of worker 1 gets a gradient that is no number
SPOIL = """
import os
if os.environ.get("RANK") == "1":
    from gcnzc.optim import Averaged
    usual, steps = Averaged.step, 0
    def step(self, closure=None):
        global steps
        steps += 1
        if steps == int(os.environ["SPOILED_STEP"]):
            self.param_groups[0]["params"][0].grad.fill_(float("nan"))
        usual(self, closure)
    Averaged.step = step
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Run what is asked for; the exit status."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--faults", type=int, default=50)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=list(KINDS))
    asked = parser.parse_args(argv)
    if INSIDE not in os.environ:
        return inside(sys.argv[1:] if argv is None else argv)
    chance = random.Random(asked.seed)
    failed = 0
    with tempfile.TemporaryDirectory(prefix="faults-") as folder:
        graph = made(Path(folder))
        for number in range(asked.faults):
            kind = asked.kinds[number % len(asked.kinds)]
            after_s = chance.uniform(0.0, 4.0)
            ended = Fault(graph, Path(folder) / f"run-{number}", kind, after_s, chance).ended()
            harness.record(
                "faults",
                {"fault": kind, "number": number, "seed": asked.seed, "workers": WORKERS},
                after_s=after_s,
                **ended,
            )
            failed += not ended["passed"]
    print(f"{asked.faults - failed} of {asked.faults} runs ended as they should", flush=True)
    return 1 if failed else 0


def inside(words: Sequence[str]) -> int:
    """Run this program in namespaces that end with this process; its exit status."""
    command = ["unshare", *NAMESPACES, sys.executable, "-m", "bench.robustness.faults", *words]
    # unshare itself ignores SIGTERM, which a time limit sends
    with subprocess.Popen(
        command, env=os.environ | {INSIDE: "1"}, preexec_fn=namespaces.die_with_parent
    ) as process:
        return process.wait()


def made(folder: Path) -> Path:
    """Return the folder of a small prepared graph."""
    raw, graph = folder / "raw", folder / "graph"
    sizes = ["--nodes", "2000", "--edges", "12000", "--num-features", "24", "--classes", "4"]
    assert cli.main(["make", str(raw), "--kind", "planted", *sizes]) == 0
    assert cli.main(["prepare", str(raw), str(graph)]) == 0
    return graph


class Fault:
    """One run, and what happens to it."""

    def __init__(
        self, graph: Path, run: Path, kind: str, after_s: float, chance: random.Random
    ) -> None:
        self.graph, self.run, self.kind, self.after_s = graph, run, kind, after_s
        self.victim, self.step = chance.randrange(1, WORKERS), chance.randrange(1, 400)
        self.has_agents = kind.split()[-1] in ("agent", "agents")
        self.num_epochs = EPOCHS_UNTIL_JOINED if kind == "more agents" else EPOCHS
        self.options = [*EVERYWHERE.split(), "--epochs", str(self.num_epochs)]
        self.shared_before = set(os.listdir("/dev/shm"))
        self.temporary = run.with_suffix(".temporary")
        self.temporary.mkdir()
        seeds = load(graph).split["train"]
        self.seeds = len(seeds), f"{seeds_checksum(seeds):016x}"

    def ended(self) -> dict[str, Any]:
        """Run with the fault, and return how the run ended."""
        began = time.monotonic()
        disk = self.small_disk() if self.kind == "disk full" else contextlib.nullcontext()
        with disk:
            if self.kind.startswith("link"):
                code, talk = self.on_machines()
            elif self.has_agents:
                code, talk = self.with_agents()
            else:
                code, talk = self.here()
            wrong = self.wrong(code, talk)
        left = self.left()
        return {
            "passed": not wrong and not left,
            "wrong": wrong,
            "left": left,
            "exit": code,
            "named": bool(NAMED.search(talk)),
            "run_s": time.monotonic() - began,
        }

    def command(self, *words: str) -> list[str]:
        """Return the arguments of the command line."""
        return [sys.executable, "-m", "gcnzc", "train", *words]

    def environment(self) -> dict[str, str]:
        """Return the additional environment variables."""
        places = {"PYTHONPATH": str(ROOT), "TMPDIR": str(self.temporary)}
        return places | {"OMP_NUM_THREADS": "1"}

    def here(self) -> tuple[int, str]:
        """Exit status and talk of a run on this machine."""
        words = [str(self.graph), "--out", str(self.run), *self.options]
        code, talk = self.started(self.command(*words, "--workers", str(WORKERS)), strike=True)
        if self.kind == "kill launcher":
            self.wait(lambda: not self.processes(), 20)
            resumed = self.command("--resume", str(self.run), "--workers", str(WORKERS))
            code, more = self.started(resumed, strike=False)
            talk += more
        return code, talk

    def started(self, command: Sequence[str], strike: bool) -> tuple[int, str]:
        """Exit status and talk of a command."""
        environment = os.environ | self.environment()
        hook = self.run.with_suffix(".hook")
        if self.kind == "nan":
            hook.mkdir()
            (hook / "sitecustomize.py").write_text(SPOIL)
            environment |= {"PYTHONPATH": f"{hook}:{ROOT}", "SPOILED_STEP": str(self.step)}
        with subprocess.Popen(
            command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        ) as process:
            if strike:
                threading.Thread(target=self.strike, args=(process,), daemon=True).start()
            try:
                talk, _ = process.communicate(timeout=LIMIT_S)
            except subprocess.TimeoutExpired:
                for each in self.processes():
                    with contextlib.suppress(ProcessLookupError):
                        os.kill(each, signal.SIGKILL)
                process.kill()
                talk = process.communicate()[0] + "\nfaults: it hung"
            if hook.exists():
                shutil.rmtree(hook)
            return process.returncode, talk

    def strike(self, process: subprocess.Popen) -> None:
        """Let it happen, some time after the first epoch."""
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
            block = self.run.parent / "block"
            with contextlib.suppress(OSError), block.open("wb") as file:
                while True:
                    file.write(bytes(1 << 16))
            time.sleep(2.0)
            block.unlink()

    def with_agents(self) -> tuple[int, str]:
        """Exit status of the first of two launchers on this machine, and the talk of both."""
        machines = "2" if self.kind == "replace agent" else "1:2"
        with launchers(self.graph, self.run, machines, self.options, self.environment()) as found:
            first = found.start()
            second = None if self.kind == "more agents" else found.start()
            wait_for(lambda: self.epochs() >= 1 or first.poll() is not None, LIMIT_S)
            time.sleep(self.after_s)
            if second is not None:
                second.kill()
                second.wait()
            if self.kind != "fewer agents":
                found.start()
            code = found.wait(first)
            if code is None:
                return 1, found.output() + "\nfaults: it hung"
            return code, found.output()

    def on_machines(self) -> tuple[int, str]:
        """Exit status of the first machine, and the talk of all, of a run on four of them."""
        # errors are said on stderr, and `Ran` keeps stdout
        launcher = ["sh", "-c", 'exec "$@" 2>&1', "sh", sys.executable]
        launcher += ["-m", "torch.distributed.run", "--nnodes", str(WORKERS)]
        launcher += ["--rdzv-id", "7", "--rdzv-backend", "c10d", "--max-restarts", "3"]
        launcher += ["--rdzv-endpoint", "machine0:29400"]
        launcher += ["--rdzv-conf", "join_timeout=30,read_timeout=10"]
        launcher += ["--log-dir", str(self.run / "logs")]
        launcher += ["-m", "gcnzc", "train", str(self.graph), "--out", str(self.run)]
        with cluster.Cluster(workers=WORKERS, mbit_per_s=200) as machines:
            done: list[Any] = []
            thread = threading.Thread(
                target=lambda: done.append(
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
            talk = "\n".join(done[0].output)
            if not done[0].in_time:
                talk += "\nfaults: it hung"
            return done[0].codes[0], talk

    def wrong(self, code: int, talk: str) -> str:
        """Return what is wrong with the end of the run; empty if it is correct."""
        if "faults: it hung" in talk:
            return "it hung"
        if code:
            if self.kind == "link down" and NAMED.search(talk):
                return ""
            return f"exit status {code}: {talk[-1500:]}"
        lines = [json.loads(line) for line in (self.run / "record.jsonl").read_text().splitlines()]
        if [line["epoch"] for line in lines] != list(range(self.num_epochs)):
            return "the record is not whole"
        # a step that is skipped has used its seeds, and changed nothing
        used = [(line["seeds"], line["seeds_checksum"]) for line in lines]
        if any(each != self.seeds for each in used):
            return f"seeds {used}, not {self.seeds}"
        if cli.main(["evaluate", str(self.run)]) != 0:
            return "the model cannot be evaluated"
        result = json.loads((self.run / "result.json").read_text())
        if result["test_accuracy"] < 0.5:
            return f"the model has learned nothing: {result['test_accuracy']}"
        checkpoint.load(self.run / "checkpoint.pt")
        if self.kind == "nan" and "was skipped on all workers" not in talk:
            return "the step was not skipped"
        return ""

    def left(self) -> list[str]:
        """Return processes and files that remain and should not."""
        self.wait(lambda: not self.processes(), 10)
        left = [f"process {each}" for each in self.processes()]
        left += [f"/dev/shm/{name}" for name in set(os.listdir("/dev/shm")) - self.shared_before]
        # torch makes its compiler's cache whatever it runs
        temporary = [name for name in os.listdir(self.temporary) if "inductor" not in name]
        left += [f"temporary {name}" for name in temporary]
        return left + [path.name for path in self.run.glob("*.partial*")]

    def epochs(self) -> int:
        """Return the number of recorded epochs."""
        path = self.run / "record.jsonl"
        return len(path.read_text().splitlines()) if path.exists() else 0

    def processes(self) -> list[int]:
        """Return the processes of the run, by id."""
        found = []
        for entry in Path("/proc").iterdir():
            with contextlib.suppress(OSError):
                if entry.name.isdigit() and str(self.run) in (entry / "cmdline").read_text():
                    found.append(int(entry.name))
        return sorted(found)

    def wait(self, condition: Any, seconds: float) -> None:
        """Wait until a condition holds, or until a time limit."""
        end = time.monotonic() + seconds
        while not condition() and time.monotonic() < end:
            time.sleep(0.1)

    @contextlib.contextmanager
    def small_disk(self) -> Iterator[None]:
        """Yield a disk of 8 MB for the run folder."""
        disk = self.run.with_suffix(".disk")
        disk.mkdir()
        subprocess.run(["mount", "-t", "tmpfs", "-o", "size=8m", "tmpfs", disk], check=True)
        self.run = disk / "run"
        try:
            yield
        finally:
            subprocess.run(["umount", "-l", disk], check=True)


if __name__ == "__main__":
    sys.exit(main())
