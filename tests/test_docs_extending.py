"""The skeletons of ``docs/extending.md`` run as printed, and so do the tests printed beside them."""

import re
from pathlib import Path
from typing import Any

import pytest

PAGE = Path(__file__).parents[1] / "docs" / "extending.md"


def sections() -> dict[str, str]:
    """The code of each section, from its marker to the next."""
    parts = re.split(r"<!-- (\w+) -->", PAGE.read_text())
    return {
        name: "\n".join(re.findall(r"```python\n(.*?)```", text, re.DOTALL))
        for name, text in zip(parts[1::2], parts[2::2], strict=True)
    }


def test_the_page_has_its_skeletons() -> None:
    assert list(sections()) == ["kernel", "prior", "method", "question", "compressor"]


@pytest.mark.parametrize("name", ["kernel", "prior", "method", "question", "compressor"])
def test_a_skeleton_passes_its_own_tests(name: str) -> None:
    # dataclasses look their module up by name, so the code runs under this one's.
    namespace: dict[str, Any] = {"__name__": __name__}
    exec(compile(sections()[name], f"{PAGE.name}:{name}", "exec"), namespace)
    tests = [value for key, value in namespace.items() if key.startswith("test_")]
    assert tests
    for test in tests:
        test()
