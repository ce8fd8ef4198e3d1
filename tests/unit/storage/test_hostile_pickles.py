"""Pickles made to kill, fill or stop whoever loads them, in every kind of file that holds one: each is refused at once."""

from __future__ import annotations

import pickle
import resource
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from mcore_rlhf.errors import CheckpointError, Corrupt, Incomplete, Unsupported, Untrusted
from mcore_rlhf.storage.dcp.metadata import read_metadata
from mcore_rlhf.storage.dcp.rankfile import read_rank_file
from mcore_rlhf.storage.pickle_scan import MAX_KEYS_WEIGHT, scan
from mcore_rlhf.storage.pt import read_pt
from mcore_rlhf.storage.resolve import MAX_DEPTH
from tests.fuzz.mutators.pickles import integer, parsed
from tests.fuzz.mutators.zips import rebuild
from tests.unit.storage.forge import member, write_pt

GOLDENS = Path(__file__).parents[2] / "goldens"
START = b"\x80\x02"


def _read_pt(folder: Path, data: bytes) -> object:
    write_pt(folder / "x.pt", data, _0=bytes(8))
    return read_pt(folder, "x.pt").tree


def _read_rank_file(folder: Path, data: bytes) -> object:
    write_pt(folder / "x.pt", data, _0=bytes(8))
    return read_rank_file(folder, "x.pt").tree


def _read_metadata(folder: Path, data: bytes) -> object:
    (folder / ".metadata").write_bytes(data)
    return read_metadata(folder)


READERS: dict[str, Callable[[Path, bytes], object]] = {
    "pt": _read_pt, "rank file": _read_rank_file, "metadata": _read_metadata,
}  # fmt: skip


def text(value: str) -> bytes:
    data = value.encode()
    return b"X" + len(data).to_bytes(4, "little") + data


def doubled(times: int, leaf: bytes = b"N") -> bytes:
    """``t = (t, t)``, so many times."""
    return leaf + b"\x85q\x00" + b"h\x00\x86q\x00" * times


def shared_list(times: int) -> bytes:
    """``l = [l, l]``, so many times: fine as it is, endless for whoever follows it."""
    return b"]q\x00" + b"]q\x01(h\x00h\x00eq\x00" * times


