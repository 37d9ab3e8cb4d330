"""What a site does with a request: its data, its chains, one message back."""

from __future__ import annotations

import logging
import re
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import torch

from fedpop.entries import module_named
from fedpop.errors import (
    CheckpointError,
    ExtraError,
    FedpopError,
    ScaleError,
    SchemaError,
    SecureSumError,
    SettingsError,
)
from fedpop.evaluation import scores
from fedpop.federation.clients import Federation
from fedpop.federation.participation import Active
from fedpop.federation.table_format import USUAL_TABLE, TableFormat
from fedpop.files import parse_bytes, read_sealed, read_tensors, writable_folder, write_sealed, write_tensors
from fedpop.flower.allowed import Allowed
from fedpop.flower.ledger import Ledger
from fedpop.flower.processes import locked
from fedpop.flower.records import entry_of
from fedpop.flower.requests import (
    THE_SERVER,
    TRIAL,
    Request,
    digest_for,
    digest_of,
    headed,
    refusal,
    why_not_understood,
)
from fedpop.flower.secure_site import MASKED, TRUSTED, SecureSite, sealed, topic_of, trusted
from fedpop.flower.site_folder import SETTINGS, read_common_key, read_secret, read_site
from fedpop.flower.site_state import SiteState
from fedpop.flower.table_form import form_changes
from fedpop.keys import Key
from fedpop.message import Message, Tensors
from fedpop.message.fixed_point import FixedPoint
from fedpop.methods.asking import question_from_description
from fedpop.methods.base import Algorithm, Round, guard_for
from fedpop.mixed import common_key, gaussian, groups, laplace, quadrature, scored
from fedpop.mixed.common_key import CommonKey
from fedpop.mixed.disclosure import DesignColumns, SmallCounts, design_columns
from fedpop.mixed.study import FormulaStudy
from fedpop.mixed.table import Rows
from fedpop.population import Population
from fedpop.privacy.secure import Policy
from fedpop.privacy.site_noise import PrivateRound
from fedpop.questions import Question
from fedpop.run.members import Asking
from fedpop.settings import rebuilt
from fedpop.site.plan import Plan
from fedpop.site.refusal import Code, Refusal
from fedpop.site.sites import OUTSIDE, Sites
from fedpop.site.store import LocalStore
from fedpop.site.study import SiteData, Study, Survey, Training, UnitData
from fedpop.site.work import Work
from fedpop.threads import threads

log = logging.getLogger("fedpop.site")

STUDIES: Mapping[str, type[Study]] = {kind.__name__: kind for kind in (Survey, Training, FormulaStudy)}
"""What an experiment may be about."""
QUESTIONS = (groups, common_key, gaussian, laplace, quadrature, scored, scores)
"""Whose questions a site knows, because they are imported; methods import the others."""
DESCRIPTION, MODEL = "method.json", "model.safetensors"
"""The study's description as a site received it, and the tensors that belong to it."""
COLUMNS, FORMULA = "columns.safetensors", "formula.json"
"""A design that was answered: its columns at this site, and its formula."""
THETA, SEALED = "theta.safetensors", "theta.json"
"""What the federation learned, at a site or for one that comes later."""
WITHHELD = "the message is out of all proportion to what is usual and is not sent: look at the data's scale"

OUT_OF_SCALE = "a column's size or spread is out of all proportion to most sites'; its log says which column"


