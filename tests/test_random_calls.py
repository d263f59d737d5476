"""Random wrong calls, and faults that the checks of them must find."""

import pytest
import torch

import random_calls
from random_calls import Call, check_seed, fault

CALLS = 900  # more find more: each seed is another call
EACH = 25


@pytest.mark.parametrize("part", range(0, 100, EACH))
@pytest.mark.parametrize("hundred", range(0, CALLS, 100))
def test_wrong_calls_are_refused_in_one_sentence(device, hundred, part):
    refused = 0
    for seed in range(hundred + part, hundred + part + EACH):
        found, what = check_seed(seed, device)
        assert found in ("valid", "refused"), f"seed {seed}: {what}: {found}"
        refused += found == "refused"
    assert refused > 0.6 * EACH


def test_every_operation_is_called_wrongly(device):
    called = {random_calls.random_call(seed, device).name for seed in range(450)}
    assert called == set(random_calls.TABLE)


def silu(message, *, kind=ValueError, with_gradients=None, writes=False):
    """A function that refuses every call with the given error."""

    def refuse(x, **rest):
        if writes:
            x.zero_()
        if with_gradients and x.requires_grad:
            raise kind(with_gradients)
        raise kind(message)

    refuse.__name__ = "silu"
    return refuse


GOOD = "silu: x must be float32, got int64"
FAULTS = {
    "another operation": (silu("gelu: x must be float32, got int64"), "not one sentence"),
    "no argument": (silu("silu: something must be right, got int64"), "not one sentence"),
    "two lines": (silu(GOOD + "\nand more"), "not one sentence"),
    "no value": (silu("silu: x must be float32"), "not one sentence"),
    "too long": (silu(GOOD + "!" * 1200), "not one sentence"),
    "another kind": (silu(GOOD, kind=RuntimeError), "RuntimeError"),
    "another path": (silu(GOOD, with_gradients=GOOD + "!"), "if an input requires grad"),
}


@pytest.mark.parametrize("what", FAULTS)
def test_faults_are_found(what):
    function, text = FAULTS[what]
    assert text in fault(Call(0, function, {"x": torch.ones(2)}))


def test_what_is_written_is_found():
    with pytest.raises(AssertionError, match="memory was changed"):
        fault(Call(0, silu(GOOD, writes=True), {"x": torch.ones(2)}))


def test_what_is_right_is_no_fault():
    assert fault(Call(0, silu(GOOD), {"x": torch.ones(2)})) is None
