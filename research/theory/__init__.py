"""The paper's theorem, measured."""

from research.experiment import Experiment
from research.theory import page, run

EXPERIMENT = Experiment(name=run.NAME, seeds=10, jobs=run.jobs, sheets=page.sheets, page=page.page)
