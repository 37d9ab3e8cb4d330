"""Models as plain data, so that a population can be read back without pickle.

Only torch's own layers are rebuilt, from the arguments of their constructors; the shape of anything
else has to be given by the user again.
"""

from __future__ import annotations

import inspect
import itertools
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from torch import nn

from fedpop.entries import called, entry_named
from fedpop.errors import CheckpointError, SettingsError
from fedpop.federation.inputs import Example
from fedpop.models import likelihoods
from fedpop.models.base import Model
from fedpop.models.composition import Composition
from fedpop.models.custom import CustomModel
from fedpop.models.image_layers import CropFlip, Standardise
from fedpop.models.likelihoods import Likelihood
from fedpop.models.modules import KeyedDropout, blank
from fedpop.models.split import Split
from fedpop.settings import class_of, describe, name_of, ours

OURS: dict[str, type[nn.Module]] = {"CropFlip": CropFlip, "Standardise": Standardise}
"""Layers of fedpop's own that a file can hold beside torch's."""
AGAIN = "given again"
"""Of a model that is not made of torch's own layers."""
LARGEST_MODEL = 2**30
"""Parameters of any model."""
MOST_PARAMETERS = 2**24
"""That a file may ask for beyond the values it holds: a head's, where the prior's mean is given."""
LARGEST_ARGUMENT, MOST_LAYERS = 2**26, 1000
"""Numbers that a layer in a file may be made of, and layers that a file may ask for: each takes time."""


@describe.register
def _(value: Model) -> str:
    return repr(value)


@describe.register
def _(value: nn.Module) -> dict[str, Any]:
    return {"kind": "Module", "spec": module_spec(value), "shown": repr(value)}


def described_module(plain: dict[str, Any]) -> nn.Module:
    """A network among the settings (an energy's): its values are in theta."""
    if plain["spec"] is None:
        raise CheckpointError(
            "this prior's network is not made of torch's own layers only, so it cannot be rebuilt from the "
            "file; give it again: fedpop.load(path, prior=...)"
        )
    return modules_from([plain["spec"]], 0)[0]


def model_spec(model: Model) -> dict[str, Any] | None:
    """A description from which the model can be built again, or None when that is not possible."""
    likelihood = _described_likelihood(model)
    if isinstance(model, CustomModel):
        return {"kind": "CustomModel", "likelihood": likelihood} | _parameters(model)
    parts = [module_spec(m) for m in model.modules()]
    if any(part is None for part in parts):
        return None
    dtype = str(model.initial_phi().dtype).removeprefix("torch.")
    common = {"likelihood": likelihood, "modules": parts, "dtype": dtype}
    if isinstance(model, Composition):
        return {"kind": "Composition", "precision": model.precision} | common
    if isinstance(model, Split):
        return {"kind": "Split", "personal": model.personal, "precision": model.precision} | common
    return None


def _described_likelihood(model: Model) -> dict[str, Any]:
    family = type(model.likelihood)
    return {"name": family.name if ours(family) else name_of(family)} | _settings(model.likelihood)


def saved_spec(model: Model) -> dict[str, Any]:
    """The same, and of a model that cannot be built again enough to know it by."""
    shown = [" ".join(repr(m).split()) for m in model.modules()]
    again = {"kind": AGAIN, "likelihood": _described_likelihood(model), "shown": shown}
    return model_spec(model) or again


def _parameters(model: CustomModel) -> dict[str, Any]:
    """Names, shapes and links: all of a function's model that a file can hold."""
    return {
        part: [[n, list(s), k] for n, s, k in zip(layout.names, layout.shapes, layout.links, strict=True)]
        for part, layout in (("phi", model.phi_layout), ("z", model.z_layout))
    }


