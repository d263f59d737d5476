"""The fully injected families, for tests of all families.

Properties of one family (operators of a forward, coordinates, masks) are tested in separate files.
"""

import importlib.util

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
from family_cogvideox import COGVIDEOX
from family_cosmos import COSMOS
from family_flux import CHROMA, FLUX, FLUX2, FLUX3
from family_hunyuan import HUNYUAN_VIDEO, HUNYUAN_VIDEO15
from family_krea2 import KREA2
from family_ltx import LTX
from family_ltx2 import LTX2
from family_lumina2 import LUMINA2
from family_minimax_h3 import MINIMAX_H3
from family_mochi import MOCHI
from family_qwenimage import QWEN_IMAGE
from family_qwenimage21 import QWEN_IMAGE21
from family_sd3 import SD3
from family_wan import WAN
from family_z_image import Z_IMAGE

_FAMILIES = (
    *(LTX, LTX2, FLUX, FLUX2, FLUX3, CHROMA, QWEN_IMAGE, SD3, WAN, COSMOS),
    *(HUNYUAN_VIDEO, HUNYUAN_VIDEO15, COGVIDEOX, MOCHI, KREA2, Z_IMAGE, LUMINA2),
    *(QWEN_IMAGE21, MINIMAX_H3),
)
# Older versions of diffusers do not have all of them.
FAMILIES = {f.name: f for f in _FAMILIES if importlib.util.find_spec(f.module) is not None}
# Their models index by a boolean mask before the blocks, or read numbers of tokens, which waits for the GPU;
# or they copy numbers to it.
WAITING = ("hunyuan_video15", "qwenimage21", "lumina2")
if torch.cuda.is_available():
    WAITING += ("chroma",)
every_family = pytest.mark.parametrize("family", FAMILIES.values(), ids=str)
