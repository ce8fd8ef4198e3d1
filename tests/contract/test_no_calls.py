"""Nothing that we write calls anything but a closed list: attacks through every door, and what a real loader does with the targets.

The witness takes the targets apart by itself, with the standard library's ``pickletools``, and has a list of its own.
"""

from __future__ import annotations

import io
import json
import pickle
import pickletools
import shutil
import struct
import sys
import types
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from mcore_rlhf.convert import convert
from mcore_rlhf.core.catalog import dtype_of
from mcore_rlhf.errors import CheckpointError, Unsupported, Untrusted
from mcore_rlhf.families.options import ReadOptions
from mcore_rlhf.formats.registry import open_checkpoint
from mcore_rlhf.storage.dcp.writer import saved
from mcore_rlhf.storage.nested import calls_of
from mcore_rlhf.storage.pickling import pickle_tree
from mcore_rlhf.storage.pt import read_pt
from mcore_rlhf.storage.stored import Namespace, new_stub, stub_class
from mcore_rlhf.storage.torch_values import SmallTensor
from tests.helpers.conversions import GOLDENS
from tests.helpers.every_format import EVERY, Zoo, options
from tests.unit.storage.forge import Call, called, write_pt

CANARY = "accelerate.canary_of_a_test"
WITH_PICKLES = ("megatron", "megatron-dist", "deepspeed", "universal")
MADE = {
    "torch._utils _rebuild_tensor_v2", "torch._utils _rebuild_tensor_v3", "torch Size", "torch device", "collections OrderedDict",
    "_codecs encode", "numpy dtype", "numpy._core.multiarray _reconstruct", "numpy.core.multiarray _reconstruct", "argparse Namespace",
    "__builtin__ bytes", "__builtin__ set", "collections defaultdict", "_io BytesIO", "numpy._core.multiarray scalar",
    "megatron.core.enums ModelType", "megatron.core.transformer.enums AttnBackend",
    "megatron.core.transformer.enums InferenceCudaGraphScope", "megatron.core.rerun_state_machine RerunDiagnostic",
    "megatron.core.rerun_state_machine RerunMode", "megatron.core.rerun_state_machine RerunState", "signal Signals",
    "deepspeed.runtime.zero.config ZeroStageEnum", "deepspeed.runtime.fp16.loss_scaler LossScaler",
    "deepspeed.runtime.fp16.loss_scaler DynamicLossScaler", "deepspeed.utils.tensor_fragment fragment_address",
}  # fmt: skip


@pytest.fixture(autouse=True)
def canary(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[object]]:
    """A framework's function that anybody may find who loads a pickle."""
    ran: list[object] = []
    module = types.ModuleType(CANARY)

    def sing(*args: object) -> object:
        ran.append(args)
        return 1

    sing.__module__, sing.__qualname__ = CANARY, "sing"
    vars(module)["sing"] = sing
    monkeypatch.setitem(sys.modules, CANARY, module)
    yield ran
    assert not ran, "a function of the checkpoint was called"


def pickles_in(folder: Path) -> Iterator[bytes]:
    """Every pickle of a target: of zips, of zips inside of ``.distcp`` files, and bare ones."""
    for path in sorted(folder.rglob("*")):
        data = path.read_bytes() if path.is_file() else b""
        if path.suffix == ".distcp":
            yield from _of_items(data)
        elif data[:4] == b"PK\3\4":
            yield from _of_zip(data)


def _of_zip(data: bytes) -> Iterator[bytes]:
    with zipfile.ZipFile(io.BytesIO(data)) as zipped:
        yield from (zipped.read(name) for name in zipped.namelist() if name.endswith("data.pkl"))


def _of_items(data: bytes) -> Iterator[bytes]:
    at = data.find(b"PK\6\6")
    start = 0
    while at >= 0:
        nbytes, offset = struct.unpack_from("<QQ", data, at + 40)
        end = at + 56 + 20 + 22
        if offset + nbytes == at - start:
            yield from _of_zip(data[start:end])
            start = end
        at = data.find(b"PK\6\6", at + 4)