def require_same(spec: dict[str, Any] | None, model: Model) -> None:
    """Raise unless a model given anew has the parameters of the saved one."""
    mine = saved_spec(model)
    if spec is None:
        return
    if spec["kind"] == "CustomModel" and not isinstance(model, CustomModel):
        raise CheckpointError(f"this population was learned with a CustomModel, not with {model!r}")
    if spec["likelihood"] != mine["likelihood"]:
        raise CheckpointError(
            f"the model's likelihood is not the saved one: {_likelihood(mine)} now, {_likelihood(spec)} then"
        )
    for part in ("shown", "modules", "personal"):
        if part in spec and part in mine and spec[part] != mine[part]:
            raise CheckpointError(
                f"the model is not the saved one: {_brief(mine[part])} now, {_brief(spec[part])} then"
            )
    if not isinstance(model, CustomModel) or spec["kind"] != "CustomModel":
        return
    for part, its in _parameters(model).items():
        if its != spec[part]:
            raise CheckpointError(
                f"the model's {part} is not the saved one: {_shown(its)} now, {_shown(spec[part])} then"
            )


def _likelihood(spec: dict[str, Any]) -> str:
    """As it is written.

    >>> _likelihood({"likelihood": {"name": "normal", "variance": 0.5}})
    'normal(variance=0.5)'
    """
    name, *_ = (own := dict(spec["likelihood"])).values()
    return f"{name}({', '.join(f'{n}={v!r}' for n, v in own.items() if n != 'name')})"


def _brief(part: Any) -> str:
    """Layers in a line."""
    if not isinstance(part, list):
        return str(part)
    words = [p if isinstance(p, str) else _layer(p) for p in part]
    return " ".join(", ".join(words).split())[:300]


def _layer(spec: dict[str, Any]) -> str:
    if "children" in spec:
        return f"Sequential({', '.join(map(_layer, spec['children']))})"
    return f"{spec['class']}({', '.join(f'{n}={v}' for n, v in spec['args'].items())})"


def _shown(parameters: list[Any]) -> str:
    return ", ".join(f"{n}{s or ''} ({link})" for n, s, link in parameters) or "nothing"


def _settings(value: Any) -> dict[str, Any]:
    return asdict(value)


def model_from(spec: dict[str, Any] | None, values: int = LARGEST_MODEL) -> Model:
    """The model of a description; ``values`` is how many there are for it, where that is known."""
    if spec is None or spec["kind"] == AGAIN:
        raise CheckpointError(
            "this model is not made of torch's own layers only, so it cannot be rebuilt from the file; "
            "give it again: fedpop.load(path, model=...)"
        )
    if spec["kind"] == "CustomModel":
        raise CheckpointError(
            f"this model is a function, which a file without code cannot hold (phi: {_shown(spec['phi'])}; "
            f"z: {_shown(spec['z'])}); give it again: fedpop.load(path, model=CustomModel(...))"
        )
    settings = dict(spec["likelihood"])
    likelihood = _family(settings.pop("name"))(**settings)
    modules = [m.to(getattr(torch, spec["dtype"])) for m in modules_from(spec["modules"], values)]
    if spec["kind"] == "Composition":
        fixed = modules[2] if len(modules) > 2 else None
        return Composition(modules[0], modules[1], likelihood, fixed=fixed, precision=spec["precision"])
    return Split(modules[0], spec["personal"], likelihood, precision=spec.get("precision", "auto"))


def _family(name: str) -> type[Likelihood]:
    found = class_of(Likelihood, name) if ":" in name else likelihoods.families().get(name)
    if found is None:
        raise CheckpointError(
            f"unknown likelihood {name!r}: it was saved with a class that is not defined here; import the "
            "module that defines it first"
        )
    return found


