"""`train_dots.py` with its generator registered."""

import runpy
import sys
from pathlib import Path

sys.argv.append("--register")
runpy.run_path(str(Path(__file__).with_name("train_dots.py")), run_name="__main__")
