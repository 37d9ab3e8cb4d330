"""What leaves a site, from a record of all that was sent: neither rows nor draws of z. And what a curious
server can make of one site's messages all the same, as ``docs/deployment.md`` says."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fedpop as fp
from fedpop.errors import EstimateError
from fedpop.flower.client import app
from fedpop.flower.deployment import run_deployment
from fedpop.flower.final_questions import ASKED
from fedpop.flower.records import message_from_record, request_from_record
from fedpop.flower.remote import RoundTerms
from fedpop.flower.requests import Request
from fedpop.flower.site_state import SiteState
from fedpop.message import Channel, Message, Payload, Tensors
from fedpop.questions.spectral import Spectral
from tests.flower.local_grid import LocalGrid
from tests.flower.sites import across, deployment, enrol, transport_on
from tests.helpers import generator, seeded
from tests.methods.conformance import four, made
from tests.methods.test_conformance import holds

CPU = torch.device("cpu")
ABOUT = {"site", "experiment", "version", "protocol", "round", "digest", "units", "cost", "named", "question"}
"""All that a reply to a round or a question says beside its vectors."""
HELLO = {"site", "experiment", "version", "protocol", "units", "examples", "splits", "study"}
COSTS = {"log_likelihood", "examples", "acceptance", "clients", "divergences"}
COSTS |= {"gradient_evaluations", "head_steps", "backbone_passes"}


def opened(grid: LocalGrid) -> list[tuple[str, Request, Message]]:
    return [
        (site, request_from_record(m.content), message_from_record(r.content)) for site, m, r in grid.traffic
    ]


def plain(payload: Payload) -> Tensor:
    """A vector that was not compressed."""
    return Channel().decode("", payload, 0)


@pytest.mark.parametrize("name", ["FedSOUL", "FedAvg", "SCAFFOLD", "Ditto", "FedRep", "APFL"])
@pytest.mark.parametrize("kind", ["linear", "softmax"])
def test_neither_rows_nor_draws_leave(name: str, kind: str, tmp_path: Path) -> None:
    """No row of x, no target, no private state, nor a multiple of one, in any message of a whole run: before
    the rounds, in them, with validation scores between them, and what is asked at the end."""
    brief = {"final": fp.chains.Final(2, 5, 5)} if name == "FedSOUL" else {}
    method, held_out = made(name, kind, **brief), four(kind, seed=5)
    data = {n: fp.Client(x, y, validation=held_out[n]) for n, (x, y) in four(kind).items()}
    grid = LocalGrid(app, enrol(tmp_path, data))
    states: dict[str, list[Tensors]] = {n: [] for n in data}

    def watch(site: str, request: Any, reply: Any) -> list[Any]:
        file = tmp_path / site / "experiments" / "test" / "chain.safetensors"
        if file.exists():
            memory = SiteState.read(file)
            states[site] += [s.get(torch.tensor([0]), CPU) for s in (memory.before, memory.after)]
        return [reply]

    grid.fault = watch
    options = {"callbacks": [fp.callbacks.EarlyStop(every=2)], "afterwards": tuple(ASKED)}
    run_deployment(
        deployment(method, 4, terms=RoundTerms(sites=4), **options), transport_on(grid), tmp_path / "run"
    )
    kinds = set()
    for site, request, reply in opened(grid):
        kinds |= {request.kind, request.header.get("question")}
        secrets = [v for x, y in (four(kind)[site], held_out[site]) for v in (*x, y.double())]
        for state in states[site]:
            for secret in set(method.private) & set(state):
                secrets += [state[secret], *state[secret].reshape(-1, state[secret].shape[-1])]
        for told_of, payload in reply.payloads.items():
            if told_of == "counts":  # of chains that have mixed: zeros and ones, as some labels are
                continue
            vector = plain(payload)
            assert not any(holds(vector, secret) for secret in secrets if secret.numel() > 1)
        allowed = HELLO if request.kind == "hello" else ABOUT
        assert set(reply.header) <= allowed
        assert {n for n in reply.numbers if not n.startswith("norms.")} <= COSTS
        assert reply.named == {}
    assert kinds >= {"ask", "hello", "train", "finish", "validation score"}
    assert name != "FedSOUL" or kinds >= {"marginal likelihood", "information", "diagnostics"}
    assert any(
        method.private and set(method.private) & set(s) for model_here in states.values() for s in model_here
    ) or (not method.private)


def test_a_sites_secret_is_in_no_message(tmp_path: Path) -> None:
    data = four("softmax")
    folders = enrol(tmp_path, data)
    for k, folder in enumerate(folders.values()):
        (folder / "secret").write_text(f"{1234567890123 + k}\n")
    grid = LocalGrid(app, folders)
    run_deployment(deployment(made("FedSOUL", "softmax"), 2, terms=RoundTerms(sites=4)), transport_on(grid))
    output = json.dumps([dict(reply.header) for _, _, reply in opened(grid)])
    assert "12345678901" not in output
    assert all(b"12345678901" not in p.data for _, _, r in opened(grid) for p in r.payloads.values())


LEVELS = {'"f"': 5, '"m"': 5, "null": 1}
"""Rows of each level as a site tells of them; null: of those that are too rare."""


def test_what_the_pre_round_tells_of_columns(tmp_path: Path) -> None:
    """Sums and counts; levels of a few rows not at all."""
    text = "age,sex,dose\n" + "".join(f"{30 + i},{'f' if i % 2 else 'm'},{i}\n" for i in range(10))
    folders = {}
    for name in ("north", "south"):
        folder = tmp_path / name
        folder.mkdir()
        (folder / "rows.csv").write_text(text + "77,rare,3\n")
        (folder / "site.toml").write_text(f'name = "{name}"\ndata = "rows.csv"\n')
        (folder / "secret").write_text("1\n")
        folders[name] = folder
    grid = LocalGrid(app, folders)
    schema = {"x": ["age", "sex"], "y": "dose", "categories": ["sex"]}
    model = fp.Composition(None, nn.Linear(3, 1), fp.likelihoods.Normal(1.0))
    run_deployment(
        deployment(fp.FedAvg(model), 1, terms=RoundTerms(sites=2), schema=schema), transport_on(grid)
    )
    sums: dict[str, dict[str, list[float]]] = {}
    for site, request, reply in opened(grid):
        if site == "north" and request.kind == "ask":
            sent = {n: plain(payload).tolist() for n, payload in reply.payloads.items()}
            sums[request.header["question"]] = sent
    ages = [*range(30, 40), 77]
    mean = sum(ages) / 11  # of both sites: they have the same rows
    squares = sum((age - mean) ** 2 for age in ages)
    scales = {column: sum(powers) for column, powers in sums.pop("column scales").items()}
    assert scales == {'["age"]': 2, '["dose"]': 2}  # a one for the size, and a one for the spread
    assert sums == {
        "schema": {'["age"]': [11, sum(ages)]} | {f'["sex", {s}]': [n] for s, n in LEVELS.items()},
        "standardisation": {'["age"]': [11, pytest.approx(squares, rel=1e-12)]},
    }
    output = json.dumps([[dict(r.header), list(r.payloads)] for _, _, r in opened(grid)])
    assert "rare" not in output


# --- what a curious server can compute -------------------------------------------------------------


def linear_site(n: int, k: int = 4) -> tuple[Tensor, Tensor]:
    g = generator(3)
    x = torch.randn(n, k, generator=g)
    return x, x.sum(1) + torch.randn(n, generator=g)


def model(k: int = 4) -> fp.Composition:
    return fp.Composition(
        seeded(nn.Linear(k, 2, bias=False), 1),
        seeded(nn.Linear(2, 1, bias=False), 2),
        fp.likelihoods.Normal(0.5),
    )


def others(k: int = 4) -> dict[str, tuple[Tensor, Tensor]]:
    g = generator(4)
    return {n: (torch.randn(12, k, generator=g), torch.randn(12, generator=g)) for n in ("bea", "cem")}


def first_round(grid: LocalGrid, site: str) -> tuple[Request, Message]:
    return next((m, r) for s, m, r in opened(grid) if s == site and m.kind == "train")


def test_the_mean_of_the_draws_from_i(tmp_path: Path) -> None:
    """mu + sigma^2 I_mu, from one site's bytes; where one draw is made it is the draw itself."""
    beta_step = fp.steps.BetaStep(form="left")
    prior = fp.priors.Normal(scale=0.7, mean=0.3)
    method = fp.FedSOUL(
        model(), prior=prior, engine="sampled", local_steps=1, beta_step=beta_step, start="random"
    )
    _, grid = across(method, {"ada": linear_site(6)} | others(), tmp_path, rounds=1)
    request, reply = first_round(grid, "ada")
    d = 2
    beta = request.tensors["beta"]
    mu, sigma = beta[:d], beta[d:].exp()
    revealed = mu + sigma.square() * plain(reply.payloads["I"])[:d]
    memory = SiteState.read(tmp_path / "ada" / "experiments" / "test" / "chain.safetensors")
    z = memory.after.get(torch.tensor([0]), CPU)["z"].flatten()
    torch.testing.assert_close(revealed, z, rtol=1e-4, atol=1e-5)


