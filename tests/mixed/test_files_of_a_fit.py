"""How much of the package a reader has to know to follow one fit: files whose code runs, imports aside."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import fedpop as fp

ROOT = Path(fp.__file__).parent
MOST = 35


def files_of(call: Callable[[], object]) -> set[str]:
    """Files of the package with code that ran."""
    seen: set[str] = set()

    def look(frame: FrameType, event: str, argument: Any) -> None:
        code = frame.f_code
        if event == "call" and code.co_name != "<module>":
            seen.add(code.co_filename)

    before = sys.getprofile()
    sys.setprofile(look)
    try:
        call()
    finally:
        sys.setprofile(before)
    return {str(Path(name).relative_to(ROOT)) for name in seen if name.startswith(f"{ROOT}/")}


def test_one_fit_runs_code_of_few_files(simulated):
    frame, fit = simulated([6] * 10), fp.mixed_model
    found = files_of(lambda: fit("y ~ x + w + s + (w | g)", frame))
    assert {"mixed/gaussian.py", "run/members.py", "site/sites.py", "message/channel.py"} <= found
    assert len(found) <= MOST, sorted(found)
