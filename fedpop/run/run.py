"""One run: its server, those it works with, and where it stands."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor

from fedpop.client.losses import WORK
from fedpop.decisions import Decision
from fedpop.errors import (
    CheckpointError,
    EstimateError,
    FedpopError,
    SettingsError,
    warn_user,
)
from fedpop.evaluation.scores import ValidationScore
from fedpop.evaluation.verdict import Verdict
from fedpop.federation.clients import Federation
from fedpop.files import WRONG_CONTENT, cannot_go_on, reading, remove_temporary, writable_folder, write_json
from fedpop.keys import Key
from fedpop.message import Tensors, Total
from fedpop.methods.base import (
    Algorithm,
    Asks,
    ChecksData,
    EndsByItself,
    Facts,
    FindsRate,
    Paced,
    PopulationPrior,
    Round,
    Staged,
    check_participation,
    check_robust,
    check_secure,
    chosen,
    role_of,
)
from fedpop.population import Population
from fedpop.population.loading import require_fits
from fedpop.questions import Question
from fedpop.run import checkpoint as checkpoints
from fedpop.run import deciding, stages
from fedpop.run.breakdown import nobody, patient_interrupts, require_finite_theta, require_somebody
from fedpop.run.callbacks import Callback
from fedpop.run.lock import locked_folder
from fedpop.run.members import Asking, LocalMembers, Members, roster_of
from fedpop.run.metrics import Metrics
from fedpop.run.personal_models import AsTheyStand, FinalPass, PersonalModels
from fedpop.run.private import PrivateTotals, check_callbacks, private_method, refuse, terms
from fedpop.run.progress import progress_bar
from fedpop.run.settings import Settings
from fedpop.run.trial import likelihoods_of
from fedpop.settings import describe
from fedpop.site.plan import Plan
from fedpop.site.sites import Sites
from fedpop.site.study import Training
from fedpop.threads import threads

R = TypeVar("R")


class Run:
    """A server and the members it works with (a federation on this machine, or remote sites), from the
    first question to the last round."""

    def __init__(
        self,
        algorithm: Algorithm,
        members: Federation | Members,
        settings: Settings,
        folder: Path | None = None,
        callbacks: Sequence[Callback] = (),
        restart: int = 0,
    ) -> None:
        roster = members.roster if isinstance(members, Members) else roster_of(members, settings.sites)
        settings.participation.check(roster)
        check_participation(algorithm, settings.participation)
        waits = members.waits if isinstance(members, Members) else True
        if settings.aggregate is not None:
            if settings.secure is not None or settings.privacy is not None:
                raise SettingsError("aggregate= looks at single messages: leave out secure and privacy")
            check_robust(algorithm)
        if settings.privacy is not None:
            algorithm = private_method(algorithm)
            check_callbacks(callbacks)
        choice = chosen(algorithm, settings.participation, waits)
        asked, algorithm = algorithm, choice.method
        algorithm.check(members.names)
        if settings.secure is not None:
            check_secure(algorithm)
        if settings.sites is not None and not algorithm.channel.one_for_all:
            raise SettingsError("a site of several clients has one compressor: give one for all")
        checks = role_of(algorithm, ChecksData)
        if isinstance(members, Federation) and checks is not None:
            checks.check_data(members)
        for callback in callbacks:
            callback.check(members)
        if isinstance(members, Federation):
            members = LocalMembers(
                Training(algorithm), members, settings.memory, settings.sites, settings.secure
            )
        self.private: PrivateTotals | None = None
        if settings.privacy is not None:
            given = terms(
                settings.privacy,
                settings.participation,
                members.roster,
                settings.rounds,
                settings.secure,
                members.waits,
            )
            self.private = PrivateTotals(given, algorithm, None if folder is None else folder / "privacy")
        # Every setting is checked by now: nothing is created for a run that cannot be.
        self.folder = None if folder is None else writable_folder(folder)
        self.metrics = None if self.folder is None else Metrics(self.folder)
        self.members, self.settings, self.callbacks = members, settings, list(callbacks)
        self.ends = stages.planned([], settings.rounds)
        """Of its stages; schedules go by the present one."""
        self.restart = restart
        self.key = Key(settings.seed)
        """The server's. Sites have others, which in simulation derive from the seed too."""
        self.secret = Key(settings.seed, purpose="site")
        self.algorithm = algorithm
        """What runs."""
        self.asked = None if asked is algorithm else asked
        """What was given, where that left open what runs."""
        self.engine = choice.reason
        """And why it is this."""
        self.server: Tensors = {}
        self.usual: Tensors = {} if self.private is None else dict(self.private.bounds)
        """Norms of messages, which the guard goes by; or bounds, which follow them under privacy."""
        self.round = 0
        self.totals: dict[str, float] = {}
        self.history: list[dict[str, Any]] = []
        self.threading = deciding.threading(self)
        """How many threads it works with, and why."""
        self.counted: int | None = None
        """How many units the server's state is of."""
        self.verdict: Verdict | None = None
        self.inverse: Tensor | None = None
        """Of the information at theta, where a verdict has found it."""
        self.best_round: int | None = None
        """The round whose theta is returned, where validation data choose it."""
        self.doubted: dict[str, list[str]] = {}
        """Whose answers before the rounds were left out, and to which questions."""
        self.decisions: tuple[Decision, ...] = ()
        """What settings left open, and what it is here."""
        self._best: tuple[Tensors, Tensors] | None = None
        """The server's state, and what members need to go back to theirs."""
        self._resumed: Path | None = None
        """The checkpoint that the run went on from. Its tensors have whatever form the method gave them: what
        the run does with them tells whether they are its own."""

    @property
    def local_members(self) -> LocalMembers:
        """The members, where they are on this machine."""
        if not isinstance(self.members, LocalMembers):
            raise SettingsError("this needs clients' data and states, which are at their sites")
        return self.members

    @property
    def federation(self) -> Federation:
        return self.local_members.federation

    @property
    def sites(self) -> Sites:
        return self.local_members.sites

    @property
    def plan(self) -> Plan:
        return self.local_members.plan

    @property
    def facts(self) -> Facts:
        stage = stages.stage_at(self.ends, self.round)
        clients = self.members.units
        active = self.settings.participation.expected(self.members.roster)
        examples = self.members.examples if self.private is None else math.inf
        return Facts(clients, stage.end, self.restart, stage.start, self.ends[0], active, examples)

    # --- a run from start to end -------------------------------------------------------------

    def execute(self, *, resume: bool, progress: bool | None) -> Population:
        """All rounds; nothing that was finished is lost to a crash or a Ctrl-C."""
        with locked_folder(self.folder):
            if self.folder is not None:
                remove_temporary(self.folder)
            try:
                return self._execute(resume, progress)
            except WRONG_CONTENT as error:
                if self._resumed is None or isinstance(error, FedpopError):
                    raise
                raise cannot_go_on(self._resumed, error) from error

    def _execute(self, resume: bool, progress: bool | None) -> Population:
        with threads(self.threads):
            stopped = self.begin(resume)
        with (
            threads(self.threads),
            nullcontext() if self.metrics is None else self.metrics.opened(),
            patient_interrupts() as interrupted,
            progress_bar(self.label, self.ends[-1], self.round, progress, self.engine) as bar,
        ):
            while not (stopped or self.exhausted) and (self.round < self.ends[-1] or self._goes_on()):
                metrics = self.train_round()
                stopped = self._called_back(metrics) | self.over | self.exhausted
                self.history.append(metrics)
                if nobody(metrics):  # what were they sent?
                    require_finite_theta(self.algorithm.broadcast(self.server), self.history, self.round - 1)
                    require_somebody(self.history, stopped or self.round == self.ends[-1])
                if self.metrics is not None:
                    self.metrics.add(metrics)
                for callback in self.callbacks:
                    callback.recorded(self, metrics)
                last = stopped or self.round == self.ends[-1]
                if last or interrupted.is_set() or self.round % self.settings.checkpoint_every == 0:
                    self._write_checkpoint(stopped)
                bar.update(self.round, self.round if last else self.ends[-1], metrics)
                if interrupted.is_set():
                    raise KeyboardInterrupt
            require_finite_theta(self.algorithm.publish(self.server), self.history, self.round)
            self.recall()  # to the best theta on validation data, where that was watched
            if self.best_round is not None or self.private is not None:
                self.verdict = None
            elif self.verdict is None and stages.worth_judging(self):
                self.verdict = self._judge()
            for callback in self.callbacks:
                callback.finished(self)
            bar.say(self.verdict)
        if self.folder is not None:
            verdict = None if self.verdict is None else self.verdict.plain()
            result = {"rounds": self.round, "best_round": self.best_round, "convergence": verdict}
            write_json(self.folder / "result.json", result)
        return self.population()

    def _called_back(self, metrics: dict[str, Any]) -> bool:
        """Whether a callback ends the run; all of them are to see the round. Their errors are their own."""
        resumed, self._resumed = self._resumed, None
        stopped = any([c.after_round(self, metrics) for c in self.callbacks])  # noqa: C419
        self._resumed = resumed
        return stopped

    def _goes_on(self) -> bool:
        """At the end of a stage: whether there is another one, which there is until theta has converged."""
        if self.settings.rounds is not None:
            return False
        self.verdict = self._judge()
        if stages.undecided(self.verdict):
            self.verdict = self._judge(thorough=True)
        end = stages.next_end(self.round, self.verdict)
        if end is None:
            return False
        self.ends, self.verdict = [*self.ends, end], None
        return True

    @property
    def threads(self) -> int:
        return int(self.threading.chosen)

    @property
    def label(self) -> str:
        return (self.asked or self.algorithm).label

    @property
    def over(self) -> bool:
        """The method has come to an end by itself."""
        ends = role_of(self.algorithm, EndsByItself)
        return ends is not None and ends.over(self.server)

    @property
    def exhausted(self) -> bool:
        """A further round would spend more privacy than there is."""
        return self.private is not None and self.private.exhausted

    def _judge(self, thorough: bool = False) -> Verdict | None:
        """A verdict on the present theta; the inverse information that it finds serves further stages."""
        found = stages.judged(self, thorough)
        self.inverse = self.inverse if found.inverse is None else found.inverse
        self.spend({"seconds": found.seconds})
        return found.verdict

    def population(self) -> Population:
        """What has been learned so far; by which engine makes no difference to what is asked of it."""
        method, learned = self.algorithm, role_of(self.algorithm, PopulationPrior)
        return Population(
            algorithm=method if self.asked is None else self.asked.replace(model=method.model),
            published=self.algorithm.publish(self.server),
            key=self.secret,
            federation=self.members.federation,
            store=self.members.store,
            names=list(self.members.names),
            learned_from=self.members.units,
            elsewhere=None if isinstance(self.members, LocalMembers) else self._asked_at_the_end,
            history=self.history,
            totals=self.totals,
            rounds=self.round,
            drift=None if learned is None else learned.drift(self.server),
            convergence=self.verdict,
            best_round=self.best_round,
            how=[
                *([("engine", self.engine)] if self.engine else []),
                *([] if learned is None else learned.how()),
                *([] if self.private is None else self.private.lines()),
            ],
            decisions=self.decisions,
            threads=self.threads,
        )

    def begin(self, resume: bool = False) -> bool:
        """Ask what has to be asked before the first round, or go on from a checkpoint; True: it was over."""
        saved = None
        if self.folder is not None:
            if resume:
                saved = checkpoints.read(self._checkpoints)
            elif any(self._checkpoints.glob("round-*.json")):
                raise CheckpointError(
                    f"{self.folder} already holds a run; use resume=True to go on with it, or another "
                    "output folder"
                )
        self.requested = self._config()
        if saved is not None:
            checkpoints.require_same(self.requested, saved.config)
            self.ends = stages.planned(saved.ends, self.settings.rounds)
            if self.metrics is not None:
                self.history = self.metrics.read(saved.metrics_bytes, saved.metrics_digest)
            stopped = self._restore(saved)
            self._decide(write=self.requested != saved.config)  # the same, with more rounds
            return stopped
        started = time.perf_counter()
        self._compute_in(self.algorithm.model.chosen_precision(), self.algorithm)
        if finds := role_of(self.algorithm, FindsRate):
            self._use(finds.calibrated(self._trial))
        known: Tensors = {}
        if asks := role_of(self.algorithm, Asks):
            for question in asks.questions(self.facts, self.key):
                known |= self._asked(question, known)
        self.server = self.algorithm.init(self.facts, self.key, known)
        self.spend({"seconds": time.perf_counter() - started})
        self._decide(write=True)
        return False

    def _decide(self, write: bool) -> None:
        """Say what was decided, beside the settings: a run that is resumed may decide otherwise."""
        self.decisions = deciding.decisions_of(self)
        if self.folder is not None and write:
            plain = [decision.plain() for decision in self.decisions]
            write_json(self.folder / "config.json", self.requested | {"decisions": plain})

    def _compute_in(self, precision: str, algorithm: Algorithm) -> None:
        """The type that the backbone runs in is chosen once, and stays: it is in the checkpoint."""
        self.precision = precision
        self.algorithm = algorithm.replace(model=algorithm.model.at_precision(precision))

    def _use(self, algorithm: Algorithm) -> None:
        """This method from now on, here and wherever members are."""
        if algorithm is not self.algorithm:
            self.algorithm = algorithm
            self.members.update_method(algorithm)

    def ask(
        self,
        question: Question[R],
        known: Tensors,
        key: Key,
        models: PersonalModels | None = None,
        split: str | None = None,
    ) -> tuple[R, Total]:
        """Ask everyone, or those who have examples in this split, to answer from these models."""
        if self.private is not None:
            refuse(f"the answers to {question.name!r}")
        broadcast = (
            self.algorithm.broadcast(self.server) if models is not None and models.as_in_rounds else {}
        )
        return self.members.ask(Asking(question, known, key, self.algorithm, models, broadcast, split))

    def _asked(self, question: Question[Tensors], known: Tensors, late: tuple[str, ...] = ()) -> Tensors:
        """One of the questions before the rounds, which may leave something with units."""
        if self.private is not None:
            refuse(f"the answers to {question.name!r}")
        key = self.secret.at(round=0, purpose=question.name)
        result, total = self.members.ask(Asking(question, known, key, self.algorithm, late=late))
        for name in self.members.names_of(total.suspects):
            self.doubted.setdefault(name, []).append(question.name)
            if question.excludes:
                warn_user(
                    f"{name} takes no part: its answer to {question.name!r} is out of all proportion to the "
                    "others'; look at its data's scale (guard=None lets it take part)"
                )
        self.spend({"out_of_proportion": len(total.suspects)} if total.suspects else {})
        self.members.commit(entered=False)
        self.spend({name: total.numbers.get(name, 0.0) for name in (*WORK, "bytes_down")})
        self.spend({"bytes_up": total.bytes_up})
        return result

    def _asked_at_the_end(self, question: Question[R]) -> R:
        return self.ask(question, self.algorithm.publish(self.server), self.secret, FinalPass())[0]

    def _config(self) -> dict[str, Any]:
        model = self.algorithm.model
        config = {
            "algorithm": (self.asked or self.algorithm).describe(),
            "model": {"modules": [repr(m) for m in model.modules()], "likelihood": repr(model.likelihood)},
            "rounds": self.settings.rounds,
            "seed": self.settings.seed,
            "participation": self.settings.participation.describe(),
            "memory": self.settings.memory,
            "precision": self.settings.precision,
            "sites": self.settings.sites and {k: list(v) for k, v in self.settings.sites.items()},
            "restart": self.restart,
        } | self.members.describe()
        if self.engine:
            config["engine"] = self.engine
        if self.settings.weigh != "server":
            config["weigh"] = self.settings.weigh
        if self.settings.secure is not None:
            config["secure"] = self.settings.secure.bits
        if self.settings.aggregate is not None:
            config["aggregate"] = describe(self.settings.aggregate)
        if self.settings.privacy is not None:
            config["privacy"] = describe(self.settings.privacy)
        return json.loads(json.dumps(config))  # type: ignore[no-any-return]

    def _trial(self, algorithm: Algorithm, rounds: int) -> list[float]:
        """Trial rounds of a method with these members: a separate run, which costs what any rounds cost."""
        run = Run(algorithm, self.members.fresh(algorithm), self.settings, restart=self.restart)
        path = likelihoods_of(run, rounds)
        self.spend({k: v for k, v in run.totals.items() if k != "seconds"})
        return path

    # --- one round ---------------------------------------------------------------------------

    def train_round(self) -> dict[str, Any]:
        """One round; state changes only when all of it is done."""
        started = time.perf_counter()
        self._ask_newcomers()
        method, shared = self.algorithm, self.key.at(round=self.round, purpose="train")
        secret = self.secret.at(round=self.round, purpose="train")
        if self.round == self.facts.start > 0 and self.private is None:
            if staged := role_of(method, Staged):
                inverse = self._inverse_information() if staged.wants_information else None
                self.server = staged.extended(self.server, self.facts, inverse)
            self.inverse = None
        drawn_by = self.key if self.private is None else self.private.sampling
        active = self.members.active(self.settings.participation, drawn_by, self.round)
        facts = self.facts
        broadcast = method.broadcast(self.server) | self.usual
        if paced := role_of(method, Paced):
            broadcast |= paced.pace(self.round, facts)
        sites = 0 if self.private is None else self.members.messages(active.ids)
        now = Round(
            self.round,
            broadcast,
            secret,
            shared,
            weigh=self.settings.weigh_at_site,
            secure=self.settings.secure,
            robust=self.settings.aggregate,
            private=None if self.private is None else self.private.round(method, broadcast, active, sites),
        )
        if self.private is not None and self.private.unopened(sites):
            total = Total.of_nobody(self.members.units)
        else:
            total = self.members.round(method, now, active)
        if self.private is not None:
            roster = self.members.roster
            total = self.private.noised(total, method, broadcast, self.round, active, roster, sites)
        self.server = method.server_round(self.server, total, facts, shared)
        self.members.commit()
        self.usual = dict(total.usual if self.private is None else self.private.bounds)
        self.round += 1
        self.spend({"bytes_up": total.bytes_up, "bytes_down": self.members.bytes_down(broadcast, active.ids)})
        self.spend({name: total.numbers.get(name, 0.0) for name in WORK})
        metrics: dict[str, Any] = {"round": self.round, "active": len(active.ids)}
        metrics |= method.metrics(self.server, total.numbers)
        metrics["left_out"] = self.members.names_of(total.left_out)
        metrics |= self.members.metrics() | ({} if self.private is None else self.private.metrics())
        if total.suspects:
            absurd = self.members.names_of(total.suspects)
            metrics |= {"out_of_proportion": absurd, "unbiased": False}
            self.spend({"out_of_proportion": len(absurd)})
        metrics |= {name: self.totals[name] for name in ("bytes_up", "bytes_down")}
        self.spend({"seconds": time.perf_counter() - started})
        metrics["seconds"] = self.totals["seconds"]
        return metrics

    def _ask_newcomers(self) -> None:
        """Whoever came after the questions is asked those that last, and the server counts who is there. All
        else about them is as of a client that takes part for the first time."""
        asks, known = role_of(self.algorithm, Asks), Tensors()
        while late := tuple(self.members.newcomers()):
            for question in () if asks is None else asks.questions(self.facts, self.key):
                known |= self._asked(question, known, late) if question.lasting else {}
        if asks is not None and (known or self.members.units != self.counted):
            self.server = asks.grown(self.server, self.facts, known)
        self.counted = self.members.units

    def _inverse_information(self) -> Tensor | None:
        """For scoring steps in the stage that begins: at the theta that the last one would have published."""
        if self.inverse is None and self.settings.rounds is not None:  # it was extended: not yet judged
            self._judge()
        return self.inverse

    def spend(self, more: Mapping[str, float]) -> None:
        """Add to what the run has cost."""
        for name, value in more.items():
            self.totals[name] = self.totals.get(name, 0.0) + value

    # --- between rounds, for callbacks -------------------------------------------------------

    def validation_score(self) -> float:
        """Mean predictive log-likelihood of all validation examples at the published theta; NaN where it
        cannot be had now."""
        key = self.secret.at(round=self.round, purpose="validation")
        question = ValidationScore(self.algorithm)
        published = self.algorithm.publish(self.server)
        try:
            return self.ask(question, published, key, AsTheyStand(), question.split)[0]
        except EstimateError as error:  # a secure sum whose cohort has become another one, say
            warn_user(f"round {self.round}: no validation score ({error})")
            return math.nan

    def remember(self) -> None:
        """Keep the present state as the best so far: the server's, and on request each site's."""
        self._best, self.best_round = (dict(self.server), self.members.remember()), self.round

    def recall(self) -> None:
        """Go back to the best state so far, which stays remembered whatever comes after."""
        if self._best is not None:
            server, remembered = self._best
            self.server = dict(server)
            self.members.recall(remembered)

    # --- checkpoints -------------------------------------------------------------------------

    @property
    def _checkpoints(self) -> Path:
        assert self.folder is not None
        return self.folder / "checkpoints"

    def _write_checkpoint(self, stopped: bool) -> None:
        if self.metrics is None:
            return
        self.metrics.settle()
        tensors = {f"server.{n}": t for n, t in self.server.items()} | self.members.state()
        tensors |= {f"guard.{n}": t for n, t in self.usual.items()}
        if self.private is not None:
            tensors |= {f"private.{n}": t for n, t in self.private.state().items()}
        if self._best is not None:
            server, remembered = self._best
            tensors |= {f"best.server.{n}": t for n, t in server.items()}
            tensors |= {f"best.{n}": t for n, t in remembered.items()}
        finds = role_of(self.algorithm, FindsRate)
        checkpoints.write(
            self._checkpoints,
            checkpoints.Checkpoint(
                round=self.round,
                tensors=tensors,
                config=self.requested,
                metrics_bytes=self.metrics.size,
                metrics_digest=self.metrics.digest,
                ends=self.ends,
                best_round=self.best_round,
                threads=self.threads,
                precision=self.precision,
                totals=self.totals,
                doubted=self.doubted,
                rate=None if finds is None else finds.rate(),
                callbacks={str(i): c.state() for i, c in enumerate(self.callbacks)},
                stopped=stopped,
            ),
        )
        if self.private is not None:
            self.private.forget_before(self.round)

    def _restore(self, saved: checkpoints.Checkpoint) -> bool:
        tensors, asked, method, device = saved.tensors, self.algorithm, self.algorithm, self.members.device
        self._resumed = self._checkpoints / f"round-{saved.round:08d}"
        with reading(self._resumed, "a checkpoint"):
            self.server = _part("server.", tensors, device)
            self.usual = _part("guard.", tensors, torch.device("cpu"))
            if self.private is not None:
                self.private.restore(_part("private.", tensors, torch.device("cpu")))
            others = ("server.", "best.", "guard.", "private.")
            self.members.restore({n: t for n, t in tensors.items() if not n.startswith(others)})
            best = _part("best.", tensors, torch.device("cpu"))
            if best:
                remembered = {n: t for n, t in best.items() if not n.startswith("server.")}
                self._best = (_part("server.", best, device), remembered)
            self.round, self.best_round, self.totals = saved.round, saved.best_round, dict(saved.totals)
            self.doubted = dict(saved.doubted)
            finds = role_of(method, FindsRate)
            if saved.rate is not None and finds is not None and finds.rate() != saved.rate:
                method = finds.with_rate(saved.rate)
            require_fits(method.publish(self.server), method)
            if isinstance(self.members, LocalMembers):
                self.members.sites.check_states(method, method.broadcast(self.server), self.secret)
        self._compute_in(saved.precision, method)
        if method is not asked:
            self.members.update_method(self.algorithm)
        if self.settings.threads is None:
            self.threading = Decision("threads", str(saved.threads), "as when the run began")
        for i, callback in enumerate(self.callbacks):
            if saved.callbacks.get(str(i)):
                callback.restore(saved.callbacks[str(i)])
        return saved.stopped


def _part(prefix: str, tensors: Tensors, device: torch.device) -> Tensors:
    return {n[len(prefix) :]: t.to(device) for n, t in tensors.items() if n.startswith(prefix)}
