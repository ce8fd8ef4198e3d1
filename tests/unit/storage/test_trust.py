"""Files that attack whoever loads them. Each would create a file called ``ran``; none may."""

from __future__ import annotations

import builtins
import functools
import io
import operator
import os
import pickle
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from mcore_rlhf.errors import CheckpointError, Corrupt, Unsupported, Untrusted
from mcore_rlhf.storage.pt import read_pt
from mcore_rlhf.storage.stored import Stub
from mcore_rlhf.storage.trust import PickleVerdict, judge
from tests.unit.storage.forge import called, saved_pickle, write_pt

TOUCH = "touch ran"


@pytest.fixture(autouse=True)
def nothing_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.chdir(tmp_path)
    yield
    assert not (tmp_path / "ran").exists(), "code of the file was run"


def _short(text: bytes) -> bytes:
    return b"X" + len(text).to_bytes(4, "little") + text


_RAN, _CMD = _short(b"ran"), _short(TOUCH.encode())
ATTACKS: dict[str, bytes] = {
    "os.system": called(os.system, TOUCH),
    "subprocess": called(subprocess.run, ["touch", "ran"]),
    "exec": called(exec, "open('ran','w')"),
    "eval": called(eval, "open('ran','w')"),
    "open": called(open, "ran", "w"),
    "import": called(builtins.__import__, "antigravity"),
    "partial": called(functools.partial, print),
    "methodcaller": called(operator.methodcaller, "system", TOUCH),
    "attrgetter": called(operator.attrgetter, "system"),
    "getattr": b"\x80\x02c__builtin__\ngetattr\ncos\nsystem\n" + _short(b"__call__") + b"\x86R" + _CMD + b"\x85R.",
    "torch.load": called(torch.load, "other.pt"),
    "pickle.loads": called(pickle.loads, called(os.system, TOUCH)),
    "numpy.load": called(np.load, "other.npy"),
    "in a framework's name": b"\x80\x02cmegatron.core.utils\nos.system\n" + _CMD + b"\x85R.",
    "module with a dot": b"\x80\x02co\ns.system\n" + _CMD + b"\x85R.",
    "no module": b"\x80\x02c\nos.system\n" + _CMD + b"\x85R.",
    "inst opcode": b"\x80\x02(" + _CMD + b"ios\nsystem\n.",
    "obj opcode": b"\x80\x02(cos\nsystem\n" + _CMD + b"o.",
    "stack global": b"\x80\x02" + _short(b"os") + b"q\x00" + _short(b"system") + b"q\x01h\x00h\x01\x93" + _CMD + b"\x85R.",
    "protocol 4": called(os.system, TOUCH, protocol=4),
    "protocol 5": called(os.system, TOUCH, protocol=5),
    "extension opcode": b"\x80\x02\x82\x01.",
    "rebuild calls it": (
        b"\x80\x02ctorch._tensor\n_rebuild_from_type_v2\n(cos\nsystem\nctorch\nTensor\n" + _CMD + b"\x85}tR."
    ),
    "default factory": b"\x80\x02ccollections\ndefaultdict\ncos\nsystem\n\x85R.",
    "in an array of objects": saved_pickle({"a": np.array([1], object)}).replace(
        b"K\x01a", b"cos\nsystem\n" + _CMD + b"\x85Ra"
    ),
    "as a key": b"\x80\x02}cos\nsystem\n" + _CMD + b"\x85RK\x01s.",
    "state of a stub": b"\x80\x02cmegatron.core\nX\n)\x81cos\nsystem\n" + _CMD + b"\x85Rb.",
}  # fmt: skip


@pytest.mark.parametrize("attack", ATTACKS)
@pytest.mark.parametrize(
    "wish", [(), ("os.system", "builtins.exec", "builtins.getattr", "megatron.core.utils.os.system")]
)
def test_attacks_are_refused_even_with_a_stub(tmp_path: Path, attack: str, wish: tuple[str, ...]) -> None:
    write_pt(tmp_path / "x.pt", ATTACKS[attack])
    with pytest.raises((Untrusted, Corrupt, Unsupported), match=r"x\.pt"):
        read_pt(tmp_path, "x.pt", stubs=wish)