LONG = b"\x8a\x10" + bytes(15) + b"\x01"
OBJECT = b"cmegatron.core\nX\nq\x00"
ATTACKS: dict[str, bytes] = {
    "a deep tuple as a key": START + b"}N" + b"\x85" * 300_000 + b"Ns.",
    "a deep tuple in a set": b"\x80\x04\x8f(N" + b"\x85" * 300_000 + b"\x90.",
    "a deep tuple in a frozenset": b"\x80\x04(N" + b"\x85" * 300_000 + b"\x91.",
    "a doubled tuple as a key": START + b"}" + doubled(26) + b"Ns.",
    "a doubled tuple as one of several keys": START + b"}(K\x01N" + doubled(26) + b"Nu.",
    "a tuple doubled a million times": START + doubled(1_000_000) + b"}h\x00Ns.",
    "a long tuple as many keys": START + b"(" + b"N" * 4000 + b"tq\x00}(" + b"h\x00N" * 20_000 + b"u.",
    "colliding keys": START + b"}(" + b"".join(
        b"(" + b"".join(b"J\xff\xff\xff\xff" if n >> bit & 1 else b"J\xfe\xff\xff\xff" for bit in range(13)) + b"tN"
        for n in range(1 << 13)
    ) + b"u.",
    "a huge memo index": START + b"Nr\xff\xff\xff\x3f.",
    "a huge memo index after MEMOIZE": b"\x80\x04N\x94r\xff\xff\xff\x3f.",
    "bytearray of 2 GiB": START + b"c__builtin__\nbytearray\nJ\xff\xff\xff\x7f\x85R.",
    "bytes of 2 GiB": START + b"c__builtin__\nbytes\nJ\xff\xff\xff\x7f\x85R.",
    "BYTEARRAY8 of 2 GiB": b"\x80\x05\x96" + (1 << 31).to_bytes(8, "little") + b".",
    "a text of 4 GiB": START + b"X\xff\xff\xff\xff.",
    "a frame of 4 EiB": b"\x80\x04\x95" + (1 << 62).to_bytes(8, "little") + b"N.",
    "an integer of 2 GiB": START + b"\x8b\xff\xff\xff\x7f.",
    "many long integers": START + b"](" + LONG * 5000 + b"e.",
    "a million empty sets": b"\x80\x04](" + b"\x8f" * 1_000_000 + b"e.",
    "a million objects": START + OBJECT + b"](" + b"h\x00)\x81" * 1_000_000 + b"e.",
    "DUP": START + b"N2\x86.",
    "POP": START + b"NN0.",
    "PUT": START + b"Np1000000000\n.",
    "an opcode of no pickle": START + b"\xff.",
    "a name of a megabyte": START + b"cmegatron.core\n" + b"X" * 1_000_000 + b"\n.",
    "an object as a key": START + OBJECT + b"})\x81Ns.",
    "an object with a state as a key": START + b"}" + OBJECT + b")\x81}bNs.",
    "a class given a state": START + OBJECT + b"}" + text("stub_name") + text("os.system") + b"sb.",
    "a class given attributes": START + OBJECT + b"N}" + text("__new__") + b"Ns\x86b.",
    "a state twice": START + OBJECT + b")\x81}" + text("a") + b"Nsb}" + text("a") + b"K\x01sb.",
    "an object's class": START + OBJECT + b")\x81N}" + text("__class__") + b"cmegatron.core\nY\ns\x86bh\x00)R.",
    "a storage given a state": START + b"(" + text("storage") + b"ctorch\nFloatStorage\n" + text("0") + text("cpu")
    + b"K\x02tQ}" + text("key") + text("1") + b"sb.",
    "a reference that is no tuple": START + b"NQ.",
    "a reference of other types": START + b"(" + text("storage") + b"NNNNtQ.",
    "a reference to a subclass": START + OBJECT + b"(h\x00h\x00h\x00h\x00h\x00tQ.",
    "an object that is called": START + OBJECT + b")R)R.",
    "something behind the end": START + b"N.N.",
    "nothing": b"",
    "no STOP": START + b"N",
    "STOP alone": START + b".",
    "underflow": START + b"\x86.",
    "a mark that is not there": START + b"NNu.",
}  # fmt: skip


@pytest.mark.parametrize("reader", READERS)
@pytest.mark.parametrize("attack", ATTACKS)
def test_attacks_end_at_once_and_cost_nothing(tmp_path: Path, attack: str, reader: str) -> None:
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    began = time.process_time()
    if attack == "an object's class":  # harmless where a stub is all that there is
        _harmless(tmp_path, reader, ATTACKS[attack])
        return
    with pytest.raises((Untrusted, Corrupt, Incomplete, Unsupported)) as raised:
        READERS[reader](tmp_path, ATTACKS[attack])
    assert time.process_time() - began < 3
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 200_000  # kB
    assert len(str(raised.value)) < 1500
    assert str(tmp_path) in str(raised.value)


def _harmless(folder: Path, reader: str, data: bytes) -> None:
    try:
        found = READERS[reader](folder, data)
    except CheckpointError:
        return
    assert type(found).__name__ == "X"


UNENDING: dict[str, bytes] = {
    "lists": shared_list(40),
    "a list in sets": b"]q\x00(" + b"".join(b"K" + bytes([n]) for n in range(250)) * 40 + b"e](" +
    b"c__builtin__\nset\nh\x00\x85R" * 5000 + b"e",
    "a list in ordered dictionaries": b"](" + b"K\x01K\x02\x86" * 10_000 + b"eq\x00](" +
    b"ccollections\nOrderedDict\nh\x00\x85R" * 5000 + b"e",
    "a text in bytes": text("x" * 1_000_000) + b"q\x00](" + b"c_codecs\nencode\nh\x00" + text("latin1") + b"\x86R"
    * 1 + (b"c_codecs\nencode\nh\x00" + text("latin1") + b"\x86R") * 500 + b"e",
    "sets of doubled tuples": b"c__builtin__\nset\n]" + doubled(26) + b"a\x85R",
    "states": OBJECT + b")\x81q\x01" + b"".join(OBJECT + b")\x81h\x01h\x01\x86bq\x01" for _ in range(30)),
}  # fmt: skip


