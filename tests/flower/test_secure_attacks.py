"""What an attacker who has all bytes of a secure run makes of them: no more than of the totals.

The reconstructions are those of ``docs/deployment.md``: a site's posterior mean from its I, the direction
of its only row from its move, sums over its rows from its answers to questions.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import fedpop as fp
from fedpop.flower.client import app
from fedpop.flower.deployment import run_deployment
from fedpop.flower.records import message_from_record, request_from_record
from fedpop.flower.remote import RoundTerms
from fedpop.flower.secure_sums import SecureTerms
from fedpop.message import Channel, Message
from fedpop.message.summed import SumForm
from fedpop.message.words import SumWords
from fedpop.privacy import secure
from fedpop.privacy.secure import Attempt
from tests.flower.local_grid import LocalGrid
from tests.flower.secured import keyed
from tests.flower.sites import deployment, enrol, transport_on
from tests.helpers import generator, seeded

pytest.importorskip("Crypto")
SITES, SIZE, SEEDS = 5, 12, 6


def rows(seed: int, count: int = 1) -> dict[str, fp.Client]:
    g = generator(seed)
    return {f"s{i}": fp.Client(torch.randn(count, SIZE, generator=g), torch.randn(count, generator=g))
            for i in range(SITES)}  # fmt: skip


def line() -> fp.Composition:
    head = nn.Linear(SIZE, 1, bias=False)
    nn.init.zeros_(head.weight)
    return fp.Composition(None, head, fp.likelihoods.Normal(1.0))


def recorded(root: Path, method: Any, data: Any, hidden: bool) -> LocalGrid:
    """All that was sent in one round, and before it."""
    folders = enrol(root, data)
    terms = SecureTerms(keyed(folders)) if hidden else None
    grid = LocalGrid(app, folders)
    waits = RoundTerms(sites=SITES, timeout=20.0)
    run_deployment(deployment(method, 1, terms=waits, secure=terms), transport_on(grid))
    return grid


def replies(grid: LocalGrid, kind: str = "train", question: str = "") -> dict[str, tuple[Any, Message]]:
    found = {}
    for site, sent, reply in grid.traffic:
        request = request_from_record(sent.content)
        if request.kind == kind and request.header.get("question", "") == question:
            found[site] = (request, message_from_record(reply.content))
    return found


def answers(grid: LocalGrid, question: str) -> dict[str, tuple[Any, Message]]:
    """What was sent in a round, or for a question."""
    return replies(grid, "ask", question) if question else replies(grid)


def plain_vectors(grid: LocalGrid, name: str, question: str = "") -> dict[str, Tensor]:
    every = answers(grid, question)
    return {s: Channel().decode(name, m.payloads[name], 0) for s, (_, m) in every.items()}


def read_as_if_unmasked(words: bytes, form: SumForm, name: str) -> Tensor:
    start = 0
    sizes = [width * count for width, count in form.layout]
    pieces = [words[sum(sizes[:i]) : sum(sizes[: i + 1])] for i in range(len(sizes))][2:]
    for (vector, _, step, bits, size), piece in zip(form.vectors, pieces, strict=True):
        if vector == name:
            empty = torch.zeros((1, size) if step is not None else (1, size, 6), dtype=torch.int64)
            return SumWords(empty, step, torch.float64, bits).unpacked(piece).value()[0]
    raise AssertionError((name, start))


def masked_vectors(grid: LocalGrid, name: str, question: str = "") -> dict[str, Tensor]:
    """What a site's bytes say of it to whoever takes them for its vector."""
    out = {}
    for site, (request, message) in answers(grid, question).items():
        attempt = Attempt.of(request.header["secure"]["attempt"])
        found = secure.read(message.payloads["masked"].data, attempt, site)
        out[site] = read_as_if_unmasked(found.words, SumForm.of(found.about), name)
    return out


def total_vector(grid: LocalGrid, name: str, question: str = "") -> Tensor:
    """What the server opens."""
    every = answers(grid, question)
    attempt = Attempt.of(every["s0"][0].header["secure"]["attempt"])
    masked = {s: secure.read(m.payloads["masked"].data, attempt, s) for s, (_, m) in every.items()}
    opening = {s: m.payloads["unmasked"].data for s, (_, m) in replies(grid, "unmask").items()}
    words = secure.opened(attempt, masked, None if question else opening)
    return read_as_if_unmasked(words, SumForm.of(masked["s0"].about), name)


