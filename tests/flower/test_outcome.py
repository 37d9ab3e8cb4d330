"""What came of a run across sites: estimates under the names of columns, warnings, and the report of both."""

from __future__ import annotations

import html
import json
import re
from pathlib import Path
from typing import Any

import pytest
from torch import nn

import fedpop as fp
from fedpop.cli import main
from fedpop.federation.reading import encoded, input_names, read_columns, width
from fedpop.files import read_json
from fedpop.flower.outcome import OF_ALL, OF_THE_MEAN, estimates
from fedpop.report.run import run_report
from tests.flower.commands import Made, fedpop

FORM = {"x": ["sex", "age"], "levels": {"sex": ["f", "m", "x"]}, "scale": {"age": [40.0, 10.0]}}


def rows_of(page: str, title: str) -> list[list[str]]:
    """The cells of the table under a title."""
    part = page[page.index(f"<h2>{title}</h2>") :]
    body = part[part.index("<tbody>") : part.index("</tbody>")]
    cells = [re.findall(r"<td[^>]*>(.*?)</td>", row) for row in body.split("<tr")[1:]]
    return [[html.unescape(cell) for cell in row] for row in cells]


def test_inputs_have_names_in_the_order_of_their_columns(tmp_path: Path) -> None:
    """A row that has one input only: its name says which."""
    assert len(input_names(FORM)) == width(FORM)
    for cell, name in (("x,40", "sex = x"), ("m,40", "sex = m"), ("f,50", "age (per 10)")):
        (tmp_path / "rows.csv").write_text(f"sex,age\n{cell}\n")
        x = encoded(read_columns(tmp_path / "rows.csv", ["sex", "age"], "city"), FORM)
        assert x.sum() == 1
        assert input_names(FORM)[int(x[0].argmax())] == name


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> tuple[Made, fp.Population]:
    """Rows without noise: dose = (age - 30) / 10 + [sex = m], and 1 more at the second site."""
    found = Made(tmp_path_factory.mktemp("outcome"), rounds=25)
    file = found.server / "app" / "federation.toml"
    file.write_text(file.read_text().replace("[sites]", "afterwards = []\n[sites]"))
    return found, found.run_deployment()


def test_estimates_are_what_made_the_data(made: tuple[Made, fp.Population]) -> None:
    federation, population = made
    run = federation.server / "run"
    found = {row["name"]: row for row in read_json(run / "outcome.json")["estimates"]}
    sd = read_json(run / "agreed.json")["form"]["scale"]["age"][1]
    age = f"weight[age (per {sd:.3g})]"
    assert found[age]["estimate"] == pytest.approx(0.1 * sd, rel=0.1)
    assert found["weight[sex = m]"]["estimate"] == pytest.approx(1.0, rel=0.1)
    assert found["bias"]["estimate"] == pytest.approx(0.1 * 5.5 + 0.5, rel=0.2)
    spread = {name: row["spread"] for name, row in found.items() if "spread" in row}
    assert max(spread, key=lambda name: spread[name]) == "bias"
    assert [row["of"] for row in found.values()] == [OF_ALL] * len(population.phi) + [OF_THE_MEAN] * 3


def test_standard_errors_go_with_their_estimates(made: tuple[Made, fp.Population]) -> None:
    _, population = made
    z = population.model.z_layout
    flat = z.flatten(
        {
            "weight": population.typical["weight"] * 0
            + population.typical["weight"].new_tensor([[1.0, 2.0]]),
            "bias": population.typical["bias"] * 0 + 3,
        }
    )
    rows = estimates(
        population,
        FORM | {"x": ["age", "sex"], "levels": {"sex": ["f", "m"]}},
        {"the prior's mean": flat.tolist()},
    )
    errors = {row["name"]: row.get("error") for row in rows if row["of"] == OF_THE_MEAN}
    assert errors == {"weight[age (per 10)]": 1.0, "weight[sex = m]": 2.0, "bias": 3.0}


def test_the_report_says_whose_it_is(
    made: tuple[Made, fp.Population], capsys: pytest.CaptureFixture[str]
) -> None:
    """Name, sites, participation, estimates, warnings; by the federation's folder or by that of its run."""
    federation, _ = made
    main(["report", str(federation.server)])
    file = federation.server / "run" / "report.html"
    page = file.read_text()
    assert run_report(federation.server / "run") == file
    assert "<h1>fedpop: clinics</h1>" in page
    assert "A federation of 2 sites: FedSOUL" in page
    rounds = read_json(federation.server / "run" / "result.json")["rounds"]
    assert [row[:3] for row in rows_of(page, "Sites")] == [
        [n, "-", f"{rounds} of {rounds}"] for n in ("north", "south")
    ]
    outcome = read_json(federation.server / "run" / "outcome.json")
    assert [row[0] for row in rows_of(page, "Estimates")] == [row["name"] for row in outcome["estimates"]]
    assert outcome["warnings"]  # without noise the spread of two slopes is as small as may be
    assert [row[0] for row in rows_of(page, "Warnings")] == outcome["warnings"]
    capsys.readouterr()
    fedpop("server", "status", federation.server)
    shown = capsys.readouterr().out
    assert all(f"  warning   {words}\n" in shown for words in outcome["warnings"])


def test_who_was_left_out_is_counted_with_the_reason(tmp_path: Path) -> None:
    base: dict[str, Any] = {"active": 2, "loss": 1.0, "bytes_up": 1, "bytes_down": 1, "seconds": 1.0}
    lines = [
        base | {"round": 1, "heard": ["a"], "reasons": {"b": "it did not answer in time"}},
        base | {"round": 2, "heard": ["a", "b"], "reasons": {}},
        base | {"round": 3, "heard": ["c"], "reasons": {"b": "<b>", "a": "it did not answer in time"}},
        base
        | {"round": 4, "heard": ["c"], "reasons": {"b": "it did not answer in time"}, "late_from": {"b": 2}},
    ]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    page = run_report(tmp_path).read_text()
    late = "it did not answer in time"
    assert rows_of(page, "Sites") == [
        ["a", f"{late} (1)", "2 of 3", "1", "2", "0"],
        ["b", f"{late} (2); <b> (1)", "1 of 4", "1", "2", "2"],
        ["c", "-", "2 of 2", "3", "4", "0"],
    ]
    assert "<b>" not in page


def test_a_large_tensor_is_shown_by_its_size(tmp_path: Path) -> None:
    net = nn.Sequential(nn.Linear(3, 30), nn.Tanh())
    import torch

    model = fp.Composition(net, nn.Linear(30, 1), fp.likelihoods.Normal(1.0))
    x = torch.linspace(-1, 1, 12).reshape(4, 3)
    population = fp.FedSOUL(model, engine="sampled").fit([(x, x[:, 0])] * 2, rounds=1, progress=False)
    names = [row["name"] for row in estimates(population, {"x": ["a", "b", "c"]}, {})]
    assert "backbone.0.weight (90 numbers)" in names
    assert "weight[0]" in names
    small = fp.Composition(nn.Linear(3, 2), nn.Linear(2, 1), fp.likelihoods.Normal(1.0))
    population = fp.FedSOUL(small, engine="sampled").fit([(x, x[:, 0])] * 2, rounds=1, progress=False)
    names = [row["name"] for row in estimates(population, {"x": ["a", "b", "c"]}, {})]
    assert {"backbone.weight[0, a]", "backbone.weight[1, c]", "weight[1]"} <= set(names)
    assert estimates(fp.FedAvg(small).fit([(x, x[:, 0])] * 2, rounds=1, progress=False), {}, {}) == []