def test_a_second_pickle_behind_the_first_is_refused(tmp_path: Path) -> None:
    write_pt(tmp_path / "x.pt", b"\x80\x02K\x07." + called(os.system, TOUCH))
    with pytest.raises(Corrupt, match="bytes follow its end"):
        read_pt(tmp_path, "x.pt")


def test_a_pickle_inside_bytes_stays_bytes(tmp_path: Path) -> None:
    evil = called(os.system, TOUCH)
    torch.save({"_extra_state": io.BytesIO(evil), "raw": evil}, tmp_path / "x.pt")
    tree = read_pt(tmp_path, "x.pt").tree
    assert tree["_extra_state"].getvalue() == tree["raw"] == evil


def test_stubs_hold_still_whatever_is_done_to_them(tmp_path: Path) -> None:
    """A state with method names, and calls of the class, neither replace methods nor run anything."""
    state = b"}(" + _short(b"__reduce__") + b"cmegatron.core\nY\n" + _short(b"__class__") + b"K\x01u"
    write_pt(tmp_path / "x.pt", b"\x80\x02cmegatron.core\nX\n" + _CMD + b"\x85R" + state + b"b.")
    stub = read_pt(tmp_path, "x.pt").tree
    assert isinstance(stub, Stub)
    assert stub.stub_args == (TOUCH,)
    assert set(stub.stub_state) == {"__reduce__", "__class__"}
    assert stub.__class__.stub_name == "megatron.core.X"


def test_a_stub_is_not_a_function_that_can_be_called_again(tmp_path: Path) -> None:
    write_pt(tmp_path / "x.pt", b"\x80\x02cmegatron.core\nX\n)R)R.")
    with pytest.raises(Corrupt):
        read_pt(tmp_path, "x.pt")


def test_rebuilding_cannot_set_attributes_of_classes(tmp_path: Path) -> None:
    """``_rebuild_from_type_v2`` sets any attribute on what it is told to rebuild."""
    build = (
        b"ctorch._tensor\n_rebuild_from_type_v2\n(cmegatron.core\nX\nctorch\nTensor\n)}" + _short(b"a") + b"K\x01stR."
    )
    write_pt(tmp_path / "x.pt", b"\x80\x02" + build)
    with pytest.raises(CheckpointError, match=r"x\.pt"):
        read_pt(tmp_path, "x.pt")


def test_a_forged_numpy_dtype_cannot_turn_bytes_into_pointers(tmp_path: Path) -> None:
    """A structured type with object fields and flags that deny it makes numpy itself follow raw pointers."""
    forged = (3, "|", None, ("a",), {"a": (np.dtype(object), 0)}, 8, 8, 0)

    class Forged:
        def __reduce__(self) -> Any:
            return np.dtype, ("V8", False, True), forged

    array = (np._core.multiarray._reconstruct, (np.ndarray, (0,), b"b"), (1, (1,), Forged(), False, b"\x41" * 8))

    class Array:
        def __reduce__(self) -> Any:
            return array

    write_pt(tmp_path / "x.pt", pickle.dumps({"a": Array()}, 2))
    with pytest.raises(Unsupported, match="numpy array of dtype 'V8'"):
        read_pt(tmp_path, "x.pt")


@pytest.mark.parametrize(
    ("shape", "data"), [((3,), b"\0" * 8), ((-1,), b""), ((2**62, 4), b""), ((1,), [1]), ((1,), "text")]
)
def test_arrays_whose_data_does_not_fit_are_corrupt(tmp_path: Path, shape: Any, data: Any) -> None:
    class Array:
        def __reduce__(self) -> Any:
            state = (1, shape, np.dtype("f8"), False, data)
            return np._core.multiarray._reconstruct, (np.ndarray, (0,), b"b"), state

    write_pt(tmp_path / "x.pt", pickle.dumps({"deep": [Array()]}, 2))
    with pytest.raises(Corrupt, match=r"deep\.0 is a numpy array"):
        read_pt(tmp_path, "x.pt")