def alike(a: Tensor, b: Tensor) -> float:
    """The cosine between directions."""
    a, b = a.double().flatten(), b.double().flatten()
    return abs(float(a @ b / (a.norm() * b.norm())))


def means(data: dict[str, fp.Client]) -> dict[str, Tensor]:
    """Where sites' posteriors under the prior N(0, I) are."""
    out = {}
    for name, client in data.items():
        x, y = client.x.double(), client.y.double()
        out[name] = torch.linalg.solve(x.T @ x + torch.eye(SIZE, dtype=torch.float64), x.T @ y)
    return out


ATTACKS: dict[
    str, tuple[str, Callable[[], Any], int, Callable[[dict[str, fp.Client]], dict[str, Tensor]]]
] = {
    "row direction": (
        "dw",
        lambda: fp.FedAvg(line(), local=fp.LocalSGD(epochs=1, rate=0.1)),
        1,
        lambda data: {n: c.x[0] for n, c in data.items()},
    ),
    "posterior mean": (
        "I",
        lambda: fp.FedSOUL(
            line(), prior=fp.priors.Normal(scale=1.0), engine="sampled", start="random", local_steps=50
        ),
        20,
        means,
    ),
}


@pytest.mark.parametrize("what", list(ATTACKS))
def test_reconstructions_from_all_bytes_do_no_better_than_from_totals(what: str, tmp_path: Path) -> None:
    """Paired over sites and seeds. Of single messages in the clear the same reconstruction succeeds, and so
    it does where all other sites collude: the total less theirs."""
    name, method, count, truths = ATTACKS[what]
    plain, bytes_, totals, colluding = [], [], [], []
    for seed in range(SEEDS):
        data = rows(seed, count)
        truth = truths(data)
        open_ = plain_vectors(recorded(tmp_path / f"plain{seed}", method(), data, False), name)
        grid = recorded(tmp_path / f"secure{seed}", method(), data, True)
        masked, total = masked_vectors(grid, name), total_vector(grid, name)
        for site in data:
            size = len(truth[site])
            others = sum(v[:size].double() for other, v in open_.items() if other != site)
            plain.append(alike(open_[site][:size], truth[site]))
            bytes_.append(alike(masked[site][:size], truth[site]))
            totals.append(alike(total[:size], truth[site]))
            colluding.append(alike(total[:size] - others, truth[site]))
    apart = np.array(bytes_) - np.array(totals)
    error = apart.std(ddof=1) / len(apart) ** 0.5
    assert apart.mean() < 3 * error
    assert np.mean(totals) < 0.8
    assert np.mean(plain) > 0.9
    assert np.mean(colluding) > 0.9


# --- two rows, from what is asked before the rounds ------------------------------------------------

FEATURES = 8


def two_rows_at_s0(seed: int) -> dict[str, fp.Client]:
    g = generator(100 + seed)
    sizes = {"s0": 2} | {f"s{i}": 12 for i in range(1, SITES)}
    return {s: fp.Client(torch.randn(n, FEATURES, generator=g), torch.randn(n, generator=g))
            for s, n in sizes.items()}  # fmt: skip


def from_cross_products(v: Tensor, client: fp.Client, request: Any) -> float:
    """How much of both rows lies in the plane that their cross product spans."""
    s = v.double().reshape(FEATURES, FEATURES)
    values, vectors = torch.linalg.eigh(s / s.abs().max())
    top = vectors[:, values.abs().argsort()[-2:]]
    whitener = request.tensors["asked.whitener"].double()
    span = torch.linalg.qr(torch.linalg.inv(whitener).mT @ top)[0]
    rows = client.x.double()
    return float(((rows @ span).norm(dim=1) / rows.norm(dim=1)).mean())


