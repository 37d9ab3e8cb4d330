"""Every question, three ways with the same result: everyone in one process; sites of one whose messages go
through bytes, of which the server sees the sum alone; and requests over the Grid.

Questions of mixed models are in ``tests/mixed``.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch

import fedpop as fp
from fedpop.evaluation.convergence import ToTheOptimum
from fedpop.evaluation.diagnostics import ChainsAndGradient
from fedpop.evaluation.information import Information
from fedpop.evaluation.marginal import MarginalLikelihood
from fedpop.evaluation.newcomers import DataShare, NewcomerWidth
from fedpop.evaluation.scores import ValidationScore
from fedpop.flower.client import app
from fedpop.flower.deployment import enrolled_members
from fedpop.flower.remote import RemoteMembers, RoundTerms
from fedpop.flower.site import open_site
from fedpop.keys import Key
from fedpop.message import Aggregate, Channel, Tensors, Total
from fedpop.methods.base import Algorithm, usual_participation
from fedpop.methods.fsgld import Surrogates
from fedpop.methods.qlsd import Reference
from fedpop.questions import Question
from fedpop.questions.contributions import Contributions
from fedpop.questions.curvature import Curvature, CurvatureStep
from fedpop.questions.features import FeatureMoments, FeatureScale
from fedpop.questions.forms import ExampleShape
from fedpop.questions.least_squares import LeastSquares
from fedpop.questions.pooled import PooledFit
from fedpop.questions.scales import ColumnScales
from fedpop.questions.schema import ColumnSquares, ColumnTotals
from fedpop.questions.spectral import CrossProducts, SecondMoments
from fedpop.questions.targets import TargetSize
from fedpop.run.members import Asking, LocalMembers, Members
from fedpop.run.personal_models import AsTheyStand, FinalPass, PersonalModels
from fedpop.run.run import Run
from fedpop.run.settings import Settings
from fedpop.settings import known as classes
from fedpop.site.plan import WHOLE
from fedpop.site.sites import Sites
from fedpop.site.study import Survey, Training, table_units
from tests.flower.local_grid import LocalGrid
from tests.flower.sites import deployment, enrol, transport_on
from tests.methods.conformance import four, made

KEY = Key(0, purpose="asked")
Theta = Callable[[Algorithm], Tensors]


@dataclass(frozen=True)
class Case:
    """A question of a method, what is known when it is asked, and which models of its units it needs."""

    question: Callable[[Algorithm, Tensors], Question[Any]]
    method: str = "FedSOUL"
    kind: str = "linear"
    models: PersonalModels | None = None
    before: tuple[type[Question[Any]], ...] = ()
    """Questions whose results are known: before the rounds."""
    settings: tuple[tuple[str, Any], ...] = ()
    validation: bool = False
    close: float = 1e-10
    """Of the largest entry: sums of doubles, unless messages are float32."""
    entry: str = ""
    """Names the model, where it is a function of the user's."""

    def made(self) -> Algorithm:
        if self.entry:
            return fp.FedSOUL(line_model())
        return made(self.method, self.kind, **dict(self.settings))


def line(phi: Tensors, z: Tensors, x: torch.Tensor) -> torch.Tensor:
    return z["a"] + z["b"] * x[:, 0]


def line_model() -> fp.CustomModel:
    zero = torch.zeros((), dtype=torch.float64)
    return fp.CustomModel(outputs=line, likelihood=fp.likelihoods.Normal("learned"), z={"a": zero, "b": zero})


def phi(method: Algorithm) -> torch.Tensor:
    return method.model.initial_phi()


def w(method: Algorithm) -> torch.Tensor:
    return torch.cat((method.model.initial_phi(), method.model.initial_z()))


def hierarchical(cls: type[Any], *more: Any) -> Callable[[Algorithm, Tensors], Question[Any]]:
    return lambda method, known: cls(method.hierarchy, *more)


