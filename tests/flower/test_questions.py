"""Users' questions work across machines, and what is agreed on first is asked as questions are."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor, nn

import fedpop as fp
from fedpop.errors import CheckpointError, EstimateError, SettingsError
from fedpop.files import read_json
from fedpop.flower.client import app
from fedpop.flower.deployment import run_deployment
from fedpop.flower.records import request_from_record
from fedpop.flower.remote import RemoteMembers, RoundTerms
from fedpop.flower.site import open_site
from fedpop.keys import Key
from fedpop.message import Answer, Tensors, Total
from fedpop.message.declared import Sent
from fedpop.methods.asking import describe_question, question_from_description
from fedpop.models.base import Model
from fedpop.questions import Question, Units
from fedpop.questions.forms import ExampleShape
from fedpop.questions.schema import Schema
from fedpop.run.members import LocalMembers, Members
from fedpop.run.settings import Settings
from fedpop.site.study import Survey
from tests.flower.local_grid import LocalGrid
from tests.flower.sites import across, deployment, enrol, here, transport_on
from tests.helpers import linear_model
from tests.methods.conformance import four, made


@dataclass(frozen=True)
class SquaresAbout(Question[float]):
    """A user's: the sum of (y - at)^2 of rows whose first column is above a threshold, times what the
    model says its outputs are."""

    model: Model
    at: Tensor
    above: float
    name: ClassVar[str] = "squares about"
    sends: ClassVar[dict[str, Sent]] = {"squares": Sent("squares about a value")}

    def ask(self, known: Tensors) -> Tensors:
        return {"phi": known["phi"]}

    def answer(self, asked: Tensors, units: Units, key: Key) -> Answer:
        cohort = units.cohort
        assert isinstance(cohort.x, Tensor)
        rows = (cohort.y.reshape(-1) - self.at).square() * (cohort.x[:, 0] > self.above) * self.model.outputs
        each = rows.new_zeros(len(cohort)).index_add(0, cohort.owner, rows)
        return Answer(torch.isfinite(each), {"squares": each.unsqueeze(1)})

    def finish(self, known: Tensors, total: Total) -> float:
        return float(total.plain["squares"])


def test_newcomers_have_the_prior_that_sites_were_asked_for(tmp_path: Path) -> None:
    """The simulator's widths, and theta goes out with them."""
    g = torch.Generator().manual_seed(0)
    data = {}
    for i in range(6):
        x, z = torch.randn(12, 2, generator=g), 0.2 * torch.randn(2, generator=g)
        data[f"site-{i}"] = (x, x @ z + 0.5 * torch.randn(12, generator=g))
    prior = fp.priors.Normal(scale=2.0, learn_scale=False)  # ten times too wide
    model = fp.Composition(None, nn.Linear(2, 1, bias=False), fp.likelihoods.Normal(0.25))
    method = fp.FedSOUL(model, prior=prior, engine="sampled")
    grid = LocalGrid(app, enrol(tmp_path, data))
    planned = deployment(method, 3, terms=RoundTerms(sites=6), afterwards=("newcomers",))
    population = run_deployment(planned, transport_on(grid), tmp_path / "run")
    alone = here(method, data, rounds=3).for_newcomers()
    assert set(population.newcomers) == {0, 1, 5}
    assert population.newcomers[0] < 0.2
    assert population.newcomers == pytest.approx(alone.newcomers, rel=1e-4)
    assert fp.load(tmp_path / "run" / "population").newcomers == population.newcomers
    assert "prior's sd times" in read_json(tmp_path / "run" / "afterwards.json")["newcomers"]["words"]


def test_a_question_of_ones_own_is_answered_across_machines(tmp_path: Path) -> None:
    method, data = made("FedAvg", "linear"), four("linear")
    elsewhere, grid = across(method, data, tmp_path, rounds=1)
    at = torch.tensor(0.5)
    asked = SquaresAbout(elsewhere.model, at, 0.25)
    found = elsewhere.ask(asked)
    assert found == pytest.approx(here(method, data, rounds=1).ask(asked), rel=1e-6)
    by_hand = sum(float(((y - 0.5) ** 2 * (x[:, 0] > 0.25)).sum()) for x, y in data.values())
    assert found == pytest.approx(by_hand, rel=1e-6)
    last = request_from_record(grid.traffic[-1][1].content)
    assert last.header["description"] == {
        "kind": f"{SquaresAbout.__module__}:SquaresAbout",
        "fields": {
            "model": {"kind": "own", "what": "model"},
            "at": {"kind": "sent", "name": "own.at"},
            "above": 0.25,
        },
    }
    assert torch.equal(last.tensors["own.at"], at)


def test_a_tensor_that_is_sent_already_does_not_go_twice() -> None:
    model, at = linear_model(), torch.ones(3)
    description, more = describe_question(SquaresAbout(model, at, 0.0), {"asked.phi": at})
    assert not more
    method = fp.FedAvg(model)
    again = question_from_description(description, {"asked.phi": at}, method)
    assert again == SquaresAbout(model, at, 0.0)
    with pytest.raises(CheckpointError, match="needs a method"):
        question_from_description(description, {"asked.phi": at}, None)
    with pytest.raises(CheckpointError, match="unknown question 'Nonsense'"):
        question_from_description({"kind": "Nonsense", "fields": {}}, {}, method)
    strange: Any = object()
    with pytest.raises(SettingsError, match="cannot be asked across machines"):
        describe_question(SquaresAbout(model, at, strange), {})


