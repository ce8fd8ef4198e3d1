"""ms-swift on Megatron: ``<output_dir>/checkpoint-N/iter_NNNNNNN`` in ``torch_dist``, each step with a tracker of its own.

Source: ms-swift 4.6.0, ``swift/megatron/trainers/base.py`` (``save_checkpoint``: ``args.json`` and, unless ``--save_safetensors false``,
the weights as Hugging Face has them lie in the step too), ``swift/megatron/utils/megatron_lm_utils.py`` (``save_mcore_checkpoint``,
``load_mcore_checkpoint``: ``--mcore_model`` names one step, whose tracker is asked). Its ``swift sft`` without Megatron is transformers'
``Trainer``, and so are its steps.
"""

from __future__ import annotations

from .table import Trainer

TRACKER = "latest_checkpointed_iteration.txt"
TRAINER = Trainer(
    name="ms-swift",
    title="ms-swift on Megatron",
    steps=("checkpoint-{step}",),
    marks=(TRACKER,),
    needs=(TRACKER,),
    resumes="named",
    formats=("megatron-dist",),
    told="--mcore_model {path} --finetune false",
)