def module_spec(module: nn.Module) -> dict[str, Any] | None:
    """Class name, constructor arguments and children of a module of ``torch.nn``."""
    if isinstance(module, KeyedDropout):
        return {"class": "Dropout2d" if module.channels else "Dropout", "args": {"p": module.p}}
    if isinstance(module, CropFlip):
        return {"class": "CropFlip", "args": {"padding": module.padding, "flip": module.flip}}
    if isinstance(module, Standardise):
        return {"class": "Standardise", "args": {"mean": list(module.mean), "sd": list(module.sd)}}
    cls = type(module)
    if getattr(nn, cls.__name__, None) is not cls or any(True for _ in module.buffers(recurse=False)):
        return None  # buffers (running statistics, say) are not part of theta
    if any(not p.requires_grad for p in module.parameters()):
        return None  # frozen weights are not part of theta either
    if isinstance(module, nn.Sequential):
        children = [module_spec(m) for m in module]
        return None if None in children else {"class": "Sequential", "children": children}
    if any(True for _ in module.children()):
        return None
    args: dict[str, Any] = {}
    for name, parameter in inspect.signature(cls.__init__).parameters.items():
        if name in ("self", "device", "dtype", "args", "kwargs"):
            continue
        if not hasattr(module, name):
            if parameter.default is inspect.Parameter.empty:
                return None
            continue
        value = getattr(module, name)
        if name == "bias":
            value = value is not None
        if not isinstance(value, bool | int | float | str | tuple | list | None):
            return None
        args[name] = list(value) if isinstance(value, tuple) else value
    spec = {"class": cls.__name__, "args": args}
    same = repr(module_from(spec)) == repr(module)
    return spec if same else None


def modules_from(specs: list[dict[str, Any]], values: int) -> list[nn.Module]:
    """Modules of descriptions, which are counted before any memory is asked for."""
    layers = parameters = 0
    for size in itertools.chain.from_iterable(map(_sizes, specs)):
        layers, parameters = layers + 1, parameters + size
        if layers > MOST_LAYERS:
            raise CheckpointError(f"a model of more than {MOST_LAYERS:,} layers is larger than any")
        if parameters > values + MOST_PARAMETERS:
            raise CheckpointError(
                f"a model of {parameters:,} parameters or more does not go with {values:,} values"
            )
    return [module_from(spec) for spec in specs]


def _sizes(spec: dict[str, Any]) -> Iterator[int]:
    """Parameters of each layer of a description."""
    if spec["class"] == "Sequential":
        yield 0
        for child in spec["children"]:
            yield from _sizes(child)
    else:
        yield sum(p.numel() for p in module_from(spec, device="meta").parameters())


def module_from(spec: dict[str, Any], device: str = "cpu") -> nn.Module:
    """The module of a description; on the device "meta" it takes no memory."""
    if spec["class"] in OURS:
        return OURS[spec["class"]](**spec["args"])
    cls = getattr(nn, spec["class"], None)
    if not (isinstance(cls, type) and issubclass(cls, nn.Module)):
        raise CheckpointError(f"{spec['class']!r} is not a layer of torch.nn")
    if cls is nn.Sequential:
        return nn.Sequential(*[module_from(child, device) for child in spec["children"]])
    args = {k: tuple(v) if isinstance(v, list) else v for k, v in spec["args"].items()}
    for name, value in args.items():
        most = MOST_LAYERS if name.endswith("_layers") else LARGEST_ARGUMENT
        several = value if isinstance(value, tuple) else (value,)
        if len(several) > MOST_LAYERS or any(isinstance(v, int | float) and abs(v) > most for v in several):
            raise CheckpointError(
                f"a layer {spec['class']} with {name} = {str(value)[:50]} is larger than any"
            )
    if "device" not in inspect.signature(cls.__init__).parameters:
        module: nn.Module = cls(**args)
        return module
    # Its values come from a file: random ones would only disturb the global generator.
    return cls(**args, device="meta") if device == "meta" else blank(cls, **args)


def model_named(entry: str, example: Example, folder: str | Path | None = None, seed: int = 0) -> Model:
    """The model; a function with an argument is given the number of inputs, or the shape of an example that
    is not a row. Modules in ``folder`` come first. The seed decides first weights that torch draws."""
    found = entry_named(entry, folder)
    if inspect.isfunction(found):
        shape = example.shapes[0]
        found = called(entry, found, shape[0] if len(shape) == 1 else shape, seed)
    if not isinstance(found, Model):
        raise SettingsError(
            f"{entry!r} is not a model, nor a function that makes one, but {type(found).__name__}: give a "
            "fedpop.Composition, Split or CustomModel"
        )
    return found
