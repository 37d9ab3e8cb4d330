"""What mixture and energy priors are for, run afresh; the committed results are held to it over ten seeds."""

import pytest
import torch

from fedpop.report.results import Results
from research.clusters import EXPERIMENT, SHOTS, TASK, differences, run_seed
from research.seeds import interval95

pytestmark = pytest.mark.slow


@pytest.fixture(autouse=True)
def one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def beats(results, name):
    """The interval of the difference to the Normal prior lies above zero, with no data and with a few."""
    for shots in SHOTS:
        found = differences(results, f"log_likelihood_{shots}", name, "Normal")
        centre, low, _ = interval95(found)
        assert centre > 0, (name, shots)
        assert low > 0, (name, shots, found)


def test_mixture_and_energy_priors_beat_the_normal_one_on_new_clients(tmp_path):
    results = Results(tmp_path)
    for seed in range(100, 104):  # seeds that nothing was chosen on
        results.add(run_seed(TASK, seed, names=("Normal", "Mixture", "Energy")))
    beats(results, "Mixture")
    beats(results, "Energy")


@pytest.mark.parametrize("name", ["Mixture", "Energy"])
def test_committed_results_say_so_too(name):
    results = Results.open(EXPERIMENT.folder)
    assert len(results.of(method=name)) == len(results.of(method="Normal")) == 10
    beats(results, name)