@dataclass(frozen=True)
class Site:
    """A site: its name, its secret, its folder, and where its data are."""

    name: str
    secret: int
    """What its random numbers are keyed by, in the place of the run's seed: nobody else knows it."""
    folder: Path
    where: str
    """Its data: a file, a folder of images, or ``module:function``."""
    threads: int = 1
    memory: str = "1GiB"
    spectral_rows: int = 10
    """With fewer rows than these it refuses the spectral start."""
    allowed: Allowed = field(default_factory=Allowed)
    """Which questions and formulas it answers."""
    small_counts: SmallCounts = field(default_factory=SmallCounts)
    """How many rows a formula's design may set apart."""
    table: TableFormat = USUAL_TABLE
    modules: Sequence[str] = ()
    """Modules of the site's own settings: a model that is not made of torch's layers comes from these."""
    policy: Policy = field(default_factory=Policy)
    """The site's own terms of secure sums."""
    lasting: bool = False
    """This process answers many requests: what the last one read is at hand for the next."""
    at_hand: dict[str, SiteExperiment] = field(default_factory=dict, compare=False, repr=False)

    @property
    def data(self) -> SiteData:
        return SiteData(self.name, self.where, self.folder, self.table)

    def answer(self, request: Request) -> Message:
        """The reply to a request, which is in the ledger before it leaves."""
        reply = self._reply(request)
        about = {"run": str(request.header.get("experiment", "")), "kind": request.kind}
        try:
            Ledger.of(self.folder).add(about | entry_of(reply))
        except CheckpointError as error:
            log.error(
                "%s: its reply does not leave, as the ledger cannot be written: %s", request.kind, error
            )
            return refusal("the site cannot write its ledger", Code.DISK, site=self.name)
        return reply

    def _reply(self, request: Request) -> Message:
        """Errors that are not meant for the server stay here, in the log."""
        try:
            if (why := why_not_understood(request.header, THE_SERVER)) is not None:
                raise Refusal(f"site {self.name}: {why}", Code.VERSION)
            with threads(self.threads):
                return self._answer(request)
        except Refusal as error:
            log.warning("%s refused: %s", request.kind, error)
            return refusal(str(error), error.code, site=self.name)
        except ScaleError as error:
            log.error("%s: the site stops here: %s", request.kind, error)
            return refusal(OUT_OF_SCALE, Code.SCALE, site=self.name)
        except SchemaError as error:  # it is written for the server, too
            log.error("%s failed: %s", request.kind, error)
            return refusal(str(error), Code.DATA, site=self.name)
        except ExtraError as error:  # a package that the site lacks says nothing of its data
            log.error("%s failed: %s", request.kind, error)
            return refusal(f"site {self.name}: {error}", site=self.name)
        except SecureSumError as error:  # what it says is of the server's own making
            log.warning("%s refused: %s", request.kind, error)
            return refusal(str(error), Code.SECURE, site=self.name)
        except FedpopError as error:
            log.error("%s failed: %s", request.kind, error)
            return refusal(f"{type(error).__name__}; the site's log says more", site=self.name)
        except Exception as error:
            log.exception("%s failed", request.kind)
            return refusal(f"{type(error).__name__}; the site's log says more", site=self.name)

    def _answer(self, request: Request) -> Message:
        experiment = self._experiment(str(request.header["experiment"]), anew=request.kind == "hello")
        if request.kind == "hello":
            return experiment.hello(request)
        with locked(experiment.state_file):
            if request.kind in ("train", "ask"):
                experiment.require_sum(request)
            return {
                "train": experiment.train,
                "ask": experiment.ask,
                "unmask": experiment.secure.unmask,
                "finish": experiment.finish,
            }[request.kind](request)

    def _experiment(self, name: str, anew: bool) -> SiteExperiment:
        """The experiment of this name, with what was read of it where the data are still the same."""
        stamp = stamp_of(self.where) if self.lasting else None
        found = self.at_hand.get(name)
        if found is None or anew or found.stamp != stamp:
            if anew if found is None else found.stamp != stamp:
                for words in form_changes(self.folder, self.where, self.table):
                    log.warning("the data: %s", words)
            found = SiteExperiment(self, name, stamp)
            self.at_hand.clear()
            if self.lasting:
                self.at_hand[name] = found
        return found


Stamp = tuple[object, ...]


def stamp_of(where: str) -> Stamp:
    """What changes when a file, or one in a folder, does; a function is called at every greeting."""
    path = Path(where)
    if ":" in where or not path.exists():
        return ()
    files = sorted(path.rglob("*")) if path.is_dir() else [path]
    states = [(str(file), file.stat()) for file in files]
    return tuple((file, s.st_mtime_ns, s.st_size, s.st_ino) for file, s in states)


