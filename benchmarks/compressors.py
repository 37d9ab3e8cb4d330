"""Encoding and decoding a million numbers, over drawing as many and copying them once."""

from __future__ import annotations

import torch
from rich.table import Table

import fedpop as fp
from benchmarks.timing import Advance, in_turns, ratio, shown
from fedpop.keys import Key
from fedpop.report.results import Record, record

NAME = "compressors"
ENTRIES, SECONDS, LEAST, TARGET = 1_000_000, 15.0, 9, 4.0
COMPRESSORS = (
    fp.compressors.Identity(),
    fp.compressors.QSGD(),
    fp.compressors.QSGD(levels=7),
    fp.compressors.QSGD(levels=1),
    fp.compressors.RandK(),
    fp.compressors.RandK(share=0.01),
    fp.compressors.Natural(),
)


def there_and_back(compressor: fp.compressors.Compressor, v: torch.Tensor) -> None:
    compressor.decode(compressor.encode(v, Key(0)))


def measure(advance: Advance) -> list[Record]:
    key = Key(0, purpose="bench")
    v = key.normal(key.server(), (ENTRIES,))[0]
    programs = {"bare": lambda: torch.rand(ENTRIES).clone()}
    programs |= {repr(c): lambda c=c: there_and_back(c, v) for c in COMPRESSORS}
    laps = in_turns(programs, seconds=SECONDS, least=LEAST, advance=advance)
    out = []
    for compressor in COMPRESSORS:
        repeats = laps[repr(compressor)]
        sizes = {"bytes": compressor.encoded_bytes(ENTRIES), "omega": compressor.omega(ENTRIES)}
        metrics = ratio(repeats, laps["bare"]) | sizes | {"target": TARGET, "repeats": len(repeats)}
        setting = {"benchmark": NAME, "entries": ENTRIES}
        cost = {"seconds": sum(lap.wall for lap in repeats) / len(repeats)}
        out.append(record("bench", setting, repr(compressor), 0, metrics, cost, {}))
    return out


def tables(records: list[Record]) -> list[Table]:
    table = Table(
        title=f"encode and decode of {ENTRIES:,} numbers over torch.rand and one copy",
        caption=f"One thread; median and quartiles of {records[0]['metrics']['repeats']} turns",
    )
    for name in ("compressor", "bits per entry", "ratio", "ratio, wall clock", "target"):
        table.add_column(name, justify="left" if name == "compressor" else "right")
    for r in records:
        m = r["metrics"]
        bits = f"{8 * m['bytes'] / ENTRIES:.2f}"
        table.add_row(r["method"], bits, shown(m, "ratio"), shown(m, "ratio_wall"), f"{m['target']:.2f}")
    return [table]
