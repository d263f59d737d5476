"""tools/quality/seeded_faults.toml: each fault applies to this checkout, and its tests exist."""

import pytest

import seeded_faults
from conftest import CHECKOUT

FAULTS = seeded_faults.read_faults()
each_fault = pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.name)


def test_names_differ():
    assert FAULTS and len({fault.name for fault in FAULTS}) == len(FAULTS)


@each_fault
def test_each_replacement_applies(fault):
    assert fault.replacements
    for replacement in fault.replacements:
        text = (CHECKOUT / replacement.path).read_text(encoding="utf-8")
        assert text.count(replacement.old) == 1, replacement
        assert replacement.new != replacement.old


@each_fault
def test_each_test_exists(fault):
    assert fault.tests
    for test in fault.tests:
        path, _, name = test.partition("::")
        assert (CHECKOUT / path).is_file()
        text = (CHECKOUT / path).read_text(encoding="utf-8")
        assert not name or f"\ndef {name.partition('[')[0]}(" in text
