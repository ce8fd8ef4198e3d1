"""The objects that a run's configuration asks for: what a script imports."""

from __future__ import annotations

from .config.options import kl_controller, manager_options, prompt_sampler

__all__ = [
    "kl_controller",
    "manager_options",
    "prompt_sampler",
]