@pytest.mark.parametrize("attack", UNENDING)
def test_what_refers_to_itself_too_often_is_refused(tmp_path: Path, attack: str) -> None:
    began = time.process_time()
    with pytest.raises(Untrusted, match=r"fill the memory|as keys"):
        _read_pt(tmp_path, START + UNENDING[attack] + b".")
    assert time.process_time() - began < 3


NESTED = {
    "lists": b"]" * 100_000 + b"a" * 99_999,
    "dictionaries": (b"}" + text("a")) * 100_000 + b"}" + b"s" * 100_000,
    "tuples": b"N" + b"\x85" * 300_000,
    "arguments": OBJECT + b"0"[:0] + b"h\x00" * 100_000 + b"N" + b"\x85R" * 100_000,
    "parameters": b"ctorch._utils\n_rebuild_parameter\nq\x00" + b"h\x00" * 100_000 + b"N" + b"\x85R" * 100_000,
    "states": OBJECT + (b")\x81h\x00" * 50_000) + b")\x81" + b"b" * 50_000,
}


@pytest.mark.parametrize("kind", NESTED)
def test_deep_nests_are_refused_politely(tmp_path: Path, kind: str) -> None:
    with pytest.raises((Unsupported, Corrupt)):
        _read_pt(tmp_path, START + NESTED[kind] + b".")


def test_as_deep_as_allowed(tmp_path: Path) -> None:
    tree: list[Any] = []
    for _ in range(MAX_DEPTH - 1):
        tree = [tree]
    assert _read_pt(tmp_path, pickle.dumps(tree, 2)) == tree
    with pytest.raises(Unsupported, match="nested too deeply: more than 64 levels"):
        _read_pt(tmp_path, pickle.dumps([tree], 2))


def test_what_holds_itself_is_refused(tmp_path: Path) -> None:
    with pytest.raises(Unsupported, match=r"a\.0 is an object that holds itself"):
        _read_pt(tmp_path, START + b"}" + text("a") + b"]q\x00h\x00as.")


