"""What the names in pickles are trusted with: what may be read, and, which is far less, what we write.

Reading runs nothing, so that any class of a known framework may be read, as an inert stub: a new enum of Megatron's must not stop
``inspect``. Writing is another matter, since a real loader calls what a pickle names. :data:`WRITTEN` is all that is written of other
programs' classes: exact names that frameworks themselves write there, each with the one way in which a pickle may make it. A name that
only lies below a framework is a stranger's, who may have chosen a function of it.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable
from enum import Enum, auto
from typing import Any

from ..errors import Problems, Untrusted
from .meanings import STORAGES, has_meaning
from .stored import Stub


class PickleVerdict(Enum):
    """What becomes of a global in a pickle."""

    REAL = auto()
    """Made into the value that it means, by code of ours: plain data types, tensors."""
    STUB = auto()
    """Loaded as an inert stub; written back where :data:`WRITTEN` has it, or the user named it with ``--stub``."""
    UNKNOWN = auto()
    """Refused, unless the user names it with ``--stub``."""
    HARMFUL = auto()
    """Refused always."""


class AllowedForm(Enum):
    """How a pickle that we write may use a name. Each may also stand as a value, which calls nothing."""

    VALUE = auto()
    """In no other way: a class that is only referred to, or an activation function."""
    MEMBER = auto()
    """Called with one value: an enum's member."""
    CALL = auto()
    """Called with plain values, and nothing more: a path, a date."""
    OBJECT = auto()
    """Made by its ``__new__`` without arguments, then given its attributes by name."""
    TUPLE = auto()
    """Made by its ``__new__`` with plain values: a named tuple."""
    NAMESPACE = auto()
    """Called without arguments, then given its attributes by name."""


def _below(module: str, names: str, form: AllowedForm) -> dict[str, AllowedForm]:
    return {f"{module}.{name}": form for name in names.split()}


