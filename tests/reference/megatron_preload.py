"""What ranks with Megatron import before they are forked from one another: later, each would import it for itself."""

# ruff: noqa: F401
import mcore_rlhf.demo.trainer

# isort: split
import megatron.core.dist_checkpointing.validation

import mcore_rlhf.demo.live_state
import mcore_rlhf.demo.megatron_args
import mcore_rlhf.demo.megatron_checkpoint
import mcore_rlhf.engines.megatron
import tests.reference.architectures_jobs
import tests.reference.dist_jobs
import tests.reference.engine_model_jobs
import tests.reference.hf_jobs
