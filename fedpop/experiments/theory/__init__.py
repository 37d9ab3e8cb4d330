"""The paper's theorem, measured."""

from fedpop.experiments.experiment import Experiment
from fedpop.experiments.theory import page, run

EXPERIMENT = Experiment(name=run.NAME, seeds=10, jobs=run.jobs, sheets=page.sheets, page=page.page)
