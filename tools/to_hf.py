#!/usr/bin/env python3
"""A front of `mcore-rlhf-to-hf`, for a clone that is not installed: see :mod:`mcore_rlhf.cli.tools.to_hf`."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from mcore_rlhf.cli.tools.to_hf import main

if __name__ == "__main__":
    sys.exit(main())