def test_long_tuples_that_are_no_keys_are_read(tmp_path: Path) -> None:
    tree = {"many": tuple(range(50_000)), "key": {(n, "x"): n for n in range(MAX_KEYS_WEIGHT // 3)}}
    assert _read_pt(tmp_path, pickle.dumps(tree, 2)) == tree


def test_a_long_list_of_small_lists_is_read(tmp_path: Path) -> None:
    tree = [[n] for n in range(300_000)]
    assert _read_pt(tmp_path, pickle.dumps(tree, 2)) == tree


def test_frozen_values_cannot_be_changed_after_they_were_checked(tmp_path: Path) -> None:
    """``BUILD`` on a tensor that was made: the slots of a frozen dataclass could be set that way."""
    tensor = (
        b"ctorch._utils\n_rebuild_tensor_v2\n((" + text("storage") + b"ctorch\nFloatStorage\n" + text("0") + text("cpu")
    )
    tensor += b"K\x02tQK\x00K\x02\x85K\x01\x85\x89ccollections\nOrderedDict\n)RtR"
    state = b"N}(" + text("start") + b"K\x64" + text("shape") + b"M\xe8\x03\x85u\x86b"
    assert _read_pt(tmp_path, START + tensor + b".").shape == (2,)  # type: ignore[attr-defined]
    for reader in ("pt", "rank file"):
        with pytest.raises(Unsupported, match="with a state"):
            READERS[reader](tmp_path, START + tensor + state + b".")


def genuine() -> list[bytes]:
    import zipfile

    found = [path.read_bytes() for path in sorted(GOLDENS.rglob(".metadata"))]
    for path in sorted(GOLDENS.rglob("*.pt")):
        with zipfile.ZipFile(path) as zipped:
            found += [zipped.read(name) for name in zipped.namelist() if name.endswith("data.pkl")]
    return found


def test_genuine_pickles_pass_and_their_beginnings_do_not() -> None:
    pickles = genuine()
    assert len(pickles) > 100
    for data in pickles:
        scan(data)
    for data in sorted(set(pickles), key=len)[:20]:
        for stop in range(0, len(data) - 1, 1 + len(data) // 50):
            with pytest.raises(Exception, match=r"\w"):
                scan(data[:stop])


def test_the_scan_agrees_with_the_loader_about_where_opcodes_begin() -> None:
    """An opcode that the scan takes for two bytes longer than it is would hide what follows."""
    import pickletools

    from mcore_rlhf.storage import pickle_scan

    for info in pickletools.opcodes:
        code = ord(info.code)
        nbytes = pickle_scan._ATOMS[code]
        if nbytes >= 0:
            assert (info.arg.n if info.arg else 0) == nbytes, info.name


def test_integers_of_255_bytes_pass() -> None:
    scan(pickle.dumps(2**2038, 2))
    with pytest.raises(Untrusted, match="opcode"):
        scan(pickle.dumps(2**2040, 2))


def test_the_state_of_a_random_generator_is_read(tmp_path: Path) -> None:
    import numpy as np
    import torch

    state = np.random.PCG64(7).state
    torch.save(state, tmp_path / "x.pt")
    assert read_pt(tmp_path, "x.pt").tree == state


TENSOR = (
    b"ctorch._utils\n_rebuild_tensor_v2\nq\x01((X\x07\x00\x00\x00storagectorch\nFloatStorage\nX\x01\x00\x00\x000X\x03\x00\x00\x00cpuK\x02tQ"
    b"K\x00%s%s\x89ccollections\nOrderedDict\n)Rtq\x02Rq\x03"
)
"""A tensor of two elements; what it is made of is in the memo under 1 and 2, and it itself under 3."""
NONE, MILLION = (b"K\x00\x85", b"K\x01\x85"), (b"J\x40\x42\x0f\x00J\x40\x42\x0f\x00\x86", b"K\x00K\x00\x86")
TENTH = (b"J\xa0\x86\x01\x00\x85", b"K\x00\x85")


@pytest.mark.parametrize(
    ("like", "more", "words"),
    [
        (MILLION, b"", "shape (1000000, 1000000) in 2 stored elements"),
        (TENTH, b"h\x01h\x02R" * 1000, "many in the same place"),
        (NONE, b"h\x01h\x02R" * 10**6, "objects in its first"),
        (NONE, b"h\x03" * 10**6, "refers to itself so often"),
        (NONE, (TENSOR % NONE) * 75_000, "more tensors than a file of"),
    ],
    ids=["expanded", "expanded a thousand times", "called again", "the same again", "empty"],
)
def test_tensors_that_would_fill_the_memory(tmp_path: Path, like: tuple[bytes, bytes], more: bytes, words: str) -> None:
    before, began = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, time.process_time()
    with pytest.raises(Untrusted) as refusal:
        _read_pt(tmp_path, START + b"](" + TENSOR % like + more + b"e.")
    assert words in str(refusal.value)
    assert time.process_time() - began < 5
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 200_000  # kB


def test_a_mask_and_shared_layers_are_read(tmp_path: Path) -> None:
    """What ``expand`` made, twelve names of one layer, and as many empty tensors as a large model has parameters."""
    import torch

    layer, mask = torch.zeros(512, 512), torch.zeros(1, 1).expand(4096, 4096)
    names = {"mask": mask, **{f"layers.{n}.weight": layer[:] for n in range(12)}}
    names |= {f"experts.{n}.weight": torch.empty(0) for n in range(20_000)}
    torch.save(names, tmp_path / "x.pt")
    assert read_pt(tmp_path, "x.pt").tree.keys() == names.keys()


@pytest.mark.parametrize("dim", [5, -1, 10**9])
def test_a_cut_along_a_dimension_that_is_not_there(tmp_path: Path, dim: int) -> None:
    golden = GOLDENS / "verl" / "fsdp2_ws3" / "model_world_size_3_rank_0.pt"
    opcodes = parsed(member(golden, "data.pkl"))
    at = next(at for at, opcode in enumerate(opcodes) if opcode[1] == "dim")
    at = next(number for number in range(at, len(opcodes)) if opcodes[number][0] == "BININT1")
    opcodes[at] = ("", None, integer(dim))
    shutil.copy(golden, tmp_path / "x.pt")
    rebuild(tmp_path / "x.pt", {"data.pkl": b"".join(raw for _, _, raw in opcodes)})
    with pytest.raises(Corrupt, match="cut along"):
        read_rank_file(tmp_path, "x.pt")