@dataclass
class AtHand:
    """The state of units as it was written last; a request takes it, and gives it back once it is on disk."""

    state: SiteState | None = None
    stamp: Stamp = ()

    def take(self, path: Path) -> SiteState | None:
        found, self.state = self.state, None
        return found if self.stamp == stamp_of(str(path)) else None

    def give(self, path: Path, state: SiteState) -> None:
        self.state, self.stamp = state, stamp_of(str(path))


def answered_designs(folder: Path) -> list[DesignColumns]:
    """Designs that a site has answered, of all formulas."""
    earlier = []
    for file in sorted(folder.glob(f"experiments/*/*{COLUMNS}")):
        description = read_sealed(file.with_name(FORMULA), "an answered formula")
        earlier.append(DesignColumns.read(str(description["formula"]), read_tensors(file)))
    return earlier


@dataclass(frozen=True)
class SiteExperiment:
    """One experiment at a site: the study, and the states of its units."""

    site: Site
    name: str
    stamp: Stamp | None = None
    """Of the data, when they were read."""
    at_hand: AtHand = field(default_factory=AtHand, compare=False, repr=False)

    @cached_property
    def folder(self) -> Path:
        # It becomes a folder's name, and comes from elsewhere.
        if not re.fullmatch(r"[a-z0-9_-][a-z0-9_.-]{0,99}", self.name):
            raise Refusal("an experiment's name has small letters, digits, '-', '_' and '.', no dot first")
        return writable_folder(self.site.folder / "experiments" / self.name)

    @property
    def state_file(self) -> Path:
        return self.folder / "chain.safetensors"

    # --- hello -------------------------------------------------------------------------------

    def hello(self, request: Request) -> Message:
        """Store the server's study; reply who is here. Of the data only sizes and splits are sent."""
        self.site.allowed.require_study(study_from(request.header["study"], request.tensors))
        terms = request.header.get("secure")
        joined = {} if terms is None else self.secure.greeted(terms)
        keep_hello(self.folder, request)
        federation = self.federation
        for note in self.study.notes(self.site.data):
            log.warning("%s: %s", self.name, note)
        header = {
            "experiment": self.name,
            "site": self.site.name,
            "units": len(federation),
            "examples": int(federation.train.sizes.sum()),
            "splits": sorted(federation.splits),
            "study": request.header["study_digest"],
        } | joined
        # Units are identified by hashes of their names where the study says so; else nobody has to know them.
        return headed(header | ({"hashes": federation.units.tolist()} if request.header["drawn"] else {}))

    @cached_property
    def secure(self) -> SecureSite:
        """The site's part in secure sums."""
        site = self.site
        return SecureSite(site.name, site.folder, self.name, self.folder, site.policy)

    def require_sum(self, request: Request) -> None:
        """Where somebody has confirmed a list of sites nothing leaves by itself."""
        if "secure" not in request.header and trusted(self.site.folder) is not None:
            raise Refusal(
                "this site answers in secure sums only, since a list of sites was confirmed here: the "
                f"server's [privacy] has secure = true, or {TRUSTED} goes",
                Code.SECURE,
            )

    @cached_property
    def study(self) -> Study:
        """What the federation is about."""
        if not (self.folder / DESCRIPTION).exists():
            raise Refusal("this site does not know the experiment: greet it first", Code.STRANGER)
        description = read_sealed(self.folder / DESCRIPTION, "a study's description")
        self._require_module(description["study"])
        study = study_from(description["study"], read_tensors(self.folder / MODEL, description["digest"]))
        if isinstance(study, FormulaStudy):
            key = CommonKey(read_common_key(self.site.folder), self._tell_shared)
            study = replace(study, common_key=key)
        return study

    def _tell_shared(self, hashes: Sequence[int]) -> None:
        """Only this site's log says which groups are at another site, too."""
        names = dict(zip(self.federation.units.tolist(), self.federation.names, strict=True))
        each = ", ".join(repr(names[one]) for one in hashes)
        log.error("%s: groups that are at another site, too: %s", self.name, each)

    def _require_module(self, study: Mapping[str, Any]) -> None:
        """A server names no code that the site's own settings do not."""
        entry = str(study.get("method", {}).get("entry", ""))
        if entry and entry.partition(":")[0] not in self.site.modules:
            raise Refusal(
                f"the model {entry!r} is not made of torch's own layers, so its code has to be at the site: "
                f"name its module in site.toml, modules = [{entry.partition(':')[0]!r}]",
                Code.MODEL,
            )

    @property
    def method(self) -> Algorithm:
        """The server's method on this site's copy of the model."""
        if self.study.algorithm is None:
            raise Refusal("there are no rounds: the experiment is not about a method", Code.STUDY)
        return self.study.algorithm

    @property
    def form(self) -> Mapping[str, Any]:
        """What the sites' data look like."""
        return self.study.form if isinstance(self.study, Training) else {}

    @cached_property
    def unit_data(self) -> UnitData:
        """This site's data as the study has them."""
        data = self.study.read(self.site.data)
        if isinstance(self.study, FormulaStudy):
            self._check_design(self.study, data)
        return self.study.unit_data(data)

    def _check_design(self, study: FormulaStudy, rows: Rows) -> None:
        """What a design would show of few rows is not answered, alone or beside those answered before, which
        are at this site. A design that was checked is stored before anything made of it leaves."""
        if study.design is None:
            self.site.small_counts.check_scaled(study, rows, answered_designs(self.site.folder))
            return
        found, file = design_columns(study, rows).tensors(), self.folder / COLUMNS
        stored = read_tensors(file) if file.exists() else {}
        if stored.keys() == found.keys() and all(torch.equal(stored[n], v) for n, v in found.items()):
            return
        self.site.small_counts.check(study, rows, answered_designs(self.site.folder))
        write_sealed(self.folder / FORMULA, {"formula": study.formula.text})
        if stored:  # it was answered from other rows before these
            file.rename(self.folder / f"{sum(1 for _ in self.folder.glob(f'*{COLUMNS}'))}-{COLUMNS}")
        write_tensors(file, found)
        log.info("%s: the formula %s is answered, from %d row(s)", self.name, study.formula.text, len(rows))

    @property
    def federation(self) -> Federation:
        return self.unit_data.federation

    # --- work --------------------------------------------------------------------------------

    def stored_state(self, last_counted: int) -> SiteState:
        units = self.federation.units.tolist()
        if not self.state_file.exists():
            if last_counted >= 0:
                log.warning(
                    "%s: no state here, though round %d counted: a stateless start", self.name, last_counted
                )
            return SiteState.empty(units)
        if (state := self.at_hand.take(self.state_file)) is not None and state.names == units:
            return state
        try:
            return SiteState.read(self.state_file, units)
        except CheckpointError as error:
            log.warning("%s: %s: a stateless start", self.name, error)
            return SiteState.empty(units)

    @cached_property
    def plan(self) -> Plan:
        """Which units are worked on together, for the site's memory."""
        return self.study.plan(self.federation, parse_bytes(self.site.memory))

    def sites(self, store: LocalStore, secure: FixedPoint | None = None) -> Sites:
        tables = self.unit_data.tables
        return Sites.one(self.site.name, self.federation, self.study.device, store, tables, secure)

    def key(self, round: int, purpose: str) -> Key:
        """This site's key, at the address that the server names."""
        return Key(self.site.secret, round, purpose)

    def _ids(self, units: Sequence[int] | None) -> torch.Tensor:
        """Positions of the units that are asked; None: all."""
        here = range(len(self.federation))
        if units is not None and not (units and set(units) <= set(here) and len(set(units)) == len(units)):
            why = "the server asks for units that are not at this site: greet it first"
            raise Refusal(why, Code.STRANGER)
        return torch.tensor(here if units is None else units, dtype=torch.int64)

    def train(self, request: Request) -> Message:
        """One round: the same reply to the same request, whatever happened in between."""
        number, last_counted = int(request.header["round"]), int(request.header["heard"])
        method, units = self.method, request.header["units"]
        ids = self._ids(units)
        digest = digest_for(digest_of(request.tensors), units)
        if digest != request.header["digest"]:
            raise Refusal("theta did not arrive as it was sent", Code.DAMAGED)
        terms = request.header.get("secure")
        everyone = self.study.needs_everyone
        attempt = None if terms is None else self.secure.attempt(request, everyone)
        header = {"site": self.site.name, "experiment": self.name, "round": number, "digest": digest}
        if attempt is not None and (again := self.secure.again(attempt)) is not None:
            log.info("%s: round %d again, the same reply", self.name, number)
            return sealed(header, MASKED, again)
        state = self.stored_state(last_counted)
        if attempt is None and state.round == number and state.digest == digest and state.reply is not None:
            log.info("%s: round %d again, the same reply", self.name, number)
            return state.reply
        if number < state.round:
            log.warning("%s: round %d after round %d: the server went back", self.name, number, state.round)
        self._remember(state, request, last_counted)
        store = state.start_of(self.study.keeps, number, last_counted)
        _forget(store, state.noted, request.header["noted"])
        shared, weight = Key(int(request.header["seed"]), number, "/train"), request.header.get("weight")
        key = self.key(number, "site/train")
        private = request.header.get("private")
        bounded = None if private is None else PrivateRound.of(private)
        hidden = None if terms is None else FixedPoint(int(terms["bits"]))
        now = Round(
            number, request.tensors, key, shared, weigh=weight is not None, secure=hidden, private=bounded
        )
        sites = self.sites(store)
        active = Active(ids, torch.full((len(ids),), 1.0 if weight is None else float(weight)), ratio=False)
        messages = int(request.header["active"])
        (work,) = sites.round_work(method, now, active, self.plan, messages, encode=True)
        message = work.message
        if message.withheld is not None:
            message = replace(message, payloads={})
            log.warning("%s: round %d: %s", self.name, number, WITHHELD)
        if work.outliers is not None and bool(work.outliers.any()):
            whom = [self.federation.names[i] for i in work.ids[work.outliers.cpu()].tolist()]
            log.warning("%s: round %d: out of all proportion, left out: %s", self.name, number, whom)
        reply = None if attempt is not None else headed(header, message)
        state.before, state.after = self._both_sides(sites, work, now)
        state.round, state.digest, state.units, state.reply = number, digest, units, reply
        state.write(self.state_file)
        if self.site.lasting:
            self.at_hand.give(self.state_file, state)
        sent = int(message.units), message.bytes
        log.info("%s: round %d, %d unit(s), %d bytes", self.name, number, *sent)
        if attempt is None:
            assert reply is not None
            return reply
        self.secure.require_shared(attempt, bounded)
        guard = None if bounded else guard_for(method, request.tensors, messages, True)
        norms = () if guard is None else guard.names
        topic = topic_of(False, request) if everyone else ""
        return sealed(header, MASKED, self.secure.reply(attempt, message, method.sends, norms, None, topic))

    def _both_sides(self, sites: Sites, work: Work, now: Round) -> tuple[LocalStore, LocalStore]:
        """States before a round (which hold what units enter with, as long as they have not) and after it,
        if its message counts."""
        before, after = sites.snapshot(), sites.snapshot()
        entered = before.entered.clone()
        before.put(work.ids, sites.states(self.method, work.ids, now.broadcast, now.key))
        before.entered = entered  # what units enter with is theirs once they have taken part
        work.settle(work.message.received)
        for ids, states in sites.updates:
            after.put(ids, states)
        return before, after

    def _remember(self, state: SiteState, request: Request, last_counted: int) -> None:
        """Store the present state where validation data chose the round that led to it."""
        best = int(request.header["best"])
        if best >= 0 and best != state.best_round and last_counted <= best:
            state.best = LocalStore.restore(state.current(self.study.keeps, last_counted).state())
            state.best_round = best

    def ask(self, request: Request) -> Message:
        """An answer to a question; what it leaves with units is noted under its name."""
        header, last_counted = request.header, int(request.header["heard"])
        question = self._suppressing(_question(header["description"], request.tensors, self.study))
        self.site.allowed.require_question(question)
        self._require_rows(question, header.get("secure") is not None)
        about = {"site": self.site.name, "experiment": self.name, "question": question.name}
        terms = header.get("secure")
        attempt = None if terms is None or "attempt" not in terms else self.secure.attempt(request, True)
        if terms is not None:  # names of what some of its units have are data, too
            self._require_plain(question, header)
        if attempt is not None and (again := self.secure.again(attempt)) is not None:
            return sealed(about, MASKED, again)
        state = self.stored_state(last_counted)
        store = state.current(self.study.keeps, last_counted)
        hidden = None if terms is None else FixedPoint(int(terms["bits"]))
        sites, key = self.sites(store, hidden), self.key(int(header["key"][0]), str(header["key"][1]))
        known = _part("known.", request.tensors)
        broadcast = _part("broadcast.", request.tensors)
        models = rebuilt(header["models"], {})
        asking = Asking(question, known, key, self.study.algorithm, models, broadcast)
        plan, personal = asking.models_at(sites, self.plan)
        asked = question.ask(known) if models is not None else _part("asked.", request.tensors)
        among = self._ids(header.get("units"))
        method = self.study.algorithm
        guard = None if method is None else method.guard
        messages = None if terms is None else int(terms["messages"])
        (work,) = sites.question_work(
            question,
            asked,
            key,
            plan,
            personal=personal,
            among=among,
            encode=True,
            guard=guard,
            messages=messages,
        )
        if terms is not None and attempt is None:  # what its vectors are called, which everyone is to know
            return headed(about | {"names": _names(work.message)})
        work.settle(work.message.received)
        if work.outliers is not None and bool(work.outliers.any()):
            whom = [self.federation.names[i] for i in work.ids[work.outliers.cpu()].tolist()]
            log.warning("%s: %s: out of all proportion, left out: %s", self.name, question.name, whom)
        if question.excludes and work.outliers is not None:
            sites.updates.append((work.ids, {OUTSIDE: work.outliers}))
        if sites.updates:
            for side in {id(s): s for s in (state.before, state.after)}.values():
                for ids, states in sites.updates:
                    side.put(ids, states, entered=False)
            state.noted[question.name] = sorted(sites.updates[0][1])
            state.write(self.state_file)
        if attempt is None or terms is None:
            return headed(about, work.message)
        topic = topic_of(isinstance(self.study, FormulaStudy), request)
        also = {name: (kind, int(size)) for name, kind, size in terms["names"]}
        return sealed(
            about, MASKED, self.secure.reply(attempt, work.message, question.sends, (), also, topic)
        )

    def _require_plain(self, question: Question[Any], header: Mapping[str, Any]) -> None:
        """Raise where a question's sum would be another one than its words say, or its difference to an
        earlier one that of a few units."""
        if question.name != header["question"]:
            raise SecureSumError(f"the question {header['question']!r} is {question.name!r}")
        if header.get("units") is not None and header["models"] is None and not question.closes:
            raise SecureSumError("a sum of some units, beside one of all, would tell of the others")

    def _suppressing(self, question: Question[Any]) -> Question[Any]:
        """The question with this site's own minimum, where a formula's asks for smaller cells. (The
        response is exempt: its sums reveal as much.)"""
        if not isinstance(self.study, FormulaStudy):
            return question
        exempt = () if self.study.response is None else (self.study.response,)
        return question.suppressing(self.site.small_counts.minimum, exempt)

    def _require_rows(self, question: Question[Any], secure: bool) -> None:
        """Cross products of a few rows reveal the rows: they are not sent."""
        rows, least = int(self.federation.train.sizes.sum()), self.site.spectral_rows
        if question.shows_rows is None or rows >= least or question.shows_rows >= least:
            return
        if question.quorum:
            raise Refusal(
                f'the spectral start is refused with fewer than {least} rows; use start = "random", or '
                f'start = {{kind = "Spectral", minimum = {least}}}, under which such a site sends zeros',
                Code.FEW_ROWS,
            )
        then = "the others do"
        if secure:
            then = "a secure sum needs everyone: lower spectral_rows in site.toml, or leave this site out"
        why = f"{question.name}: products of fewer than {least} rows are not sent; {then}"
        raise Refusal(why, Code.FEW_ROWS)

    def finish(self, request: Request) -> Message:
        """Store the theta that was learned, and the states to predict with."""
        header, last_counted = request.header, int(request.header["heard"])
        state = self.stored_state(last_counted)
        self._remember(state, request, last_counted)
        store = state.current(self.study.keeps, last_counted)
        if header["recall"] and state.best is not None:
            store = state.best
        write_tensors(self.folder / "final.safetensors", store.state())
        published = dict(request.tensors)
        if self.study.algorithm is not None:
            population = Population(
                self.study.algorithm,
                published,
                Key(self.site.secret, purpose="site"),
                None,
                rounds=int(header["rounds"]),
                learned_from=int(header["learned_from"]),
                how=[(str(title), str(words)) for title, words in header["how"]],
            )
            population.save(self.folder / "population")
            published = population.published
        keep_theta(self.folder, published)
        for trial in self.folder.parent.glob(f"{self.name}{TRIAL}*"):
            shutil.rmtree(trial)
        return headed({"site": self.site.name, "experiment": self.name})