WRITTEN: dict[str, AllowedForm] = {
    **_below("megatron.core.enums", "ModelType Fp8Recipe Fp4Recipe", AllowedForm.MEMBER),
    **_below(
        "megatron.core.transformer.enums", "ModelType LayerType AttnType AttnMaskType AttnBackend", AllowedForm.MEMBER
    ),
    **_below(
        "megatron.core.transformer.enums", "CudaGraphModule CudaGraphScope InferenceCudaGraphScope", AllowedForm.MEMBER
    ),
    **_below(
        "megatron.core.rerun_state_machine",
        "RerunDiagnostic RerunMode RerunState RerunValidationStatus",
        AllowedForm.MEMBER,
    ),
    **_below(
        "megatron.core.inference.config",
        "PrefixCachingEvictionPolicy PrefixCachingCoordinatorPolicy",
        AllowedForm.MEMBER,
    ),
    **_below(
        "megatron.core.inference.config",
        "KVCacheManagementMode CudaGraphSizingDistribution AsyncScheduleMode",
        AllowedForm.MEMBER,
    ),
    "megatron.core.dist_checkpointing.validation.StrictHandling": AllowedForm.MEMBER,
    "megatron.core.distributed.fsdp.src.megatron_fsdp.fully_shard.ShardingStrategy": AllowedForm.MEMBER,
    "megatron.core.models.mimo.config.role.ModuleLayout": AllowedForm.MEMBER,
    "megatron.core.optimizer.optimizer_config.OptimizerConfig": AllowedForm.OBJECT,
    "megatron.core.transformer.pipeline_parallel_layer_layout.PipelineParallelLayerLayout": AllowedForm.OBJECT,
    "megatron.core.extensions.transformer_engine.TEDelayedScaling": AllowedForm.OBJECT,
    **_below("megatron.core.activations", "squared_relu quick_gelu fast_gelu", AllowedForm.VALUE),
    **_below("deepspeed.runtime.fp16.loss_scaler", "LossScalerBase LossScaler DynamicLossScaler", AllowedForm.OBJECT),
    "deepspeed.runtime.fp16.loss_scaler.LossScaleProfile": AllowedForm.MEMBER,
    "deepspeed.runtime.zero.config.ZeroStageEnum": AllowedForm.MEMBER,
    **_below("deepspeed.runtime.zero.offload_config", "OffloadDeviceEnum OffloadStateTypeEnum", AllowedForm.MEMBER),
    "deepspeed.runtime.config.DtypeEnum": AllowedForm.MEMBER,
    "deepspeed.runtime.tensor_parallel.config.AUTOTP_MODE": AllowedForm.MEMBER,
    "deepspeed.module_inject.autotp_config.PartitionType": AllowedForm.MEMBER,
    "deepspeed.utils.tensor_fragment.fragment_address": AllowedForm.OBJECT,
    "deepspeed.checkpoint.universal_checkpoint.SubparamShape": AllowedForm.OBJECT,
    "deepspeed.ops.adam.fused_adam.FusedAdam": AllowedForm.VALUE,
    "deepspeed.ops.adam.cpu_adam.DeepSpeedCPUAdam": AllowedForm.VALUE,
    "transformer_engine.pytorch.optimizers.fused_adam.FusedAdam": AllowedForm.VALUE,
    "transformer_engine.pytorch.optimizers.fused_sgd.FusedSGD": AllowedForm.VALUE,
    **_below(
        "transformer_engine.common.recipe", "DelayedScaling Float8CurrentScaling Float8BlockScaling", AllowedForm.OBJECT
    ),
    **_below(
        "transformer_engine.common.recipe", "MXFP8BlockScaling NVFP4BlockScaling MMParams QParams", AllowedForm.OBJECT
    ),
    "transformer_engine.common.recipe.Format": AllowedForm.MEMBER,
    "transformer_engine.common.recipe._FormatHelper": AllowedForm.TUPLE,
    **_below(
        "torchao.optim",
        "subclass_8bit.OptimState8bit subclass_4bit.OptimState4bit subclass_fp8.OptimStateFp8",
        AllowedForm.VALUE,
    ),
    **_below("apex.optimizers", "fused_adam.FusedAdam fused_sgd.FusedSGD", AllowedForm.VALUE),
    **_below(
        "transformers.trainer_utils", "IntervalStrategy SaveStrategy EvaluationStrategy HubStrategy", AllowedForm.MEMBER
    ),
    **_below("transformers.trainer_utils", "SchedulerType FSDPOption", AllowedForm.MEMBER),
    **_below("transformers.training_args", "OptimizerNames ParallelMode", AllowedForm.MEMBER),
    **_below("transformers", "training_args.TrainingArguments trainer_pt_utils.AcceleratorConfig", AllowedForm.OBJECT),
    "transformers.training_args_seq2seq.Seq2SeqTrainingArguments": AllowedForm.OBJECT,
    "transformers.integrations.deepspeed.HfTrainerDeepSpeedConfig": AllowedForm.OBJECT,
    **_below("accelerate", "state.PartialState utils.dataclasses.DeepSpeedPlugin", AllowedForm.OBJECT),
    **_below("trl.trainer", "grpo_config.GRPOConfig dpo_config.DPOConfig sft_config.SFTConfig", AllowedForm.OBJECT),
    "prime_rl.orchestrator.types.Progress": AllowedForm.OBJECT,
    "skyrl.train.config.sft_config.TrainOnWhat": AllowedForm.MEMBER,
    **_below(
        "trl.trainer", "rloo_config.RLOOConfig reward_config.RewardConfig ppo_config.PPOConfig", AllowedForm.OBJECT
    ),
    **_below("trl.trainer", "kto_config.KTOConfig distillation_config.DistillationConfig", AllowedForm.OBJECT),
    **_below(
        "trl.experimental",
        "cpo.cpo_config.CPOConfig orpo.orpo_config.ORPOConfig gkd.gkd_config.GKDConfig",
        AllowedForm.OBJECT,
    ),
    **_below(
        "trl.experimental",
        "online_dpo.online_dpo_config.OnlineDPOConfig gold.gold_config.GOLDConfig",
        AllowedForm.OBJECT,
    ),
    "llamafactory.hparams.training_args.TrainingArguments": AllowedForm.OBJECT,
    **_below(
        "axolotl.core.training_args", "AxolotlTrainingArguments AxolotlORPOConfig AxolotlKTOConfig", AllowedForm.OBJECT
    ),
    **_below("axolotl.core.training_args", "AxolotlCPOConfig AxolotlRewardConfig AxolotlPRMConfig", AllowedForm.OBJECT),
    **_below("swift.trainers.arguments", "TrainingArguments Seq2SeqTrainingArguments", AllowedForm.OBJECT),
    **_below("transformers.utils.generic", "PaddingStrategy TensorType", AllowedForm.MEMBER),
    **_below(
        "accelerate.utils.dataclasses",
        "DistributedType SageMakerDistributedType ComputeEnvironment",
        AllowedForm.MEMBER,
    ),
    **_below(
        "accelerate.utils.dataclasses",
        "FP8BackendType DynamoBackend LoggerType PrecisionType RNGType",
        AllowedForm.MEMBER,
    ),
    **_below("peft.utils.peft_types", "PeftType TaskType", AllowedForm.MEMBER),
    **_below(
        "omegaconf",
        "dictconfig.DictConfig listconfig.ListConfig base.Metadata base.ContainerMetadata",
        AllowedForm.OBJECT,
    ),
    **_below("omegaconf.nodes", "AnyNode NoneNode StringNode PathNode IntegerNode BytesNode", AllowedForm.OBJECT),
    **_below("omegaconf.nodes", "FloatNode BooleanNode EnumNode LiteralNode", AllowedForm.OBJECT),
    **_below("torch.optim", "adam.Adam adamw.AdamW sgd.SGD adamax.Adamax nadam.NAdam radam.RAdam", AllowedForm.VALUE),
    **_below("torch.optim", "rmsprop.RMSprop adagrad.Adagrad Adafactor Muon", AllowedForm.VALUE),
    **_below("torch.nn.functional", "gelu silu relu", AllowedForm.VALUE),
    "torch._C._nn.gelu": AllowedForm.VALUE,
    **_below(
        "numpy.dtypes", "BoolDType ByteDType UByteDType Int8DType UInt8DType Int16DType UInt16DType", AllowedForm.VALUE
    ),
    **_below("numpy.dtypes", "Int32DType UInt32DType Int64DType UInt64DType Float16DType", AllowedForm.VALUE),
    **_below("numpy.dtypes", "Float32DType Float64DType Complex64DType Complex128DType", AllowedForm.VALUE),
    **_below("signal", "Signals Handlers", AllowedForm.MEMBER),
    **_below("pathlib", "Path PosixPath WindowsPath PurePath PurePosixPath PureWindowsPath", AllowedForm.CALL),
    **_below(
        "pathlib._local", "Path PosixPath WindowsPath PurePath PurePosixPath PureWindowsPath", AllowedForm.CALL
    ),  # Python 3.13
    **_below("datetime", "datetime date time timedelta timezone", AllowedForm.CALL),
    "decimal.Decimal": AllowedForm.CALL,
    "uuid.UUID": AllowedForm.OBJECT,
    "types.SimpleNamespace": AllowedForm.NAMESPACE,
}
"""The closed list of what we write besides torch's, numpy's and Python's own (:data:`MADE_BY_US`).

Sources: megatron-core 0.19.2 and 0.16.1 (``core/safe_globals.py``, which lists what its own checkpoints name, and the enums of its
arguments; ``optimizer/cpu_offloading/hybrid_optimizer.py``); DeepSpeed 0.19.8 (``runtime/zero``, ``runtime/fp16``, ``checkpoint``);
Transformer Engine's recipes as megatron-core 0.19.2 lists them; transformers 5.23.0, accelerate 1.15.0, peft 0.21.2,
omegaconf 2.4.0, TRL 0.23 and 1.16.0 (``trl/trainer``, ``trl/experimental``: the classes of its ``training_args.bin``), LLaMA-Factory
0.9.5, Axolotl 0.19.0 and ms-swift 4.6.0 (theirs); prime-rl 559b447 (``orchestrator/ckpt.py``: a dataclass of four numbers);
the pickles of every checkpoint in ``tests/goldens``."""

