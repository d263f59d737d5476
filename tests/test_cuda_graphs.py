"""Forwards captured into CUDA graphs: the same bits as without graphs, after all changes between calls.

On a CPU the graphs are emulated (graphs.py); what only CUDA has is tested where there is a GPU.
"""

import contextlib
import copy
import functools
import gc
import itertools
import logging
import threading
import weakref
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import changes
import small_models
from changes import WEIGHT_CHANGES, changing
from checks import compute_as_other_threads
from families import FAMILIES, WAITING
from graphs import EmulatedGraph, Pair, graphs, module_of  # noqa: F401
from random_modes import run_threads
from random_sequences import Twins

pytestmark = pytest.mark.usefixtures("_one_thread")
LTX, FLUX = FAMILIES["ltx"], FAMILIES["flux"]
ONE_BLOCK = {"blocks": 1}
FIRST = "the first call of its kind"
# A partially injected model that gets tables on the CPU.
UNCAPTURED_ON_CUDA = ("stable_audio",)
CAPTURED = [family for family in FAMILIES.values() if family.name not in WAITING]
every_captured = pytest.mark.parametrize("family", CAPTURED, ids=str)
needs_cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


@pytest.fixture
def pair(graphs, device):  # noqa: F811
    return Pair(graphs, LTX, device, config=ONE_BLOCK)


class OwnLinear(nn.Module):
    """Replaces a linear layer."""

    def __init__(self, linear):
        super().__init__()
        self.linear = linear


def replace_proj_in(make):
    return lambda model: setattr(model, "proj_in", make(model.proj_in))


@pytest.mark.parametrize(
    ("family", "dtype"),
    [
        *((family, torch.bfloat16) for family in CAPTURED),
        *((LTX, dtype) for dtype in (torch.float32, torch.float16)),
    ],
    ids=str,
)
def test_replays_have_the_same_bits(graphs, device, family, dtype):  # noqa: F811
    pair = Pair(graphs, family, device, dtype)
    outs = [pair.call() for _ in range(5)]
    assert pair.calls.captured == 1
    assert pair.calls.replayed >= 2  # 3, unless the first call of a process imports something
    assert pair.calls.uncaptured.keys() == {FIRST}
    assert all(not torch.equal(a, b) for a, b in itertools.combinations(outs, 2))


@pytest.mark.drawn(times=0, period=3)
@every_captured
def test_every_variant_of_inputs(graphs, device, family):  # noqa: F811
    pair = Pair(graphs, family, device, config=family.one_block, max_cuda_graphs=16)
    for _ in range(3):
        for options in family.options.values():
            pair.call(**options)
    variants = len(family.options)
    assert variants - 1 <= pair.calls.captured <= variants  # two of them may be alike
    assert pair.calls.replayed >= variants - 1


@pytest.mark.parametrize("name", WAITING)
def test_models_that_wait_for_the_gpu_are_not_captured(graphs, device, name):  # noqa: F811
    if name not in FAMILIES:
        pytest.skip("this diffusers lacks the model")
    if name in ("hidream", "lumina2") and device == "cpu":
        pytest.skip("an emulated graph does not notice `tolist`")
    pair = Pair(graphs, FAMILIES[name], device, torch.bfloat16)
    for _ in range(3):
        pair.call()
    assert pair.calls.captured == 0
    assert pair.calls.uncaptured.keys() > {FIRST}


# diffusers copies a number from the host, or reads the text's lengths.
WAITING_OPTIONS = {
    *(("qwenimage", name) for name in ("padded text", "holes in the text")),
    ("bria_fibo2", "prompts of two lengths"),
}


@needs_cuda
@every_captured
def test_no_forward_waits_for_the_gpu(kernel, device, family):
    """Not even the first of a kind: nothing is read back from the GPU."""
    model = family.model(device, torch.bfloat16, head_dim=64)
    kernel.inject_kernels(model)
    for name, options in family.options.items():
        if (family.name, name) in WAITING_OPTIONS:
            continue
        arguments = family.inputs(device, torch.bfloat16, **options)
        with torch.no_grad():
            model(**arguments)
            torch.cuda.set_sync_debug_mode("error")
            try:
                model(**arguments)
            finally:
                torch.cuda.set_sync_debug_mode("default")


def test_outputs_are_the_callers_own(pair):
    pair.captured()
    first = pair.call()
    kept = first.clone()
    with torch.inference_mode():
        for _ in range(3):
            pair.call().fill_(7.0)
    assert torch.equal(first, kept)
    with torch.inference_mode():
        outs = [pair.model(**pair.inputs()) for _ in range(3)]
    assert {type(out).__name__ for out in outs} == {"Transformer2DModelOutput"}
    assert outs[2].sample is outs[2][0]


