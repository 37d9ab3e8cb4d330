"""The one-machine runtime: rounds of any algorithm over cohorts of clients, with checkpoints."""

from __future__ import annotations

import copy
import json
import math
import os
import signal
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

import torch
from torch import Tensor

from fedpop.algorithms.base import Algorithm, Facts, Info, Message, Tensors, require_whole
from fedpop.client.plan import Plan, parse_bytes, plan_for
from fedpop.client.store import LocalStore
from fedpop.errors import CheckpointError, FedpopError, SettingsError
from fedpop.federation.clients import Federation
from fedpop.federation.cohort import Cohort
from fedpop.federation.participation.rules import Active, Everyone, Participation
from fedpop.federation.participation.rules import resolve as resolve_participation
from fedpop.files import writable_folder, write_json
from fedpop.keys import Key
from fedpop.runtime import checkpoint as checkpoints
from fedpop.runtime.callbacks import Callback
from fedpop.runtime.progress import progress_bar

if TYPE_CHECKING:
    from fedpop.population import Population


WORK = ("backbone_passes", "head_steps", "gradient_evaluations")
"""What a round's info counts of clients' work."""


@dataclass(frozen=True)
class Settings:
    """How a run is carried out, apart from the method itself."""

    rounds: int
    seed: int
    participation: Participation
    memory: str
    checkpoint_every: int

    def __post_init__(self) -> None:
        require_whole(rounds=self.rounds, seed=self.seed, checkpoint_every=self.checkpoint_every)
        if self.rounds < 1:
            raise SettingsError(f"rounds must be at least 1, not {self.rounds}")
        if self.checkpoint_every < 1:
            raise SettingsError(f"checkpoint_every must be at least 1, not {self.checkpoint_every}")
        if not 0 <= self.seed < 2**64:
            raise SettingsError(f"a seed is a whole number from 0 to 2^64 - 1, not {self.seed}")


def simulate(
    algorithm: Algorithm,
    clients: Any,
    *,
    rounds: int = 500,
    seed: int = 0,
    participation: Participation | int | float | Sequence[float] | None = None,
    out: str | Path | None = None,
    resume: bool = False,
    callbacks: Sequence[Callback] = (),
    progress: bool | None = None,
    memory: str = "1GiB",
    checkpoint_every: int = 50,
    restarts: int = 0,
) -> Population:
    """Run a method on one machine and return the population it learned.

    ``participation`` is who takes part in a round: None for everyone; a probability such as 0.1 for each
    client by itself (1.0 is everyone); a whole number such as 10 for that many, drawn without replacement;
    or a rule such as ``Bernoulli([0.1, 0.5, ...])`` or ``Uniform(1)``.

    ``out`` receives ``config.json``, ``metrics.jsonl`` and checkpoints, from which ``resume`` goes on to
    the same bits. ``restarts`` further runs from other random starts are compared by their marginal
    likelihood and the best one is returned.

    >>> import torch, fedpop as fp
    >>> from torch import nn
    >>> x, y = torch.ones(4, 3), torch.zeros(4)
    >>> model = fp.Composition(nn.Linear(3, 1), nn.Linear(1, 1), fp.likelihoods.Normal(1.0))
    >>> len(fp.simulate(fp.FedSOUL(model), [(x, y), (x, y)], rounds=2))
    2
    """
    rule = algorithm.usual_participation() if participation is None else resolve_participation(participation)
    settings = Settings(rounds, seed, rule, memory, checkpoint_every)
    if restarts < 0:
        raise SettingsError(f"restarts must be 0 or more, not {restarts}")
    if restarts:
        algorithm.check_restarts()
    algorithm = algorithm.but(model=algorithm.model.at_precision(algorithm.model.chosen_precision()))
    federation = algorithm.model.prepare(Federation.of(clients))
    algorithm.model.check_start(federation)
    folder = None if out is None else Path(out)
    best: tuple[float, Population] | None = None
    scores = []
    for restart in range(restarts + 1):
        where = folder / f"restart-{restart}" if folder is not None and restarts else folder
        method = algorithm
        if restart > 0 and getattr(algorithm, "start", None) in ("auto", "spectral"):
            method = algorithm.but(start="random")
        own = copy.deepcopy(list(callbacks)) if restarts else list(callbacks)
        run = Run(method, federation, settings, where, own, restart)
        population = run.execute(resume=resume, progress=progress)
        if not restarts:
            return population
        score = population.log_likelihood().value
        scores.append(score)
        if best is None or score > best[0]:
            best = (score, population)
    if folder is not None:
        write_json(folder / "restarts.json", {"log_likelihood": scores})
    assert best is not None
    return best[1]


