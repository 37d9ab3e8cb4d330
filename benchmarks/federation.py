"""Rounds over Flower: three sites on this machine, ours and, in turns with them, rounds in which the client
imports torch and does nothing; and what sites send of a network's J, with and without compression."""

from __future__ import annotations

import json
import os
import resource
import signal
import subprocess
import sys
import tempfile
import time
from itertools import pairwise
from pathlib import Path
from statistics import median

import torch
from rich.table import Table
from torch import nn

import fedpop as fp
from benchmarks.timing import Advance, Spread, shown
from benchmarks.turns_client import NOTHING
from fedpop.flower import admission, offline, server_commands, site_commands
from fedpop.flower.processes import free_port
from fedpop.flower.requests import Request, digest_of
from fedpop.flower.site import open_site
from fedpop.keys import Key
from fedpop.methods.base import Facts
from fedpop.report.results import Record, record

NAME = "federation"
SITES, ROUNDS, TARGET = ("a", "b", "c"), 10, 1.1
"""Rounds of each kind; the first of all, in which everyone arrives, does not count."""
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
    out = []
    with tempfile.TemporaryDirectory() as folder:
        ours, empty = rounds_of(Path(folder), lambda share: advance(0.9 * share))
        parts = parts_of(Path(folder) / f"site-{SITES[0]}")
    parts["Flower's polls and transport, and waiting for a core"] = median(ours) - sum(parts.values())
    setting = {"benchmark": NAME, "sites": len(SITES), "rounds": ROUNDS}
    ratios = Spread.of([a / b for a, b in zip(ours, empty, strict=True)])
    metrics = ratios.metrics("ratio") | Spread.of(ours).metrics("seconds") | {"empty": median(empty)}
    metrics |= {"of_medians": median(ours) / median(empty), "target": TARGET, "repeats": len(ours)}
    out.append(record("bench", setting, "a round over Flower", 0, metrics, {"seconds": sum(ours)}, {}))
    for part, seconds in parts.items():
        setting = {"benchmark": NAME, "part": part}
        metrics = {"seconds": seconds, "share": seconds / median(ours)}
        out.append(record("bench", setting, "a round over Flower", 0, metrics, {"seconds": seconds}, {}))
    return out + messages(median(ours))


def parts_of(folder: Path) -> dict[str, float]:
    """What a message costs at a site, each part by itself in a quiet process: imports, then the work.
    Processor seconds, the least of five: what is left of a noisy machine's."""
    steps = {
        "a client process that imports flwr": "import flwr.clientapp",
        "importing torch": "import torch",
        "importing fedpop": "import fedpop.flower.client",
    }
    codes = ["\n".join(list(steps.values())[: k + 1]) for k in range(len(steps))]
    turns = [[_seconds_of(code) for code in codes] for _ in range(5)]
    least = [0.0, *(min(laps) for laps in zip(*turns, strict=True))]
    out = {part: least[k + 1] - least[k] for k, part in enumerate(steps)}
    experiment = offline.experiment_of(folder, None)
    method, facts = experiment.method, Facts(len(SITES), ROUNDS + 1)
    broadcast = method.broadcast(method.init(facts, Key(0), {}))
    laps = []
    for k in range(3):
        header = {
            "version": fp.__version__,
            "experiment": experiment.name,
            "round": ROUNDS + 1 + k,
            "seed": 0,
        }
        header |= {
            "heard": ROUNDS + k,
            "units": None,
            "noted": [],
            "best": -1,
            "active": len(SITES),
            "digest": digest_of(broadcast),
        }
        start = time.perf_counter()
        reply = open_site(folder).answer(Request("train", header, broadcast))
        laps.append(time.perf_counter() - start)
        if reply.refused is not None:
            raise RuntimeError(reply.refused)
    return out | {"the site's data, round and chain": median(laps)}


