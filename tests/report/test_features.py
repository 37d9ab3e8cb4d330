"""The feature table: what a class says is what a live client does."""

import functools
from dataclasses import fields

import pytest
import torch

import fedpop as fp
from fedpop.errors import SettingsError
from fedpop.methods import METHODS
from fedpop.report.counted import COUNTED
from fedpop.report.features import (
    COLUMNS,
    COUNTED_DRAWS,
    by_formula,
    counted,
    feature_sheets,
    features,
    live,
    small_model,
)


@functools.cache
def alive(name: str) -> fp.Population:
    return live(METHODS[name], small_model(METHODS[name].of_classes))


@pytest.mark.parametrize("name", list(METHODS))
def test_memory_on_a_live_client_is_what_the_formula_says(name: str) -> None:
    model = small_model(METHODS[name].of_classes)
    row = features(METHODS[name], model)
    assert COUNTED[row.name] == counted(METHODS[name], model)
    assert row.to_predict == by_formula(row.memory, model.z_layout.size, model.phi_layout.size)
    # M draws, or the means and scales that they are drawn of.
    assert row.memory.startswith(("M ", "2 ")) == row.uncertainty


@pytest.mark.parametrize("name", list(METHODS))
def test_personalised_means_that_clients_predict_differently(name: str) -> None:
    population = alive(name)
    x = torch.linspace(-1, 1, 7, dtype=torch.float64).unsqueeze(0)
    means = [population.predict(i, x).mean.flatten()[0].item() for i in range(len(population))]
    assert (max(means) - min(means) > 1e-9) == METHODS[name].about.personalised


@pytest.mark.parametrize("name", list(METHODS))
def test_compression_is_there_or_refused(name: str) -> None:
    method = METHODS[name]
    if method.compressed:
        made = method(small_model(method.of_classes), compressor="qsgd")
        assert made.channel.compressors == (fp.compressors.QSGD(),)
        assert not made.channel.transparent
    else:
        with pytest.raises(SettingsError, match="does not compress"):
            method(small_model(), compressor="qsgd")


@pytest.mark.parametrize("name", list(METHODS))
def test_the_table_draws_as_often_as_it_says(name: str) -> None:
    method = alive(name).algorithm
    if any(f.name == "final" for f in fields(method)):
        assert method.footprint.final_draws == COUNTED_DRAWS


def test_a_row_for_every_method() -> None:
    table, references, note = feature_sheets()
    assert [row[0] for row in table.rows] == [m.name for m in METHODS.values()]
    assert all(len(row) == len(COLUMNS) for row in table.rows)
    assert all(reference for _, reference in references.rows)
    assert "d_phi = 21" in note