_TENSORS = frozenset(f"torch._utils._rebuild_tensor_{version}" for version in ("v2", "v3"))
MADE_BY_US = _TENSORS | {
    "torch.Size", "torch.device", "collections.OrderedDict", "collections.Counter", "collections.defaultdict", "collections.deque",
    "builtins.set", "builtins.frozenset", "builtins.bytes", "builtins.bytearray", "builtins.complex", "_codecs.encode", "_io.BytesIO",
    "argparse.Namespace", "numpy.dtype", "numpy.core.multiarray._reconstruct", "numpy._core.multiarray._reconstruct",
    "numpy.core.multiarray.scalar", "numpy._core.multiarray.scalar",
}  # fmt: skip
"""What is called to make tensors, arrays and containers: of values of our own, never of a stub's."""
OF_SHARDS = frozenset(
    {
        "torch._tensor._rebuild_from_type_v2", "torch._utils._rebuild_wrapper_subclass", "torch.serialization._get_layout",
        "torch.distributed.tensor.DTensor", "torch.distributed.tensor._dtensor_spec.DTensorSpec",
        "torch.distributed.tensor._dtensor_spec.TensorMeta", "torch.distributed.tensor._dtensor_spec.ShardOrderEntry",
        "torch.distributed.tensor.placement_types.Shard", "torch.distributed.tensor.placement_types.Replicate",
        "torch.distributed.device_mesh.DeviceMesh",
        "torch.distributed._mesh_layout._MeshLayout", "torch.distributed._mesh_layout._FlatLayout",
    }
)  # fmt: skip
"""What a rank's part of a tensor is made of, in files that :mod:`.dcp.sharded` describes and in no others: nothing that was read is
written under these names. Source: files of torch 2.13.0."""
_NAMED_ONLY = frozenset(STORAGES) | {
    "numpy.ndarray",
    *(f"builtins.{kind}" for kind in ("list", "dict", "int", "float", "str", "bool", "tuple")),
}
_PLAIN = (type(None), bool, int, float, str, bytes)


