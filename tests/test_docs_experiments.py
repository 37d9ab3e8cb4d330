"""The page on experiments lists all of them, and says of each which data it needs."""

import re
from importlib import import_module
from pathlib import Path

from fedpop.data.catalogue import DATASETS
from fedpop.experiments.names import EXPERIMENTS

PAGE = (Path(__file__).parents[1] / "docs" / "experiments.md").read_text()
ROWS = dict(re.findall(r"^\| `fedpop experiment (\S+)` \|.*\| (.+?) \|$", PAGE, re.MULTILINE))


def test_every_experiment_is_on_the_page() -> None:
    assert set(ROWS) == set(EXPERIMENTS)


def test_those_that_read_images_say_which() -> None:
    for name, data in ROWS.items():
        own = import_module(f"fedpop.experiments.{name.replace('-', '_')}").EXPERIMENT
        assert (data == "drawn") == (not own.data)
        told = {word.lower().replace("-", "") for word in data.split(", ")}
        assert told <= {*DATASETS, "drawn", "grouped tables"}