def who(rule: Participation, clients: int, key: Key, round: int) -> Active:
    """The active clients of a round: they depend on the rule, the seed and the round, never on the method."""
    return rule.draw(clients, key.at(round=round, purpose="train").at(purpose="who"))


class Run:
    """One run: its server state, its clients' states, and where it stands."""

    def __init__(
        self,
        algorithm: Algorithm,
        federation: Federation,
        settings: Settings,
        folder: Path | None,
        callbacks: list[Callback],
        restart: int = 0,
    ) -> None:
        settings.participation.check(len(federation))
        algorithm.check_participation(settings.participation)
        algorithm.check(len(federation))
        algorithm.check_data(federation)
        for callback in callbacks:
            callback.check(federation)
        budget = parse_bytes(settings.memory)
        # Every setting is checked by now: nothing is created for a run that cannot be.
        self.folder = None if folder is None else writable_folder(folder)
        self.federation, self.settings, self.callbacks = federation, settings, callbacks
        self.device = algorithm.model.initial_phi().device
        self.facts = Facts(len(federation), settings.rounds, restart)
        self.key = Key(settings.seed)
        self.algorithm = algorithm
        self.plan: Plan = plan_for(algorithm, federation, budget)
        self.store = LocalStore(len(federation))
        self.server: Tensors = {}
        self.round = 0
        self.totals: dict[str, float] = {}
        self.history: list[dict[str, Any]] = []
        self.threads = torch.get_num_threads()
        self._remembered: tuple[Tensors, LocalStore] | None = None
        self._cohort: tuple[Active, Cohort] | None = None

    # --- a run from start to end -------------------------------------------------------------

    def execute(self, *, resume: bool, progress: bool | None) -> Population:
        from fedpop.population import Population

        stopped = self._begin(resume)
        label = self.algorithm.label
        with (
            _threads(self.threads),
            self._metrics_file() as file,
            _patient_interrupts() as interrupted,
            progress_bar(label, self.settings.rounds, self.round, progress) as bar,
        ):
            while self.round < self.settings.rounds and not stopped:
                metrics = self.train_round()
                stopped = any([c.after_round(self, metrics) for c in self.callbacks])  # noqa: C419 (all are to see the round)
                self.history.append(metrics)
                if file is not None:
                    file.write((json.dumps(metrics) + "\n").encode())
                last = stopped or self.round == self.settings.rounds
                if file is not None and (
                    last or interrupted.is_set() or self.round % self.settings.checkpoint_every == 0
                ):
                    file.flush()
                    os.fsync(file.fileno())  # a checkpoint may not be newer than the lines it counts
                    self._write_checkpoint(file.tell(), stopped)
                bar.update(self.round, metrics)
                if interrupted.is_set():
                    raise KeyboardInterrupt
        self.recall()  # to the best theta on validation data, where that was watched
        return Population(
            algorithm=self.algorithm,
            published=self.algorithm.publish(self.server),
            key=self.key,
            federation=self.federation,
            store=self.store,
            history=self.history,
            totals=self.totals,
            rounds=self.round,
            drift=self.algorithm.drift(self.server),
        )

    def _begin(self, resume: bool) -> bool:
        saved = None
        if self.folder is not None:
            if resume:
                saved = checkpoints.read(self.folder / "checkpoints")
            elif any((self.folder / "checkpoints").glob("round-*.json")):
                raise CheckpointError(
                    f"{self.folder} already holds a run; use resume=True to go on with it, or another "
                    "output folder"
                )
        self.requested = self._config()
        if saved is not None:
            checkpoints.require_same(self.requested, saved.config)
            return self._restore(saved)
        started = time.perf_counter()
        self.algorithm = self.algorithm.calibrated(self._trial)
        self.server = self.algorithm.init(self.facts, self.key)
        for phase in self.algorithm.phases[:-1]:
            everyone = Everyone().draw(len(self.federation), self.key)
            self.server, info, updates = self._phase(phase, everyone, self.key.at(round=0, purpose=phase))
            for ids, local in updates:
                self.store.put(ids, local)
            self._add_totals({name: info.sums.get(name, 0.0) for name in WORK})
        self._add_totals({"seconds": time.perf_counter() - started})
        if self.folder is not None:
            write_json(self.folder / "config.json", self.requested)
        return False

    def _config(self) -> dict[str, Any]:
        config = {
            "algorithm": self.algorithm.describe(),
            "model": {
                "modules": [repr(m) for m in self.algorithm.model.modules()],
                "likelihood": repr(self.algorithm.model.likelihood),
                "autocast": str(getattr(self.algorithm.model, "autocast", None)),
            },
            "rounds": self.settings.rounds,
            "seed": self.settings.seed,
            "participation": self.settings.participation.describe(),
            "memory": self.settings.memory,
            "restart": self.facts.restart,
            "clients": len(self.federation),
            "data": self.federation.fingerprint(),
        }
        return json.loads(json.dumps(config))  # type: ignore[no-any-return]

    def _trial(self, algorithm: Algorithm, rounds: int) -> list[float]:
        """Trial rounds of a method on this federation, away from this run's own state.

        The likelihood is the marginal one where it is closed-form, else the expected complete-data one
        that the rounds themselves report.
        """
        from fedpop.population import Population

        run = Run(algorithm, self.federation, self.settings, None, [], self.facts.restart)
        path: list[float] = []
        try:
            run._begin(resume=False)
            exact = getattr(algorithm, "exact", False)
            for k in range(rounds + 1):
                if k:
                    metrics = run.train_round()
                if exact:
                    theta = {name: run.server[name] for name in ("phi", "beta")}
                    now = Population(algorithm, theta, run.key, run.federation)
                    path.append(now.log_likelihood().value)
                elif k and metrics["loss"] is not None:
                    path.append(-metrics["loss"] * int(self.federation.train.sizes.sum()))
        except (FedpopError, ArithmeticError, RuntimeError):
            return [0.0, -math.inf]
        finally:  # trial rounds cost what any round costs
            self._add_totals({k: v for k, v in run.totals.items() if k != "seconds"})
        return path if all(math.isfinite(v) for v in path) else [0.0, -math.inf]

    # --- one round ---------------------------------------------------------------------------

    def train_round(self) -> dict[str, Any]:
        """One round of the last phase; state changes only when all of it is done."""
        started = time.perf_counter()
        key = self.key.at(round=self.round, purpose="train")
        active = who(self.settings.participation, len(self.federation), self.key, self.round)
        server, info, updates = self._phase("train", active, key)
        self.server = server
        for ids, local in updates:
            self.store.put(ids, local)
        self.round += 1
        metrics: dict[str, Any] = {"round": self.round, "active": len(active.ids)}
        metrics |= self.algorithm.metrics(server, info)
        metrics["left_out"] = [self.federation.names[i] for i in info.left_out]
        self._add_totals({name: info.sums.get(name, 0.0) for name in WORK})
        metrics["bytes_up"], metrics["bytes_down"] = (
            self.totals["bytes_up"],
            self.totals["bytes_down"],
        )
        self._add_totals({"seconds": time.perf_counter() - started})
        metrics["seconds"] = self.totals["seconds"]
        return metrics

    def _phase(
        self, phase: str, active: Active, key: Key
    ) -> tuple[Tensors, Info, list[tuple[Tensor, Tensors]]]:
        method = self.algorithm
        broadcast = method.broadcast(phase, self.server)
        channel = method.channel(key)
        total: Message | None = None
        info = Info()
        updates = []
        for cohort in self._cut(active):
            ids = cohort.ids.cpu()
            local = self._enter(ids, broadcast, key) if phase == "train" else {}
            new, message, part = method.local_round(phase, broadcast, cohort, local, channel, key)
            updates.append((ids, new))
            total = message if total is None else total + message
            info = info + part
        if total is None:
            total = Message({}, 0)
        total = replace(total, ratio=active.ratio)
        server = method.server_round(phase, self.server, total, self.facts, key)
        down = sum(t.numel() * t.element_size() for t in broadcast.values()) * len(active.ids)
        self._add_totals({"bytes_up": channel.bytes_up, "bytes_down": down})
        return server, info, updates

    def _cut(self, active: Active) -> Iterator[Cohort]:
        """The round's cohorts, one at a time; a single one of everyone is kept for the next round."""
        if self._cohort is not None:
            then, held = self._cohort
            if torch.equal(then.ids, active.ids) and torch.equal(then.weights, active.weights):
                yield held
                return
        groups = self.plan.cut(active.ids, self.federation.train.sizes)
        for ids, weights in zip(groups, active.weights.split([len(g) for g in groups]), strict=True):
            cohort = self.federation.cohort(ids, weights, self.device)
            if len(ids) == len(self.federation):
                self._cohort = (active, cohort)
            yield cohort

    def _enter(self, ids: Tensor, broadcast: Tensors, key: Key) -> Tensors:
        seen = self.store.seen(ids)
        if bool(seen.all()):
            return self.store.get(ids, self.device)
        fresh = self.algorithm.enter(ids.to(self.device), broadcast, key)
        if bool(seen.any()):
            held = self.store.get(ids[seen], self.device)
            for name, value in held.items():
                fresh[name][seen.to(self.device)] = value
        return fresh

    def _add_totals(self, more: dict[str, float]) -> None:
        for name, value in more.items():
            self.totals[name] = self.totals.get(name, 0.0) + value

    # --- validation, for callbacks -----------------------------------------------------------

    def validation_score(self) -> float:
        """Mean predictive log-likelihood of all validation examples at the published theta."""
        published = self.algorithm.publish(self.server)
        key = self.key.at(round=self.round, purpose="validation")
        ids = (self.federation.splits["validation"].sizes > 0).nonzero().squeeze(1)
        total, examples = 0.0, 0.0
        for group in self.plan.cut(ids, self.federation.train.sizes):
            ones = torch.ones(len(group))
            cohort = self.federation.cohort(group, ones, self.device)
            held_out = self.federation.cohort(group, ones, self.device, "validation")
            local = self._enter(group, self.algorithm.broadcast("train", self.server), key)
            sums = self.algorithm.score(published, cohort, held_out, local, key)
            total += float(sums["log_prob"])
            examples += float(sums["examples"])
        return total / max(examples, 1.0)

    def remember(self) -> None:
        """Keep the present state as the best so far."""
        self._remembered = (dict(self.server), LocalStore.restore(self.store.state()))

    def recall(self) -> None:
        """Go back to the best state so far."""
        if self._remembered is not None:
            self.server, self.store = self._remembered

    # --- checkpoints -------------------------------------------------------------------------

    def _write_checkpoint(self, metrics_bytes: int, stopped: bool) -> None:
        assert self.folder is not None
        tensors = {f"server.{n}": t for n, t in self.server.items()} | self.store.state()
        if self._remembered is not None:
            server, store = self._remembered
            tensors |= {f"best.server.{n}": t for n, t in server.items()}
            tensors |= {f"best.{n}": t for n, t in store.state().items()}
        calibrated = self.algorithm.describe()
        checkpoints.write(
            self.folder / "checkpoints",
            checkpoints.Checkpoint(
                round=self.round,
                tensors=tensors,
                config=self.requested,
                metrics_bytes=metrics_bytes,
                threads=self.threads,
                totals=self.totals,
                calibrated_rate=_rate(calibrated) if _rate(self.requested["algorithm"]) is None else None,
                callbacks={str(i): c.state() for i, c in enumerate(self.callbacks)},
                stopped=stopped,
            ),
        )

    def _restore(self, saved: checkpoints.Checkpoint) -> bool:
        tensors = saved.tensors
        self.server = {n[7:]: t.to(self.device) for n, t in tensors.items() if n.startswith("server.")}
        self.store = LocalStore.restore(tensors)
        if "best.slots" in tensors:
            best = {n[5:]: t for n, t in tensors.items() if n.startswith("best.")}
            server = {n[7:]: t for n, t in best.items() if n.startswith("server.")}
            self._remembered = (server, LocalStore.restore(best))
        self.round, self.totals = saved.round, dict(saved.totals)
        rate = saved.calibrated_rate
        if rate is not None and hasattr(self.algorithm, "with_rate"):
            self.algorithm = self.algorithm.with_rate(rate)
        self.metrics_bytes = saved.metrics_bytes
        self.threads = saved.threads
        for i, callback in enumerate(self.callbacks):
            if str(i) in saved.callbacks:
                callback.restore(saved.callbacks[str(i)])
        return saved.stopped

    metrics_bytes = 0

    @contextmanager
    def _metrics_file(self) -> Iterator[BinaryIO | None]:
        if self.folder is None:
            yield None
            return
        path = self.folder / "metrics.jsonl"
        if self.round == 0:
            path.write_bytes(b"")
        elif not path.exists() or path.stat().st_size < self.metrics_bytes:
            raise CheckpointError(
                f"cannot resume: {path} is missing or shorter than its checkpoint says; put it back, or use "
                "another output folder"
            )
        with open(path, "r+b") as file:
            # Rounds after the checkpoint are run again, so their lines must go.
            file.truncate(self.metrics_bytes)
            file.seek(0)
            self.history = [json.loads(line) for line in file]
            file.seek(self.metrics_bytes)
            yield file


def _rate(described: dict[str, Any]) -> float | None:
    step = described.get("phi_step")
    return step.get("rate") if isinstance(step, dict) and step.get("kind") == "SGD" else None


@contextmanager
def _threads(count: int) -> Iterator[None]:
    """The same bits need the same split of sums over threads: those of the run's first start."""
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


@contextmanager
def _patient_interrupts() -> Iterator[threading.Event]:
    """Ctrl-C waits for the end of the round, so that a checkpoint can be written; twice stops at once."""
    event = threading.Event()
    if threading.current_thread() is not threading.main_thread():
        yield event
        return

    def handler(number: int, frame: Any) -> None:
        if event.is_set():
            raise KeyboardInterrupt
        event.set()

    previous = signal.signal(signal.SIGINT, handler)
    try:
        yield event
    finally:
        signal.signal(signal.SIGINT, previous)
