"""A settings file of a small comparison, and changes to it."""

import json
from pathlib import Path

import pytest

from fedpop.comparison.config import config_from
from fedpop.errors import SettingsError

SMALL = {
    "task": {"kind": "synthetic", "b": 6, "k": 4, "d": 2, "held_out": 4, "new_clients": 2, "validation": 3},
    "run": {"rounds": 3, "seeds": 1, "participation": 3, "every": 3, "last": 2},
    "method": [
        {"name": "FedAvg", "local": {"epochs": 2, "rate": 0.005, "batch": 3}},
        {
            "name": "FedSOUL",
            "label": "ours",
            "final": {"draws": 20},
            "phi_step": {"kind": "Adam", "rate": 0.05},
        },
    ],
}


def changed(**tables):
    return json.loads(json.dumps(SMALL)) | tables


def expect_mistake(method, told):
    def read():
        config = config_from(changed(method=[method]), Path("wrong.toml"))
        return config.entries[0].build(config.task.task.model(0))

    with pytest.raises(SettingsError, match=f"^wrong.toml: .*{told}"):
        read()
    with pytest.raises(SettingsError) as caught:
        read()
    assert str(caught.value).count("wrong.toml") == 1
