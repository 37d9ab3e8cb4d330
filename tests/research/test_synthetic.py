"""The synthetic experiment on a small task: what its records have beside the demo's, its table and page."""

import pytest
import torch

from fedpop.data.synthetic import SyntheticTask
from fedpop.report.results import Results
from research import synthetic
from research.__main__ import main

TASK = SyntheticTask(b=40, d=2, k=6, held_out=10)


@pytest.fixture(scope="module")
def outcomes():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield synthetic.run_task(TASK, 0, ("FedSOUL", "FedRep-spectral", "FedAvg"))
    torch.set_num_threads(before)


def test_of_fedsoul_it_is_told_where_it_ended_and_what_theta_adds(outcomes):
    by_name = {o.record["method"]: o.record["metrics"] for o in outcomes}
    assert by_name["FedSOUL"]["local_optimum"] == 0
    # Intervals that do not take theta for granted are wider.
    assert by_name["FedSOUL"]["coverage90"] < by_name["FedSOUL"]["coverage90_theta"] < 1
    assert not {"local_optimum", "coverage90_theta"} & (by_name["FedAvg"].keys() | by_name["Exact"].keys())


def test_the_experiments_report_and_table(tmp_path, outcomes, capsys):
    Results(tmp_path).add([o.record for o in outcomes])
    main(["report", str(tmp_path)])
    assert "FedSOUL" in capsys.readouterr().out
    assert "| FedSOUL |" in (tmp_path / "results.md").read_text()
    assert (tmp_path / "report.html").read_text().count("<svg") == 2
