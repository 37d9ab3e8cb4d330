"""Rounds over Flower: three and twenty sites on this machine, in seconds a round, with where they go; what a
site and the server take while they wait; what sites send of a network's J, with and without compression."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from statistics import median

from rich.table import Table
from torch import nn

import fedpop as fp
from benchmarks.timing import Advance, Spread, shown
from fedpop.flower import admission, offline, server_commands, site_commands
from fedpop.flower.processes import free_port
from fedpop.flower.requests import Request, digest_of, versions
from fedpop.flower.site import open_site
from fedpop.keys import Key
from fedpop.methods.base import Facts
from fedpop.report.results import Record, record

NAME = "federation"
SITES, ROUNDS = (3, 20), 20
"""Sites of each federation, and its rounds; the first, in which everyone arrives, does not count."""
GOALS = {3: 1.0, 20: 5.0}
"""Seconds a round, at most, where nobody else uses the machine."""
IDLE = 20.0
"""Seconds for which sites that wait are looked at."""
COMPRESSORS = (fp.compressors.Identity(), fp.compressors.QSGD(levels=16), fp.compressors.Natural())
SETTINGS = """name = "bench"
[data]
x = ["x"]
y = "y"
standardise = false
[method]
name = "FedAvg"
[run]
rounds = {rounds}
afterwards = []
[sites]
sites = {sites}
[server]
address = "{address}"
"""


def measure(advance: Advance) -> list[Record]:
    out, laps = [], []
    for k, sites in enumerate(SITES):
        with tempfile.TemporaryDirectory() as folder, federation(Path(folder), sites) as running:
            laps = running.rounds(lambda share, k=k: advance((k + share) / (len(SITES) + 1)))
            running.children[0].wait()
            parts = {"the site's data, round and chain": work_of(Path(folder) / "site-0")}
        load = os.getloadavg()[0]
        for who, seconds in running.worked.items():
            parts[f"processor seconds of {who}"] = seconds / (ROUNDS - 1)
        setting = {"benchmark": NAME, "sites": sites, "rounds": ROUNDS}
        metrics = Spread.of(laps).metrics("seconds") | {
            "goal": GOALS[sites],
            "load": load,
            "repeats": len(laps),
        }
        out.append(record("bench", setting, "a round over Flower", 0, metrics, {"seconds": sum(laps)}, {}))
        for part, seconds in parts.items():
            setting = {"benchmark": NAME, "sites": sites, "part": part}
            metrics = {"seconds": seconds, "share": seconds / median(laps)}
            out.append(record("bench", setting, "a round over Flower", 0, metrics, {"seconds": seconds}, {}))
    return out + idle(max(SITES)) + messages(median(laps))


class Running:
    """A federation of real processes."""

    def __init__(self, server: Path, children: list[subprocess.Popen[bytes]]) -> None:
        self.server, self.children = server, children
        self.worked: dict[str, float] = {}
        """Processor seconds of the server, and of a site, between the first and the last round."""

    def rounds(self, advance: Advance) -> list[float]:
        """Seconds of each round but the first."""
        metrics, begun = self.server / "run" / "metrics.jsonl", None
        while self.children[0].poll() is None:
            time.sleep(0.1)
            done = len(metrics.read_text().splitlines()) if metrics.exists() else 0
            advance(done / ROUNDS)
            if done and begun is None:
                begun = self.processor()
            if begun is not None and done < ROUNDS:
                self.worked = {who: now - begun[who] for who, now in self.processor().items()}
        if self.children[0].returncode:
            raise RuntimeError(f"the federation failed: {(self.server / 'run' / 'server.log').read_text()}")
        lines = [json.loads(line) for line in metrics.read_text().splitlines()]
        return [later["seconds"] - sooner["seconds"] for sooner, later in pairwise(lines)]

    def processor(self) -> dict[str, float]:
        server = sum(seconds_of(p) for p in family(self.children[0].pid))
        sites = [sum(seconds_of(p) for p in family(c.pid)) for c in self.children[1:]]
        return {"the server": server, "one site": sum(sites) / len(sites)}


@contextmanager
def federation(folder: Path, sites: int, needed: int | None = None) -> Iterator[Running]:
    """Server and sites, which run while this is entered; with more sites needed than there are, they wait."""
    address, server = f"127.0.0.1:{free_port()}", folder / "server"
    said: list[str] = []
    server_commands.init(server, "bench", address, [], False, said.append)
    (server / "app" / "federation.toml").write_text(
        SETTINGS.format(rounds=ROUNDS, sites=needed or sites, address=address)
    )
    (folder / "rows.csv").write_text("x,y\n" + "".join(f"{i},{2 * i}\n" for i in range(20)))
    for k in range(sites):
        site = folder / f"site-{k}"
        given = (address, str(folder / "rows.csv"), server / "tls" / "ca.crt", False, said.append)
        site_commands.enrol(site, f"s{k}", *given)
        admission.admit(server, f"s{k}", site / "node.pub", said.append)
    code = [sys.executable, "-c", "from fedpop.cli import main; main()"]
    quiet = {"env": environment_of_children(), "stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    children = [subprocess.Popen([*code, "server", "run", str(server)], **quiet)]
    joins = [[*code, "site", "join", str(folder / f"site-{k}")] for k in range(sites)]
    children += [subprocess.Popen(join, **quiet) for join in joins]
    try:
        yield Running(server, children)
    finally:
        for child in children:
            if child.poll() is None:
                child.send_signal(signal.SIGTERM)
        for child in children:
            child.wait()


def environment_of_children() -> dict[str, str]:
    """What is imported is compiled, as it is wherever it was installed."""
    added = {"PYTHONPATH": str(Path(fp.__file__).parent.parent), "OMP_NUM_THREADS": "1"}
    return {n: v for n, v in os.environ.items() if n != "PYTHONDONTWRITEBYTECODE"} | added


def idle(sites: int) -> list[Record]:
    """What the server and a site take while all are there and nothing is to be done."""
    with tempfile.TemporaryDirectory() as folder, federation(Path(folder), sites, sites + 1) as running:
        log = running.server / "run" / "server.log"
        while not log.exists() or log.read_text().count(" is here") < sites:
            time.sleep(0.5)
        time.sleep(5.0)
        before, start = running.processor(), time.monotonic()
        time.sleep(IDLE)
        spent, passed = running.processor(), time.monotonic() - start
        server = sum(memory_of(p) for p in family(running.children[0].pid))
        each = [sum(memory_of(p) for p in family(c.pid)) for c in running.children[1:]]
    out = []
    for who, memory in {"the server": server, "one site": sum(each) / len(each)}.items():
        metrics = {"memory": memory, "core": (spent[who] - before[who]) / passed}
        setting = {"benchmark": NAME, "sites": sites, "idle": who}
        out.append(record("bench", setting, "waiting", 0, metrics, {"seconds": passed}, {}))
    return out


def family(pid: int) -> list[int]:
    """A process and all below it."""
    found, parents = [pid], {}
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            parents[int(folder.name)] = int((folder / "stat").read_text().rpartition(")")[2].split()[1])
        except OSError:
            continue
    for one in found:
        found += [child for child, parent in parents.items() if parent == one]
    return found


def seconds_of(pid: int) -> float:
    """Of a processor."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return 0.0
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def memory_of(pid: int) -> float:
    """MiB that are in memory; pages that processes share count for each."""
    try:
        return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 2**20
    except OSError:
        return 0.0


