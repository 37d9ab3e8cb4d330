"""The page on constants has every number in the code that changes results, and what it names is there."""

import doctest
import re
from collections import Counter
from pathlib import Path

from tests.test_gallery import loaded

PAGE = (Path(__file__).parents[1] / "docs" / "constants.md").read_text()
DOCS = loaded("constants")
FILES = sorted(str(path.relative_to(DOCS.ROOT)) for path in DOCS.ROOT.rglob("*.py"))
LISTED = [
    *((path, names) for rows in DOCS.TABLES.values() for path, known in rows.items() for names in known),
    *((path, names) for _, known in DOCS.OTHERS.values() for path, names in known.items()),
]
ROWS = [row for rows in DOCS.TABLES.values() for known in rows.values() for row in known.values()]
EACH = Counter((path, name) for path, names in LISTED for name in names.split(", "))

VAGUE = {
    *(
        "APART",
        "CLOSE",
        "ENOUGH",
        "EXACT",
        "EDGE",
        "FAR",
        "FEW",
        "FIRST",
        "FLAT",
        "LARGE",
        "LARGEST",
        "LEAST",
    ),
    *(
        "LEFT",
        "LONGEST",
        "LOOSE",
        "MANY",
        "MOST",
        "NEAR",
        "SMALL",
        "SMALLEST",
        "TOGETHER",
        "TOLERANCE",
        "WIDE",
    ),
    *("WIDER", "WORTH"),
}
"""What bounds something, and does not say what."""


def test_a_number_that_changes_results_is_on_the_page() -> None:
    missing = [f"{path}: {n}" for path in FILES for n in DOCS.numbers_in(path) if (path, n) not in EACH]
    assert not missing, (
        f"say in docs/constants.py what these decide and how that is known (TABLES), or of which kind that "
        f"changes no results they are (OTHERS): {', '.join(missing)}"
    )


def test_what_the_page_names_is_in_the_code_once() -> None:
    gone = [f"{path}: {name}" for path, name in EACH if name not in DOCS.constants(path)]
    assert not gone, "docs/constants.py names constants that are not there"
    assert {each for each, times in EACH.items() if times > 1} == set()


def test_every_constant_says_what_it_decides_and_how_that_is_known() -> None:
    assert all(decides and evidence for decides, evidence in ROWS)
    assert not [cell for row in ROWS for cell in row if "|" in cell or cell.endswith(".")]


def test_what_the_evidence_names_is_there() -> None:
    root = DOCS.ROOT.parent
    text = " ".join(
        cell for rows in DOCS.TABLES.values() for k in rows.values() for r in k.values() for cell in r
    )
    paths = re.findall(r"`((?:tests|research)/[\w/]+(?:\.py)?)`", text)
    assert len(paths) > 5
    assert all((root / path).exists() for path in paths)
    for page, anchor in re.findall(r"\]\((\w[\w-]*)\.md(#[\w-]+)?\)", text):
        titles = re.findall(r"^#+ (.+)$", (root / "docs" / f"{page}.md").read_text(), re.MULTILINE)
        slugs = {re.sub(r"[^\w -]", "", title.lower()).replace(" ", "-") for title in titles}
        assert not anchor or anchor[1:] in slugs


def test_every_area_is_a_table_with_the_values_that_the_code_has() -> None:
    made = DOCS.on_page_markdown(PAGE)
    assert "<!--" not in made
    assert "| `LARGEST_DENSE_MASS` | `20` | dimensions of z" in made
    assert "| `HMC.target_acceptance` | `0.8` |" in made
    assert "`population/saving.py`: POPULATION_FORMAT, PIECE_BYTES" in made
    assert set(re.findall(r"^<!-- constants: (\w+) -->$", PAGE, re.MULTILINE)) == {*DOCS.TABLES, "others"}


def test_the_pages_example_prints_what_it_shows() -> None:
    code = "\n".join(re.findall(r"```pycon\n(.*?)```", PAGE, re.DOTALL))
    case = doctest.DocTestParser().get_doctest(code, {}, "constants.md", None, 0)
    assert doctest.DocTestRunner().run(case).failed == 0


def test_constants_are_named_by_what_they_bound() -> None:
    names = Counter(name for path in FILES for name in DOCS.numbers_in(path))
    assert {name for name, times in names.items() if times > 1} == set()
    assert VAGUE & names.keys() == set()


def test_numbers_are_found_in_tuples_and_expressions() -> None:
    body = DOCS.ast.parse("A, B = 1, 'b'\nC = D = max(2, x)\nE = True\nF: float = G\nH.i = 3\nk = 4").body
    found = {name: DOCS.numeric(value) for name, value in DOCS.assigned(body)}
    assert found == {"A": True, "B": False, "C": True, "D": True, "E": False, "F": False, "k": True}
