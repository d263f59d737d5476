"""Forms of a forward's arguments for the random sequences.

A form is a function of keyword arguments that returns (args, kwargs) with the same values in another form.
"""

import functools

import torch
from torch import nn


def _floating_names(arguments):
    return [
        name
        for name, value in arguments.items()
        if isinstance(value, torch.Tensor) and value.is_floating_point() and value.dim() > 1
    ]


def _with(names, change):
    """Change the arguments with these names."""

    def form(arguments):
        return (), {**arguments, **{name: change(arguments[name]) for name in names(arguments)}}

    return form


_with_tensors = functools.partial(
    _with, lambda given: [name for name, value in given.items() if isinstance(value, torch.Tensor)]
)
_with_first = functools.partial(_with, lambda given: [_floating_names(given)[0]])
_with_timestep = functools.partial(_with, lambda given: {"timestep"} & given.keys())


def offset(tensor):
    """The same values at an address that is aligned to one element."""
    memory = tensor.new_empty(tensor.numel() + 1)
    return memory[1:].view(tensor.shape).copy_(tensor)


def strided(tensor):
    return tensor.transpose(0, -1).contiguous().transpose(0, -1)


def gapped(tensor):
    return torch.stack((tensor, tensor), -1)[..., 0]


def expanded(tensor):
    if tensor.dtype == torch.long and tensor.dim() == 1:
        return tensor  # MiniMax-H3 writes rows to these places: to equal ones in any order
    return tensor[:1].expand_as(tensor)


def overlapping(tensor):
    memory = torch.cat((tensor.flatten(), tensor.flatten()))
    strides = [max(1, stride // 2) for stride in tensor.stride()]
    return memory.as_strided(tensor.shape, strides)


def requiring_grad(tensor):
    return tensor.clone().requires_grad_() if tensor.is_floating_point() else tensor


def made_in_inference_mode(tensor):
    with torch.inference_mode():
        return tensor.clone()


class Subclass(torch.Tensor):
    pass


def one_memory(arguments):
    """All tensors are aligned views of one."""
    tensors = {name: value for name, value in arguments.items() if isinstance(value, torch.Tensor)}
    sizes = [-(-value.nbytes // 256) * 256 for value in tensors.values()]
    device = next(iter(tensors.values())).device
    parts = torch.empty(sum(sizes), dtype=torch.uint8, device=device).split(sizes)
    views = {
        name: part[: value.nbytes].view(value.dtype).view(value.shape).copy_(value)
        for part, (name, value) in zip(parts, tensors.items(), strict=True)
    }
    return (), {**arguments, **views}


def positional(arguments):
    (_, first), *others = arguments.items()
    return (first,), dict(others)


def without_last_tensor(arguments):
    last = _floating_names(arguments)[-1]
    return (), {name: value for name, value in arguments.items() if name != last}


# Forms accepted by models.
GOOD_FORMS = {
    "as they are": lambda arguments: ((), arguments),
    "a model output": lambda arguments: ((), {**arguments, "return_dict": True}),
    "offset": _with_tensors(offset),
    "strided": _with_tensors(strided),
    "gapped": _with_tensors(gapped),
    "all expanded": _with_tensors(expanded),
    "requiring grad": _with_tensors(requiring_grad),
    "parameters": _with_tensors(lambda tensor: nn.Parameter(tensor, requires_grad=False)),
    "of inference mode": _with_tensors(made_in_inference_mode),
    "subclass": _with_first(lambda tensor: tensor.as_subclass(Subclass)),
    "one memory": one_memory,
    "positional": positional,
    "long timestep": _with_timestep(lambda timestep: (timestep * 1000).long()),
    "reversed keywords": lambda arguments: ((), dict(reversed(arguments.items()))),
}
# Forms for which calls are captured.
QUIET_FORMS = [form for form in GOOD_FORMS if form != "subclass"]
# Forms refused by some models.
FORMS = {
    **GOOD_FORMS,
    "overlapping": _with_first(overlapping),
    "another dtype": _with_first(torch.Tensor.double),
    "meta": _with_first(lambda tensor: tensor.to("meta")),
    "on the host": _with_first(torch.Tensor.cpu),
    "wrong width": _with_first(lambda tensor: tensor[..., 1:]),
    "wrong batch": _with_first(lambda tensor: tensor[:0]),
    "a list": _with_first(lambda tensor: [tensor]),
    "float timestep": _with_timestep(lambda timestep: 500.0),
    "scalar timestep": _with_timestep(lambda timestep: timestep.flatten()[0]),
    "one missing": without_last_tensor,
    "one too many": lambda arguments: ((), {**arguments, "unknown": None}),
}
