"""Mixed models against references from R: agreement, coverage of new groups, why partial pooling."""

from fedpop.experiments.experiment import Experiment
from fedpop.experiments.mixed import page, run

EXPERIMENT = Experiment(
    name=run.NAME, seeds=3, data="grouped", jobs=run.jobs, sheets=page.sheets, page=page.page
)