def open_site(folder: str | Path, lasting: bool = False) -> Site:
    """The site whose folder this is; ``lasting`` where it answers many requests."""
    if not str(folder):
        raise SettingsError("this node was started without its site's folder: --node-config 'site=\"...\"'")
    settings = read_site(Path(folder))
    for module in settings.modules:
        module_named(module, settings.folder, f"{settings.folder / SETTINGS}: {module}")
    allowed = Allowed(settings.questions, settings.formulas, settings.columns)
    allowed.check(str(settings.folder / SETTINGS))
    return Site(
        name=settings.name,
        secret=read_secret(settings.folder),
        folder=settings.folder,
        where=settings.where,
        threads=settings.threads,
        memory=settings.memory,
        spectral_rows=settings.spectral_rows,
        allowed=allowed,
        small_counts=SmallCounts(settings.minimum, settings.single_rows),
        table=settings.table,
        modules=tuple(settings.modules),
        policy=Policy(settings.minimum_sites, settings.colluding),
        lasting=lasting,
    )


def keep_hello(folder: Path, request: Request) -> None:
    """Store what a request says of an experiment: its study, and tensors such as where a model starts."""
    description = {name: request.header[name] for name in ("experiment", "study")}
    description["digest"] = write_tensors(folder / MODEL, request.tensors)
    write_sealed(folder / DESCRIPTION, description)


