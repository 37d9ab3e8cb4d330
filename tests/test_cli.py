"""What people type first, and which pages there are."""

from importlib import import_module
from pathlib import Path
from pkgutil import iter_modules

import pytest

from fedpop import comparison
from fedpop.cli import REPORTS, main
from fedpop.report.results import Results, record
from fedpop.version import __version__


@pytest.mark.parametrize("typed", [["version"], ["--version"], ["-V"]])
def test_the_version(typed: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    main(typed)
    assert capsys.readouterr().out == f"fedpop {__version__}\n"


def test_nothing_at_all_shows_the_commands(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        main([])
    assert end.value.code == 0
    assert "usage: fedpop" in (shown := capsys.readouterr().out)
    assert all(command in shown for command in ("demo", "compare", "fit", "tune", "server", "site"))


def test_every_report_is_listed() -> None:
    names = ["fedpop.comparison", *(f"fedpop.comparison.{m.name}" for m in iter_modules(comparison.__path__))]
    own = {n: vars(import_module(n)).get("REPORT") for n in names}
    imported = {n for n, r in own.items() if any(r is own[o] for o in names if n.startswith(f"{o}."))}
    assert {r.name: n for n, r in own.items() if r is not None and n not in imported} == REPORTS


def test_records_of_an_experiment_have_no_report_here(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    Results.open(tmp_path).add([record("bench", {}, "x", 0, {}, {}, {})])
    with pytest.raises(SystemExit):
        main(["report", str(tmp_path)])
    told = capsys.readouterr().err
    assert "holds records of bench; there are reports of compare, demo, tune" in told
    assert "python -m research report FOLDER" in told
