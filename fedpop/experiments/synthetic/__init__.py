"""The paper's synthetic settings over seeds."""

from fedpop.experiments.experiment import Experiment
from fedpop.experiments.synthetic import page, run

EXPERIMENT = Experiment(name=run.NAME, seeds=10, jobs=run.jobs, sheets=page.sheets, page=page.page)