FINAL = FinalPass()
SAMPLED = (("engine", "sampled"),)
CASES: dict[type[Question[Any]], Case] = {
    SecondMoments: Case(lambda m, known: SecondMoments(2), close=1e-6),
    CrossProducts: Case(lambda m, known: CrossProducts(m.model, 2), before=(SecondMoments,), close=1e-5),
    TargetSize: Case(lambda m, known: TargetSize(m.model, 2)),
    LeastSquares: Case(lambda m, known: LeastSquares(m.model, phi(m))),
    Contributions: Case(lambda m, known: Contributions(m.hierarchy, phi(m))),
    PooledFit: Case(lambda m, known: PooledFit(m.model, phi(m)), entry=f"{__name__}:line_model"),
    Curvature: Case(lambda m, known: Curvature(m.model, w(m)), "FedAvg", "softmax"),
    CurvatureStep: Case(lambda m, known: CurvatureStep(m.model, w(m), 1.0), "FedAvg", "softmax"),
    FeatureScale: Case(lambda m, known: FeatureScale(m.model, phi(m), (1e-3, 1e3)), kind="softmax"),
    FeatureMoments: Case(lambda m, known: FeatureMoments(m.model, phi(m), True), kind="softmax"),
    Surrogates: Case(lambda m, known: Surrogates(m), "FSGLD", "softmax"),
    Reference: Case(lambda m, known: Reference(m.model, w(m)), "QLSD", "softmax"),
    MarginalLikelihood: Case(hierarchical(MarginalLikelihood), models=FINAL, settings=SAMPLED),
    Information: Case(hierarchical(Information), models=FINAL, settings=SAMPLED),
    ToTheOptimum: Case(hierarchical(ToTheOptimum), models=FINAL, settings=SAMPLED),
    ChainsAndGradient: Case(
        hierarchical(ChainsAndGradient, 0.1, (), True), kind="softmax", models=FINAL, settings=SAMPLED
    ),
    DataShare: Case(hierarchical(DataShare), models=FINAL, settings=SAMPLED),
    NewcomerWidth: Case(lambda m, known: NewcomerWidth(m, (0, 1)), models=FINAL, settings=SAMPLED),
    ValidationScore: Case(
        lambda m, known: ValidationScore(m), kind="softmax", models=AsTheyStand(), validation=True
    ),
    ExampleShape: Case(lambda m, known: ExampleShape()),
}

COLUMNS = {"x": ["age", "kind"], "y": "dose", "categories": ["kind"], "minimum": 3}
MEAN = {'["age"]': torch.tensor([0.0, 50.0], dtype=torch.float64)}
TABLES: dict[type[Question[Any]], tuple[Question[Any], Tensors]] = {
    ColumnScales: (ColumnScales(("age", "dose"), 3), {}),
    ColumnTotals: (ColumnTotals(("age",), ("kind",), 3, True), {}),
    ColumnSquares: (ColumnSquares(("age",), 3, True), MEAN),
}
"""Questions about tables, before it is agreed what examples look like, and what is known."""


def test_every_question_has_a_case() -> None:
    ours = {c for c in classes(Question).values() if c.__module__.startswith("fedpop.")}
    assert {c for c in ours if not c.__module__.startswith("fedpop.mixed.")} == {*CASES, *TABLES}


def data(case: Case) -> dict[str, Any]:
    plain = four(case.kind)
    if not case.validation:
        return plain
    return {n: fp.Client(*xy, validation=xy) for n, xy in plain.items()}


def close(one: Total, other: Total, tolerance: float) -> None:
    """The same units and sums, to so much of the sum of absolute values."""
    assert (one.count, one.left_out) == (other.count, other.left_out)
    assert one.plain.keys() == other.plain.keys()
    for name, total in one.plain.items():
        scale = max(float(total.abs().nan_to_num().max()), 1.0)
        torch.testing.assert_close(other.plain[name], total, rtol=0, atol=tolerance * scale, equal_nan=True)


