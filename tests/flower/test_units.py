"""Who takes part counts units, whatever sites hold them; a site works on as many together as fit it."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch

import fedpop as fp
from fedpop.errors import SettingsError
from fedpop.flower.client import app
from fedpop.flower.deployment import run_deployment
from fedpop.flower.records import message_from_record, request_from_record
from fedpop.flower.remote import RoundTerms
from fedpop.flower.site_records import SiteRecord, active_parts, roster_of_sites
from fedpop.flower.site_state import SiteState
from fedpop.keys import Key, unit_of
from fedpop.methods.base import Algorithm, usual_participation
from fedpop.run.run import Run
from fedpop.run.settings import Settings
from fedpop.site.plan import Plan
from tests.flower.local_grid import LocalGrid
from tests.flower.sites import across, deployment, enrol, same_bits, transport_on
from tests.methods.conformance import four, made

CPU = torch.device("cpu")
TWO = {"north": ("ada", "bea", "cem"), "south": ("dag", "eve")}
SITES = {site: [f"{site}/{group}" for group in groups] for site, groups in TWO.items()}


def data(kind: str = "softmax") -> dict[str, dict[str, Any]]:
    stored = four(kind) | {"eve": four(kind, seed=3)["ada"]}
    return {site: {group: stored[group] for group in groups} for site, groups in TWO.items()}


def units(kind: str = "softmax") -> dict[str, Any]:
    return {
        f"{site}/{group}": stored for site, groups in data(kind).items() for group, stored in groups.items()
    }


def requests(grid: LocalGrid, kind: str = "train") -> list[tuple[str, Any, Any]]:
    each = [(s, request_from_record(m.content), message_from_record(r.content)) for s, m, r in grid.traffic]
    return [(s, m, r) for s, m, r in each if m.kind == kind]


def simulated(method: Algorithm, rule: Any, rounds: int) -> fp.Population:
    return method.fit(units(), rounds=rounds, participation=rule, sites=SITES, progress=False)


RULES: dict[str, Any] = {
    "a half": fp.participation.Bernoulli(0.5),
    "two": fp.participation.Uniform(2),
    "by site": fp.participation.Bernoulli({"north": 0.4, "south": 0.8}),
    "everyone": fp.participation.Everyone(),
}


CASES = [(n, r) for n in ("FedSOUL", "SCAFFOLD") for r in ("a half", "two")]


@pytest.mark.parametrize(("name", "rule"), [*CASES, ("FedAvg", "by site"), ("FedAvg", "everyone")])
def test_the_same_units_take_part_as_in_the_simulator(name: str, rule: str, tmp_path: Path) -> None:
    """To the bit: theta, how many took part, what each unit keeps; a site without any is not asked."""
    method = made(name, "softmax")
    terms = RoundTerms(sites=2)
    elsewhere, grid = across(method, data(), tmp_path, rounds=6, rule=RULES[rule], terms=terms)
    here = simulated(method, RULES[rule], 6)
    same_bits(elsewhere.published, here.published)
    assert [m["active"] for m in elsewhere.history] == [m["active"] for m in here.history]
    asked = Counter[int]()
    for _, request, reply in requests(grid):
        some = request.header["units"]
        assert int(reply.units) == (int(reply.units) if some is None else len(some))
        asked[request.header["round"]] += int(reply.units)
    assert [asked[k] for k in range(6)] == [m["active"] for m in here.history]
    assert here.store is not None
    place = {n: i for i, n in enumerate(units())}
    for site, names in SITES.items():
        file = tmp_path / site / "experiments" / "test" / "chain.safetensors"
        stored = SiteState.read(file).after
        for i, unit in enumerate(names):
            assert bool(stored.entered[i]) == bool(here.store.entered[place[unit]]), unit
            if stored.entered[i]:
                theirs = here.store.get(torch.tensor([place[unit]]), CPU)
                same_bits(stored.get(torch.tensor([i]), CPU), theirs)


def test_the_test_has_rounds_of_one_site_alone(tmp_path: Path) -> None:
    _, grid = across(made("FedAvg", "softmax"), data(), tmp_path, rounds=6, rule=RULES["two"])
    each = Counter(m.header["round"] for _, m, _ in requests(grid))
    assert set(each.values()) == {1, 2}


def test_hashes_of_units_are_told_where_some_are_drawn(tmp_path: Path) -> None:
    """Neither their names nor, where everyone takes part, their hashes leave a site."""
    method = made("FedAvg", "softmax")
    for rule in ("two", "everyone"):
        _, grid = across(method, data(), tmp_path / rule, rounds=1, rule=RULES[rule])
        for site, request, reply in requests(grid, "hello"):
            draws = rule == "two" and request.header["study"]["kind"] == "Training"
            hashes = [unit_of(n) for n in SITES[site]] if draws else None
            assert reply.header.get("hashes") == hashes
        for _, _, reply in [r for kind in ("hello", "ask", "train") for r in requests(grid, kind)]:
            assert "ada" not in str(reply.header)


@pytest.mark.parametrize("name", ["FedSOUL", "SCAFFOLD"])
def test_a_lost_reply_did_not_happen_to_those_who_took_part(name: str, tmp_path: Path) -> None:
    """The units of that round go on as in the simulator, the others at the site as if nobody had asked."""
    method, rule = made(name, "softmax"), RULES["two"]
    gone = (1, 2)

    def fault(site: str, request: Any, reply: Any) -> list[Any] | None:
        about = request_from_record(request.content).header
        return None if site == "north" and about.get("round") in gone else [reply]

    grid = LocalGrid(app, enrol(tmp_path, data()))
    grid.fault = fault
    planned = deployment(method, 6, rule=rule, terms=RoundTerms(sites=2, timeout=0.1))
    elsewhere = run_deployment(planned, transport_on(grid))
    missed = [m["round"] - 1 for m in elsewhere.history if "north" in m["left_out"]]
    assert missed
    federation = fp.Federation.of(units())
    prepared = method.prepared(federation.example)
    run = Run(prepared, prepared.model.checked(federation), Settings(6, 0, rule, sites=SITES))
    north = {unit_of(n) for n in SITES["north"]}
    run.sites.lost = lambda k, stored: torch.tensor([k in missed and int(u) in north for u in stored])
    same_bits(elsewhere.published, run.execute(resume=False, progress=False).published)
    assert all(m["units_left_out"] in (1, 2) for m in elsewhere.history if m["left_out"])


def test_units_of_one_site_count_alike(tmp_path: Path) -> None:
    rule = fp.participation.Bernoulli({n: 0.3 + 0.1 * k for k, n in enumerate(units())})
    with pytest.raises(SettingsError, match="take part with different probabilities"):
        across(made("FedAvg", "softmax"), data(), tmp_path, rounds=20, rule=rule)


def test_observed_weights_count_units() -> None:
    """A site of two of which one took part was there for half of a round."""
    sites = {"a": SiteRecord(units=2, hashes=[5, 9]), "b": SiteRecord(units=1, hashes=[7])}
    roster = roster_of_sites(sites)
    assert (roster.units.tolist(), list(roster.names)) == ([5, 9, 7], ["a", "a", "b"])
    active = fp.participation.Availability([[1], [0, 1, 2]], 3, "inverse").draw(roster, Key(0, round=0))
    parts = active_parts(sites, active)
    assert list(parts) == ["a"]
    assert parts["a"].units == [1]
    assert parts["a"].ids.tolist() == [1]


# --- memory ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["FedSOUL", "SCAFFOLD", "QLSD"])
def test_a_site_with_little_memory_finds_the_same(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    method, sizes = made(name, "softmax"), list[int]()
    simulation, cut_up = simulated(method, usual_participation(method), 2), Plan.cut

    def watched(self: Plan, *ids: Any) -> Any:
        groups = cut_up(self, *ids)
        if self.per_row:  # not those that are asked before there is a model
            sizes.extend(map(len, groups))
        return groups

    monkeypatch.setattr(Plan, "cut", watched)
    whole, _ = across(method, data(), tmp_path / "much", rounds=2)
    assert max(sizes) == 3
    sizes.clear()
    folders = enrol(tmp_path / "few", data())
    for folder in folders.values():
        settings = folder / "site.toml"
        settings.write_text(settings.read_text() + 'memory = "1"\n')
    cut = run_deployment(
        deployment(method, 2, terms=RoundTerms(sites=2)), transport_on(LocalGrid(app, folders))
    )
    assert set(sizes) == {1}
    for n in whole.published:
        torch.testing.assert_close(cut.published[n], whole.published[n], rtol=1e-5, atol=1e-6)
        torch.testing.assert_close(cut.published[n], simulation.published[n], rtol=1e-5, atol=1e-6)
