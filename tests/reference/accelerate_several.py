"""An actor and a critic of one Accelerator on some ranks, saved and loaded by itself; ``torchrun … -m tests.reference.accelerate_several``.

The first rank leaves as JSON what each step saw.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import warnings
from pathlib import Path

from tests.trainers.hf_runs import actor_and_critic

if __name__ == "__main__":
    signal.alarm(120)  # a rank that hangs outlives whoever waits for it
    warnings.simplefilter("ignore")
    what, folder = sys.argv[1], Path(sys.argv[2])
    seen = actor_and_critic(save=folder) if what == "save" else actor_and_critic(resume=folder)
    if os.environ["RANK"] == "0":
        print(json.dumps(seen))
        sys.stdout.flush()
    os._exit(0)  # gloo's groups wait for one another where ranks end at different moments