def test_the_direction_of_a_single_row_from_j(tmp_path: Path) -> None:
    """J of a linear backbone is an outer product with the row: its right singular vector is the row."""
    x, y = linear_site(1)
    method = fp.FedSOUL(model(), engine="sampled", start="random")
    _, grid = across(method, {"ada": (x, y)} | others(), tmp_path, rounds=1)
    j = plain(first_round(grid, "ada")[1].payloads["J"])[:8].reshape(2, 4)
    row = torch.linalg.svd(j)[2][0]
    cosine = float((row @ x[0]).abs() / x[0].norm())
    assert cosine > 1 - 1e-5


def test_both_rows_of_two_from_the_spectral_message(tmp_path: Path) -> None:
    """S = v v' - sum y^2 x x' of two rows is y1 y2 (x1 x2' + x2 x1'): its image is spanned by both rows,
    which is why a site with fewer than ten refuses to send it."""
    x, y = linear_site(2)
    data = {"ada": (x, y)} | others()
    _, grid = across(fp.FedSOUL(model(), engine="sampled"), data, tmp_path / "allowed", rounds=1)
    asked = [(m, r) for s, m, r in opened(grid) if s == "ada" and m.kind == "ask"]
    request, reply = next((m, r) for m, r in asked if m.header["question"] == "cross products")
    s = plain(reply.payloads["cross"]).double().reshape(4, 4)
    whitener = request.tensors["asked.whitener"]
    vectors = torch.linalg.eigh(s)
    top = vectors[1][:, vectors[0].abs().argsort()[-2:]]
    span = torch.linalg.qr(torch.linalg.inv(whitener).mT @ top)[0]
    for row in x.double():
        assert float((span @ (span.mT @ row) - row).norm() / row.norm()) < 1e-3

    folders = enrol(tmp_path / "refused", data)
    settings = folders["ada"] / "site.toml"
    settings.write_text(settings.read_text().replace("spectral_rows = 2\n", ""))
    planned = deployment(fp.FedSOUL(model(), engine="sampled"), 1, terms=RoundTerms(sites=3))
    grid = LocalGrid(app, folders)
    with pytest.raises(EstimateError, match="ada: the spectral start is refused with fewer than 10 rows"):
        run_deployment(planned, transport_on(grid))
    sent = {m.header["question"] for s, m, r in opened(grid) if s == "ada" and r.payloads}
    assert sent == {"example"}  # the shape of one
    zeros = fp.FedSOUL(model(), engine="sampled", start=Spectral(minimum=10))
    run_deployment(deployment(zeros, 1, terms=RoundTerms(sites=3)), transport_on(LocalGrid(app, folders)))


