"""The gallery's examples run, print what the page shows, and leave what their pictures are drawn from."""

import importlib.util
import re
import sys
from pathlib import Path

import pytest

from tests.test_readme import shape

ROOT = Path(__file__).parents[1]


def loaded(name: str):
    """A file of docs/, which is no package."""
    spec = importlib.util.spec_from_file_location(f"docs_{name}", ROOT / "docs" / f"{name}.py")
    module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


PICTURES = loaded("pictures")


@pytest.mark.parametrize("name", PICTURES.GALLERY)
def test_an_example_prints_what_the_page_shows_and_can_be_drawn(name):
    names, printed = PICTURES.example(name)
    assert shape(printed) == shape((ROOT / "docs" / "pictures" / f"{name}.txt").read_text())
    assert PICTURES.GALLERY[name](names).startswith("<svg")


def test_every_example_is_in_the_gallery_and_has_a_picture():
    files = {path.stem for path in (ROOT / "examples" / "gallery").glob("*.py")}
    page = (ROOT / "docs" / "gallery.md").read_text()
    assert files == set(PICTURES.GALLERY) == set(re.findall("<!-- example: (.+) -->", page))
    assert len(files) == 5


def test_pictures_on_pages_are_those_that_the_script_draws():
    drawn = {f"{name}.svg" for name in (*PICTURES.GALLERY, *PICTURES.PAGES)}
    assert {path.name for path in PICTURES.OUT.glob("*.svg")} == drawn
    used = set()
    for page in (ROOT / "docs").rglob("*.md"):
        used |= set(re.findall(r"pictures/(\w+\.svg)", page.read_text()))
    assert used | {f"{name}.svg" for name in PICTURES.GALLERY} == drawn


def test_the_examples_say_what_they_promise():
    """The numbers behind two captions: sharing helps, and the guard names the right client."""
    names, _ = PICTURES.example("shrinkage")
    assert names["error"]["shared"] < names["error"]["alone"]
    _, printed = PICTURES.example("culprit")
    assert "left out: site-07" in printed
