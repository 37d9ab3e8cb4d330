"""The ClientApp of Flower's stock node: a request in, a reply out, each in a new process."""

from __future__ import annotations

from pathlib import Path

from flwr.app import Context
from flwr.app import Message as FlowerMessage
from flwr.clientapp import ClientApp

from fedpop.errors import FedpopError, PayloadError
from fedpop.flower.logs import log_to
from fedpop.flower.records import message_to_record, request_from_record
from fedpop.flower.requests import refusal
from fedpop.flower.site import open_site
from fedpop.message import Message
from fedpop.site.refusal import Code

app = ClientApp()


@app.query()
@app.train()
@app.evaluate()
def handle(message: FlowerMessage, context: Context) -> FlowerMessage:
    """What the node's site answers; its folder is in the node's configuration, ``site="..."``."""
    return FlowerMessage(message_to_record(_reply(message, context)), reply_to=message)


def _reply(message: FlowerMessage, context: Context) -> Message:
    try:
        request = request_from_record(message.content)
    except PayloadError as error:
        return refusal(str(error), Code.UNREADABLE)
    try:
        site = open_site(_folder(context))
    except FedpopError as error:
        return refusal(f"the site's folder cannot be used ({type(error).__name__})")
    try:
        log_to(site.folder / "site.log")
    except OSError:
        return refusal("the site cannot write its log", Code.DISK)
    return site.answer(request)


def _folder(context: Context) -> str:
    """The folder of this node's site; in a simulation of Flower's, of the one that its number stands for."""
    folder = str(context.node_config.get("site", ""))
    every = str(context.run_config.get("sites", ""))
    if folder or not every or "partition-id" not in context.node_config:
        return folder
    folders = sorted(path.parent for path in Path(every).glob("*/site.toml"))
    number = int(context.node_config["partition-id"])
    return str(folders[number]) if number < len(folders) else ""
