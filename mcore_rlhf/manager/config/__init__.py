"""A run's configuration: one YAML file, and the objects that it asks for."""

from __future__ import annotations

from .options import kl_controller, manager_options, prompt_sampler
from .run import RunConfig, load_run_config

__all__ = ["RunConfig", "kl_controller", "load_run_config", "manager_options", "prompt_sampler"]