def work_of(folder: Path) -> float:
    """Seconds of a round at a site, by itself in this process: its data, the round, its chain on disk."""
    experiment = offline.experiment_of(folder, None)
    method, facts = experiment.method, Facts(3, ROUNDS + 1)
    broadcast = method.broadcast(method.init(facts, Key(0), {}))
    site, laps = open_site(folder, lasting=True), []
    for k in range(5):
        header = versions() | {
            "experiment": experiment.name,
            "round": ROUNDS + 1 + k,
            "seed": 0,
            "heard": ROUNDS + k,
            "units": None,
            "noted": [],
            "best": -1,
            "active": 3,
            "digest": digest_of(broadcast),
        }
        start = time.perf_counter()
        reply = site.answer(Request("train", header, broadcast))
        laps.append(time.perf_counter() - start)
        if reply.refused is not None:
            raise RuntimeError(reply.refused)
    return median(laps)


def backbone() -> nn.Module:
    """The paper's network for 32 x 32 images."""
    return nn.Sequential(
        nn.Conv2d(3, 64, 5), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(64, 64, 5), nn.ReLU(), nn.MaxPool2d(2),
        nn.Flatten(), nn.Linear(1600, 120), nn.ReLU(), nn.Linear(120, 64), nn.ReLU(),
    )  # fmt: skip


def messages(round_seconds: float) -> list[Record]:
    """Bytes of one site's J, and how long the server decodes those of all sites, over a round."""
    entries = sum(p.numel() for p in backbone().parameters())
    key = Key(0, purpose="bench")
    vector = key.normal(key.server(), (entries,))[0]
    out = []
    for compressor in COMPRESSORS:
        data = compressor.encode(vector, key)
        laps = []
        for _ in range(9):
            start = time.perf_counter()
            for _ in range(SITES[0]):
                compressor.decode(data, entries)
            laps.append(time.perf_counter() - start)
        metrics = {"bytes": len(data), "fewer": 4 * entries / len(data), "decode": median(laps)}
        metrics |= {"share": median(laps) / round_seconds}
        setting = {"benchmark": NAME, "entries": entries}
        out.append(record("bench", setting, repr(compressor), 0, metrics, {"seconds": sum(laps)}, {}))
    return out


def tables(records: list[Record]) -> list[Table]:
    one = Table(title="a round over Flower")
    for name in ("sites", "seconds", "goal on a quiet machine", "load of this one"):
        one.add_column(name, justify="right")
    parts = Table(title="where a round over Flower goes")
    for name in ("sites", "part", "seconds", "share of the round"):
        parts.add_column(name, justify="right")
    still = Table(title="while nothing is to be done")
    for name in ("sites", "who", "MiB", "cores"):
        still.add_column(name, justify="right")
    two = Table(title="one site's J of the CIFAR backbone")
    for name in ("compressor", "bytes", "fewer than float32", "decoding, share of a round"):
        two.add_column(name, justify="right")
    for r in records:
        m, setting = r["metrics"], r["setting"]
        if "goal" in m:
            one.add_row(str(setting["sites"]), shown(m, "seconds"), f"{m['goal']:.0f}", f"{m['load']:.1f}")
        elif "part" in setting:
            parts.add_row(str(setting["sites"]), setting["part"], f"{m['seconds']:.3f}", f"{m['share']:.2f}")
        elif "idle" in setting:
            still.add_row(str(setting["sites"]), setting["idle"], f"{m['memory']:.0f}", f"{m['core']:.4f}")
        else:
            two.add_row(r["method"], f"{m['bytes']:,}", f"{m['fewer']:.2f}", f"{m['share']:.4f}")
    return [one, parts, still, two]