def test_models_with_graphs_are_no_modules_of_the_report(graphs, device):  # noqa: F811
    """The model itself, and its copy, have no calls in the report, because they do not run on a kernel."""
    model = LTX.model(device)
    names = {calls.name for calls in graphs.inject_kernels(copy.deepcopy(model)).calls}
    report = graphs.inject_kernels(model, cuda_graphs=True)
    assert {calls.name for calls in report.calls} == names
    report = graphs.inject_kernels(copy.deepcopy(model), cuda_graphs=True)
    assert report.already_injected
    assert {calls.name for calls in report.calls} == names


def test_a_cpu_has_no_graphs(kernel):
    model = LTX.model("cpu")
    report = kernel.inject_kernels(model, cuda_graphs=True)
    with torch.inference_mode():
        model(**LTX.inputs("cpu"))
    (calls,) = report.cuda_graphs
    (reason,) = calls.uncaptured
    assert calls.captured == 0
    assert "cpu" in reason


@pytest.mark.parametrize("small", small_models.MODELS, ids=str)
def test_models_in_part(graphs, device, small):  # noqa: F811
    model = small.model(device)
    plain = copy.deepcopy(model)
    graphs.inject_kernels(plain)
    report = graphs.inject_kernels(model, cuda_graphs=True)
    with torch.inference_mode():
        for seed in range(4):
            arguments = small.arguments(device, seed=seed)
            out = small_models.tensors(model(**arguments))
            expected = small_models.tensors(plain(**arguments))
            assert len(out) == len(expected) > 0
            for mine, its in zip(out, expected, strict=True):
                if device == "cuda":
                    assert torch.equal(mine, its)
                else:  # with an emulated graph convolutions have other memory, and sum in another order
                    torch.testing.assert_close(mine, its, rtol=1e-4, atol=1e-5)
    (calls,) = report.cuda_graphs
    if device == "cuda" and small.name in UNCAPTURED_ON_CUDA:
        assert calls.captured == 0
        assert calls.uncaptured.keys() - {FIRST}
    else:
        assert calls.captured == 1
        assert calls.replayed >= 1  # a late import


def test_the_graph_used_least_recently_goes_first(graphs, device):  # noqa: F811
    pair = Pair(graphs, LTX, device, config=ONE_BLOCK, max_cuda_graphs=2)
    state = pair.model.forward.__self__
    for tokens in (1, 2):
        pair.captured(tokens=tokens)
    pair.call(tokens=1)
    pair.captured(tokens=3)  # in the place of 2
    captured = pair.calls.captured
    pair.call(tokens=1)
    assert pair.calls.captured == captured
    pair.call(tokens=2)
    assert pair.calls.captured == captured + 1
    assert len(state._captures) == 2


