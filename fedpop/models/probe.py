"""A few made-up examples sent through a model before anyone's data: does it do what federating needs?

One example alone and in a batch must give the same output (else clients' data mix, and theta depends on how
they are grouped); inputs must stay as they are; nothing may be drawn from torch's global generator. Whether
several clients can be worked on side by side, by ``torch.func.vmap``, is tried here, too.
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from fedpop.errors import DataError, FedpopError, ModelError
from fedpop.federation.clients import Federation
from fedpop.federation.cohort import double
from fedpop.federation.inputs import Example, Inputs, leaves, map_inputs
from fedpop.keys import Key
from fedpop.models.modules import RowKeys

if TYPE_CHECKING:
    from fedpop.models.base import Model

USERS = Exception
"""What a module may raise that was given something else than it expects: code that is not ours."""
PROBED_ROWS = 3
ORDER_OF_SUMS, ORDER_IN_DOUBLE, ORDER_IN_BFLOAT16 = 1e-3, 1e-7, 5e-2
"""How much of the largest output may differ by the order of sums: far more than rounding does, some 1e-6 of a
deep network's in single precision, and far less than a layer that mixes examples."""


ANY_ROWS = sys.maxsize
LARGEST_STEP_SIDE_BY_SIDE = 2**17
"""Numbers that a client's step through a convolutional network keeps for its backward pass, up to which steps
of several clients are worked on side by side: a filter for each client is slow, a call for each is slower."""


def rounding(dtype: torch.dtype) -> float:
    """How much of the largest number may differ by the order of sums."""
    return ORDER_IN_DOUBLE if dtype == torch.float64 else ORDER_OF_SUMS


def global_generator(names: str = "") -> ModelError:
    where = f"{names} draws" if names else "the model draws"
    return ModelError(
        f"{where} from torch's global generator (functional dropout, say), so runs could not be repeated or "
        "resumed; use nn.Dropout modules, which fedpop keys, or a dropout of 0 there, or switch it off with "
        "module.eval()"
    )


def not_accepted(x: Inputs, error: Exception) -> DataError:
    """What may help, beside what torch says."""
    shapes = [tuple(v.shape[1:]) for v in leaves(x)]
    message = f"the model does not accept examples of shape {shapes}: {error}"
    if () in shapes:
        message += "; x has one number per example: where the model wants columns, use x[:, None]"
    if any(not v.is_floating_point() for v in leaves(x)):
        message += "; x holds whole numbers: where the model wants others, use x.float()"
    if isinstance(x, tuple | dict):
        how = "forward(x[0], x[1], ...)" if isinstance(x, tuple) else "forward(**x), by its names"
        message += f"; a {type(x).__name__} of inputs reaches the module as {how}"
    return DataError(message)


def outputs_at(model: Model, x: Inputs, phi: Tensor) -> int:
    """One forward pass: does the model accept such examples, and how many outputs come out?"""
    count = leaves(x)[0].shape[0]
    ids = torch.zeros(count, dtype=torch.int64, device=phi.device)
    keys = RowKeys(Key(0, purpose="probe"), ids, torch.arange(count, device=phi.device))
    before = torch.get_rng_state()
    with torch.no_grad():
        try:
            features = model.embed(phi, x, keys)
            z = model.initial_z()
            eta: object = (
                model.head_outputs(phi, z.unsqueeze(0), features)[0]
                if model.linear
                else model.head_at(phi, z, features)
            )
        except USERS as error:
            if isinstance(error, FedpopError):
                raise
            raise not_accepted(x, error) from error
        if not isinstance(eta, Tensor):
            raise ModelError(
                f"the head returned a {type(eta).__name__}, not one tensor of outputs [n, outputs]; wrap it "
                "in a module that returns the tensor alone"
            )
        if not torch.equal(before, torch.get_rng_state()):
            raise global_generator(_drawing(model, lambda: model.embed(phi, x, keys)))
    if eta.dim() != 2 or eta.shape[0] != count:
        if isinstance(x, Tensor) and x.dim() == 1:
            raise not_accepted(x, ValueError("one number per example"))
        raise ModelError(
            f"for {count} examples the head gave outputs of shape {tuple(eta.shape)}; "
            f"expected ({count}, {model.outputs})"
        )
    return eta.shape[1]


