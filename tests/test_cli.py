"""What people type first."""

import pytest

from fedpop.cli import main
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
    assert all(command in shown for command in ("demo", "compare", "fit", "experiment", "server", "site"))
