"""Runs diffusers' own tests of models plain and with kernels injected at birth, and lists what differs.

The tests are in diffusers' repository, of which a checkout's `tests` folder is needed, with `models` and the
files beside it. A model gets its kernels at the end of its `__init__`. Tests whose outcomes differ run again
in both ways, one after the other, and are listed if they differ again:

    git clone --depth 1 --branch v0.42.1 https://github.com/huggingface/diffusers /tmp/diffusers
    python tools/quality/diffusers_tests.py /tmp/diffusers tests/models --processes 15 --output /tmp/out.json
    python tools/quality/diffusers_tests.py /tmp/diffusers tests/models/autoencoders -- -k "offload"

The package `parameterized` is needed, too. Its exit status is 1 if outcomes differ.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import importlib
import json
import os
import pkgutil
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

CHECKOUT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(CHECKOUT / "tools"))
from builder.package import hub_name  # noqa: E402

KERNEL_ID, VERSION = hub_name(CHECKOUT)
INJECTED, OUTCOMES = "DIFFUSERS_TESTS_INJECTED", "DIFFUSERS_TESTS_OUTCOMES"
PLAIN_AND_INJECTED = ("plain", "injected")

# Of a run: each test's outcome, and its error if it failed, by its name.
Outcomes = dict[str, tuple[str, str]]


# --------------------------------------------------------------------------------------------------
# The plugin of pytest


def model_classes() -> Iterator[type]:
    """All model classes of diffusers."""
    import diffusers.models
    from diffusers import ModelMixin

    for info in pkgutil.walk_packages(diffusers.models.__path__, "diffusers.models."):
        with contextlib.suppress(ImportError):  # of an optional package
            importlib.import_module(info.name)
    found = [ModelMixin]
    for cls in found:
        found += cls.__subclasses__()
    yield from dict.fromkeys(found[1:])


def born_with_kernels(cls: Any, inject: Callable[[Any], object]) -> Callable:
    """The class's `__init__`, after which a model gets kernels, unless a subclass's goes on."""
    init = cls.__init__

    @functools.wraps(init)
    def init_and_inject(self: Any, *args: Any, **kwargs: Any) -> None:
        init(self, *args, **kwargs)
        if type(self).__init__ is init_and_inject:
            with contextlib.suppress(ValueError):  # there is nothing to replace
                inject(self)

    return init_and_inject


def pytest_configure() -> None:
    if os.environ.get(INJECTED) == "1":
        from kernels import get_kernel

        kernel = get_kernel(KERNEL_ID, version=VERSION, trust_remote_code=True)
        for cls in model_classes():
            if "__init__" in vars(cls):
                cls.__init__ = born_with_kernels(cls, kernel.inject_kernels)  # type: ignore[misc]


_outcomes: Outcomes = {}


def pytest_runtest_logreport(report: Any) -> None:
    if report.failed or report.nodeid not in _outcomes or report.skipped:
        error = str(report.longrepr).strip().splitlines()[-1] if report.failed else ""
        if _outcomes.get(report.nodeid, ("passed", ""))[0] != "failed":
            _outcomes[report.nodeid] = (report.outcome, error)


def pytest_sessionfinish(session: Any) -> None:
    if OUTCOMES in os.environ and not hasattr(session.config, "workerinput"):
        Path(os.environ[OUTCOMES]).write_text(json.dumps(_outcomes))


# --------------------------------------------------------------------------------------------------
# Runs


def run(
    folder: Path, tests: Sequence[str], is_injected: bool, processes: int, more: Sequence[str]
) -> Outcomes:
    with tempfile.TemporaryDirectory() as temporary:
        path = Path(temporary) / "outcomes.json"
        environment = {
            "LOCAL_KERNELS": f"{KERNEL_ID}={CHECKOUT}",
            "HF_HUB_OFFLINE": "1",
            **os.environ,
            "PYTHONPATH": os.pathsep.join(
                [str(Path(__file__).parent), *filter(None, [os.environ.get("PYTHONPATH")])]
            ),
            INJECTED: str(int(is_injected)),
            OUTCOMES: str(path),
        }
        # In both ways, so that both import the same modules.
        command = [sys.executable, "-m", "pytest", "-q", "-p", Path(__file__).stem, "--tb=line"]
        command += [
            "-p",
            "no:cacheprovider",
            "-p",
            "no:warnings",
            "--continue-on-collection-errors",
        ]
        command += ["--numprocesses", str(processes)] if processes > 1 else []
        subprocess.run([*command, *more, *tests], cwd=folder, env=environment)
        if not path.exists():
            raise SystemExit("pytest did not run")
        return {name: tuple(outcome) for name, outcome in json.loads(path.read_text()).items()}


def differing(plain: Outcomes, injected: Outcomes) -> list[str]:
    """Tests whose outcomes differ."""
    names = dict.fromkeys([*plain, *injected])
    missing = ("missing", "")
    return [n for n in names if plain.get(n, missing)[0] != injected.get(n, missing)[0]]


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", type=Path, help="checkout of diffusers")
    parser.add_argument("tests", nargs="*", default=["tests/models"], help="as pytest takes them")
    parser.add_argument("--processes", type=int, default=1)
    parser.add_argument("--output", type=Path, help="JSON file for the outcomes")
    given = [*sys.argv[1:], "--"]
    own, more = given[: given.index("--")], given[given.index("--") + 1 : -1]
    arguments = parser.parse_args(own)
    folder = arguments.folder.resolve()
    plain, injected = (
        run(folder, arguments.tests, is_injected, arguments.processes, more)
        for is_injected in (False, True)
    )
    found = differing(plain, injected)
    if found:
        again = [run(folder, found, is_injected, 1, ()) for is_injected in (False, True)]
        found = [name for name in differing(*again) if name in found]
    if arguments.output is not None:
        results = {"plain": plain, "injected": injected, "differing": found}
        arguments.output.write_text(json.dumps(results, indent=1) + "\n")
    for name, outcomes in zip(PLAIN_AND_INJECTED, (plain, injected), strict=True):
        counts = Counter(outcome for outcome, _ in outcomes.values())
        print(f"{name}: " + ", ".join(f"{n} {outcome}" for outcome, n in counts.items()))
    print(f"{len(found)} of {len(plain)} tests differ:")
    for test in found:
        print(f"  {test}")
        for name, outcomes in zip(PLAIN_AND_INJECTED, (plain, injected), strict=True):
            print(f"    {name}: {' '.join(outcomes.get(test, ('missing', '')))}")
    return int(bool(found))


if __name__ == "__main__":
    sys.exit(main())
