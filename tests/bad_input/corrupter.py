"""Damage to files, by kind: bits, ends, other files' bytes, and JSON of another type."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from fedpop.files import write_sealed

Damage = Callable[[bytes], bytes]


def flip(share: float, bit: int) -> Damage:
    """One bit, at this share of the file's length."""

    def damage(data: bytes) -> bytes:
        out = bytearray(data)
        out[min(int(share * len(out)), len(out) - 1)] ^= 1 << bit
        return bytes(out)

    return damage


FLIPS: dict[str, Damage] = {
    f"bit {bit} at {share:.2f}": flip(share, bit)
    for bit, share in zip([0, 3, 6, 7] * 4, [i / 15 for i in range(16)], strict=True)
}
ENDS: dict[str, Damage] = {
    "empty": lambda d: b"",
    "half": lambda d: d[: len(d) // 2],
    "all but one byte": lambda d: d[:-1],
    "ten bytes": lambda d: d[:10],
    "a byte more": lambda d: d + b"\n ",
    "twice": lambda d: d + d,
    "not text": lambda d: b"\xff\xfe\x00\x01" + d,
    "latin-1": lambda d: "größe".encode("latin-1") + d,
    "zeros": lambda d: bytes(len(d)),
    "absurd shape": lambda d: (
        (n := b'{"phi":{"dtype":"F32","shape":[999999999999,9999999],"data_offsets":[0,4]}}')
        and len(n).to_bytes(8, "little") + n + b"0000"
    ),
    "absurd header": lambda d: (2**62).to_bytes(8, "little") + d[8:],
}
TYPES: dict[str, Damage] = {
    "null": lambda d: b"null",
    "a list": lambda d: b"[]",
    "an object": lambda d: b"{}",
    "a number": lambda d: b"3",
    "a text": lambda d: b'"x"',
    "a list of numbers": lambda d: b"[1, 2]",
    "deep nesting": lambda d: b"[" * 100_000 + b"]" * 100_000,
    "deep objects": lambda d: b'{"a":' * 50_000 + b"1" + b"}" * 50_000,
    "a long number": lambda d: b"1" * 5000,
    "not a number": lambda d: b'{"round": NaN}',
}
WRONG: dict[str, Any] = {
    "null": None,
    "true": True,
    "minus one": -1,
    "a fraction": 0.5,
    "huge": 10**30,
    "text": "x",
    "list": [],
    "numbers": [1, 2],
    "object": {},
    "nested": {"a": {"b": [{}]}},
}
"""Values of the wrong type, or out of range, for one place of a JSON file."""


def resealed(path: Path, change: Callable[[dict[str, Any]], Any]) -> None:
    """Change a sealed file as somebody would who can seal it again."""
    plain = json.loads(path.read_text())
    plain.pop("seal")
    change(plain)
    write_sealed(path, plain)


def content(folder: Path) -> dict[str, bytes]:
    """Every file, so that it can be seen that nothing was written."""
    return {str(p.relative_to(folder)): p.read_bytes() for p in folder.rglob("*") if p.is_file()}