def first_taken(model: Model, example: Example, phi: Tensor) -> int:
    """The least whole number, 0 or 1, of which examples are taken: a sequence of length 0 is none."""
    if all(own.is_floating_point for own in example.dtypes):
        return 0
    for least in (0, 1):
        with torch.no_grad():
            try:
                x = example.at_least(least).zeros(2, phi.device, phi.dtype)
                model.head_at(phi, model.initial_z(), model.embed(phi, x))
            except USERS:
                continue
            return least
    return 0


def twice_in_double(model: Model, example: Example, phi: Tensor) -> bool:
    """Whether features have second derivatives in phi, and can be had in double precision, as the exact
    engine and verdicts on theta want them: fused attention has none, a ``.float()`` in between is none."""
    if not model.network or not phi.numel():
        return True
    x = map_inputs(double, example.zeros(2, phi.device, phi.dtype))
    at = _shaken(phi, "phi").double().requires_grad_()
    with torch.enable_grad():
        try:
            features = leaves(model.embed(at, x))[0]
            (slope,) = torch.autograd.grad(features.square().sum(), at, create_graph=True)
            if slope.requires_grad:
                torch.autograd.grad(slope.sum(), at, allow_unused=True)
        except USERS:
            return False
    return True


def vectorises_head(model: Model, x: Inputs, phi: Tensor) -> bool:
    """Whether two clients' heads run side by side as chains will want them, with a derivative in z."""
    with torch.no_grad():
        features = model.embed(phi, x)
    both = map_inputs(lambda v: torch.stack((v, v)), features)

    def run(z: Tensor) -> Tensor:
        many: Tensor = torch.func.vmap(lambda z, f: model.head_at(phi, z, f))(z, both)
        return many

    return _vectorises(run, model.initial_z())


def rows_side_by_side(model: Model, example: Example, phi: Tensor) -> int:
    """Examples of each client up to which steps of several on their own copies of the model are worked on
    side by side: none where vmap does not know a layer, few where a convolution has much work by itself."""
    z, kept = model.initial_z(), 0
    size, x = phi.numel(), example.zeros(2, phi.device, phi.dtype)
    both = map_inputs(lambda v: torch.stack((v, v)), x)

    def one(w: Tensor, x: Inputs) -> Tensor:
        phi, z = torch.split_with_sizes(w, [size, len(w) - size])
        return model.head_outputs(phi, z.unsqueeze(0), model.embed(phi, x))

    def run(w: Tensor) -> Tensor:
        many: Tensor = torch.func.vmap(one)(w, both)
        return many

    def count(tensor: Tensor) -> Tensor:
        nonlocal kept
        kept += tensor.numel()
        return tensor

    w = torch.cat((phi, z))
    if model.convolutional:
        with torch.autograd.graph.saved_tensors_hooks(count, lambda t: t), torch.enable_grad():
            one(w.detach().requires_grad_(), x)
        most = LARGEST_STEP_SIDE_BY_SIDE * 2 // max(kept, 1)
    else:
        most = ANY_ROWS
    return most if most and _vectorises(run, w) else 0


def _vectorises(run: Callable[[Tensor], Tensor], w: Tensor) -> bool:
    """Whether this runs for two clients with these parameters, with a derivative, and not as a loop that vmap
    makes of what it does not know."""
    with torch.enable_grad(), warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        at = w.detach().expand(2, -1).clone().requires_grad_()
        try:
            out = run(at)
            if out.requires_grad:
                torch.autograd.grad(out.sum(), at, allow_unused=True)
        except USERS:
            return False
    return not any("performance drop" in str(w.message) for w in said)