def made_in(data: bytes) -> set[str]:
    """The names that a pickle of protocol 2 calls, or makes objects of: opcode by opcode."""
    stack: list[Any] = []
    memo: dict[int, Any] = {}
    found: set[str] = set()
    for opcode, argument, _ in pickletools.genops(data):
        if opcode.name in ("BINPUT", "LONG_BINPUT"):
            memo[argument] = stack[-1]
        elif opcode.name in ("BINGET", "LONG_BINGET"):
            stack.append(memo[argument])
        elif opcode.name == "GLOBAL":
            stack.append(argument)
        elif opcode.name in ("REDUCE", "NEWOBJ"):
            stack.pop()
            found.add(str(stack.pop()))
            stack.append(None)
        else:
            assert opcode.name not in ("INST", "OBJ", "NEWOBJ_EX", "STACK_GLOBAL", "EXT1", "EXT2", "EXT4")
            before = [item.name for item in opcode.stack_before]
            if "stackslice" in before:
                while stack.pop() != "the mark":
                    pass
                before = before[: before.index("mark")]
            del stack[len(stack) - len(before) :]
            stack += ["the mark" if item.name == "mark" else None for item in opcode.stack_after]
    return found


@pytest.mark.parametrize("to", WITH_PICKLES)
@pytest.mark.parametrize("source", EVERY)
def test_every_target_calls_the_closed_list_alone(source: str, to: str, zoo: Zoo) -> None:
    there, _ = zoo.pair(source, to)
    pickles = list(pickles_in(there))
    assert pickles
    assert set().union(*map(made_in, pickles)) <= MADE


@pytest.mark.parametrize("case", ["dist_muon_layerwise_dp2_bf16", "muon_pingpong_dp2_bf16"])
def test_what_later_megatrons_write_goes_on(case: str, tmp_path: Path) -> None:
    """With enums of the rerun machine and of CUDA graphs, in objects of ranks."""
    to = "megatron-dist" if case.startswith("dist") else "megatron"
    convert(GOLDENS.parent / "megatron_0_19" / case, tmp_path / "out", options(to))
    assert set().union(*map(made_in, pickles_in(tmp_path / "out"))) <= MADE


def sung(note: str = "x") -> Any:
    return stub_class(f"{CANARY}.sing")(note)


_SING = f"c{CANARY}\nsing\n".encode()
_CALL = _SING + b"K\x01\x85R."
_PADDED = (b"\x80\x02" + _CALL).ljust(64, b"\0")
_SPACE = b"cargparse\nNamespace\n)\x81}"