OWN = """
from dataclasses import dataclass
from typing import ClassVar
import torch
from fedpop.message.declared import Sent
from fedpop.message import Answer
from fedpop.questions import Question

@dataclass(frozen=True)
class RowsAbove(Question):
    least: float
    name: ClassVar[str] = "rows above"

    def answer(self, asked, units, key):
        rows = (units.cohort.y > self.least).double()
        return Answer(torch.ones(len(units.cohort), dtype=torch.bool), sums={"n": rows.sum().reshape(1)})

    def finish(self, known, total):
        return float(total.plain["n"])
"""


def test_a_site_imports_the_modules_that_its_settings_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (folder,) = enrol(tmp_path, {"ada": four("linear")["ada"]}).values()
    settings = folder / "site.toml"
    settings.write_text(settings.read_text() + 'modules = ["rows_above_of_mine"]\n')
    with pytest.raises(SettingsError, match="there is no module rows_above_of_mine"):
        open_site(folder)
    (folder / "rows_above_of_mine.py").write_text(OWN)
    monkeypatch.setattr(sys, "path", list(sys.path))
    open_site(folder)
    asked = question_from_description({"kind": "RowsAbove", "fields": {"least": 1.0}}, {}, None)
    assert asked.name == "rows above"
    sys.modules.pop("rows_above_of_mine")


# --- what is agreed on first -----------------------------------------------------------------------


def surveyed(grid: LocalGrid, form: dict[str, Any], sites: int) -> Members:
    """Sites of whose data nothing is agreed yet."""
    settings = Settings(1, 0, fp.participation.Everyone())
    return RemoteMembers(Survey(form), transport_on(grid), "test", RoundTerms(sites=sites), settings)


def test_the_schema_is_one_question_for_tables_here_and_elsewhere(tmp_path: Path) -> None:
    """The same object, carried by requests or on this machine, finds the same."""
    folders, tables = {}, {}
    for k, name in enumerate(("north", "south", "west")):
        folder = tmp_path / name
        folder.mkdir()
        ages, kinds = [40.0 + 7 * i + k for i in range(8)], ["a" if i < 5 + k else "b" for i in range(8)]
        rows = "".join(f"{a},{s},{i}\n" for i, (a, s) in enumerate(zip(ages, kinds, strict=True)))
        (folder / "rows.csv").write_text(f"age,kind,dose\n{rows}")
        (folder / "site.toml").write_text(f'name = "{name}"\ndata = "rows.csv"\n')
        (folder / "secret").write_text("1\n")
        folders[name], tables[name] = folder, {"age": ages, "kind": kinds}
    grid = LocalGrid(app, folders)
    data = {"x": ["age", "kind"], "y": "dose", "categories": ["kind"], "minimum": 3}
    schema = Schema(("age",), ("kind",), 3)
    elsewhere = schema.asked(surveyed(grid, data, 3).asks)
    assert elsewhere == schema.asked(LocalMembers(Survey(), tables).asks)
    # Three, two and one rows of the second level: only one site sends its count.
    assert elsewhere["kind"].counts == {"a": 18, "b": 3}  # type: ignore[union-attr]
    assert elsewhere["kind"].suppressed == 3  # type: ignore[union-attr]


def test_shapes_that_differ_are_counted_not_named(tmp_path: Path) -> None:
    data = {"ada": (torch.zeros(4, 3), torch.zeros(4)), "bea": (torch.zeros(4, 2), torch.zeros(4))}
    grid = LocalGrid(app, enrol(tmp_path, data))
    planned = deployment(made("FedAvg", "linear"), 1, terms=RoundTerms(sites=2))
    with pytest.raises(
        SettingsError, match=r"different shapes, those of 1 unit\(s\) \[\[2\]\], of 1 .*\[\[3\]\]"
    ):
        run_deployment(planned, transport_on(grid))


def test_everyone_who_answered_must_be_readable(tmp_path: Path) -> None:
    data = {n: (torch.zeros(4, 3), torch.zeros(4)) for n in ("ada", "bea")}
    grid = LocalGrid(app, enrol(tmp_path, data))

    def other_question(site: str, request: Any, reply: Any) -> list[Any]:
        if site == "bea":
            record = reply.content.config_records["fedpop"]
            record["json"] = str(record["json"]).replace('"question": "example"', '"question": "else"')
        return [reply]

    grid.fault = other_question
    with pytest.raises(EstimateError, match="bea: it answers another request"):
        surveyed(grid, {}, 2).asks(ExampleShape(), {})


def test_a_model_of_a_table_still_starts(tmp_path: Path) -> None:
    """Nothing but scales has to be asked where columns are neither standardised nor named."""
    folder = tmp_path / "north"
    folder.mkdir()
    (folder / "rows.csv").write_text("age,dose\n" + "".join(f"{i},{i}\n" for i in range(9)))
    (folder / "site.toml").write_text('name = "north"\ndata = "rows.csv"\n')
    (folder / "secret").write_text("1\n")
    grid = LocalGrid(app, {"north": folder})
    schema = {"x": ["age"], "y": "dose", "standardise": False}
    method = fp.FedAvg(fp.Composition(None, nn.Linear(1, 1), fp.likelihoods.Normal(1.0)))
    run_deployment(deployment(method, 1, schema=schema), transport_on(grid))
    requests = [request_from_record(m.content) for _, m, _ in grid.traffic]
    assert {r.header["question"] for r in requests if r.kind == "ask"} == {"column scales"}