def _drawing(model: Model, run: Callable[[], object]) -> str:
    """The layers during whose pass the global generator moves, by name."""
    found: list[str] = []
    states: list[Tensor] = []
    handles = []
    for top in model.modules():
        for name, sub in top.named_modules():
            if not list(sub.children()):

                def after(m: nn.Module, _args: object, _out: object, name: str = name) -> None:
                    if not torch.equal(states.pop(), torch.get_rng_state()):
                        found.append(f"{name} ({type(m).__name__})")

                handles.append(sub.register_forward_pre_hook(lambda *_: states.append(torch.get_rng_state())))
                handles.append(sub.register_forward_hook(after))
    try:
        run()
    finally:
        for handle in handles:
            handle.remove()
    return ", ".join(found[:3])


def check_derivative(model: Model, example: Example) -> None:
    """Raise where outputs have no derivative, or one of other weights than those that are given: what is
    computed again in a backward pass finds the module's own."""
    x = example.zeros(2, model.device, model.dtype)
    w = torch.cat([_shaken(v, name) for v, name in ((model.initial_phi(), "phi"), (model.initial_z(), "z"))])
    again: list[str] = []
    with torch.enable_grad():
        phi, z = torch.split_with_sizes(w.requires_grad_(), [model.phi_layout.size, model.z_layout.size])
        out = model.head_outputs(phi, z.unsqueeze(0), model.embed(phi, x))
        if not out.requires_grad:
            return
        with _calls(model, lambda name, _: again.append(name)):
            try:
                torch.autograd.grad(out.sum(), w, allow_unused=True)
            except USERS as error:
                raise ModelError(
                    f"the model's backward pass fails: {str(error).splitlines()[0]}; let no operation write "
                    "into what another one needs (h = h.relu() rather than h.relu_(), torch.where rather "
                    "than h[...] = 0), and see that module(x).sum().backward() works"
                ) from error
    if again:
        raise ModelError(
            f"{again[0]} is computed again in the backward pass (torch.utils.checkpoint), where it does not "
            "have the weights that it was given; switch that off, as by gradient_checkpointing_disable()"
        )


@contextmanager
def _calls(model: Model, tell: Callable[[str, nn.Module], None]) -> Iterator[None]:
    """Layers are told of, by name, when they are called."""
    handles = [
        sub.register_forward_pre_hook(lambda m, _args, name=name: tell(f"{name} ({type(m).__name__})", m))
        for top in model.modules()
        for name, sub in top.named_modules()
    ]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def check_rows(model: Model, example: Example) -> None:
    """Raise where examples in a batch see each other, or are changed by the model."""
    phi, z = (_shaken(v, name) for v, name in ((model.initial_phi(), "phi"), (model.initial_z(), "z")))
    x = _made_up(example, phi)
    with torch.no_grad():
        try:
            given = map_inputs(torch.clone, x)
            features = model.embed(phi, x)
            _unchanged(x, given, "its input")
            before = map_inputs(torch.clone, features)
            together = model.head_outputs(phi, z.unsqueeze(0), features)[0]
            _unchanged(features, before, "the features that it gets from the backbone")
            own = [model.embed(phi, map_inputs(lambda v, i=i: v[i : i + 1], x)) for i in range(PROBED_ROWS)]
            alone = [model.head_outputs(phi, z.unsqueeze(0), one) for one in own]
        except USERS as error:
            if isinstance(error, FedpopError):
                raise
            _fixed_batch(model, example, error)
            return  # made-up values that this model does not take: real ones will tell
    # Features, too: a head that is all but zero hides what they do.
    pairs = zip(leaves(before), *(leaves(one) for one in own), strict=True)
    apart = [(torch.cat(parts), whole, 1e-2) for whole, *parts in pairs if whole.is_floating_point()]
    apart.append((torch.cat(alone, 1)[0], together, 1.0))
    near = rounding(phi.dtype) if model.autocast is None else ORDER_IN_BFLOAT16
    if not all(_alike(each, whole, near, least) for each, whole, least in apart):
        raise ModelError(
            "an example gives another output by itself than in a batch: the model lets examples see each "
            "other (a mean or softmax over the first axis, batch statistics, a recurrent or attention layer "
            "without batch_first=True), which would mix clients' data. Let every operation act within one "
            "example; fedpop.layers.replace_batchnorm(module) replaces batch statistics"
        )