def test_both_rows_of_two_from_the_moments_of_a_linear_model(tmp_path: Path) -> None:
    """F'F with a column of ones tells the mean of two rows and their spread, 2 v v', and so mean + v and
    mean - v; F'y then tells which target is whose. A site with fewer than ten rows sends none of it, and the
    run goes on with the others' moments."""
    x, y = linear_site(2)
    data = {"ada": (x, y)} | others()
    model_here = fp.Composition(None, seeded(nn.Linear(4, 1), 2), fp.likelihoods.Normal())
    _, grid = across(fp.FedSOUL(model_here), data, tmp_path / "allowed", rounds=1)

    def moments(grid: LocalGrid) -> list[Message]:
        every = [(s, m, r) for s, m, r in opened(grid) if s == "ada" and m.kind == "ask"]
        return [r for _, m, r in every if m.header["question"] == "least squares"]

    sent = plain(moments(grid)[0].payloads["moments"])
    second, cross = sent[:25].reshape(5, 5), sent[25:30]
    mean = second[4, :4] / 2
    spread = torch.linalg.eigh(second[:4, :4] - 2 * torch.outer(mean, mean))
    v = spread[1][:, -1] * (spread[0][-1] / 2).sqrt()
    rows = torch.stack((mean + v, mean - v))
    targets = torch.linalg.lstsq(torch.cat((rows, torch.ones(2, 1)), 1).mT, cross.unsqueeze(1))[0].flatten()
    order = [0, 1] if float((rows[0] - x[0]).norm()) < float((rows[1] - x[0]).norm()) else [1, 0]
    torch.testing.assert_close(rows[order], x.double(), rtol=1e-4, atol=1e-4, check_dtype=False)
    torch.testing.assert_close(targets[order], y.double(), rtol=1e-4, atol=1e-4, check_dtype=False)

    folders = enrol(tmp_path / "refused", data)
    settings = folders["ada"] / "site.toml"
    settings.write_text(settings.read_text().replace("spectral_rows = 2\n", ""))
    grid = LocalGrid(app, folders)
    found = run_deployment(
        deployment(fp.FedSOUL(model_here), 2, terms=RoundTerms(sites=3)), transport_on(grid)
    )
    assert found.history[-1]["heard"] == sorted(data)
    (refused,) = moments(grid)
    assert not refused.payloads
    assert "fewer than 10 rows" in str(refused.refused)
