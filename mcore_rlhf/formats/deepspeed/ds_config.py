"""What the configuration that a run stores, ``ds_config``, says of how its files are."""

from __future__ import annotations

import re
from collections.abc import Mapping

_REDUCED_SINCE = (0, 19, 3)


def section(config: object, name: str) -> Mapping[str, object]:
    """A section of it; empty where there is none."""
    found = config.get(name) if isinstance(config, Mapping) else None
    return found if isinstance(found, Mapping) else {}


def is_round_robin(config: object) -> bool:
    """Whether stages 1 and 2 deal the parameters of a group to the ranks like cards."""
    return bool(section(config, "zero_optimization").get("round_robin_gradients"))


def momentum_is_flat(config: object, *, bf16_optimizer: bool) -> bool:
    """Whether stages 1 and 2 cut a momentum of Muon's like all other states.

    Source: deepspeed 0.19.8, ``runtime/bf16_optimizer.py`` (``_prepare_muon_updates``), ``runtime/zero/stage_1_and_2.py``
    (``_apply_muon_updates_cpu_offload``).

    Args:
        config: The run's.
        bf16_optimizer: Whether the run's optimizer is ``BF16_Optimizer``.
    """
    offload = section(section(config, "zero_optimization"), "offload_optimizer")
    return bf16_optimizer or offload.get("device") in ("cpu", "nvme")


def momentum_is_unreduced(config: object, version: object) -> bool:
    """Whether ranks computed momenta of gradients of which only their own elements were reduced.

    With ``reduce_scatter``, which is the default, DeepSpeed did so up to 0.19.2, and ranks do not agree on a parameter at a border.
    Source: deepspeedai/DeepSpeed, pull requests 8090 and 8141.

    Args:
        config: The run's.
        version: DeepSpeed's, as its files say it.
    """
    numbers = tuple(map(int, re.findall(r"\d+", str(version))[:3]))
    scattered = section(config, "zero_optimization").get("reduce_scatter") is not False
    return scattered and len(numbers) > 0 and numbers < _REDUCED_SINCE
