"""Checkpoints on the Hugging Face Hub, read by ranges where they lie: ``hf://ORG/MODEL[@REVISION]``.

The revision becomes a commit when the repository is opened: whatever is pushed meanwhile, all bytes are of one commit.

Source: huggingface_hub 2.4.0, ``hf_api.py`` (``repo_info``, ``list_repo_tree``), ``file_download.py`` (``hf_hub_url``),
``utils/_http.py`` (``http_backoff``: 5xx, 429 and broken connections are tried again).
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from pathlib import PurePosixPath
from typing import Any
from urllib.parse import unquote

from ..errors import NotACheckpoint, StorageError, UsageError
from ..installation import to_install
from .fetched import FetchingStore
from .store import StorePath

_URL = re.compile(r"hf://(?:models/)?([^/@]+/[^/@]+)(?:@([^/]+))?(?:/(.*))?")


class HubStore(FetchingStore):
    """One model repository at one commit.

    Args:
        repo: ``ORG/MODEL``.
        revision: A branch, a tag, or a commit.

    Raises:
        NotACheckpoint: There is no such repository or revision, or it needs a token.
        StorageError: The Hub cannot be reached.
    """

    def __init__(self, repo: str, revision: str | None = None) -> None:
        from huggingface_hub import HfApi, RepoFile
        from huggingface_hub.errors import GatedRepoError, RepositoryNotFoundError, RevisionNotFoundError

        super().__init__()
        self._repo, self._named = repo, f"@{revision}" if revision else ""
        self._endpoint = os.environ.get("HF_ENDPOINT")
        api = HfApi(endpoint=self._endpoint)
        try:
            self._commit = api.repo_info(repo, revision=revision).sha
            entries = list(api.list_repo_tree(repo, recursive=True, revision=self._commit))
        except GatedRepoError as error:
            raise NotACheckpoint(
                f"{self}: its authors ask who reads it; accept their conditions on the Hub, and set HF_TOKEN."
            ) from error
        except RevisionNotFoundError as error:
            raise NotACheckpoint(f"{self}: the repository has no such revision.") from error
        except RepositoryNotFoundError as error:
            raise NotACheckpoint(f"{self}: there is no such repository, or HF_TOKEN has no right to it.") from error
        except Exception as error:  # whatever its HTTP library raises
            raise StorageError(f"{self}: the Hub cannot be read: {error}\nHF_ENDPOINT names another one.") from error
        self._folders: dict[str, dict[str, int | None]] = {"": {}}
        for entry in entries:
            path = PurePosixPath(entry.path)
            beside = self._folders.setdefault("" if path.parent == PurePosixPath() else str(path.parent), {})
            beside[path.name] = entry.size if isinstance(entry, RepoFile) else None

    def __reduce__(self) -> tuple[Any, ...]:
        """For another process: the same commit."""
        return HubStore, (self._repo, self._commit)

    def __str__(self) -> str:
        return f"hf://{self._repo}{self._named}/"

    def listed(self, folder: str) -> Mapping[str, int | None]:
        """See :meth:`Store.listed`; all folders were listed at once."""
        return self._folders.get(folder, {})

    def version(self, path: str) -> str:
        """See :meth:`Store.version`; the commit, of all of them."""
        del path
        return str(self._commit)

    def fetch(self, file: str, start: int, stop: int) -> bytes:
        """See :meth:`FetchingStore.fetch`."""
        from huggingface_hub import hf_hub_url
        from huggingface_hub.utils import (  # type: ignore[attr-defined] # documented, but not in its __all__
            build_hf_headers,
            hf_raise_for_status,
            http_backoff,
        )

        url = hf_hub_url(self._repo, file, revision=self._commit, endpoint=self._endpoint)
        headers = {**build_hf_headers(library_name="mcore_rlhf"), "Range": f"bytes={start}-{stop - 1}"}
        try:
            answer = http_backoff("GET", url, headers=headers, follow_redirects=True, timeout=60)
            hf_raise_for_status(answer)
        except Exception as error:  # whatever its HTTP library raises
            raise StorageError(f"{self}{file}: cannot read: {error}") from error
        return bytes(answer.content)


def open_hub(url: str) -> StorePath:
    """The repository, or the folder or file in it, that a URL names.

    Args:
        url: ``hf://ORG/MODEL``, ``hf://ORG/MODEL@REVISION/FOLDER``; a revision with slashes in it is quoted (``refs%2Fpr%2F1``).

    Raises:
        UsageError: It names none, or huggingface_hub is not installed.
        CheckpointError: See :class:`HubStore`.
    """
    named = _URL.fullmatch(url.rstrip("/"))
    if named is None:
        raise UsageError(f"{url}: names no model\nA URL of the Hub is hf://ORG/MODEL or hf://ORG/MODEL@REVISION.")
    try:
        import huggingface_hub  # noqa: F401
    except ImportError:
        raise UsageError(
            f"{url}: is on the Hugging Face Hub, and huggingface_hub, which reads it, is not installed.\n"
            f"Install it: {to_install('object')}; or download the model: hf download {named[1]}"
        ) from None
    repo, revision, path = named.groups()
    return StorePath(HubStore(repo, unquote(revision) if revision else None), PurePosixPath(path or ""))
