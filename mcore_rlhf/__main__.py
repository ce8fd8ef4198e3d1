"""``python -m mcore_rlhf`` is ``mcore-rlhf``."""

from __future__ import annotations

from mcore_rlhf.cli import main

if __name__ == "__main__":
    main()
