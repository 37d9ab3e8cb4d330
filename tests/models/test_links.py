"""Links: natural values for people, free ones for everything else."""

import math

import pytest
import torch

import fedpop as fp
from fedpop.errors import ModelError
from fedpop.models.links import LINKS, LinkedLayout, positive, real, unit
from fedpop.server.optimisers import natural_units

WIDE = torch.float64


@pytest.mark.parametrize("name", list(LINKS))
def test_there_and_back(name: str) -> None:
    link = LINKS[name]
    free = torch.linspace(-8, 8, 33, dtype=WIDE)
    natural = link.natural(free)
    assert bool((natural > link.low).all() & (natural < link.high).all())
    assert bool((natural.diff() > 0).all())
    torch.testing.assert_close(link.free(natural), free)


def test_the_free_scales_are_what_they_are_called() -> None:
    layout = LinkedLayout.of_parameters({"a": real(2.0), "b": positive(2.0), "c": unit([0.2, 0.5])})
    start = {n: torch.tensor(v, dtype=WIDE) for n, v in (("a", 2.0), ("b", 2.0), ("c", [0.2, 0.5]))}
    free = layout.flatten(start)
    expected = torch.tensor([2.0, math.log(2.0), math.log(0.25), 0.0], dtype=WIDE)
    torch.testing.assert_close(free, expected)
    for name, value in layout.views(free).items():
        torch.testing.assert_close(value, start[name])
    leading = layout.views(free.expand(3, 5, -1))
    assert {n: tuple(v.shape) for n, v in leading.items()} == {"a": (3, 5), "b": (3, 5), "c": (3, 5, 2)}
    assert [layout.link_of(n).free_name.format(n) for n in layout.names] == ["a", "log b", "logit c"]


@pytest.mark.parametrize(
    ("make", "start", "match"),
    [
        (positive, 0.0, r"positive\(0\).*between 0 and inf"),
        (positive, -1.0, r"positive\(-1\)"),
        (positive, [1.0, -2.0], r"positive\(-2\)"),
        (unit, 1.0, r"unit\(1\).*between 0 and 1"),
        (unit, 1.5, r"unit\(1\.5\)"),
        (real, float("nan"), r"real\(nan\).*finite"),
        (real, float("inf"), "finite"),
        (positive, float("inf"), r"positive\(inf\)"),
        (real, "often", "starts at numbers, not at 'often'"),
    ],
    ids=["zero", "negative", "one of several", "one", "above one", "nan", "inf", "positive inf", "word"],
)
def test_initial_values_outside_the_range_are_refused(make: object, start: object, match: str) -> None:
    with pytest.raises(ModelError, match=match):
        make(start)  # type: ignore[operator]


def test_the_natural_size_of_a_step() -> None:
    """One on logarithms and logits; a real number's own size; one where that is zero."""
    phi = {"a": 250.0, "b": positive(1e-3), "c": unit(0.99), "d": [3.0, 4.0]}
    model = fp.CustomModel(lambda phi, z, x, y: y, phi=phi, z={"u": 0.0})
    unit_of = natural_units(model, model.initial_phi())
    torch.testing.assert_close(unit_of, torch.tensor([250.0, 1.0, 1.0, 12.5**0.5, 12.5**0.5], dtype=WIDE))
    alone = fp.CustomModel(lambda phi, z, x, y: y, phi={"a": 0.0}, z={"u": 0.0})
    assert natural_units(alone, alone.initial_phi()).tolist() == [1.0]