def may_stand(name: str) -> bool:
    """Whether a name may be written as a value, which nothing calls."""
    return (
        name in WRITTEN
        or name in MADE_BY_US
        or name in _NAMED_ONLY
        or (name.startswith("torch.") and has_meaning(name))
    )


def may_be_made(name: str, *, new: bool, args: tuple[Any, ...], state: Any, items: bool) -> bool:
    """Whether an object may be written in this way, by the closed list.

    Args:
        name: Full name of its class.
        new: Whether it is made by its ``__new__``; else it is called.
        args: With which arguments.
        state: What it is given then; None for nothing.
        items: Whether it has elements, which are put in by methods of its own.
    """
    form, named = WRITTEN.get(name), type(state) is dict and all(type(key) is str for key in state)
    if form is None or form is AllowedForm.VALUE or items:
        return False
    if form in (AllowedForm.OBJECT, AllowedForm.NAMESPACE):
        return new == (form is AllowedForm.OBJECT) and not args and (state is None or named)
    plain = all(_is_plain(arg) for arg in args)
    return (
        new == (form is AllowedForm.TUPLE)
        and state is None
        and plain
        and (len(args) == 1 or form is not AllowedForm.MEMBER)
    )


def _is_plain(value: Any) -> bool:
    """Whether it calls nothing of its own; a stub in it is judged for itself."""
    return (
        type(value) in _PLAIN
        or isinstance(value, Stub)
        or (type(value) is tuple and all(map(_is_plain, value)))
        or (not isinstance(value, type) and f"{type(value).__module__}.{type(value).__qualname__}" in WRITTEN)
    )


_STUB_PREFIXES = (
    "megatron.", "deepspeed.", "transformer_engine", "apex.", "nemo.", "verl.", "rlinf.", "omegaconf.",
    "hydra.", "openrlhf.", "slime.", "mbridge.", "transformers.", "peft.", "accelerate.", "lightning.",
    "pytorch_lightning.", "numpy.dtypes.", "numpy.random.",
)  # fmt: skip
"""Frameworks whose enums and dataclasses stand in ``args``, configs and optimizer states, and can be looked at."""

_HARMFUL_MODULES = frozenset(
    {
        "_bootsubprocess", "_codecs", "_ctypes", "_frozen_importlib", "_frozen_importlib_external", "_imp",
        "_io", "_operator", "_pickle", "_posixsubprocess", "_socket", "_thread", "_winapi", "asyncio",
        "atexit", "bdb", "builtins", "cProfile", "cffi", "cloudpickle", "code", "codecs", "codeop",
        "commands", "concurrent", "copyreg", "ctypes", "dill", "distutils", "doctest", "ensurepip",
        "faulthandler", "fileinput", "ftplib", "functools", "gc", "glob", "http", "idlelib", "imaplib",
        "imp", "importlib", "inspect", "io", "joblib", "jsonpickle", "linecache", "logging", "mailbox",
        "marshal", "mmap", "multiprocessing", "nntplib", "nt", "ntpath", "operator", "os", "pdb", "pickle",
        "pickletools", "pip", "pkg_resources", "pkgutil", "platform", "poplib", "posix", "posixpath",
        "profile", "pty", "pydoc", "requests", "resource", "runpy", "sched", "setuptools", "shelve",
        "shutil", "signal", "site", "smtplib", "socket", "socketserver", "sqlite3", "ssl", "subprocess",
        "sys", "telnetlib", "tempfile", "test", "threading", "timeit", "tkinter", "trace", "types",
        "unittest", "urllib", "venv", "webbrowser", "winreg", "xmlrpc", "zipimport",
    }
)  # fmt: skip

