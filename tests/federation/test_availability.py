"""Recorded availability: what is read, what it weighs, and what is wrong with a file."""

import json

import pytest
import torch

import fedpop as fp
from fedpop.errors import CheckpointError, DataError, SettingsError
from fedpop.federation.participation import Roster
from fedpop.keys import Key
from tests.helpers import linear_model, ragged

NAMES = ["anna", "ben", "cara"]
TEXT = """round,client
3,anna
3,ben
5,cara
6,ben
6,cara
6,anna
"""


def written(tmp_path, text: str):
    path = tmp_path / "trace.csv"
    path.write_text(text)
    return path


def who(trace: fp.participation.Availability, rounds: int = 4) -> list[list[int]]:
    roster = Roster.numbered(trace.clients)
    return [trace.draw(roster, Key(0, round=k)).ids.tolist() for k in range(rounds)]


def test_rounds_are_read_in_order_with_gaps(tmp_path):
    trace = fp.participation.Availability.read(written(tmp_path, TEXT), NAMES)
    assert who(trace) == [[0, 1], [], [2], [0, 1, 2]]
    assert who(trace, 9)[4:] == [[0, 1], [], [2], [0, 1, 2], [0, 1]]  # from the start again
    assert repr(trace) == "Availability(4 rounds, 3 clients, weights='inverse')"


def test_other_ways_to_write_it(tmp_path):
    text = "\ufeffClient , time, Available, ROUND\nben,x,1,-1\nanna,y,no,-1\n\ncara,z,TRUE,0\nanna,z,1,1\n"
    assert who(fp.participation.Availability.read(written(tmp_path, text), NAMES), 3) == [[1], [2], [0]]
    numbered = "round,client\n0,7\n0,3\n"
    assert who(fp.participation.Availability.read(written(tmp_path, numbered), [3, 7]), 1) == [[0, 1]]
    federation = fp.Federation.of(dict(zip(NAMES, ragged((1, 2, 3)), strict=True)))
    assert who(fp.participation.Availability.read(written(tmp_path, TEXT), federation.names)) == [
        [0, 1],
        [],
        [2],
        [0, 1, 2],
    ]


def test_a_pass_through_the_trace_averages_to_the_sum_over_all_clients(tmp_path):
    trace = fp.participation.Availability.read(written(tmp_path, TEXT), NAMES)
    values, total = torch.tensor([1.0, 10.0, 100.0]), 0.0
    for k in range(4):
        active = trace.draw(Roster.numbered(3), Key(0, round=k))
        assert not active.ratio
        total += float((active.weights * values[active.ids]).sum())
    assert total / 4 == pytest.approx(111.0, rel=1e-6)


def test_b_over_a_weights_for_clients_available_equally_often():
    active = fp.participation.Availability([[0, 1], [], [2]], 3, weights="ratio").draw(
        Roster.numbered(3), Key(0)
    )
    assert active.ratio
    assert active.weights.tolist() == [1.0, 1.0]
    with pytest.raises(SettingsError, match="biased"):
        fp.participation.Availability([[0, 1], [1], [2]], 3, weights="ratio")


def test_a_run_follows_its_trace(tmp_path):
    clients = dict(zip(NAMES, ragged((3, 4, 5)), strict=True))
    trace = fp.participation.Availability.read(written(tmp_path, TEXT), clients)
    method = fp.FedSOUL(linear_model())
    population = method.fit(clients, rounds=6, participation=trace, out=tmp_path / "run")
    assert [line["active"] for line in population.history] == [2, 0, 1, 3, 2, 0]
    config = json.loads((tmp_path / "run" / "config.json").read_text())
    assert config["participation"]["kind"] == "Availability"
    other = fp.participation.Availability([[0, 1], [], [2], [0, 1]], 3)
    with pytest.raises(CheckpointError, match="participation"):
        method.fit(clients, rounds=6, participation=other, out=tmp_path / "run", resume=True)


WRONG = {
    "empty": ("", "the file is empty"),
    "no rows": ("round,client\n", "no rows"),
    "columns": ("time,site\n1,anna\n", "begins with a line 'round,client.*found time, site"),
    "unknown client": (TEXT + "6,dora\n", "line 8: no client 'dora' in this federation of 3"),
    "round": (TEXT + "six,anna\n", "line 8: round 'six' is not a whole number"),
    "fraction": (TEXT + "6.5,anna\n", "line 8: round '6.5' is not a whole number"),
    "too few values": (TEXT + "7\n", "line 8: 1 values where 2"),
    "too many values": (TEXT + "7,anna,1\n", "line 8: 3 values where 2"),
    "available": ("round,client,available\n1,anna,perhaps\n", "line 2: available is 1 or 0, not 'perhaps'"),
    "twice": (TEXT + "6,ben\n", "line 8: client 'ben' is listed twice in round 6"),
    "far apart": (TEXT + "1700000000,ben\n", "number them one after the other"),
    "nobody": ("round,client,available\n1,anna,0\n", "nobody is ever available"),
    "never there": ("round,client\n1,anna\n1,cara\n", "1 of 3 clients are never available.*position 1"),
}


@pytest.mark.parametrize("case", WRONG)
def test_what_is_wrong_with_a_file_is_said(tmp_path, case):
    text, message = WRONG[case]
    with pytest.raises(DataError, match=message):
        fp.participation.Availability.read(written(tmp_path, text), NAMES)


def test_a_missing_file(tmp_path):
    with pytest.raises(DataError, match=r"cannot read .*nowhere\.csv"):
        fp.participation.Availability.read(tmp_path / "nowhere.csv", NAMES)


def test_a_trace_of_another_federation():
    with pytest.raises(SettingsError, match="of 2 clients, the federation has 4"):
        fp.FedSOUL(linear_model()).fit(
            ragged(), rounds=1, participation=fp.participation.Availability([[0, 1]], 2)
        )
    with pytest.raises(DataError, match="by their positions"):
        fp.participation.Availability([[0, 4]], 2)
    with pytest.raises(SettingsError, match="weights must be one of"):
        fp.participation.Availability([[0]], 1, weights="equal")
