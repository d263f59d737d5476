"""A part of the random sequences, and what makes their failures of use: scripts, and fewer steps."""

import re
import subprocess
import sys

import pytest
import torch

import random_sequences
from conftest import CHECKOUT
from families import FAMILIES

pytestmark = pytest.mark.usefixtures("_one_thread", "_quiet")

SEQUENCES = 60
GROUPS = 6


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("group", range(GROUPS))
@pytest.mark.parametrize("family", [*FAMILIES, "unet"])
def test_injected_models_are_as_plain_ones(family, device, group):
    for seed in range(group, SEQUENCES, GROUPS):
        result = random_sequences.random_sequence(family, seed, device)
        if result.failure:
            shorter = random_sequences.shrink(result)
            pytest.fail(f"{shorter.message}\n{shorter.traceback}", pytrace=False)


def test_a_seed_gives_a_sequence(device):
    first, second = (random_sequences.random_sequence("ltx", 3, device) for _ in range(2))
    assert first.sequence == second.sequence
    assert first.forwards > 0


class Forgetful:
    """Kernels that are wrong once a model has two hooks."""

    def inject_kernels(self, model, *, attention=True):
        def forward(*args, **kwargs):
            out = type(model).forward(model, *args, **kwargs)
            hooks = sum(len(module._forward_hooks) for module in model.modules())
            return (out[0] * 2, *out[1:]) if hooks >= 2 else out

        model.forward = forward
        return type("Report", (), {"already_injected": False})

    def eject_kernels(self, model):
        vars(model).pop("forward", None)


def failing_sequence():
    steps = [
        random_sequences.Step(name, arguments)
        for name, arguments in [
            ("collect", {}),
            ("hook", {"module": "transformer_blocks.0", "kind": "post", "how": "view"}),
            ("inject", {"attention": True}),
            ("forward", {"mode": "no_grad", "options": "padded text", "seed": 1}),
            ("set_attention_backend", {"name": "native"}),
            ("hook", {"module": "transformer_blocks.1", "kind": "post", "how": "data"}),
            ("forward", {"mode": "inference_mode", "options": "padded text", "seed": 2}),
            ("finish", {}),
        ]
    ]
    model = {"family": "ltx", "dtype": "float32", "device": "cpu", "seed": 0}
    return random_sequences.repeat(random_sequences.Sequence(model, []), steps)


@pytest.fixture(scope="module")
def failed():
    """(a failure, the shortest sequence found that fails alike)."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(random_sequences, "load_kernel", Forgetful)
        result = failing_sequence()
        return result, random_sequences.shrink(result)


def test_a_failure_is_shrunk_to_the_steps_that_matter(failed):
    result, shorter = failed
    assert "forward: Difference: the output is 1 of its norm" in result.failure
    names = [step.name for step in shorter.sequence.steps]
    assert names == ["hook", "inject", "hook", "forward"]


def test_a_failures_script_repeats_it(failed, tmp_path):
    """As it stands in the message, from the checkout's folder."""
    script = failed[1].sequence.script()
    (tmp_path / "broken.py").write_text(
        "import sys; sys.path[:0] = ['tests']\n"
        "import random_sequences, test_random_sequences\n"
        "random_sequences.load_kernel = test_random_sequences.Forgetful\n" + script
    )
    run = subprocess.run(
        [sys.executable, tmp_path / "broken.py"], cwd=CHECKOUT, capture_output=True, text=True
    )
    assert run.returncode == 1
    assert re.search(r"Difference: the output is 1 of its norm", run.stderr)


@pytest.mark.parametrize(
    ("ratio", "count", "status"), [(1.04, 300, 0), (1.06, 300, 1), (1.06, 299, 0)]
)
def test_the_mean_of_errors_is_held_to_the_contract(monkeypatch, capsys, ratio, count, status):
    ratios = [("the output", ratio)] * count

    def results_of(tasks, processes):
        for task in tasks:
            model = random_sequences.Sequence({"family": "ltx"}, [])
            yield task, random_sequences.Result(0, model, 1, count, ratios=ratios)

    monkeypatch.setattr(random_sequences, "results_of", results_of)
    assert random_sequences.main(["--family", "ltx", "--sequences", "1"]) == status
    assert f"the output's error is {ratio:.3f}" in capsys.readouterr().out


@pytest.mark.parametrize("name", ["patch", "set_attention_backend", "global_hook"])
def test_global_state_is_given_back(name):
    from diffusers.models import attention_dispatch
    from torch.nn.modules import module as global_hooks

    functional, registry = torch.nn.functional, attention_dispatch._AttentionBackendRegistry
    arguments = {
        "patch": {"name": "F.gelu"},
        "set_attention_backend": {"name": "_native_math"},
        "global_hook": {"kind": "change", "cls": "Linear"},
    }
    before = (functional.gelu, registry._active_backend, len(global_hooks._global_forward_hooks))
    with pytest.raises(ZeroDivisionError), random_sequences.Twins("ltx") as twins:
        getattr(twins, name)(**arguments[name])
        changed = (functional.gelu, registry._active_backend)
        assert (*changed, len(global_hooks._global_forward_hooks)) != before
        raise ZeroDivisionError
    after = (functional.gelu, registry._active_backend, len(global_hooks._global_forward_hooks))
    assert after == before


def test_both_raise_the_same_or_it_is_a_difference():
    def raises(twins, error):
        def act(model):
            if model is twins.mine:
                raise error
            raise ValueError

        return act

    with random_sequences.Twins("ltx") as twins:
        with pytest.raises(random_sequences.Refused):
            twins.alike(raises(twins, ValueError))
        with pytest.raises(random_sequences.Difference, match="KeyError.*plain model: ValueError"):
            twins.alike(raises(twins, KeyError))
        with pytest.raises(random_sequences.Difference, match="no error"):
            twins.alike(lambda model: 1 // (model is twins.mine))
