"""The example of docs/data.md runs as printed, and the tables name what there is."""

import re
from pathlib import Path

import pytest

import fedpop as fp
from fedpop.data.catalogue import DATASETS
from fedpop.models.networks import NETWORKS
from tests.data.files import mnist

PAGE = (Path(__file__).parents[1] / "docs" / "data.md").read_text()


def test_the_example_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("FEDPOP_DATA", str(mnist(tmp_path)))
    (code,) = re.findall(r"<!-- example -->\n```python\n(.*?)```", PAGE, re.DOTALL)
    exec(compile(code, "data.md", "exec"), {})
    assert "accuracy" in capsys.readouterr().out


def test_every_set_network_and_scheme_is_on_the_page() -> None:
    assert all(f"`{name}`" in PAGE for name in (*DATASETS, *NETWORKS))
    schemes = [n for n in fp.data.__all__ if isinstance(getattr(fp.data, n), type)]
    schemes = [n for n in schemes if issubclass(getattr(fp.data, n), fp.data.Scheme) and n != "Scheme"]
    assert len(schemes) == 5
    assert all(f"`fp.data.{name}(" in PAGE for name in schemes)
