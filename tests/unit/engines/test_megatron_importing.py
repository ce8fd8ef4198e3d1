"""What Megatron's import may lack is there once anything of the engine was imported, without the demonstration."""

from __future__ import annotations

import sys
import types
import typing

import pytest
import typing_extensions

from mcore_rlhf.engines.megatron import importing


def test_override_is_offered_where_python_has_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(typing, "override", raising=False)
    importing.offer_override()
    assert typing.override is typing_extensions.override


def test_what_python_has_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    own = object()
    monkeypatch.setattr(typing, "override", own, raising=False)
    importing.offer_override()
    assert typing.override is own


def test_modules_of_triton_are_stood_in_for_where_there_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    known, loaded = "a_module_with_kernels", types.ModuleType("another_with_kernels")
    monkeypatch.setattr(importing, "_NEED_TRITON", (known, loaded.__name__))
    monkeypatch.setitem(sys.modules, loaded.__name__, loaded)
    monkeypatch.setitem(sys.modules, "triton", types.ModuleType("triton"))
    importing.stand_in_for_triton()
    assert known not in sys.modules
    monkeypatch.delitem(sys.modules, "triton")
    monkeypatch.setattr(importing.importlib.util, "find_spec", lambda name: None)
    importing.stand_in_for_triton()
    assert sys.modules[loaded.__name__] is loaded
    found = sys.modules.pop(known)
    assert found.HAVE_KERNELS is False
    assert found.is_available() is False
    with pytest.raises(AttributeError):
        _ = found.__path__