def _fixed_batch(model: Model, example: Example, why: Exception) -> None:
    """Raise for a model that takes batches of one size alone, two of zeros having passed."""
    phi, z = model.initial_phi(), model.initial_z().unsqueeze(0)
    for count in (1, PROBED_ROWS):
        try:
            model.head_outputs(phi, z, model.embed(phi, example.zeros(count, phi.device, phi.dtype)))
        except USERS as error:
            raise ModelError(
                f"the model takes two examples and not {count}: {str(error).splitlines()[0]}; let it take "
                "batches of any size (what was exported, with dynamic_shapes)"
            ) from why


def check_codes(model: Model, federation: Federation) -> None:
    """Raise by client and row where whole numbers lie outside what the model takes, as those of an embedding
    that is too small. Of each place in x the largest and the smallest are tried, so that this is quick."""
    for split, packed in federation.splits.items():
        if all(v.is_floating_point() or not len(v) for v in leaves(packed.x)) or _taken(model, packed.x):
            continue
        for i, name in enumerate(federation.names):
            start, size = int(packed.starts[i]), int(packed.sizes[i])
            for row in range(size):
                error = _refused(model, map_inputs(lambda v, at=start + row: v[at : at + 1], packed.x))
                if error is not None:
                    where = f"client {name!r}" + ("" if split == "train" else f", {split} set")
                    raise DataError(f"{where}, row {row}: {not_accepted(packed.x, error)}") from error


def _taken(model: Model, x: Inputs) -> bool:
    """Whether the model takes the extremes of x."""
    ends = (torch.amin, torch.amax)
    return all(
        _refused(model, map_inputs(lambda v, end=end: v[:1] if v.is_floating_point() else end(v, 0, True), x))
        is None
        for end in ends
    )


def _refused(model: Model, x: Inputs) -> Exception | None:
    """What is raised at these examples."""
    phi = model.initial_phi()
    with torch.no_grad():
        try:
            model.embed(phi, map_inputs(lambda v: v.to(phi.device), x))
        except IndexError as error:
            return error
    return None


def _alike(each: Tensor, whole: Tensor, near: float, least: float) -> bool:
    """The same numbers but for rounding, which goes by the largest of them."""
    near *= float(whole.abs().nan_to_num(posinf=0.0).max().clamp(min=least)) if whole.numel() else 0.0
    return each.shape == whole.shape and torch.allclose(each, whole, 0.0, near, equal_nan=True)


def _shaken(v: Tensor, name: str) -> Tensor:
    """The values that a model starts with and some more: at zeros nothing would be seen."""
    key = Key(0, purpose=f"probe.{name}")
    return v + 0.1 * key.normal(key.server(v.device), (v.shape[0],), v.dtype)[0]


def _made_up(example: Example, like: Tensor) -> Inputs:
    """Standard normal numbers; zeros and ones, or ones, where they are whole."""
    key, part = Key(0, purpose="probe.x"), iter(range(len(example.shapes)))
    rows = torch.arange(PROBED_ROWS, device=like.device)

    def fill(leaf: Tensor) -> Tensor:
        k = next(part)
        if leaf.is_floating_point():
            return key.at(purpose=f"probe.x.{k}").normal(rows, tuple(leaf.shape[1:]), leaf.dtype)
        whole = (rows % 2).clamp(min=example.least).reshape(-1, *[1] * (leaf.dim() - 1))
        return whole.expand_as(leaf).to(leaf.dtype).contiguous()

    return map_inputs(fill, example.zeros(PROBED_ROWS, like.device, like.dtype))


def _unchanged(now: Inputs, before: Inputs, what: str) -> None:
    if any(not torch.equal(a, b) for a, b in zip(leaves(now), leaves(before), strict=True)):
        raise ModelError(
            f"the model writes into {what} (x += ..., x[...] = ..., a layer with inplace=True in front), "
            "which would change the data themselves; write x = x + ..., or inplace=False"
        )
