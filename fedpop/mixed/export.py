"""A fit as a NetCDF file with the groups that ArviZ knows: posterior, observed data."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from fedpop.errors import SettingsError

if TYPE_CHECKING:
    from fedpop.mixed.fit import MixedFit


def to_netcdf(fit: MixedFit, path: Path) -> Path:
    """Draws of groups' effects with theta fixed, beside the estimates that they go by."""
    try:
        import h5netcdf
        import h5py
    except ImportError as error:
        raise SettingsError("to_netcdf needs h5netcdf and h5py: pip install 'fedpop[formula]'") from error
    names, levels = fit.design.random_names, fit.levels
    population = fit.population.sample_all()
    to = fit.units.random_map.mT
    each = [(population.posterior(n).draws - population.prior_mean) * fit.units.y_scale @ to for n in levels]
    effects = np.stack([e.numpy() for e in each], axis=2)
    chains, draws = effects.shape[:2]
    with h5netcdf.File(path, "w") as file:
        file.attrs["created_by"] = "fedpop"
        file.attrs["formula"] = fit.formula
        file.attrs["family"] = fit.family.name
        file.attrs["log_likelihood"] = fit.log_likelihood
        posterior = file.create_group("posterior")
        posterior.dimensions = {
            "chain": chains,
            "draw": draws,
            fit.group: len(levels),
            "effect": len(names),
        }
        posterior.create_variable("chain", ("chain",), data=np.arange(chains))
        posterior.create_variable("draw", ("draw",), data=np.arange(draws))
        for dimension, labels in ((fit.group, levels), ("effect", names)):
            own = np.array(labels, dtype=object)
            posterior.create_variable(dimension, (dimension,), data=own, dtype=h5py.string_dtype())
        posterior.create_variable("random_effects", ("chain", "draw", fit.group, "effect"), data=effects)
        observed = file.create_group("observed_data")
        y = fit.groups.federation.train.y.numpy()
        observed.dimensions = {"row": len(y)}
        observed.create_variable("row", ("row",), data=np.arange(len(y)))
        observed.create_variable("y", ("row",), data=y)
    return path
