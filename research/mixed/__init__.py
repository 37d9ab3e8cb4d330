"""Mixed models against references from R: agreement, coverage of new groups, why partial pooling."""

from research.experiment import Experiment
from research.mixed import page, run

EXPERIMENT = Experiment(
    name=run.NAME,
    seeds=3,
    per_seed=lambda r: r["setting"] in [run.setting_of(task) for task in run.TASKS],
    data="grouped",
    jobs=run.jobs,
    sheets=page.sheets,
    page=page.page,
)
