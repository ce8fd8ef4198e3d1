"""OpenRLHF: a folder for each role, ``_actor/global_stepN`` and ``_critic/global_stepN``, DeepSpeed's own, each with its ``latest``.

Source: OpenRLHF 3c3be62, ``openrlhf/trainer/ray/ppo_actor.py``, ``ppo_critic.py``; ``openrlhf/utils/deepspeed/deepspeed.py``
(``save_ckpt``: ``metric.json`` in the tag's folder, by which it deletes old ones); ``openrlhf/trainer/ppo_trainer.py``: the client state of
the actor, without which a resume is a KeyError. OpenRLHF 0.11.2, ``openrlhf/utils/deepspeed/deepspeed_utils.py``
(``get_optimizer_grouped_parameters``): DeepSpeed 0.19.8 loads only a file of as many groups (``runtime/zero/stage_1_and_2.py``,
``_load_legacy_checkpoint``), and with it a LambdaLR's state.
"""

from __future__ import annotations

from .table import Trainer

SECOND_GROUP = ("bias", "layer_norm.weight", "layernorm.weight", "norm.weight", "ln_f.weight")
TRAINER = Trainer(
    name="openrlhf",
    title="OpenRLHF",
    steps=("global_step{step}",),
    marks=("metric.json", "*_states.pt"),
    roles={"actor": ("_actor",), "critic": ("_critic",)},
    by_role=True,
    tracker="latest",
    tracked="global_step{step}",
    asks={
        "episode": "zero", "global_step": "step", "total_consumed_prompts": "samples", "data_loader_state_dict": "data",
    },
    second_group=SECOND_GROUP,
    wants_schedule=True,
    formats=("deepspeed",),
    tag="global_step{step}",
    told="--ckpt.path {root} --ckpt.load_enable",
)  # fmt: skip
