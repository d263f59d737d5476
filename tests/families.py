"""The fully injected families, for tests of all families.

Properties of one family (operators of a forward, coordinates, masks) are tested in separate files.
"""

import importlib
import importlib.util
from pathlib import Path

import pytest
import torch

from family import (  # noqa: F401
    KERNEL_HEADS,
    TINY_HEADS,
    Family,
    assert_close,
    joined,
    prepared,
    run,
)

# Those of family_*.py whose model diffusers has: older versions lack some.
_NAMES = {file.stem for file in Path(__file__).parent.glob("family_*.py")}
_FILES = map(importlib.import_module, sorted(_NAMES - {"family_relatives", "family_trained_ltx"}))
FAMILIES = {
    value.name: value
    for file in _FILES
    for value in vars(file).values()
    if isinstance(value, Family) and importlib.util.find_spec(value.module) is not None
}
# Their models index by a boolean mask before the blocks, or read numbers of tokens, which waits for the GPU;
# or they copy numbers to it.
WAITING = ("hidream", "hunyuan_video15", "qwenimage21", "glm_image", "lumina2", "omnigen")
if torch.cuda.is_available():
    WAITING += ("chroma", "nucleus", "joyimage", "joyimage_plus")
every_family = pytest.mark.parametrize("family", FAMILIES.values(), ids=str)