def from_moments(v: Tensor, client: fp.Client, request: Any) -> float:
    """The cosine of the worse of both rows, and their targets, with what second moments say that they are."""
    k, v = FEATURES, v.double() / float(v.double().abs().max())
    second, cross = v[: (k + 1) ** 2].reshape(k + 1, k + 1), v[(k + 1) ** 2 : (k + 1) ** 2 + k + 1]
    count = second[k, k] / 2  # of two rows it is their number
    second, cross = second / count, cross / count
    mean = second[k, :k] / 2
    values, vectors = torch.linalg.eigh(second[:k, :k] - 2 * torch.outer(mean, mean))
    spread = vectors[:, -1] * (values[-1] / 2).clamp(min=0).sqrt()
    rows = torch.cat((torch.stack((mean + spread, mean - spread)), torch.ones(2, 1).double()), 1)
    y = torch.linalg.lstsq(rows.mT, cross.unsqueeze(1))[0]
    found = torch.cat((rows[:, :k], y), 1)
    truth = torch.cat((client.x.double(), client.y.double().unsqueeze(1)), 1)
    pairs = [min(alike(found[i], truth[0]), alike(found[1 - i], truth[1])) for i in (0, 1)]
    return max(pairs)


def with_a_backbone() -> fp.FedSOUL:
    body, head = seeded(nn.Linear(FEATURES, 2, bias=False), 1), seeded(nn.Linear(2, 1, bias=False), 2)
    model = fp.Composition(body, head, fp.likelihoods.Normal(0.5))
    return fp.FedSOUL(model, engine="sampled", local_steps=3)


def linear() -> fp.FedSOUL:
    return fp.FedSOUL(fp.Composition(None, seeded(nn.Linear(FEATURES, 1), 2), fp.likelihoods.Normal()))


MOMENTS: dict[str, tuple[str, str, Callable[[], Any], Callable[[Tensor, fp.Client, Any], float], float]] = {
    "two rows": ("cross products", "cross", with_a_backbone, from_cross_products, 0.8),
    "two rows and targets": ("least squares", "moments", linear, from_moments, 0.8),
}


@pytest.mark.parametrize("what", list(MOMENTS))
def test_two_rows_are_in_no_bytes_but_those_of_all_other_sites_together(what: str, tmp_path: Path) -> None:
    """The same, of the two rows of one site and what it answers before the first round."""
    question, name, method, score, enough = MOMENTS[what]
    found: dict[str, list[float]] = {n: [] for n in ("plain", "bytes", "total", "colluding")}
    for seed in range(SEEDS):
        data = two_rows_at_s0(seed)
        clear = recorded(tmp_path / f"plain{seed}", method(), data, False)
        open_, request = plain_vectors(clear, name, question), answers(clear, question)["s0"][0]
        grid = recorded(tmp_path / f"secure{seed}", method(), data, True)
        asked = answers(grid, question)["s0"][0]
        total = total_vector(grid, name, question)
        others = sum(v.double() for s, v in open_.items() if s != "s0")
        found["plain"].append(score(open_["s0"], data["s0"], request))
        found["bytes"].append(score(masked_vectors(grid, name, question)["s0"], data["s0"], asked))
        found["total"].append(score(total, data["s0"], asked))
        found["colluding"].append(score(total - others, data["s0"], asked))
    means_ = {n: float(np.mean(v)) for n, v in found.items()}
    apart = np.array(found["bytes"]) - np.array(found["total"])
    assert apart.mean() < 3 * apart.std(ddof=1) / len(apart) ** 0.5
    assert max(means_["bytes"], means_["total"]) < enough, means_
    assert min(means_["plain"], means_["colluding"]) > 0.99, means_


def test_nothing_but_masks_and_what_is_declared_in_the_clear_leaves_a_site(tmp_path: Path) -> None:
    """Moments and scales before the first round included: no number, no count of units, no name of data."""
    data = rows(0, 20)
    grid = recorded(tmp_path, fp.FedSOUL(line(), engine="sampled", local_steps=3), data, True)
    kinds = set()
    for _, sent, reply in grid.traffic:
        request, message = request_from_record(sent.content), message_from_record(reply.content)
        kinds.add(request.kind)
        if request.kind == "hello":
            continue
        assert set(message.payloads) <= {"masked", "unmasked"}
        assert message.numbers == {}
        assert message.named == {}
        assert int(message.units.sum()) == 0
        names = {"site", "experiment", "round", "digest", "question", "version", "protocol", "names"}
        assert message.header.keys() <= names
    assert kinds == {"hello", "ask", "train", "unmask", "finish"}