FORGED: dict[str, Callable[[], object]] = {
    "called": sung,
    "called without arguments": stub_class(f"{CANARY}.sing"),
    "made by __new__": lambda: new_stub(f"{CANARY}.sing", {"a": 1}),
    "only named": lambda: stub_class(f"{CANARY}.sing"),
    "in a list": lambda: [[sung()]],
    "as a key": lambda: {sung(): 1},
    "in a namespace": lambda: Namespace({"a": sung()}),
    "argument of an enum's member": lambda: stub_class("megatron.core.enums.ModelType")(sung()),
    "attribute of a scaler": lambda: new_stub("deepspeed.runtime.fp16.loss_scaler.LossScaler", {"update_scale": sung()}),
    "function among attributes": lambda: new_stub(
        "deepspeed.runtime.fp16.loss_scaler.LossScaler", {"update_scale": stub_class(f"{CANARY}.sing")}
    ),
    "a listed class, called": lambda: stub_class("deepspeed.runtime.fp16.loss_scaler.LossScaler")(1),
    "a listed class with slots": lambda: new_stub("deepspeed.runtime.fp16.loss_scaler.LossScaler", (None, {"__class__": 1})),
    "a listed class with arguments": lambda: new_stub("deepspeed.utils.tensor_fragment.fragment_address", None, 1),
    "an enum made by __new__": lambda: new_stub("megatron.core.enums.ModelType", {}, 1),
    "an enum of two": lambda: stub_class("megatron.core.enums.ModelType")(1, 2),
    "an enum of a function": lambda: stub_class("megatron.core.enums.ModelType")(stub_class("torch.optim.adam.Adam")),
    "an activation, called": lambda: stub_class("torch._C._nn.gelu")(1),
    "an optimizer, made": lambda: new_stub("torch.optim.adam.Adam", {"a": 1}),
    "a tensor's function": lambda: stub_class("torch._utils._rebuild_tensor_v2")(1),
    "torch's for classes": lambda: stub_class("torch._tensor._rebuild_from_type_v2")(stub_class(f"{CANARY}.sing"), 1, (), {}),
    "a dictionary's class": lambda: stub_class("collections.defaultdict")(stub_class(f"{CANARY}.sing")),
    "a path of functions": lambda: stub_class("pathlib.PosixPath")(stub_class(f"{CANARY}.sing")),
    "with elements": lambda: _with_items("deepspeed.runtime.fp16.loss_scaler.LossScaler", [1]),
    "with entries": lambda: _with_items("transformers.utils.generic.ModelOutput", {"a": 1}),
    "a harmful one that was vouched for": lambda: stub_class("os.system", True)("touch ran"),
    "a namespace with arguments": lambda: stub_class("types.SimpleNamespace")({"a": 1}),
    "a pickle in bytes": lambda: called(_canary()),
    "a pickle in a tensor of bytes": lambda: SmallTensor.of_bytes(called(_canary())),
    "a pickle in a BytesIO": lambda: io.BytesIO(called(_canary(), protocol=4)),
    "a file of torch's in a BytesIO": lambda: _saved_by_torch(zipped=True),
    "an old file of torch's in a BytesIO": lambda: _saved_by_torch(zipped=False),
    "behind a pickle of torch's": lambda: pickle.dumps(1) + called(_canary()),
    "in a storage in a pickle": lambda: called(torch.storage._load_from_bytes, _saved_by_torch(zipped=True).getvalue()),
    "a function of torch's for classes, in bytes": lambda: called(
        torch._tensor._rebuild_from_type_v2, _canary(), torch.Tensor, (), {}
    ),
    "a name put together, in bytes": lambda: b"\x80\x04\x8c\x02os\x8c\x06system\x93\x8c\x01x\x85R.",
    "protocol 0, in bytes": lambda: pickle.dumps(Call(_canary(), 1), 0),
    "opcode INST, in bytes": lambda: f"(I1\ni{CANARY}\nsing\n.".encode(),
    "opcode OBJ, in bytes": lambda: b"\x80\x02(" + f"c{CANARY}\nsing\n".encode() + b"K\x01o.",
    "with keywords, in bytes": lambda: b"\x80\x04" + f"c{CANARY}\nsing\n".encode() + b")}\x92.",
    "a state for a class, in bytes": lambda: b"\x80\x02ctorch.optim.adam\nAdam\n}X\x04\0\0\0stepK\x01sb.",
    "a call, and then nonsense, in bytes": lambda: called(_canary())[:-1] + b"\0",
    "behind a number of another base": lambda: b"\x80\x02I0x10\n0" + _CALL,
    "behind a long number of another base": lambda: b"\x80\x02L0x10\n0" + _CALL,
    "behind a text that is no ASCII": lambda: b"\x80\x02S'\xc3\xa9'\n0" + _CALL,
    "behind bytes of another encoding": lambda: b"\x80\x02c_codecs\nencode\n" + _text("\u0100") + _text("utf-8") + b"\x86R0" + _CALL,
    "behind a call of what was filled with nothing": lambda: b"\x80\x02cbuiltins\ndict\n(e)R0" + _CALL,
    "filled with nothing, then called": lambda: b"\x80\x02" + _SING + b"(eK\x01\x85R.",
    "an object that is built twice": lambda: b"\x80\x02" + _SPACE + _text("__setstate__") + _SING + b"sbK\x01b.",
    "an object that is added to": lambda: b"\x80\x02" + _SPACE + _text("append") + _SING + b"sbK\x01a.",
    "a loader for an object that is built twice": lambda: b"\x80\x02"
    + _SPACE + _text("__setstate__") + b"ctorch.storage\n_load_from_bytes\nsb.",
    "a name in another alphabet": lambda: b"\x80\x02" + b"".join(
        b"c_codecs\nencode\n" + _text(part) + _text("rot13") + b"\x86R" for part in ("bf", "flfgrz")
    ) + b"\x93K\x01\x85R.",
    "in a reference to a storage": lambda: b"\x80\x02(" + _text("module") + _SING + b"NNtQK\x01\x85R.",
    "in a zip of two directories": lambda: io.BytesIO(_of_two_directories(b"\x80\x02" + _CALL)),
    "in a tensor of long integers": lambda: SmallTensor(_PADDED, dtype_of("int64"), (len(_PADDED) // 8,), (1,)),
    "in every second byte of a tensor": lambda: SmallTensor(
        b"".join(bytes([byte, 0]) for byte in _PADDED), dtype_of("uint8"), (len(_PADDED),), (2,)
    ),
    "where a BytesIO stands": lambda: _at(3, b"not" + b"\x80\x02" + _CALL),
}  # fmt: skip


def _canary() -> Any:
    return vars(sys.modules[CANARY])["sing"]


def _text(text: str) -> bytes:
    return b"X" + struct.pack("<I", len(text.encode())) + text.encode()


def _at(place: int, data: bytes) -> io.BytesIO:
    made = io.BytesIO(data)
    made.seek(place)
    return made


def _of_two_directories(pickled: bytes) -> bytes:
    """A zip in which torch finds this pickle, and Python's ``zipfile`` None: one looks where its end says, the other before its end."""
    harmful, honest = (_taken_apart(part) for part in (pickled, b"\x80\x02N.".ljust(len(pickled))))
    directory, shift = bytearray(honest[1]), len(honest[0])
    for at in (at for at in range(len(directory)) if directory.startswith(b"PK\1\2", at)):
        (offset,) = struct.unpack_from("<I", directory, at + 42)
        struct.pack_into("<I", directory, at + 42, len(harmful[0]) + offset - shift)
    end = bytearray(harmful[2])
    struct.pack_into("<I", end, 16, len(harmful[0]))
    return harmful[0] + harmful[1] + honest[0] + bytes(directory) + bytes(end)


def _taken_apart(pickled: bytes) -> tuple[bytes, bytes, bytes]:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as zipped:
        for name, data in (("data.pkl", pickled), ("version", b"3\n"), ("byteorder", b"little")):
            zipped.writestr(f"archive/{name}", data)
    whole = buffer.getvalue()
    end = whole.rfind(b"PK\5\6")
    (at,) = struct.unpack_from("<I", whole, end + 16)
    return whole[:at], whole[at:end], whole[end:]


def _with_items(name: str, items: Any) -> Any:
    made = new_stub(name)
    made.stub_items = items
    return made


def _saved_by_torch(*, zipped: bool) -> io.BytesIO:
    buffer = io.BytesIO()
    torch.save([torch.ones(2), Call(_canary(), 1)], buffer, _use_new_zipfile_serialization=zipped)
    return buffer


@pytest.mark.parametrize("forged", FORGED)
def test_the_writer_refuses_what_is_not_listed(forged: str) -> None:
    with pytest.raises(Untrusted, match=r"x\.pt: "):
        pickle_tree({"a": [1, FORGED[forged]()]}, "x.pt")


def test_a_live_function_is_refused_as_well() -> None:
    with pytest.raises(Unsupported, match=rf"a cannot be saved: it needs '{CANARY}\.sing'"):
        pickle_tree({"a": _canary()}, "x.pt")
    with pytest.raises(Unsupported, match="cannot be saved"):
        pickle_tree({"a": Call(_canary(), 1)}, "x.pt")


def test_all_that_is_refused_is_told_at_once_with_its_place() -> None:
    tree = {"args": Namespace({"a": sung(), "b": [new_stub("verl.made.up.Config", {})]})}
    with pytest.raises(Untrusted) as raised:
        pickle_tree(tree, "x.pt")
    text = str(raised.value)
    assert f"x.pt: args.a needs '{CANARY}.sing'" in text
    assert "x.pt: args.b.0 needs 'verl.made.up.Config'" in text
    assert text.count("--stub NAME") == 1


def test_a_new_class_of_a_framework_is_read_and_written_where_somebody_vouches(tmp_path: Path) -> None:
    name = "megatron.core.new.NewEnum"
    module = b"cmegatron.core.new\nNewEnum\n"
    write_pt(tmp_path / "x.pt", b"\x80\x02" + module + b"K\x01\x85R.")
    found = read_pt(tmp_path, "x.pt").tree
    assert found.stub_args == (1,)
    with pytest.raises(Untrusted, match="--stub NAME"):
        pickle_tree(found, "y.pt")
    again = pickle.loads(pickle.dumps(read_pt(tmp_path, "x.pt", stubs=[name]).tree))  # to another process
    assert module in pickle_tree(again, "y.pt").data
    assert again == found
    assert hash(again) == hash(found)


def _zip_of_text() -> bytes:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED) as zipped:
        zipped.writestr("notes.txt", "a" * 100)
    return buffer.getvalue()


HONEST: dict[str, Callable[[], object]] = {
    "numbers": lambda: torch.get_rng_state().numpy().tobytes(),
    "a seed like a pickle": lambda: SmallTensor.of_bytes(struct.pack("<QQ", 0x0280, 0)),
    "text": lambda: b"cats are\nnot called\nR",
    "numbers of extensions": lambda: b"\x84\1\2\3\4",
    "a call of nothing": lambda: b"NNR.",
    "nothing": lambda: SmallTensor.of_bytes(b""),
    "a state of Transformer Engine 1": lambda: _of_torch({"scale_fwd": torch.ones(3), "extra_fp8_variables": {"num_gemms": 1}}),
    "a state of Transformer Engine 2": lambda: SmallTensor.of_bytes(
        pickle.dumps({"scale_fwd": torch.ones(3), "extra_fp8_variables": {"num_gemms": 1}})
    ),
    "a zip of somebody's": _zip_of_text,
    "of protocol 2": lambda: pickle.dumps({"scale_fwd": torch.ones(3), "size": torch.Size([1])}, 2),
}  # fmt: skip


def _of_torch(tree: object) -> io.BytesIO:
    buffer = io.BytesIO()
    torch.save(tree, buffer)
    return buffer


@pytest.mark.parametrize("honest", HONEST)
def test_honest_bytes_pass(honest: str) -> None:
    assert pickle_tree({"a": HONEST[honest]()}, "x.pt").data


def test_recipes_of_transformer_engine_pass() -> None:
    recipe = (
        b"\x80\x04\x8c\x20transformer_engine.common.recipe\x94\x8c\x0eDelayedScaling\x94\x93)\x81}\x8c\x0afp8_format\x94h\x00\x8c\x06Format"
        b"\x93h\x00\x8c\x0d_FormatHelper\x93K\x01K\x02\x86\x81\x85Rsb."
    )
    assert calls_of(recipe) == []
    assert calls_of(recipe.replace(b"\x8c\x06Format", b"\x8c\x06Wormat")) == ["transformer_engine.common.recipe.Wormat"]


def _forge_state(folder: Path, forged: object) -> None:
    """Through ``mcore_rlhf/state.json`` of a safetensors folder."""
    path = folder / "mcore_rlhf" / "state.json"
    content = json.loads(path.read_text(encoding="utf-8"))
    content["other"] = {**content.get("other", {}), "forged": forged}
    content["args"] = {**content.get("args", {}), "forged": forged}
    content["scheduler"] = {**content.get("scheduler", {}), "forged": forged}
    path.write_text(json.dumps(content), encoding="utf-8")
    manifest = folder / "mcore_rlhf.json"
    manifest.unlink(missing_ok=True)


@pytest.mark.parametrize("to", WITH_PICKLES)
@pytest.mark.parametrize(
    "forged",
    [
        {"$stub": [f"{CANARY}.sing", ["x"], True, None, None]},
        {"$stub": [f"{CANARY}.sing", ["x"], False, None, {"a": 1}]},
        {"$class": f"{CANARY}.sing"},
        {"$stub": ["megatron.core.enums.ModelType", [{"$stub": [f"{CANARY}.sing", [], True, None, None]}], True, None, None]},
    ],
    ids=["called", "made", "named", "inside"],
)  # fmt: skip
def test_a_call_in_the_sidecar_is_not_written(to: str, forged: object, zoo: Zoo, tmp_path: Path) -> None:
    shutil.copytree(zoo.base("hf"), tmp_path / "source")
    _forge_state(tmp_path / "source", forged)
    _convert_and_load(tmp_path, to)


@pytest.mark.parametrize("to", WITH_PICKLES)
@pytest.mark.parametrize("source", ["deepspeed", "megatron", "megatron-dist", "universal"])
def test_a_call_in_a_pickle_is_not_written(source: str, to: str, zoo: Zoo, tmp_path: Path) -> None:
    shutil.copytree(zoo.base(source), tmp_path / "source")
    (tmp_path / "source" / "mcore_rlhf.json").unlink(missing_ok=True)
    changed = 0
    for path in (tmp_path / "source").rglob("*.pt"):
        if path.name.endswith(("model_states.pt", "model_optim_rng.pt", "common.pt")):
            tree = torch.load(path, weights_only=False)
            forged = Call(_canary(), 1)
            tree |= {"forged": forged, "client_state": forged}
            if "args" in tree:
                setattr(tree["args"], "forged", forged) if not isinstance(tree["args"], dict) else None
            if isinstance(tree.get("lr_scheduler"), dict):
                tree["lr_scheduler"]["forged"] = forged
            if isinstance(tree.get("opt_param_scheduler"), dict):
                tree["opt_param_scheduler"]["forged"] = forged
            torch.save(tree, path)
            changed += 1
    assert changed
    _convert_and_load(tmp_path, to)


def _convert_and_load(folder: Path, to: str) -> None:
    """Either nothing is there, or nothing of it runs: a real loader says so."""
    refused = ""
    try:
        convert(folder / "source", folder / "out", options(to))
    except CheckpointError as error:
        refused = str(error)
    if refused:
        assert f"{CANARY}.sing" in refused
        assert not (folder / "out").exists()
        return
    assert open_checkpoint(folder / "out", ReadOptions())
    for data in pickles_in(folder / "out"):
        assert made_in(data) <= MADE
    for path in (folder / "out").rglob("*.pt"):
        torch.load(path, weights_only=False)


def test_an_object_of_a_distcp_file_is_refused_by_its_name() -> None:
    with pytest.raises(Untrusted, match=r"^layers\.0\._extra_state/shard_0_1: 0 holds a pickle of its own"):
        saved([called(_canary())], "layers.0._extra_state/shard_0_1")
