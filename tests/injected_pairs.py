"""An injected model beside the same model without kernels, both led through the same changes."""

import torch

from ltx_models import inputs, run, transformer

# What attention's kernel takes, too.
BFLOAT16 = {"dtype": torch.bfloat16, "heads": 2, "head_dim": 64}

# The relative distance that the two may have, by what roundings of a model's dtype leave.
SLACK = {torch.float32: 1e-5, torch.bfloat16: 0.03}


def pair(kernel, device, change=None, *, is_injected_first=True, **options):
    """(injected model, plain model, the injection's report); `change` is done to both.

    `options` are those of `ltx_models.transformer`.
    """
    model, plain = transformer(device, **options), transformer(device, **options)
    if change is not None:
        change(plain)
        if not is_injected_first:
            change(model)
    report = kernel.inject_kernels(model)
    if change is not None and is_injected_first:
        change(model)
    return model, plain, report


def distance(out, expected):
    """The relative L2 distance."""
    out, expected = out.detach().double(), expected.detach().double()
    return ((out - expected).norm() / expected.norm()).item()


def assert_alike(model, plain, arguments=None, *, unlike=None, forward=run, times=2):
    """Both compute the same in each of some forwards, and not what the outputs `unlike` hold."""
    arguments = inputs(plain) if arguments is None else arguments
    for _ in range(times):
        expected = forward(plain, arguments)
        out = forward(model, arguments)
        slack = SLACK[expected.dtype]
        if unlike is not None:
            assert distance(unlike, expected) > 3 * slack, "what was changed has no effect"
        assert distance(out, expected) < slack


def fallen_back(report):
    """The reasons of each module whose call the model's own code computed."""
    return {entry.name: set(entry.fell_back) for entry in report.calls if entry.fell_back}


def is_said(report, kernel, device, **options):
    """Whether the report, or its live counts, tells of more than they do of an untouched model."""
    untouched = kernel.inject_kernels(transformer(device, **options))
    left_alone = {(entry.name, entry.reason) for entry in untouched.left_alone}
    more = {(entry.name, entry.reason) for entry in report.left_alone} - left_alone
    return bool(more or fallen_back(report))
