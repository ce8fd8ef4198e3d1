from __future__ import annotations

import pytest

from mcore_rlhf.errors import UsageError
from mcore_rlhf.manager.run.options import Mirror
from mcore_rlhf.storage.objects import open_url
from mcore_rlhf.storage.settings import StoreSettings, redacted

pytest.importorskip("obstore")


@pytest.mark.parametrize(
    ("text", "kept"),
    [
        ("s3://key:hunter2@bucket/x", "s3://bucket/x"),
        (
            "GET http://u:hunter2@host:9/b?X-Amz-Signature=hunter2&prefix=x",
            "GET http://host:9/b?X-Amz-Signature=…&prefix=x",
        ),
        ("abfs://container@account/x", "abfs://container@account/x"),
    ],
)
def test_secrets_of_urls_are_not_said(text: str, kept: str) -> None:
    assert redacted(text) == kept


def test_options_are_not_shown() -> None:
    assert "hunter2" not in repr(StoreSettings({"secret_access_key": "hunter2"}))
    assert "hunter2" not in repr(Mirror("s3://key:hunter2@bucket/run", store={"secret_access_key": "hunter2"}))


@pytest.mark.parametrize(
    "given", [{"allow_http": "true"}, {"timeout": "30"}, {"timeout": "1.5m", "connect_timeout": "500ms"}]
)
def test_settings_of_requests_are_options_too(given: dict[str, str]) -> None:
    assert str(open_url("s3://key:hunter2@bucket/x", given)) == "s3://bucket/x"


@pytest.mark.parametrize("given", [{"allow_http": "maybe"}, {"timeout": "soon"}, {"nonsense": "1"}])
def test_a_setting_that_cannot_be_names_those_that_can(given: dict[str, str]) -> None:
    with pytest.raises(UsageError, match=r"allow_http.*timeout"):
        open_url("s3://bucket/x", given)
