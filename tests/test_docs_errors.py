"""The page "when it says no" is made from the code, holds every class, and its examples are true."""

import doctest
import re
from pathlib import Path

import pytest

from fedpop import errors
from tests.test_gallery import loaded

PAGE = (Path(__file__).parents[1] / "docs" / "when-it-says-no.md").read_text()
SAYS = loaded("says_no")


@pytest.fixture(scope="module")
def said():
    return SAYS.everything()


def test_every_class_of_errors_has_a_first_remedy_and_is_somewhere_raised(said):
    public = {n for n, c in vars(errors).items() if isinstance(c, type) and issubclass(c, errors.FedpopError)}
    assert set(SAYS.FIRST) == public - {"FedpopError"}
    assert {s.kind for s in said} == set(SAYS.FIRST)


def test_what_is_raised_is_on_the_page_with_its_placeholders_named(said):
    """Two messages as their authors wrote them, and none that is nothing but placeholders."""
    words = {s.words: s for s in said}
    one = words["‹where›: x has ‹inputs› rows but y has ‹shape›"]
    assert (one.kind, one.remedy) == ("DataError", "They must be of equal length")
    assert any(s.remedy == "Use resume=True to go on with it, or another output folder" for s in said)
    assert all(s.remedy for s in said)
    assert not [s.words for s in said if "‹...›" in s.words]
    assert len(said) > 500


def test_an_error_raised_anywhere_in_the_package_is_found():
    import ast

    tree = ast.parse("def f(x):\n    raise ModelError(f'{len(x)} heads; use one')")
    assert list(SAYS.raised(tree, {})) == [("ModelError", "‹number of x› heads; use one")]


def test_markup_in_messages_is_text_on_the_page():
    page = SAYS.on_page_markdown(PAGE)
    assert "<!--" not in page
    assert page.count("<tr><td>") > 500
    body = re.sub(r"</?(table|thead|tbody|tr|th|td|var)>", "", page.split("## Data of clients")[1])
    assert "<" not in body


def test_the_pages_examples_are_what_is_said():
    code = "\n".join(re.findall(r"```pycon\n(.*?)```", PAGE, re.DOTALL))
    case = doctest.DocTestParser().get_doctest(code, {}, "when-it-says-no.md", None, 0)
    runner = doctest.DocTestRunner(optionflags=doctest.ELLIPSIS)
    assert runner.run(case).attempted > 3
    assert runner.summarize().failed == 0
