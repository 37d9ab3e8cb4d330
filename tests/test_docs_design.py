"""The pages on the design name files and what is in them; both are there, in the layers that are checked."""

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.test_layers import LAYERS

ROOT = Path(__file__).parents[1]
PAGES = ("design", "glossary")


def text_of(page: str) -> str:
    return (ROOT / "docs" / f"{page}.md").read_text()


def places(page: str) -> Iterator[tuple[list[Path], list[str]]]:
    """Of each row of a table: the files that its last columns name, and the names that are in them."""
    for row in text_of(page).splitlines():
        cells = re.split(r"(?<!\\)\|", row.strip("|"))
        quoted = re.findall(r"`([^`]+)`", " ".join(cells[1:] if page == "design" else cells[-1:]))
        files = [
            q for q in quoted if re.fullmatch(r"[\w/]+(\.py|/)", q) and (page == "glossary" or "fedpop/" in q)
        ]
        if row.startswith("|") and files:
            yield (
                [ROOT / (f if page == "design" else f"fedpop/{f}") for f in files],
                [q for q in quoted if q not in files],
            )


@pytest.mark.parametrize("page", PAGES)
def test_what_the_page_names_is_there(page: str) -> None:
    found = list(places(page))
    assert len(found) > 10
    for files, names in found:
        assert all(file.exists() for file in files), files
        code = "".join(
            path.read_text() for file in files for path in (file.rglob("*.py") if file.is_dir() else [file])
        )
        for name in names:
            assert all(re.search(rf"\b{word}\b", code) for word in re.findall(r"\w+", name)), (name, files)


def test_the_packages_are_listed_in_the_order_of_their_layers() -> None:
    table = text_of("design").split("| package | what it is |")[1].split("\n\n")[0]
    rows = [re.findall(r"`(\w+)/?`", row.split("|")[1]) for row in table.splitlines() if "`" in row]
    assert rows == [list(layer) for layer in LAYERS]
