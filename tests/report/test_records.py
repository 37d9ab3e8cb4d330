"""The report of a results folder: what is shown, what is written, and which version made the numbers."""

import pytest

from fedpop.report.html import Page, Section, Sheet
from fedpop.report.records import Report
from fedpop.report.results import Results, made_by, record
from fedpop.version import __version__

SHEET = Sheet(("method", "angle"), [("FedSOUL", "0.1"), ("FedAvg & co", "0.9")])
REPORT = Report(
    name="small",
    sheets=lambda results: {"First": SHEET, "Second": SHEET},
    page=lambda results: Page("A title", f"{len(results.records)} records", [Section("One", sheet=SHEET)]),
)
OLD = "0.0.1"


@pytest.fixture
def results(tmp_path):
    found = Results(tmp_path)
    found.add([record("small", {}, "FedSOUL", 0, {"angle": 0.1}, {}, {})])
    return found


def test_all_sheets_are_shown_and_written(results, capsys):
    path = REPORT.tell(results)
    told = capsys.readouterr().out
    assert told.index("First") < told.index("Second") < told.index(str(path))
    text = (results.folder / "results.md").read_text()
    assert text.count("| FedSOUL | 0.1 |") == 2
    page = path.read_text()
    assert "A title" in page
    assert "1 records" in page
    assert "FedAvg &amp; co" in page


def test_a_report_may_say_it_in_its_own_words(results, capsys):
    own = Report(
        name="small",
        sheets=REPORT.sheets,
        page=REPORT.page,
        text=lambda results: "words\n",
        show=lambda results, console: console.print("the first alone"),
    )
    own.tell(results)
    told = capsys.readouterr().out
    assert "the first alone" in told
    assert "Second" not in told
    assert (results.folder / "results.md").read_text().startswith("words\n\nMade by")


def test_pages_say_which_version_made_the_numbers(results):
    page = REPORT.write(results).read_text()
    assert f"Made by fedpop {__version__}." in page
    assert (results.folder / "results.md").read_text().endswith(f"\nMade by fedpop {__version__}.\n")


def test_numbers_of_another_version_are_said_to_be(results):
    results.records[0]["version"] = OLD
    page = REPORT.write(results).read_text()
    told = f"Made by fedpop {OLD}. The present version is {__version__}; "
    told += "numbers of another one are to be made again."
    assert told in page
    assert (results.folder / "results.md").read_text().endswith(f"\n{told}\n")
    both = made_by([{"version": OLD}, {"version": __version__}])
    assert both.startswith(f"Made by fedpop {OLD} and {__version__}. The present version is {__version__};")
