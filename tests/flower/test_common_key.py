"""Groups at two sites: found under a key that sites have in common, told to sites and never to the server."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from fedpop.errors import DataError, SettingsError
from fedpop.flower.records import message_from_record, request_from_record
from fedpop.flower.site_folder import COMMON_KEY, common_key, read_common_key
from fedpop.keys import unit_of
from fedpop.mixed import common_key as bins
from fedpop.mixed.common_key import CommonKey
from fedpop.mixed.groups import Groups, agreed
from fedpop.mixed.study import FormulaStudy
from fedpop.mixed.summary import apart
from tests.flower.formulas import by_site, grid_of, members_on
from tests.flower.local_grid import LocalGrid

pd = pytest.importorskip("pandas", reason="mixed models need the extra 'formula'")

NAMES = [f"person {k}" for k in range(12)]


def tables(shared: bool) -> dict[str, Any]:
    """Four people at each of three sites; with ``shared`` one of the north's is in the south, too."""
    rng = np.random.default_rng(3)
    frame = pd.DataFrame({"g": np.repeat(NAMES, 6), "w": rng.normal(size=72), "y": rng.normal(size=72)})
    frames = by_site(frame, "g", 3)
    if shared:
        frames["south"] = frames["south"].assign(g=frames["south"].g.replace("person 4", "person 2"))
    return frames


def keyed(root: Path, frames: dict[str, Any], keys: dict[str, str]) -> LocalGrid:
    grid = grid_of(root, frames)
    for site, key in keys.items():
        (root / site / COMMON_KEY).write_text(f"{key}\n")
    return grid


def begun(grid: LocalGrid) -> Groups:
    """What is asked before coordinates: kinds, levels, names."""
    about = FormulaStudy.from_text("y ~ w + (1 | g)")
    groups = Groups(members_on(grid, about), about)
    agreed(groups, {}, 5)
    return groups


SAME = dict.fromkeys(("north", "south", "west"), "ab" * 32)


def test_a_group_at_two_sites_is_told_to_them_and_not_to_the_server(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    grid = keyed(tmp_path, tables(True), SAME)
    with pytest.raises(DataError, match=r"1 group\(s\) of 'g' are at more than one site") as error:
        begun(grid)
    assert "person" not in str(error.value)
    words = [record.getMessage() for record in caplog.records if record.name == "fedpop.site"]
    words = [text for text in words if "another" in text]
    assert len(words) == 2
    assert all(text.endswith("at another site, too: 'person 2'") for text in words)
    for _, _, reply in grid.traffic:
        message = message_from_record(reply.content)
        assert "person" not in f"{message.header} {list(message.payloads)}"


def test_nothing_is_found_where_nothing_is(tmp_path: Path) -> None:
    groups = begun(keyed(tmp_path, tables(False), SAME))
    assert groups.compared == len(groups) == 12


def test_without_a_key_equal_names_are_two_groups_and_it_is_said(tmp_path: Path) -> None:
    groups = begun(keyed(tmp_path, tables(True), {}))
    assert (groups.compared, len(groups)) == (0, 12)
    assert "equal names at two of them are two groups" in apart(0, 12)


def test_sites_without_the_key_are_left_out_of_it(tmp_path: Path) -> None:
    groups = begun(keyed(tmp_path, tables(True), {"south": SAME["south"], "west": SAME["west"]}))
    assert (groups.compared, len(groups)) == (8, 12)
    assert apart(8, 12).startswith("8 of 12 groups were compared")


def test_other_keys_are_noticed(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="different common keys"):
        begun(keyed(tmp_path, tables(False), SAME | {"west": "cd" * 32}))


def test_shared_bins_are_followed_up_by_further_tables(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With so few bins groups of different names share some, again and again; one that is at two sites always
    does."""
    monkeypatch.setattr(bins, "bins_for", lambda groups: 16)
    grid = keyed(tmp_path / "apart", tables(False), SAME)
    assert begun(grid).compared == 12
    asked = [request_from_record(m.content).header.get("question") for site, m, _ in grid.traffic]
    assert asked.count("names of groups by keyed bins") > 3
    with pytest.raises(DataError, match=r"1 group\(s\)"):
        begun(keyed(tmp_path / "shared", tables(True), SAME))


def test_what_leaves_says_nothing_of_a_name_without_the_key(tmp_path: Path) -> None:
    """No hash in the greeting; and tables of the same names under two keys are as any two tables."""
    grid = keyed(tmp_path, tables(False), SAME)
    begun(grid)
    hashes = {unit_of(name) for name in NAMES}
    for _, _, reply in grid.traffic:
        message = message_from_record(reply.content)
        assert "hashes" not in message.header
        assert not hashes & {int(part) for part in str(message.header).split() if part.isdigit()}
    names = torch.tensor(sorted(hashes))
    one, other = (CommonKey(bytes([k]) * 32).addresses(names, 0, 2**20) for k in (1, 2))
    assert not bool((one == other).any())
    assert len(set(one.tolist())) == len(names)


def test_a_key_is_made_once_and_taken_by_others(tmp_path: Path) -> None:
    lines = list[str]()
    for name in ("north", "south"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "site.toml").write_text(f'name = "{name}"\ndata = "x.csv"\n')
    north, south = tmp_path / "north", tmp_path / "south"
    common_key(north, False, None, lines.append)
    assert "no common key" in lines.pop()
    common_key(north, True, None, lines.append)
    common_key(south, False, north / COMMON_KEY, lines.append)
    assert len(read_common_key(north)) == 32
    assert read_common_key(north) == read_common_key(south)
    assert read_common_key(north).hex() not in "".join(lines)
    said = [line.split()[-1] for line in lines if "fingerprint" in line and str(COMMON_KEY) in line]
    assert len(set(said)) == 1
    assert (north / COMMON_KEY).stat().st_mode & 0o777 == 0o600
    with pytest.raises(SettingsError, match="there already"):
        common_key(north, True, None, lines.append)
    (tmp_path / "short").write_text("abc\n")
    (south / COMMON_KEY).unlink()
    with pytest.raises(SettingsError, match="holds no common key"):
        common_key(south, False, tmp_path / "short", lines.append)
