#!/usr/bin/env python3
"""A front of `mcore-rlhf-zero-to-fp32`, for a clone that is not installed: see :mod:`mcore_rlhf.cli.tools.zero_to_fp32`."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from mcore_rlhf.cli.tools.zero_to_fp32 import main

if __name__ == "__main__":
    sys.exit(main())
