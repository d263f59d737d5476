"""diffusers_tests.py: models get kernels at birth, and tests whose outcomes differ are found."""

import diffusers
import pytest

import diffusers_tests
from autoencoders import AUTOENCODERS


def has_kernels(model):
    return any("forward" in vars(module) for module in model.modules())


def test_models_are_born_with_kernels(kernel, monkeypatch):
    """Once their own class's `__init__` ends."""
    monkeypatch.setattr(diffusers_tests.pkgutil, "walk_packages", lambda *_: [])  # takes seconds
    parent, none = diffusers.AutoencoderKL, diffusers.AutoencoderTiny
    assert {parent, none} < {*diffusers_tests.model_classes()}
    for cls in (parent, none):
        born = diffusers_tests.born_with_kernels(cls, kernel.inject_kernels)
        monkeypatch.setattr(cls, "__init__", born)

    class Other(parent):
        def __init__(self, **config):
            super().__init__(**config)
            assert not has_kernels(self)

    config = AUTOENCODERS["kl"].config
    assert has_kernels(parent(**config)) and not has_kernels(Other(**config))
    assert has_kernels(type("Same", (parent,), {})(**config)) and not has_kernels(none())


class Report:
    def __init__(self, outcome, nodeid="a::b", error=""):
        self.outcome, self.nodeid, self.longrepr = outcome, nodeid, error
        self.failed, self.skipped = outcome == "failed", outcome == "skipped"


@pytest.mark.parametrize(
    ("phases", "expected"),
    [
        (("passed", "passed", "passed"), ("passed", "")),
        (("passed", "skipped", "passed"), ("skipped", "")),
        (("passed", "failed", "passed"), ("failed", "E: no")),
        (("failed", "passed"), ("failed", "E: no")),
        (("passed", "passed", "failed"), ("failed", "E: no")),
    ],
)
def test_outcome_of_phases(monkeypatch, phases, expected):
    monkeypatch.setattr(diffusers_tests, "_outcomes", {})
    for phase in phases:
        diffusers_tests.pytest_runtest_logreport(Report(phase, error="traceback\nE: no\n"))
    assert diffusers_tests._outcomes == {"a::b": expected}


@pytest.mark.parametrize("differs_again", [True, False])
def test_differing_tests_run_again(monkeypatch, capsys, tmp_path, differs_again):
    plain = {"a": ("passed", ""), "b": ("passed", ""), "c": ("failed", "x")}
    injected = {"a": ("passed", ""), "b": ("failed", "E: other"), "c": ("failed", "y")}
    again = {"b": ("failed", "E: other") if differs_again else ("passed", "")}
    runs = iter([plain, injected, {"b": plain["b"]}, again])
    calls = []
    monkeypatch.setattr(diffusers_tests, "run", lambda *args: (calls.append(args), next(runs))[1])
    arguments = [str(tmp_path), "tests/models", "--processes", "3", "--", "-k", "x"]
    monkeypatch.setattr("sys.argv", ["diffusers_tests.py", *arguments])
    assert diffusers_tests.main() == int(differs_again)
    first = [(tmp_path, ["tests/models"], way, 3, ["-k", "x"]) for way in (False, True)]
    assert calls == [*first, *((tmp_path, ["b"], way, 1, ()) for way in (False, True))]
    printed = capsys.readouterr().out
    assert ("1 of 3 tests differ" in printed) is differs_again
    assert ("injected: failed E: other" in printed) is differs_again
