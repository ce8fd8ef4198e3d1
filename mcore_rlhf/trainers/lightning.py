"""Lightning, at our seam: ``<dirpath>/epoch=E-step=N.ckpt``, a folder with the file that Lightning wrote.

Lightning alone writes a file of that name, and not a folder: such a file is no step, and is left as it is.

Source: lightning 2.6.6, ``pytorch/callbacks/model_checkpoint.py`` (``format_checkpoint_name``: any metrics may stand in a name, each as
``name=value``, and ``-vN`` behind one that is taken).
"""

from __future__ import annotations

from .table import Trainer

FILE = "lightning.ckpt"
"""What Lightning's own file is called in a step."""

TRAINER = Trainer(
    name="lightning",
    title="Lightning",
    steps=("step={step}.ckpt", "step={step}-*.ckpt", "*-step={step}.ckpt", "*-step={step}-*.ckpt"),
    marks=(FILE,),
    needs=(FILE,),
    resumes="named",
    told='trainer.fit(model, ckpt_path="{path}")',
)
