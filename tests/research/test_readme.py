"""The README of the experiments lists all of them, and says of each which data it needs."""

import re
from pathlib import Path

from fedpop.data.catalogue import DATASETS
from research import EXPERIMENTS, experiment_named
from research.experiment import HERE

PAGE = (HERE / "README.md").read_text()
ROWS = dict(re.findall(r"^\| `python -m research (\S+)` \|.*\| (.+?) \|$", PAGE, re.MULTILINE))


def test_every_experiment_is_on_the_page() -> None:
    assert set(ROWS) == set(EXPERIMENTS)


def test_every_experiment_is_in_the_first_readme() -> None:
    listed = re.search(r"python -m research  .*?```", (HERE.parent / "README.md").read_text(), re.DOTALL)
    assert listed is not None
    assert [name for name in EXPERIMENTS if name not in listed[0]] == []


def test_those_that_read_images_say_which() -> None:
    for name, data in ROWS.items():
        assert (data == "drawn") == (not experiment_named(name).data)
        told = {word.lower().replace("-", "") for word in data.split(", ")}
        assert told <= {*DATASETS, "drawn", "grouped tables"}


def test_its_links_lead_somewhere() -> None:
    links = [link.partition("#")[0] for link in re.findall(r"\]\(([^)]+)\)", PAGE) if "://" not in link]
    assert len(links) > len(EXPERIMENTS)
    assert not [link for link in links if not Path(HERE, link).exists()]