def test_all_refused_names_are_told_at_once_with_what_to_do(tmp_path: Path) -> None:
    pickled = b"\x80\x02](cmine.data\nRow\ncmine.data\nCell\ncposix\nsystem\ncmegatron.core\nX\ne."
    write_pt(tmp_path / "x.pt", pickled)
    with pytest.raises(Untrusted) as raised:
        read_pt(tmp_path, "x.pt", stubs=["mine.data.Cell"])
    text = str(raised.value)
    assert "'posix.system', which can run code" in text
    assert "--stub mine.data.Row" in text
    assert "Cell" not in text
    assert "megatron" not in text


def test_a_stub_that_the_user_asks_for_is_inert(tmp_path: Path) -> None:
    write_pt(tmp_path / "x.pt", b"\x80\x02c__main__\nRow\n)\x81}" + _short(b"a") + b"K\x01sb.")
    with pytest.raises(Untrusted, match=r"--stub __main__\.Row"):
        read_pt(tmp_path, "x.pt")
    row = read_pt(tmp_path, "x.pt", stubs=["__main__.Row"]).tree
    assert row.a == 1
    with pytest.raises(AttributeError, match=r"__main__\.Row: the checkpoint stores no 'b'"):
        _ = row.b


def test_an_environment_variable_cannot_open_the_door(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD", "1")
    write_pt(tmp_path / "x.pt", called(os.system, TOUCH))
    with pytest.raises(Untrusted):
        read_pt(tmp_path, "x.pt")


@pytest.mark.parametrize(
    ("name", "verdict"),
    [
        ("argparse.Namespace", PickleVerdict.REAL),
        ("numpy._core.multiarray._reconstruct", PickleVerdict.REAL),
        ("_io.BytesIO", PickleVerdict.REAL),
        ("megatron.core.transformer.enums.AttnBackend", PickleVerdict.STUB),
        ("deepspeed.runtime.fp16.loss_scaler.LossScaler", PickleVerdict.STUB),
        ("transformer_engine.common.recipe.DelayedScaling", PickleVerdict.STUB),
        ("signal.Signals", PickleVerdict.STUB),
        ("pathlib.PosixPath", PickleVerdict.STUB),
        ("types.SimpleNamespace", PickleVerdict.STUB),
        ("numpy.dtypes.UInt32DType", PickleVerdict.STUB),
        ("datetime.datetime", PickleVerdict.STUB),
        ("mine.Config", PickleVerdict.UNKNOWN),
        ("megatronx.Config", PickleVerdict.UNKNOWN),
        ("torch.distributed.device_mesh.DeviceMesh", PickleVerdict.UNKNOWN),
        ("signal.signal", PickleVerdict.HARMFUL),
        ("types.FunctionType", PickleVerdict.HARMFUL),
        ("_io.FileIO", PickleVerdict.HARMFUL),
        ("io.open", PickleVerdict.HARMFUL),
        ("_codecs.lookup", PickleVerdict.HARMFUL),
        ("torch.hub.load", PickleVerdict.HARMFUL),
        ("torch.storage._load_from_bytes", PickleVerdict.HARMFUL),
        ("torch.utils.cpp_extension.load", PickleVerdict.HARMFUL),
        ("numpy.testing._private.utils.runstring", PickleVerdict.HARMFUL),
        ("numpy.core.multiarray.fromfile", PickleVerdict.HARMFUL),
        ("megatron.core.utils.__builtins__.eval", PickleVerdict.HARMFUL),
        ("deepspeed.launcher.runner.subprocess.Popen", PickleVerdict.HARMFUL),
        ("system", PickleVerdict.HARMFUL),
        ("mine.\nX", PickleVerdict.HARMFUL),
    ],
)
def test_judgements(name: str, verdict: PickleVerdict) -> None:
    assert judge(name) is verdict
    if verdict is PickleVerdict.HARMFUL:
        assert judge(name, [name]) is verdict
    if verdict is PickleVerdict.UNKNOWN:
        assert judge(name, [name]) is PickleVerdict.STUB