@pytest.mark.skipif(torch.cuda.is_available(), reason="counts emulated graphs")
def test_no_more_graphs_than_allowed_are_alive(graphs, device):  # noqa: F811
    before = EmulatedGraph.alive
    pair = Pair(graphs, LTX, device, config=ONE_BLOCK, max_cuda_graphs=3)
    for i in range(20):
        pair.call(tokens=1 + i // 2 % 7)
    assert pair.calls.captured > 3
    assert EmulatedGraph.alive - before == 3
    graphs.eject_kernels(pair.model)
    assert EmulatedGraph.alive == before


def test_time_steps_that_are_parts_of_one_tensor(pair):
    """Slices as in pipelines, with different alignments."""
    steps = torch.linspace(1000, 1, 12, device=pair.device)
    for step in steps:
        pair.call({**pair.inputs(), "timestep": step.expand(2)})
    assert (pair.calls.captured, pair.calls.replayed) == (1, 10)


def test_constants_are_told_apart_by_value_and_type(pair):
    scales = [(0.32, 32.0, 32.0), (0.5, 32.0, 32.0), (1, 1, 1), (1.0, 1.0, 1.0), (True, 1, 1)]
    for _ in range(3):
        for scale in scales:
            pair.call({**pair.inputs(), "rope_interpolation_scale": scale})
    assert (pair.calls.captured, pair.calls.replayed) == (5, 5)


@pytest.mark.parametrize(
    ("name", "value", "reason"),
    [
        ("timestep", lambda: torch.ones(2, device="meta"), "meta"),
        ("attention_kwargs", lambda: {"anything": SimpleNamespace()}, "SimpleNamespace"),
        ("hidden_states", lambda: nn.Buffer(torch.ones(1)).to_sparse(), ""),
    ],
)
def test_arguments_that_no_graph_can_follow(pair, name, value, reason):
    pair.captured()
    with contextlib.suppress(Exception), torch.inference_mode():
        pair.model(**{**pair.inputs(), name: value()})
    assert pair.calls.captured == 1
    assert any(reason in r for r in pair.calls.uncaptured if r != FIRST)
    pair.call()
    assert pair.calls.replayed == 2


def test_errors_are_the_models_own(pair):
    pair.captured()
    arguments = pair.inputs()
    arguments["hidden_states"] = arguments["hidden_states"][..., :-1]
    for _ in range(3):
        with (
            pytest.raises(RuntimeError, match="shapes cannot be multiplied"),
            torch.inference_mode(),
        ):
            pair.model(**arguments)
    pair.call()
    assert pair.calls.captured == 1


# ------------------------------------------------------------------------------------------------
# Changes of the model


PARTS = LTX.parts
LINEAR, NORM, BLOCK, ATTENTION = (PARTS[kind] for kind in ("linear", "norm2", "block", "attention"))


def set_eps(model, eps=0.5):
    model.get_submodule(NORM).eps = eps


def hook_a_linear(model):
    model.get_submodule(LINEAR).register_forward_hook(lambda module, args, out: out * 2)


def swap_blocks(model):
    blocks = model.transformer_blocks._modules
    blocks["0"], blocks["1"] = blocks["1"], blocks["0"]


def act(name, /, **arguments):
    return lambda twins: getattr(twins, name)(**arguments)


def change_weight(how):
    return act("change_weight", module=ATTENTION if "swap" in how else LINEAR, how=how)


def set_attribute(path, name, value):
    return lambda twins: twins.apply_to_part(path, lambda part: setattr(part, name, value))


TWO_BLOCKS = ("swapped blocks", "a dropped block", "cache")
# The effect of each change: the graph is replayed, another one is captured, or no call is captured.
SAME, ANEW, UNKNOWN = "same", "anew", "unknown"
CHANGES = {
    **{f"weight {how}": (change_weight(how), ANEW) for how in WEIGHT_CHANGES},
    **{f"weight {how}": (change_weight(how), SAME) for how in ("mul_", "data.mul_", "nan", "set_")},
    "weights that are loaded": (act("load_weights", seed=2), SAME),
    "weights that are assigned": (act("load_weights", seed=2, assign=True), ANEW),
    "another module": (act("replace", module=LINEAR, kind="another"), ANEW),
    "swapped blocks": (lambda twins: twins.apply(swap_blocks), ANEW),
    "a dropped block": (lambda twins: twins.apply(lambda m: m.transformer_blocks.pop(1)), ANEW),
    "eps": (set_attribute(NORM, "eps", 0.5), ANEW),
    "heads": (set_attribute(ATTENTION, "heads", 4), ANEW),
    "no bias": (set_attribute(LINEAR, "bias", None), ANEW),
    "table": (act("change_weight", module=BLOCK, how="data ="), ANEW),
    "to another dtype and back": (act("to_and_back", dtype="float16"), ANEW),
    "config": (act("change_attribute", module="", how="config"), ANEW),
    "processor": (act("set_processor", module=ATTENTION, kind="subclass"), ANEW),
    "two levels down": (act("change_attribute", module=ATTENTION, how="processor note"), ANEW),
    "class": (act("change_attribute", module="", how="class"), ANEW),
    "quantized": (act("quantize", module="transformer_blocks"), ANEW),
    "patched function": (act("patch", name="F.gelu"), ANEW),
    "patched class": (act("patch", name="Linear.forward"), ANEW),
    "patched function of diffusers": (act("patch", name="apply_rotary_emb"), ANEW),
    "backend": (act("set_attention_backend", name="_native_math"), ANEW),
    "hook on a linear layer": (lambda twins: twins.apply(hook_a_linear), UNKNOWN),
    "hook on a block": (act("hook", module=BLOCK, kind="pre", way="none"), UNKNOWN),
    "forward on the instance": (act("wrap_forward", module=LINEAR), UNKNOWN),
    **{f"offload {k}": (act("offload", kind=k), UNKNOWN) for k in ("sequential", "model")},
    "offload leaf_level": (act("offload", kind="leaf_level"), UNKNOWN),
    "layerwise casting": (act("layerwise_casting"), UNKNOWN),
    "cache": (act("enable_cache", name="first_block"), UNKNOWN),
}


@contextlib.contextmanager
def captured_twins(device, blocks=1):
    """Twins whose usual call has been captured."""
    with Twins("ltx", graphs=True, device=device, blocks=blocks) as twins:
        twins.inject(graphs=True)
        twins.forward(times=3)
        assert twins.watch.check()["replayed"] > 0
        yield twins


@pytest.mark.whole
@pytest.mark.parametrize("name", CHANGES)
def test_changes_are_noticed_and_captured_anew(device, name):
    change, effect = CHANGES[name]
    with captured_twins(device, blocks=2 if name in TWO_BLOCKS else 1) as twins:
        change(twins)
        twins.forward(times=3)
        counts = twins.watch.check()
        assert counts["captured"] == (effect == ANEW)
        assert (counts["replayed"] > 0) == (effect != UNKNOWN)
        if effect == UNKNOWN:
            assert any("hooks" in reason for reason in counts)


def test_hooks_around_the_model_run_at_each_replay(pair):
    seen = []
    pair.model.register_forward_hook(lambda *args: seen.append(1))
    pair.captured()
    pair.call()
    assert len(seen) == sum((pair.calls.captured, pair.calls.replayed, 1))


@pytest.mark.parametrize("is_global", [False, True], ids=["linear layer", "all modules"])
def test_hooks_run_at_each_call_and_graphs_come_back_without_them(device, is_global):
    """The twins compare what the hooks saw."""
    with captured_twins(device) as twins:
        if is_global:
            twins.global_hook(cls=None)
        else:
            twins.hook(module=LINEAR, kind="post", way="replace")
        twins.forward(times=2)
        assert twins.watch.check()["replayed"] == 0 < sum(twins.seen.values())
        twins.remove_global_hook() if is_global else twins.unhook()
        twins.forward(times=3)
        assert twins.watch.check()["replayed"] > 0


def set_scale_alone(model):
    """peft's own, which changes one number. set_adapters also sets which adapters are active."""
    for module in model.modules():
        if hasattr(module, "set_scale"):
            module.set_scale("adapter1", 0.5)


def activate_both(model):
    model.set_adapters(["adapter1", "adapter2"], weights=[0.3, 2.0])


ADAPTERS = {
    "add_lora": act("add_lora", seed=1),
    "set_scale": lambda twins: twins.apply(set_scale_alone),
    "add another": act("add_lora", seed=2),
    "set_adapters": lambda twins: twins.apply(activate_both),
    **{
        name: act("change_lora", action=name)
        for name in ("disable", "enable", "fuse", "unfuse", "delete")
    },
    "unload_lora": lambda twins: twins.apply(lambda model: model.unload_lora()),
}


def test_adapters_loaded_scaled_switched_fused_and_gone(device):
    with captured_twins(device) as twins:
        for name, change in ADAPTERS.items():
            change(twins)
            twins.forward(times=3)
            counts = twins.watch.check()
            assert counts["captured"] == 1 <= counts["replayed"], name


def test_the_scale_of_adapters_of_one_call(device):
    with captured_twins(device) as twins:
        twins.add_lora(seed=1)
        for scale in (0.5, 0.25):
            twins.forward(times=3, scale=scale)
            assert twins.watch.check()["replayed"] > 0


def unchanged(function):
    return lambda *args, **kwargs: function(*args, **kwargs)


@pytest.mark.parametrize(
    ("owner", "name", "wrap"),
    [
        (F, "linear", unchanged),
        (F, "rms_norm", changing),  # in a function mode, PyTorch's calls the replacement once more
        (nn.Module, "__call__", unchanged),
    ],
    ids=lambda value: getattr(value, "__name__", value),
)
def test_patched_functions(pair, monkeypatch, owner, name, wrap):
    pair.captured()
    replayed = pair.calls.replayed
    with monkeypatch.context() as patches:
        patches.setattr(owner, name, wrap(getattr(owner, name)))
        pair.call()
        assert pair.calls.replayed == replayed
        for _ in range(3):
            pair.call()
    pair.captured()


def test_a_backend_of_a_context(device):
    with captured_twins(device) as twins:
        twins.forward(mode="attention_backend", times=1)
        assert twins.watch.check()["replayed"] == 0
        twins.forward(mode="attention_backend", times=3)
        assert twins.watch.check()["captured"] == 1


# ------------------------------------------------------------------------------------------------
# Calls that cannot be captured


class ValueReader(OwnLinear):
    """Does something that a graph cannot repeat: ``how`` is in ``UNREPEATABLE``."""

    def __init__(self, linear, how):
        super().__init__(linear)
        self.how = how
        self.calls = 0
        self.kept = []
        self.register_buffer("sum", torch.zeros((), device=linear.weight.device))

    def forward(self, x):
        out = self.linear(x)
        action, _ = UNREPEATABLE[self.how]
        result = action(self, out)
        return out if result is None else out + result * 0


RAISED = "its capture raised"
UNREPEATABLE = {  # what is added, times 0, and why there is no graph
    "item": (lambda module, out: out.abs().max().item(), RAISED),
    "nonzero": (lambda module, out: out.nonzero().numel(), RAISED),
    "mask": (lambda module, out: out[out > 0].sum(), RAISED),
    "masked write": (lambda module, out: out.__setitem__(out > 100, out[out > 100] * 0), RAISED),
    "random": (lambda module, out: torch.zeros_like(out).normal_(), RAISED),
    "dropout": (lambda module, out: F.dropout(out, 0.5, training=True), RAISED),
    "to host": (lambda module, out: out.cpu().sum().to(out.device), RAISED),
    "keep": (lambda module, out: setattr(module, "kept", [out]), "changes"),
    "count": (lambda module, out: setattr(module, "calls", module.calls + 1), "changes"),
    "write to a buffer": (lambda module, out: module.sum.add_(1), "writes"),
}


@pytest.mark.parametrize("how", UNREPEATABLE)
def test_code_that_no_graph_can_repeat_runs_without_graphs(pair, how):
    if how == "to host" and pair.device == "cpu":
        pytest.skip("the host is the device")
    pair.both(replace_proj_in(functools.partial(ValueReader, how=how)))
    for _ in range(4):
        pair.call()
    assert pair.calls.replayed == 0
    _, reason = UNREPEATABLE[how]
    assert any(reason in r for r in pair.calls.uncaptured), pair.calls
    assert pair.model.proj_in.calls == pair.plain.proj_in.calls
    assert torch.equal(pair.model.proj_in.sum, pair.plain.proj_in.sum)


class NumberMaker(OwnLinear):
    """Makes tensors of Python numbers on the device; outside of a capture this waits for the GPU."""

    def forward(self, x):
        made = {"device": x.device}
        positive = torch.where(x > 0, torch.as_tensor(3, **made), torch.tensor(True, **made))
        assert positive.dtype == torch.int64
        half, third = torch.tensor(0.5, **made), torch.as_tensor(1 / 3, dtype=x.dtype, **made)
        return self.linear(x * half) + third * positive.sum(-1, keepdim=True)


def test_numbers_become_tensors_in_a_capture(pair):
    pair.both(replace_proj_in(NumberMaker))
    pair.captured()
    assert pair.calls.uncaptured.keys() == {FIRST}


class Writer(OwnLinear):
    def forward(self, x):
        return self.linear(x.mul_(2))


def test_writing_to_an_argument(pair):
    pair.both(replace_proj_in(Writer))
    for _ in range(4):
        arguments = pair.inputs()
        other = {**arguments, "hidden_states": arguments["hidden_states"].clone()}
        with torch.inference_mode():
            out = pair.model(**arguments, return_dict=False)[0]
            assert torch.equal(out, pair.plain(**other, return_dict=False)[0])
        assert torch.equal(arguments["hidden_states"], other["hidden_states"])
    assert pair.calls.captured == 0
    assert any("writes" in reason for reason in pair.calls.uncaptured)


# ------------------------------------------------------------------------------------------------
# Replays that start before the model is checked


@pytest.fixture
def events(graphs, monkeypatch, device):  # noqa: F811
    """The order of replays and checks."""
    events = []

    def note(owner, name, event):
        original = getattr(owner, name)

        def noted(*args, **kwargs):
            result = original(*args, **kwargs)
            events.append(f"{event} {result is None}" if event == "look" else event)
            return result

        monkeypatch.setattr(owner, name, noted)

    note(module_of(graphs, "graphs.cuda_graphs").GRAPHS[device], "replay", "replay")
    note(module_of(graphs, "graphs.model_fingerprint").Fingerprint, "change", "look")
    return events


@pytest.mark.parametrize("family", [LTX, FLUX], ids=str)
def test_a_replay_starts_before_the_model_is_checked(graphs, device, family, events):  # noqa: F811
    for mode in (torch.no_grad, torch.inference_mode):
        pair = Pair(graphs, family, device)
        arguments = pair.inputs()
        with mode():
            for _ in range(2):
                pair.model(**arguments)
            events.clear()
            pair.model(**arguments)
        assert events == ["replay", "look True"]


def test_a_stale_replay_is_discarded(pair, events):
    pair.captured()
    pair.both(set_eps)
    events.clear()
    pair.call()  # with the changed model's bits
    assert events == ["replay", "look False"]
    assert pair.calls.replayed == 1


def test_no_replay_starts_when_its_memory_is_gone(pair, events):
    pair.captured()
    events.clear()
    weight = pair.model.proj_in.weight
    before, weight.data = weight.data, weight.data.clone()
    with torch.inference_mode(), contextlib.suppress(RuntimeError):
        pair.model(**pair.inputs())
    assert "replay" not in events
    assert not any(event == "look True" for event in events)
    weight.data = before


class TableReader(OwnLinear):
    """Adds a table outside the model's modules."""

    table = SimpleNamespace(values=None)  # whose attributes are not checked
    how = "whole"

    def forward(self, x):
        values = self.table.values
        if self.how == "parts":
            values = values[0] + values[1]
        elif self.how != "whole":
            values = getattr(values, self.how)
        return self.linear(x) + values


@pytest.mark.parametrize("how", ["whole", "T", "data", "parts"])
def test_tensors_outside_of_modules(pair, events, monkeypatch, how):
    values = torch.randn(2, pair.model.proj_in.out_features, device=pair.device)
    values = {"parts": values.unbind(), "T": values[:1].T}.get(how, values[0])
    monkeypatch.setattr(TableReader, "how", how)
    monkeypatch.setattr(TableReader.table, "values", values)
    pair.both(replace_proj_in(TableReader))
    pair.captured()
    tensor = values[1] if how == "parts" else values
    tensor.data = tensor.data * 2
    events.clear()
    pair.call()  # with the changed table's bits
    if how == "whole":
        assert pair.calls.captured == 2
        assert events[0] == "look True"
    pair.call()


def test_the_first_attention_of_a_process(kernel, pair, monkeypatch):
    """On a GPU it changes PyTorch's order of attentions. A pipeline has it in its first decode."""
    module, order = module_of(kernel, "graphs.cuda_graphs"), ["flash", "cudnn"]
    choose = torch._fused_sdp_choice

    def first_choice(*tensors):
        order.sort()
        return choose(*tensors)

    monkeypatch.setattr(torch, "_fused_sdp_choice", first_choice)
    monkeypatch.setattr(module, "_getters", (*module._getters, lambda: list(order)))
    module._settle.cache_clear()
    pair.captured()
    x = torch.ones(1, 1, 8, 8)
    torch._fused_sdp_choice(x, x, x)  # as scaled_dot_product_attention does
    replayed = pair.calls.replayed
    pair.call()
    assert pair.calls.replayed == replayed + 1


# ------------------------------------------------------------------------------------------------
# Interrupts, threads, copies, memory


def before_operations(kernel, patches, act):
    """Call `act` with the number of each operation that a capture records, before it runs."""
    recorder = module_of(kernel, "graphs.graph_capture")._Recorder
    record, count = recorder.__torch_function__, itertools.count()

    def recorded(self, func, types, args=(), kwargs=None):
        act(next(count))
        return record(self, func, types, args, kwargs)

    patches.setattr(recorder, "__torch_function__", recorded)


@pytest.mark.parametrize("at", (0, 17, 60))
def test_ctrl_c_in_a_capture(pair, graphs, monkeypatch, at):  # noqa: F811
    def interrupt(i):
        if i == at:
            raise KeyboardInterrupt

    pair.call()
    before_operations(graphs, monkeypatch, interrupt)
    with pytest.raises(KeyboardInterrupt), torch.inference_mode():
        pair.model(**pair.inputs(), return_dict=False)
    pair.captured()
    assert pair.calls.captured == 1


def test_too_little_memory_for_what_a_replay_returns(pair, graphs, monkeypatch):  # noqa: F811
    def out_of_memory(tensor):
        raise torch.OutOfMemoryError("CUDA out of memory")

    pair.captured()
    with monkeypatch.context() as patches:
        patches.setattr(module_of(graphs, "graphs.graph_capture"), "like", out_of_memory)
        pair.call()
    assert any("not enough memory" in reason for reason in pair.calls.uncaptured)
    captured = pair.calls.captured
    pair.call()
    assert pair.calls.captured == captured
    pair.captured(tokens=3)


def test_ctrl_c_while_graphs_are_dropped(pair, graphs, monkeypatch):  # noqa: F811
    pair.captured()
    pair.captured(tokens=3)
    pair.both(set_eps)
    of_graphs = module_of(graphs, "graphs.cuda_graphs").GRAPHS[pair.device]
    reset, count = of_graphs.reset, iter(range(10**9))

    def interrupted(self):
        if next(count) == 1:
            raise KeyboardInterrupt
        reset(self)

    with monkeypatch.context() as patches:
        patches.setattr(of_graphs, "reset", interrupted)
        with pytest.raises(KeyboardInterrupt), torch.inference_mode():
            pair.model(**pair.inputs())
    for tokens in (1, 3, 1, 3):
        pair.call(tokens=tokens)


def test_threads(graphs, device):  # noqa: F811
    pair = Pair(graphs, LTX, device)
    with torch.inference_mode():
        jobs = [pair.inputs(tokens=1 + i % 3) for i in range(24)]
        expected = [pair.plain(**job, return_dict=False)[0] for job in jobs]
    results = [None] * len(jobs)

    def work(first):
        compute_as_other_threads()
        with torch.inference_mode():
            for i in range(first, len(jobs), 4):
                results[i] = pair.model(**jobs[i], return_dict=False)[0]

    run_threads(work, 4)
    assert all(torch.equal(a, b) for a, b in zip(results, expected, strict=True))
    calls = pair.calls
    assert calls.captured + calls.replayed + sum(calls.uncaptured.values()) == len(jobs)


def test_a_copy_has_graphs_of_its_own(pair, graphs):  # noqa: F811
    pair.captured()
    duplicate = copy.deepcopy(pair.model)
    changes.change_weight(duplicate.get_submodule(LINEAR), "data =")
    assert duplicate.forward.__self__.module() is duplicate
    with torch.inference_mode():
        arguments = pair.inputs()
        outs = [duplicate(**arguments, return_dict=False)[0] for _ in range(4)]
    assert all(torch.equal(out, outs[0]) for out in outs)
    (calls,) = graphs.inject_kernels(duplicate, cuda_graphs=True).cuda_graphs
    assert (calls.captured, calls.replayed) == (1, 2)
    assert not torch.equal(outs[0], pair.call(arguments))


def test_eject_gives_the_model_back(pair, graphs):  # noqa: F811
    """A user's wrapper may still hold the forward, but keeps no graph alive."""
    pair.captured()
    forward = pair.model.forward
    (capture,) = map(weakref.ref, forward.__self__._captures.values())
    graphs.eject_kernels(pair.model)
    graphs.eject_kernels(pair.plain)
    assert "forward" not in vars(pair.model)
    pair.call()
    assert capture() is None
    with torch.inference_mode():
        arguments = pair.inputs()
        out = forward(**arguments, return_dict=False)[0]
        assert torch.equal(out, pair.plain(**arguments, return_dict=False)[0])


def test_a_refused_capture_holds_no_model(pair):
    pair.both(replace_proj_in(functools.partial(ValueReader, how="item")))
    for _ in range(3):
        pair.call()
    assert any("its capture raised" in reason for reason in pair.calls.uncaptured)
    gc.collect()
    gc.disable()
    try:
        weight = weakref.ref(next(pair.model.parameters()))
        del pair.model
        assert weight() is None
    finally:
        gc.enable()


@pytest.mark.parametrize("name", ["minimax_music3", "ltx"])
def test_a_forward_whose_module_is_gone(graphs, device, name):  # noqa: F811
    small = small_models.BY_NAME.get(name)
    model = LTX.model(device) if small is None else small.model(device)
    graphs.inject_kernels(model, cuda_graphs=True)
    forward = model.forward
    arguments = LTX.inputs(device) if small is None else small.arguments(device)
    del model
    gc.collect()
    with pytest.raises(RuntimeError, match="called after its module had been freed"):
        forward(**arguments)


def test_graphs_hold_no_replaced_weights(pair):
    """After a model is moved, or layers are replaced, graphs must not hold the old memory."""
    pair.captured()
    memory = [p.data_ptr() for p in pair.model.parameters()]
    pair.both(lambda model: model.to(torch.float64).to(torch.float32))
    state = pair.model.forward.__self__
    held = {t.data_ptr() for c in state._captures.values() for t in c.externals._tensors}
    assert not held.intersection(memory)
    pair.captured()


def test_options_are_checked(kernel, device):
    model = LTX.model(device)
    with pytest.raises(TypeError, match="cuda_graphs must be True or False, got an int"):
        kernel.inject_kernels(model, cuda_graphs=1)
    with pytest.raises(TypeError, match="max_cuda_graphs must be an int, got a float"):
        kernel.inject_kernels(model, cuda_graphs=True, max_cuda_graphs=2.0)
    with pytest.raises(ValueError, match="max_cuda_graphs must be 1 or more, got 0"):
        kernel.inject_kernels(model, cuda_graphs=True, max_cuda_graphs=0)
    assert "forward" not in vars(model)
    kernel.inject_kernels(model, cuda_graphs=True)
    with pytest.raises(ValueError, match="cuda_graphs=True"):
        kernel.inject_kernels(model)


def test_reasons_are_logged_once(pair, caplog):
    pair.captured()
    pair.both(hook_a_linear)
    with caplog.at_level(logging.WARNING, "h100_diffusers_kernels"):
        for _ in range(5):
            pair.call()
    records = [r for r in caplog.records if "without a CUDA graph" in r.getMessage()]
    assert len(records) == 1
    assert "hooks" in records[0].getMessage()


def test_compiled_models_run_without_graphs(pair):
    """With compiled parts, and a compiled model in one Dynamo graph."""
    pair.captured()
    part = pair.model.transformer_blocks[0].ff
    part.compile(backend="eager")
    for _ in range(2):
        pair.call()
    assert any("compiled" in reason for reason in pair.calls.uncaptured)
    del part._compiled_call_impl
    compiled = torch.compile(pair.model, backend="eager", fullgraph=True)
    with torch.inference_mode():
        arguments = pair.inputs()
        out = compiled(**arguments, return_dict=False)[0]
        torch.testing.assert_close(out, pair.plain(**arguments, return_dict=False)[0])
    assert pair.calls.captured == 1


def test_changes_at_each_call_are_checked_with_a_backoff(pair, graphs, monkeypatch):  # noqa: F811
    pair.captured()
    walks = []
    fingerprint = module_of(graphs, "graphs.cuda_graphs").Fingerprint
    monkeypatch.setattr(
        module_of(graphs, "graphs.cuda_graphs"),
        "Fingerprint",
        lambda model: (walks.append(1), fingerprint(model))[1],
    )
    for i in range(40):
        pair.both(functools.partial(set_eps, eps=1e-6 * (i + 1)))
        pair.call()
    assert len(walks) < 15
    for _ in range(70):
        pair.call()
    assert pair.calls.replayed > 1


# ------------------------------------------------------------------------------------------------
# Only on CUDA


@needs_cuda
def test_streams(graphs):  # noqa: F811
    pair = Pair(graphs, LTX, "cuda", torch.bfloat16)
    pair.captured()
    streams = [torch.cuda.Stream() for _ in range(3)]
    with torch.inference_mode():
        jobs = [pair.inputs() for _ in range(30)]
        expected = [pair.plain(**job, return_dict=False)[0] for job in jobs]
        torch.cuda.synchronize()
        results = []
        for i, job in enumerate(jobs):
            with torch.cuda.stream(streams[i % 3]):
                results.append(pair.model(**job, return_dict=False)[0])
        torch.cuda.synchronize()
    assert all(torch.equal(a, b) for a, b in zip(results, expected, strict=True))
    assert pair.calls.captured == 1


@needs_cuda
def test_a_capture_of_the_users_own_holds_the_model(graphs):  # noqa: F811
    pair = Pair(graphs, LTX, "cuda", torch.bfloat16)
    pair.captured()
    with torch.inference_mode():
        arguments = pair.inputs()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            out = pair.model(**arguments, return_dict=False)[0]
        arguments["hidden_states"].copy_(pair.inputs()["hidden_states"])
        graph.replay()
        assert torch.equal(out, pair.plain(**arguments, return_dict=False)[0])
    assert any("caller" in reason for reason in pair.calls.uncaptured)


@needs_cuda
@pytest.mark.parametrize("how", ("synchronize", "allocate"))
def test_what_breaks_a_capture_of_cuda(graphs, monkeypatch, how):  # noqa: F811
    """The host waits during a capture, without an operation that shows it."""
    pair = Pair(graphs, LTX, "cuda", torch.bfloat16)

    def disturb(i):
        if i == 30 and how == "synchronize":
            torch.cuda.synchronize()
        elif i == 30:
            torch.empty(1 << 50, dtype=torch.uint8, device="cuda")

    before_operations(graphs, monkeypatch, disturb)
    for _ in range(3):
        pair.call()
    assert pair.calls.captured == 0
    torch.cuda.manual_seed(0)
    torch.randn(5, device="cuda")
    pair.captured(tokens=3)


@needs_cuda
def test_other_threads_draw_random_numbers_meanwhile(graphs, monkeypatch):  # noqa: F811
    pair = Pair(graphs, LTX, "cuda", torch.bfloat16)
    drawn, failed = [], []

    def draw():
        try:
            drawn.append(torch.randn(4, device="cuda").cpu())
        except Exception as error:
            failed.append(error)

    def draw_in_a_thread(i):
        thread = threading.Thread(target=draw)
        thread.start()
        thread.join()

    pair.call()
    torch.cuda.manual_seed(3)
    with monkeypatch.context() as patches:
        before_operations(graphs, patches, draw_in_a_thread)
        pair.call()
    assert not failed
    torch.cuda.manual_seed(3)
    assert all(torch.equal(x, torch.randn(4, device="cuda").cpu()) for x in drawn)
    assert pair.calls.captured == 1


@needs_cuda
def test_memory_of_many_shapes_is_bounded(graphs):  # noqa: F811
    pair = Pair(graphs, LTX, "cuda", torch.bfloat16, max_cuda_graphs=3)
    shapes = [1, 40, 17, 90, 5, 60, 33, 75, 21, 50]

    def reserved(rounds):
        for _ in range(rounds):
            for tokens in shapes:
                pair.captured(tokens=tokens)
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        return torch.cuda.memory_reserved()

    first = reserved(2)
    assert reserved(10) <= first + (4 << 20)
    assert len(pair.model.forward.__self__._captures) == 3