def study_from(description: Mapping[str, Any], tensors: Tensors) -> Study:
    """The study of this description."""
    if description["kind"] not in STUDIES:
        raise Refusal(f"the site knows no study {description['kind']!r}", Code.STUDY)
    return STUDIES[description["kind"]].from_description(description, tensors)


def keep_theta(folder: Path, published: Tensors) -> None:
    """Write theta, and the digest by which it is known again."""
    write_sealed(folder / SEALED, {"digest": write_tensors(folder / THETA, published)})


def read_theta(folder: Path) -> Tensors:
    """Theta as it was written."""
    return read_tensors(folder / THETA, str(read_sealed(folder / SEALED, "a theta's digest").get("digest")))


def _names(message: Message) -> list[list[Any]]:
    """Names, types and lengths of a message's vectors."""
    each = sorted(message.words.items())
    return [[name, str(w.kind).removeprefix("torch."), w.digits.shape[1]] for name, w in each]


def _question(description: dict[str, Any], sent: Tensors, study: Study) -> Question[Any]:
    try:
        return question_from_description(description, sent, study.owner)
    except (CheckpointError, SettingsError) as error:
        raise Refusal(f"the site cannot make the question: {error}", Code.QUESTION) from error


def _forget(store: LocalStore, noted: Mapping[str, Sequence[str]], counted: Sequence[str]) -> None:
    """Drop what questions left whose answer from here did not count."""
    for question, names in noted.items():
        if question not in counted:
            for name in names:
                store.noted.discard(name)
                if not bool(store.entered.any()):
                    store.tensors.pop(name, None)


def _part(prefix: str, tensors: Tensors) -> Tensors:
    return {n.removeprefix(prefix): t for n, t in tensors.items() if n.startswith(prefix)}