_HARMFUL_PREFIXES = (
    "numpy.f2py", "numpy.distutils", "numpy.testing", "numpy.load", "numpy.lib", "numpy.ctypeslib",
    "numpy.memmap", "numpy.fromfile", "numpy.core", "numpy._core", "numpy.vectorize", "numpy.frompyfunc",
    "torch.load", "torch.save", "torch.hub", "torch.jit", "torch.serialization", "torch.package",
    "torch.ops", "torch.classes", "torch.utils", "torch.multiprocessing", "torch.testing", "torch.compile",
    "torch._dynamo", "torch._inductor", "torch.library", "torch._library", "torch._C", "torch.fx",
    "torch.export", "torch.storage", "torch.distributed.rpc", "torch.distributed.run",
    "torch.distributed.launch", "torch.distributed.elastic",
)  # fmt: skip

_HARMFUL_PARTS = frozenset(
    {
        "os", "sys", "subprocess", "builtins", "eval", "exec", "execfile", "compile", "system", "popen",
        "getattr", "setattr", "importlib", "ctypes", "shutil",
    }
)  # fmt: skip
"""Not even inside a framework: ``megatron.core.utils`` + ``os.system`` would be found by a real loader."""

_DOTTED_NAME = re.compile(r"[^\W\d]\w*(\.[^\W\d]\w*)+")


def judge(name: str, stubs: Collection[str] = ()) -> PickleVerdict:
    """Decide about one global of a pickle, given by its full dotted name.

    A stub runs nothing here, but one that the user asks for is written back under its own name, and a real loader would call
    it there. So what can do harm is refused even then.
    """
    if has_meaning(name):
        return PickleVerdict.REAL
    if name in WRITTEN:
        return PickleVerdict.STUB
    if is_harmful(name):
        return PickleVerdict.HARMFUL
    return PickleVerdict.STUB if name.startswith(_STUB_PREFIXES) or name in stubs else PickleVerdict.UNKNOWN


def is_harmful(name: str) -> bool:
    """Whether a name can do harm, or could be found by a loader as one that can."""
    parts = name.split(".")
    return (
        not _DOTTED_NAME.fullmatch(name)
        or parts[0] in _HARMFUL_MODULES
        or any(name == prefix or name.startswith(prefix + ".") for prefix in _HARMFUL_PREFIXES)
        or any(part in _HARMFUL_PARTS or part.startswith("__") for part in parts if part != "__main__")
    )


def require_trust(names: Iterable[str], stubs: Collection[str], file: str) -> dict[str, PickleVerdict]:
    """Judge all globals of one pickle.

    Args:
        names: Full dotted names.
        stubs: Names that the user wants as stubs (``--stub``).
        file: For the message.

    Returns:
        REAL or STUB for every name.

    Raises:
        Untrusted: At least one is refused; all of them are listed.
    """
    verdicts = {name: judge(name, stubs) for name in sorted(names)}
    problems = Problems()
    for name, verdict in verdicts.items():
        if verdict is PickleVerdict.HARMFUL:
            problems.add(
                Untrusted,
                f"{file}: asks for {name!r}, which can run code or reach the system; it is refused always",
                "No honest checkpoint needs it: do not load this file with anything else either, "
                "unless you know who wrote it and why.",
            )
        elif verdict is PickleVerdict.UNKNOWN:
            problems.add(
                Untrusted,
                f"{file}: asks for {name!r}, which is not known to be harmless "
                f"(to load it as an inert stub: --stub {name})",
                "Use --stub only for plain data classes of your own code; a stub runs nothing and is "
                "written back under its own name.",
            )
    problems.raise_if_any()
    return verdicts
