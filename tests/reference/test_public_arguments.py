"""The arguments with which a trainer trains a public model lead to the ``config.json`` under which it is published."""

from __future__ import annotations

import pytest

from mcore_rlhf.demo.workers import WorkerPool
from mcore_rlhf.models.huggingface.config import Build, architecture_of, args_of, config_of, sizes_of_config
from tests.reference.public_arguments import PUBLIC, arguments_of
from tests.reference.public_configs import PUBLIC as CONFIGS

SIZES = {"num_layers", "hidden_size", "ffn_hidden_size", "num_attention_heads", "num_query_groups", "kv_channels"}
"""Of Qwen's models the table has those of one of them."""
OF_THE_RUN = {"max_position_embeddings", "mtp_num_layers"}
"""How long its texts are; and it trains no further tokens."""


@pytest.mark.parametrize("name", PUBLIC)
def test_arguments_describe_what_is_published(name: str, pool: WorkerPool) -> None:
    config = CONFIGS[name]
    (args,) = pool.run(arguments_of, PUBLIC[name], world_size=1, timeout=60)
    (known,) = architecture_of(config)
    build = Build(config["tie_word_embeddings"], bool(args["add_qkv_bias"]))
    made, published = (
        args_of(one, known, build) for one in (config_of(args, sizes_of_config(config), known, build), config)
    )
    assert made.keys() == published.keys()
    different = {said for said in made if made[said] != published[said]}
    assert different <= (OF_THE_RUN | SIZES if name.startswith("Qwen/") else OF_THE_RUN)
