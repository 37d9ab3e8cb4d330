"""A Flower client that imports torch and does nothing: what a round costs that Flower and torch alone cost.

It answers fedpop's letters for FedAvg with zeros, without importing fedpop.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from flwr.app import Array, ArrayRecord, ConfigRecord, Context, Message, RecordDict
from flwr.clientapp import ClientApp

app = ClientApp()


@app.query()
@app.train()
@app.evaluate()
def handle(message: Message, context: Context) -> Message:
    told = json.loads(str(message.content.config_records["fedpop"]["json"]))
    about, arrays = told["about"], {}
    site = Path(str(context.node_config["site"])).name.removeprefix("site-")
    answer: dict[str, Any] = {"version": about["version"], "experiment": about["experiment"], "site": site}
    if told["kind"] == "hello":
        answer |= {"units": 1, "examples": 20, "splits": ["train"], "method": about["method_digest"]}
    else:
        answer |= {"units": 1, "cost": {}, "named": {}}
    if told["kind"] == "train":
        answer |= {"round": about["round"], "digest": about["digest"]}
        size = message.content.array_records["arrays"]["w"].shape[0]
        arrays = {"dw": torch.zeros(size), "n": torch.ones(1)}
    lengths = {name: len(vector) for name, vector in arrays.items()}
    record = {
        name: Array(dtype="float32", shape=(len(v),), stype="fedpop.float32", data=v.numpy().tobytes())
        for name, v in arrays.items()
    }
    plain = json.dumps({"about": answer, "lengths": lengths})
    content = RecordDict({"fedpop": ConfigRecord({"json": plain}), "arrays": ArrayRecord(record)})
    return Message(content, reply_to=message)
