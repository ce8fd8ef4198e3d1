"""Plain weights beside or instead of a DCP folder: RLinf's ``model_state_dict/full_weights.pt``, and the model's config."""

from __future__ import annotations

from mcore_rlhf.core.account import Report
from mcore_rlhf.core.catalog import FLOATING, TensorName
from mcore_rlhf.core.chunks import Chunks
from mcore_rlhf.core.facts import Fate
from mcore_rlhf.errors import Unsupported
from mcore_rlhf.families.fsdp.model import model_config, num_layers
from mcore_rlhf.families.fsdp.tied import find_aliases, stored_identity
from mcore_rlhf.families.module import ModuleState
from mcore_rlhf.families.options import ReadOptions
from mcore_rlhf.families.source import Source, StoredFile, TrainingState
from mcore_rlhf.layouts.parallel import ParallelConfig
from mcore_rlhf.models.spec import REPLICATED, ModelSpec, ParamSpec
from mcore_rlhf.storage.pt import read_pt
from mcore_rlhf.storage.stored import StoredTensor, whole_entry

from .folders import Located
from .shards import refuse_shards, shard_files


def plain_source(located: Located, options: ReadOptions) -> Source:
    """RLinf's plain weights as a source of weights alone.

    Args:
        located: The actor's folder.
        options: Which role, which stubs.

    Raises:
        CheckpointError: They are damaged, or there are only rank files without offsets; or those lie beside them, and the optimizer, which
            is in them, is wanted.
    """
    if located.weights is None or (located.shards and options.optimizer):
        refuse_shards(located)
    opened = read_pt(located.root, located.weights, stubs=options.stubs)
    if not isinstance(opened.tree, dict) or not all(isinstance(v, StoredTensor) for v in opened.tree.values()):
        raise Unsupported(f"{opened.directory.path}: expected a dictionary of tensors, found something else in it")
    notes = Report()
    notes.add(Fate.LOST, f"the optimizer and all else: {located.root} holds only the weights of {located.weights}")
    tensors: dict[str, StoredTensor] = opened.tree
    role = options.role or "actor"
    config, shapes = model_config(located.root), {name: stored.shape for name, stored in tensors.items()}
    aliases = find_aliases(shapes, (), config, lambda name: stored_identity([(opened.directory, tensors[name])]), notes)
    own = {name: stored for name, stored in tensors.items() if name not in aliases}
    specs = [ParamSpec(n, t.shape, t.record.dtype, REPLICATED, t.record.dtype in FLOATING) for n, t in own.items()]
    buffers = tuple(spec.name for spec in specs if not spec.trainable)
    module = ModuleState("", tuple(tensors), buffers, aliases, config=config)
    entries = {name: whole_entry(TensorName(role, name), stored) for name, stored in own.items()}
    return Source(
        format="dcp",
        root=located.root,
        role=role,
        model=ModelSpec(tuple(specs), num_layers(tensors), bool(aliases), vocab_size=options.vocab_size),
        parallel=ParallelConfig(),
        catalog=Chunks.of(entries.values()),
        state=TrainingState(located.step or 0),
        files=(StoredFile.of_zip(opened.file, opened.directory), *shard_files(located, tensors, options.stubs)),
        states=(),
        optimizer=None,
        notes=notes,
        family=module,
    )
