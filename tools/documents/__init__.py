"""The measured tables and figures of the documents. tools/render_docs.py puts them there."""

import sys
from pathlib import Path

CHECKOUT = Path(__file__).resolve().parents[2]
# The benchmarks, and the limit that tests and benchmarks hold errors to.
sys.path[:0] = [str(CHECKOUT), str(CHECKOUT / "reference")]
