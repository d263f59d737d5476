"""The benchmarks. A script puts the checkout on the path; other folders that they import from follow here."""

import sys
from pathlib import Path

CHECKOUT = Path(__file__).resolve().parents[1]
FOLDERS = ("reference", "tools", "examples", "examples/train_small_ltx", "tests")
sys.path += [str(CHECKOUT / folder) for folder in FOLDERS]
