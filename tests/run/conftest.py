"""What holds for runs: trials of a step size are short, as they are not what is tested here."""

import pytest

from fedpop.methods import fedsouk


@pytest.fixture(autouse=True)
def short_trials(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fedsouk, "RATE_TRIAL_ROUNDS", 3)
