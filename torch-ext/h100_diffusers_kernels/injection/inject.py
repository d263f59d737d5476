"""inject_kernels and eject_kernels."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from typing import Any

from torch import nn

from .cuda_graphs.device import Pool
from .generic import is_denoiser, is_model, plan_in_part
from .plan import Plan, plan_model
from .registry import family_of, known_models
from .report import NOT_AT_ALL, InjectionReport, LeftAlone, join

logger = logging.getLogger("h100_diffusers_kernels")

# The attribute of an injected model that holds what was done to it. It is on the instance, so that
# a deep copy of the model takes a copy of it along.
_PLAN = "_h100_diffusers_kernels_plan"


def inject_kernels(
    pipe_or_model: Any,
    *,
    attention: bool = True,
    cuda_graphs: bool = False,
    max_cuda_graphs: int = 8,
) -> InjectionReport:
    """Makes a diffusers model, or each denoising model of a pipeline, run on this package's kernels.

    A model whose class is known as a whole runs on them in full; every other one in part: its norms,
    activations and attentions, each by itself. The report's ``levels`` say which. Autoencoders, text
    encoders and whatever else a pipeline holds are left as they are, unless one is given by itself.

    Works in place and on the instances only: no class is changed, and neither are weights, processors,
    ``state_dict`` or configuration. Hooks, offloading, LoRA, quantized linear layers and
    ``torch.compile`` keep working, whether they come before or after, and what a user puts in the place
    of a part, or of a function or class that it is made of, is what runs. A second call with the same
    options does nothing and reports what is in place. :func:`eject_kernels` undoes it; do that before
    pickling a model as a whole (``copy.deepcopy``, ``state_dict`` and ``save_pretrained`` need no such
    care).

    A call that the kernels do not cover (under autocast, with mixed dtypes, on a device that this
    build has no kernels for) is computed by the model's own code: that is logged once for each module and
    reason, counted in the report's ``calls``, and an error where the environment variable
    ``H100_DIFFUSERS_KERNELS_STRICT`` is set to 1. Attention is the model's own, too, and this is no
    fall-back, in training, under context parallelism, within a function mode, and wherever an
    attention backend has been chosen: by ``model.set_attention_backend``, by the context manager
    ``attention_backend`` or by ``DIFFUSERS_ATTN_BACKEND``, before or after the injection. (The last
    two cannot be told from no choice where they name "native".)

    Args:
        pipe_or_model: a ``torch.nn.Module`` (a compiled or otherwise wrapped one included), or a pipeline
            with a diffusers model among its components.
        attention: whether attention itself runs on this package's kernel, too. False leaves it to
            diffusers; what comes before and after it is replaced all the same.
        cuda_graphs: whether each model's forward is captured into a CUDA graph at its second call of a kind
            (shapes, dtypes and all else but tensors' values, and what PyTorch is set to) and replayed from
            then on, where no gradients are asked for. What it returns is the caller's own, with the same
            bits. At each replay all is looked at that the forward is made of: where weights were moved or
            replaced, adapters, hooks, processors or functions changed, graphs are dropped and captured anew.
            A call that cannot be captured runs as it is: the report's ``cuda_graphs`` count the reasons,
            and the first call of each is logged. The memory that a forward works in is held
            once more, for all graphs of the pipeline. Not for a model of which another thread draws random
            numbers from CUDA's default generator: PyTorch refuses that while a graph is captured.
        max_cuda_graphs: how many graphs are kept of a model; the one used least recently goes first.

    Returns:
        The report: each module replaced, and each left alone with the reason. It is also logged,
        under the name ``h100_diffusers_kernels``.

    Raises:
        ValueError: if there is nothing in ``pipe_or_model`` that there are kernels for, or something that was
            injected with other options: eject the kernels first; or if ``max_cuda_graphs`` is less than 1.
            Nothing is changed then.
        TypeError: if an option is of another type.

    Example::

        report = kernel.inject_kernels(pipe)
        print(report)
    """
    _check_options(attention, cuda_graphs, max_cuda_graphs)
    options = {
        "attention": attention,
        "cuda_graphs": cuda_graphs,
        "max_cuda_graphs": max_cuda_graphs,
    }
    report = InjectionReport(already_injected=True)
    found = []
    for name, component in _components(pipe_or_model):
        models = list(_models_in(name, component, is_alone=component is pipe_or_model))
        if not models:
            report.left_alone.append(
                LeftAlone(name, type(component).__name__, "it is no denoising model of diffusers")
            )
            report.levels[name] = NOT_AT_ALL
        found += models
    plans = [_plan(name, model, family, options) for name, model, family in found]
    if all(plan.found_nothing for plan in plans):
        raise ValueError(
            f"inject_kernels: pipe_or_model must be or hold a {known_models()}, or a model with norms, "
            f"activations or attentions of diffusers or PyTorch, got a {type(pipe_or_model).__name__} "
            "without one"
        )
    applied = []
    pool = Pool()
    try:
        for (name, model, _), plan in zip(found, plans):
            if vars(model).get(_PLAN) is None:
                report.already_injected &= plan.found_nothing
                if not plan.is_empty:
                    applied.append((model, plan))
                    plan.apply(pool)
                    setattr(model, _PLAN, plan)
            report.extend(name, plan.report)
    except BaseException:
        for model, plan in applied:
            plan.undo(model)
            vars(model).pop(_PLAN, None)
        raise
    logger.info("inject_kernels(%s): %s", type(pipe_or_model).__name__, report)
    return report


def _plan(name: str, model: nn.Module, family: Any, options: dict[str, Any]) -> Plan:
    """The plan that is in place, if its options are the same, or a new one."""
    plan = vars(model).get(_PLAN)
    if plan is None:
        plan = (
            plan_in_part(model, options) if family is None else plan_model(model, family, options)
        )
        if options["cuda_graphs"] and not plan.found_nothing:
            plan.capture(model)
        return plan
    changed = {key: value for key, value in options.items() if plan.options[key] != value}
    if changed:
        before = {key: plan.options[key] for key in changed}
        raise ValueError(
            f"inject_kernels: {name or 'the model'} runs on kernels injected with {_shown(before)}, "
            f"got {_shown(changed)}: call eject_kernels first"
        )
    return plan


def _check_options(attention: Any, cuda_graphs: Any, max_cuda_graphs: Any) -> None:
    for name, value in (("attention", attention), ("cuda_graphs", cuda_graphs)):
        if not isinstance(value, bool):
            raise TypeError(
                f"inject_kernels: {name} must be True or False, got a {type(value).__name__}"
            )
    if isinstance(max_cuda_graphs, bool) or not isinstance(max_cuda_graphs, int):
        raise TypeError(
            f"inject_kernels: max_cuda_graphs must be an int, got a {type(max_cuda_graphs).__name__}"
        )
    if max_cuda_graphs < 1:
        raise ValueError(
            f"inject_kernels: max_cuda_graphs must be 1 or more, got {max_cuda_graphs}"
        )


def _shown(options: dict[str, Any]) -> str:
    return ", ".join(f"{name}={value}" for name, value in options.items())


def eject_kernels(pipe_or_model: Any) -> None:
    """Undoes :func:`inject_kernels`: each module gets back the forward that it had.

    A module whose forward was replaced by something else after the injection keeps that. Where nothing
    was injected, nothing happens.

    Args:
        pipe_or_model: as for :func:`inject_kernels`.
    """
    for name, component in _components(pipe_or_model):
        for module_name, module in component.named_modules():
            plan = vars(module).get(_PLAN)
            if plan is not None:
                plan.undo(module)
                delattr(module, _PLAN)
                logger.info("eject_kernels: restored %s", join(name, module_name) or "the model")


def _components(pipe_or_model: Any) -> Iterator[tuple[str, nn.Module]]:
    """The modules to look into, by name; a model is its own only component, without a name."""
    if isinstance(pipe_or_model, nn.Module):
        yield "", pipe_or_model
        return
    components = getattr(pipe_or_model, "components", None)
    if not isinstance(components, Mapping):
        components = getattr(pipe_or_model, "__dict__", {})
    for name, component in components.items():
        if isinstance(component, nn.Module):
            yield name, component


def _models_in(
    name: str, component: nn.Module, is_alone: bool
) -> Iterator[tuple[str, nn.Module, Any | None]]:
    """Models inside of a module, through wrappers such as torch.compile's, each with its family or None.

    Without a family it is, in a pipeline, a denoiser of diffusers; alone, a model of diffusers, or whatever
    it is.
    """
    is_known = False
    for module_name, module in component.named_modules():
        family = family_of(module)
        if family is not None:
            is_known = True
            yield join(name, module_name), module, family
    if is_known:
        return
    is_wanted = is_model if is_alone else is_denoiser
    outermost: list[str] = []
    for module_name, module in component.named_modules():
        if is_wanted(module) and not any(module_name.startswith(o) for o in outermost):
            outermost.append(f"{module_name}." if module_name else "")
            yield join(name, module_name), module, None
    if is_alone and not outermost:
        unwrapped = component._modules.get("_orig_mod")
        yield ("_orig_mod", unwrapped, None) if unwrapped is not None else ("", component, None)
