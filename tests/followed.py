"""How much of the package a reader has to know to follow one call: files whose code runs, imports aside."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any, TypeVar

import fedpop as fp

R = TypeVar("R")
ROOT = Path(fp.__file__).parent


def files_of(call: Callable[[], R]) -> tuple[set[str], R]:
    """Files of the package with code that ran, and what the call returned."""
    seen: set[str] = set()

    def look(frame: FrameType, event: str, argument: Any) -> None:
        code = frame.f_code
        if event == "call" and code.co_name != "<module>":
            seen.add(code.co_filename)

    before = sys.getprofile()
    sys.setprofile(look)
    try:
        found = call()
    finally:
        sys.setprofile(before)
    return {str(Path(name).relative_to(ROOT)) for name in seen if name.startswith(f"{ROOT}/")}, found
