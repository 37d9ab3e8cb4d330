"""A Flower client that is fedpop's in every second round. In those between it imports torch and does nothing:
what they take is what Flower and torch alone take, on the same machine in the same minute.

Nothing of fedpop is imported for them: every message starts a process.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch  # noqa: F401 - what the empty rounds are to pay for
from flwr.app import Array, ArrayRecord, ConfigRecord, Context, Message, RecordDict
from flwr.clientapp import ClientApp

NOTHING = "nothing.json"
"""In a site's folder: its name, and vectors of zeros as they travel: entries, and bytes in hexadecimal."""

app = ClientApp()


@app.query()
@app.train()
@app.evaluate()
def handle(message: Message, context: Context) -> Message:
    request = json.loads(str(message.content.config_records["fedpop"]["json"]))
    if request["kind"] == "train" and request["about"]["round"] % 2:
        return _nothing(message, request["about"], Path(str(context.node_config["site"])))
    from fedpop.flower.client import app as ours

    return ours(message, context)


def _nothing(message: Message, about: dict[str, Any], folder: Path) -> Message:
    stored = json.loads((folder / NOTHING).read_text())
    answer = {word: about[word] for word in ("version", "experiment", "round", "digest")}
    answer |= {"site": stored["site"], "units": 1, "cost": {}, "named": {}}
    vectors = {name: (length, bytes.fromhex(data)) for name, (length, data) in stored["vectors"].items()}
    arrays = {
        name: Array(dtype="uint8", shape=(len(data),), stype="fedpop.identity", data=data)
        for name, (_, data) in vectors.items()
    }
    plain = json.dumps({"about": answer, "lengths": {name: n for name, (n, _) in vectors.items()}})
    content = RecordDict({"fedpop": ConfigRecord({"json": plain}), "arrays": ArrayRecord(arrays)})
    return Message(content, reply_to=message)
