"""A method comes back from the plain values that describe it, kernels and schedules included."""

import json
from typing import Any

import pytest

import fedpop as fp
from fedpop.errors import CheckpointError
from fedpop.methods import rebuild
from tests.helpers import linear_model

SETTINGS: dict[str, dict[str, Any]] = {
    "mala": {"kernel": "mala"},
    "hmc": {"kernel": fp.kernels.HMC(3)},
    "sgld": {"kernel": fp.kernels.SGLD(batch=7, step_size=0.3, offset=2.0, decay=0.4)},
    "schedule": {"local_steps": fp.chains.Steps(3, 12, 50)},
    "per client": {"local_steps": {"anna": 3, "ben": 1, "carla": 2}},
}


@pytest.mark.parametrize("name", SETTINGS)
def test_described_and_rebuilt(name: str) -> None:
    method = fp.FedSOUL(linear_model(), **SETTINGS[name])
    described = json.loads(json.dumps(method.describe()))
    again = rebuild(described, "FedSOUL", method.model)
    assert isinstance(again, fp.FedSOUL)
    assert (again.kernel, again.local_steps) == (method.kernel, method.local_steps)


def test_settings_of_another_version_are_refused_by_name() -> None:
    described = fp.FedSOUL(linear_model()).describe() | {"kernel": {"kind": "RandomWalk"}}
    with pytest.raises(CheckpointError, match="unknown setting 'RandomWalk'"):
        rebuild(described, "FedSOUL", linear_model())
