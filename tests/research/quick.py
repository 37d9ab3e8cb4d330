"""What keeps tests of image experiments short: FedSOUL's final pass with few draws."""

from dataclasses import replace
from typing import Any

import pytest

from fedpop.client.final import Final
from research.images import Build

FEW = Final(chains=2, burn_in=5, draws=5)


def shorten(patch: pytest.MonkeyPatch, methods: dict[str, Build]) -> None:
    """Methods with chains get a final pass of few draws."""
    for name, build in list(methods.items()):
        if name.startswith("FedSOUL"):

            def short(model: Any, build: Any = build) -> Any:
                return replace(build(model), final=FEW)

            patch.setitem(methods, name, short)