@dataclass
class Ways:
    """Members on this machine and on the Grid, of the same data."""

    case: Case
    here: LocalMembers
    grid: Members
    method: Algorithm
    server: Tensors
    apart: dict[str, Sites]

    def asking(self, members: Members) -> Asking[Any]:
        case, method, known = self.case, self.method, Tensors()
        for before in case.before:
            known |= members.ask(Asking(CASES[before].question(method, known), known, KEY, method))[0]
        if case.models is not None:
            known = method.publish(self.server)
        question = case.question(method, known)
        broadcast = method.broadcast(self.server) if isinstance(case.models, AsTheyStand) else {}
        split = "validation" if case.validation else None
        return Asking(question, known, KEY, method, case.models, broadcast, split)

    def from_bytes(self, asking: Asking[Any]) -> Total:
        """Sums of what sites of one encoded: no row, state or single message is in it."""
        aggregate, question = Aggregate(), asking.question
        asked = question.ask(asking.known)
        for site in self.apart.values():
            plan, personal = asking.models_at(site, WHOLE)
            (work,) = site.question_work(question, asked, KEY, plan, personal=personal, encode=True)
            sent = replace(work.message, vectors={}, checked=False)
            if bool(sent.received):
                sent = Channel().receive(sent, torch.float64)
            aggregate.add(sent, torch.ones(1))
            work.settle(sent.received)
        return aggregate.total(len(self.apart), ratio=False)


@pytest.fixture
def ways(request: pytest.FixtureRequest, tmp_path: Path) -> Ways:
    case: Case = CASES[request.param]
    method = case.made()
    clients = data(case)
    federation = fp.Federation.of(clients)
    method = method.prepared(federation.example)
    federation = method.model.checked(federation)
    run = Run(method, federation, Settings(2, 0, usual_participation(method)))
    run.begin()
    grid = LocalGrid(app, enrol(tmp_path, clients, modules=case.entry.partition(":")[0]))
    planned = deployment(method, 2, terms=RoundTerms(sites=4), entry=case.entry)
    members, _ = enrolled_members(planned, transport_on(grid))
    apart = {
        name: Sites.one(name, method.model.checked(fp.Federation.of({name: values})), torch.device("cpu"))
        for name, values in clients.items()
    }
    return Ways(case, LocalMembers(Training(method), federation), members, method, run.server, apart)


@pytest.mark.parametrize("ways", CASES, indirect=True, ids=lambda c: c.__name__)
def test_a_question_three_ways(ways: Ways) -> None:
    found, here = ways.here.ask(ways.asking(ways.here))
    assert here.count == 4
    asking = ways.asking(ways.here)
    close(here, ways.from_bytes(asking), ways.case.close)
    again, there = ways.grid.ask(ways.asking(ways.grid))
    close(here, there, ways.case.close)
    assert type(found) is type(again)


@pytest.mark.parametrize("question", TABLES, ids=lambda c: c.__name__)
def test_a_question_about_tables_three_ways(question: type[Question[Any]], tmp_path: Path) -> None:
    asked, known = TABLES[question]
    survey, folders, tables = Survey(COLUMNS), {}, {}
    for k, name in enumerate(("north", "south", "west", "east")):
        folder = tmp_path / name
        folder.mkdir()
        rows = "".join(f"{30 + 7 * i + k},{'ab'[i % 2] if i < 5 + k else 'c'},{i * k}\n" for i in range(8))
        (folder / "rows.csv").write_text(f"age,kind,dose\n{rows}")
        (folder / "site.toml").write_text(f'name = "{name}"\ndata = "rows.csv"\n')
        (folder / "secret").write_text("1\n")
        folders[name] = folder
        tables |= survey.read(open_site(folder).data)
    found, here = LocalMembers(survey, tables).ask(Asking(asked, known, KEY))
    assert here.count == 4
    aggregate = Aggregate()
    for name, table in tables.items():
        site = Sites.one(name, table_units({name: table}), torch.device("cpu"), tables=[table])
        (work,) = site.question_work(asked, asked.ask(known), KEY, WHOLE, encode=True)
        aggregate.add(
            Channel().receive(replace(work.message, vectors={}, checked=False), torch.float64), torch.ones(1)
        )
    close(here, aggregate.total(4, ratio=False), 1e-12)
    settings = Settings(1, 0, fp.participation.Everyone())
    members = RemoteMembers(
        survey, transport_on(LocalGrid(app, folders)), "test", RoundTerms(sites=4), settings
    )
    again, there = members.ask(Asking(asked, known, KEY))
    close(here, there, 1e-12)
    assert found.keys() == again.keys()
    assert any(float(v.abs().sum()) for v in there.plain.values())
