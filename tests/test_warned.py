"""Warnings: at the user's own line where there is one, in one line where a command was typed."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn

import fedpop as fp
from fedpop.cli import main
from fedpop.errors import ConvergenceWarning, FedpopWarning, plain_warnings


def clients() -> list[tuple[torch.Tensor, torch.Tensor]]:
    x = torch.linspace(-1, 1, 4).unsqueeze(1)
    return [(x, (k + 1) * x[:, 0]) for k in range(3)]


def model() -> fp.Composition:
    return fp.Composition(None, nn.Linear(1, 1), fp.likelihoods.Normal(0.5))


FITS: dict[str, Callable[[], object]] = {
    "method.fit": lambda: fp.FedSOUL(model()).fit(clients(), rounds=1),
    "fp.fit": lambda: fp.fit(fp.FedSOUL(model()), clients(), rounds=1),
    "check of data": lambda: fp.PerFedAvg(model()).fit([(x[:1], y[:1]) for x, y in clients()], rounds=1),
}


@pytest.mark.parametrize("name", FITS)
def test_a_warning_points_at_the_line_that_led_to_it(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fedpop.run.simulate.advice", lambda run: "ended too soon")
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        FITS[name]()
    ours = [w for w in caught if issubclass(w.category, FedpopWarning)]
    assert ours
    assert all((w.category is ConvergenceWarning) == ("ended too soon" in str(w.message)) for w in ours)
    assert all(Path(w.filename) == Path(__file__) for w in ours)


def test_commands_tell_it_in_one_line() -> None:
    before = warnings.formatwarning
    with plain_warnings():
        assert warnings.formatwarning("read this", FedpopWarning, "a.py", 3) == "fedpop: warning: read this\n"
        other = warnings.formatwarning("not ours", DeprecationWarning, "a.py", 3)
    assert other == before("not ours", DeprecationWarning, "a.py", 3)
    assert warnings.formatwarning is before


def test_main_does(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = []
    monkeypatch.setattr("fedpop.cli.app.cli", lambda **_: seen.append(warnings.formatwarning))
    main(["methods"])
    assert seen[0] is not warnings.formatwarning
