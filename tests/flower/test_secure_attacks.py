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
from tests.helpers import generator

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


def replies(grid: LocalGrid, kind: str = "train") -> dict[str, tuple[Any, Message]]:
    found = {}
    for site, sent, reply in grid.traffic:
        request = request_from_record(sent.content)
        if request.kind == kind:
            found[site] = (request, message_from_record(reply.content))
    return found


def plain_vectors(grid: LocalGrid, name: str) -> dict[str, Tensor]:
    return {s: Channel().decode(name, m.payloads[name], 0) for s, (_, m) in replies(grid).items()}


def read_as_if_unmasked(words: bytes, form: SumForm, name: str) -> Tensor:
    start = 0
    sizes = [width * count for width, count in form.layout]
    pieces = [words[sum(sizes[:i]) : sum(sizes[: i + 1])] for i in range(len(sizes))][2:]
    for (vector, _, step, bits, size), piece in zip(form.vectors, pieces, strict=True):
        if vector == name:
            empty = torch.zeros((1, size) if step is not None else (1, size, 6), dtype=torch.int64)
            return SumWords(empty, step, torch.float64, bits).unpacked(piece).value()[0]
    raise AssertionError((name, start))


def masked_vectors(grid: LocalGrid, name: str) -> dict[str, Tensor]:
    """What a site's bytes say of it to whoever takes them for its vector."""
    out = {}
    for site, (request, message) in replies(grid).items():
        attempt = Attempt.of(request.header["secure"]["attempt"])
        found = secure.read(message.payloads["masked"].data, attempt, site)
        out[site] = read_as_if_unmasked(found.words, SumForm.of(found.about), name)
    return out


def total_vector(grid: LocalGrid, name: str) -> Tensor:
    """What the server opens."""
    every = replies(grid)
    attempt = Attempt.of(every["s0"][0].header["secure"]["attempt"])
    masked = {s: secure.read(m.payloads["masked"].data, attempt, s) for s, (_, m) in every.items()}
    answers = {s: m.payloads["unmasked"].data for s, (_, m) in replies(grid, "unmask").items()}
    words = secure.opened(attempt, masked, answers)
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