def _seconds_of(code: str) -> float:
    """What a child takes of a processor to run this."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    subprocess.run([sys.executable, "-c", code], check=True, env=environment_of_children())
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def environment_of_children() -> dict[str, str]:
    """What is imported is compiled, as it is wherever it was installed."""
    added = {"PYTHONPATH": str(Path(fp.__file__).parent.parent), "OMP_NUM_THREADS": "1"}
    return {n: v for n, v in os.environ.items() if n != "PYTHONDONTWRITEBYTECODE"} | added


def rounds_of(folder: Path, advance: Advance) -> tuple[list[float], list[float]]:
    """Seconds of rounds of a federation of real processes: ours, and an empty client's between them."""
    address, server = f"127.0.0.1:{free_port()}", folder / "server"
    lines: list[str] = []
    server_commands.init(server, "bench", address, [], False, lines.append)
    (server / "app" / "federation.toml").write_text(
        SETTINGS.format(rounds=2 * ROUNDS + 1, sites=len(SITES), address=address)
    )
    project = server / "app" / "pyproject.toml"
    client = "benchmarks.turns_client:app"
    project.write_text(project.read_text().replace("fedpop.flower.client:app", client))
    (folder / "rows.csv").write_text("x,y\n" + "".join(f"{i},{2 * i}\n" for i in range(20)))
    for name in SITES:
        site = folder / f"site-{name}"
        given = (address, str(folder / "rows.csv"), server / "tls" / "ca.crt", False, lines.append)
        site_commands.enrol(site, name, *given)
        (site / NOTHING).write_text(json.dumps({"site": name, "vectors": nothing()}))
        admission.admit(server, name, site / "node.pub", lines.append)
    code = [sys.executable, "-c", "from fedpop.cli import main; main()"]
    output = folder / "output.txt"
    with output.open("wb") as file:
        quiet = {"env": environment_of_children(), "stdout": file, "stderr": subprocess.STDOUT}
        children = [subprocess.Popen([*code, "server", "run", str(server)], **quiet)]
        metrics = server / "run" / "metrics.jsonl"
        try:
            while not (server / "run" / "status.json").exists() and children[0].poll() is None:
                time.sleep(0.5)  # sites' keys are registered before the run begins
            joins = [[*code, "site", "join", str(folder / f"site-{n}")] for n in SITES]
            children += [subprocess.Popen(join, **quiet) for join in joins]
            while children[0].poll() is None:
                time.sleep(1.0)
                done = len(metrics.read_text().splitlines()) if metrics.exists() else 0
                advance(done / (2 * ROUNDS + 1))
        finally:
            for child in children:
                if child.poll() is None:
                    child.send_signal(signal.SIGTERM)
            for child in children:
                child.wait()
    if children[0].returncode:
        raise RuntimeError(f"the federation failed:\n{output.read_text()}")
    lines = [json.loads(line) for line in metrics.read_text().splitlines()]
    if short := [line["round"] for line in lines if len(line["heard"]) < len(SITES)]:
        raise RuntimeError(f"sites were missing in rounds {short}:\n{output.read_text()}")
    laps = [(later, later["seconds"] - sooner["seconds"]) for sooner, later in pairwise(lines)]
    ours, empty = (
        [s for line, s in laps if (line.get("loss") is not None) == mine] for mine in (True, False)
    )
    return ours, empty


def nothing() -> dict[str, tuple[int, str]]:
    """What FedAvg would send of the model of three parameters, were there nothing to say."""
    zeros = {"dw": torch.zeros(3), "n": torch.ones(1)}
    return {name: (len(v), fp.compressors.Identity().encode(v, Key(0)).hex()) for name, v in zeros.items()}


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
            for _ in SITES:
                compressor.decode(data, entries)
            laps.append(time.perf_counter() - start)
        metrics = {"bytes": len(data), "fewer": 4 * entries / len(data), "decode": median(laps)}
        metrics |= {"share": median(laps) / round_seconds}
        setting = {"benchmark": NAME, "entries": entries}
        out.append(record("bench", setting, repr(compressor), 0, metrics, {"seconds": sum(laps)}, {}))
    return out


def tables(records: list[Record]) -> list[Table]:
    one = Table(title=f"a round of {len(SITES)} sites over Flower, over the same with an empty client")
    for name in ("seconds", "empty client", "ratio", "target"):
        one.add_column(name, justify="right")
    parts = Table(title="where a round over Flower goes")
    for name in ("part", "seconds", "share of the round"):
        parts.add_column(name, justify="right")
    two = Table(title="one site's J of the CIFAR backbone")
    for name in ("compressor", "bytes", "fewer than float32", "decoding, share of a round"):
        two.add_column(name, justify="right")
    for r in records:
        m = r["metrics"]
        if "ratio" in m:
            one.add_row(shown(m, "seconds"), f"{m['empty']:.2f}", shown(m, "ratio"), f"{m['target']:.2f}")
        elif "part" in r["setting"]:
            parts.add_row(r["setting"]["part"], f"{m['seconds']:.2f}", f"{m['share']:.2f}")
        else:
            two.add_row(r["method"], f"{m['bytes']:,}", f"{m['fewer']:.2f}", f"{m['share']:.4f}")
    return [one, parts, two]
