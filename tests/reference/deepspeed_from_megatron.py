"""What a rank does in real Megatron with a checkpoint that came from DeepSpeed: load it, look, and train on.

The module is imported by the tests too, so Megatron is imported only when a worker runs the job.
"""

from __future__ import annotations

from pathlib import Path

from mcore_rlhf.demo import data
from mcore_rlhf.demo.configs import Parallel, TinyGPT, Training
from tests.reference.deepspeed_models import Batch


def batches(model: TinyGPT, training: Training, first: int, last: int) -> list[Batch]:
    """What Megatron's run sees in some steps, over all data-parallel ranks: tokens and labels."""
    samples = range(training.global_batch_size)
    found = []
    for step in range(first, last):
        batch = data.micro_batch(training.seed, step, samples, model.seq_length, model.vocab_size)
        found.append((batch["tokens"].tolist(), batch["labels"].tolist()))
    return found


def load_and_train(model: TinyGPT, parallel: Parallel, training: Training, root: str, steps: int) -> list[float]:
    """Losses of the steps after the checkpoint, with the scheduler as ``--override-opt-param-scheduler`` leaves it."""
    import torch

    from mcore_rlhf.demo import megatron_checkpoint
    from mcore_rlhf.demo.trainer import DemoTrainer

    trainer = DemoTrainer(model, parallel, training)
    assert trainer.optimizer is not None
    assert trainer.scheduler is not None
    iteration = int(Path(root, megatron_checkpoint.TRACKER).read_text())
    folder = Path(root) / f"iter_{iteration:07d}" / megatron_checkpoint.rank_folder()
    state = torch.load(folder / "model_optim_rng.pt", weights_only=False)  # written a moment ago by our own conversion
    megatron_checkpoint._load_model(trainer, state)
    megatron_checkpoint._load_progress(trainer, state, release=False)
    trainer.optimizer.load_state_dict(state["optimizer"])
    trainer.optimizer.load_parameter_state(str(folder / "distrib_optim.pt"))
    trainer.scheduler.step(increment=trainer.consumed_train_samples)
    return [trainer.train_step() for _ in range(steps)]
