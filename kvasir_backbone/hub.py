"""A model on the Hugging Face hub: its name, its pinned commit, its file list and its small files.

Asks the hub's API by `huggingface_hub`; a branch or tag is turned into a commit once, and everything later
asks for that commit. Safetensors files are never fetched here: see `hub_reader`.

Knows the hub. Knows no tensors and no experts.
"""

from __future__ import annotations

import json
import random
import re
import threading
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final, TypeVar

import structlog

from kvasir_node.sources import HUB, retry_after_s
from market.plans import PlanFile
from relay.errors import ConfigError, KvasirError, Refused, Unreachable

from .shards import INDEX_NAME, index_names

_T = TypeVar("_T")
_log = structlog.get_logger("backbone")

_REFERENCE: Final = re.compile(
    r"(?P<repository>[A-Za-z0-9][A-Za-z0-9._-]{0,95}/[A-Za-z0-9._-]{1,96})(@(?P<revision>[A-Za-z0-9._/-]{1,200}))?"
)
_SCHEME: Final = "hf://"
_COMMIT: Final = re.compile(r"[0-9a-f]{40}")
_FILE: Final = re.compile(r"[A-Za-z0-9_.+-]+(/[A-Za-z0-9_.+-]+)*", re.ASCII)
_SMALL: Final = (".json", ".txt", ".model", ".jinja", ".tiktoken")
MAX_SMALL_BYTES: Final = 64 * 1024 * 1024
"""Configuration and tokenizer files above this are left out."""

ATTEMPTS: Final = 6
"""How often the hub is asked when it is busy or away."""

MAX_WAIT_S: Final = 60.0
"""No Retry-After of the hub makes the start wait longer than this at once."""

_TIMEOUT_S: Final = 20.0


@dataclass(frozen=True, slots=True)
class HubReference:
    """A repository on the hub, and the branch, tag or commit that is asked for."""

    repository: str
    revision: str = "main"

    @property
    def pinned(self) -> bool:
        """Whether the revision is a whole commit hash."""
        return _COMMIT.fullmatch(self.revision) is not None

    @property
    def text(self) -> str:
        """As the operator writes it."""
        return f"{self.repository}@{self.revision}"


@dataclass(frozen=True, slots=True)
class HubAccess:
    """How to reach the hub: its URL, and a token for private and gated models (None: none)."""

    endpoint: str = HUB
    token: str | None = None

    def __repr__(self) -> str:
        return f"HubAccess(endpoint={self.endpoint!r}, token={'set' if self.token else None})"


@dataclass(frozen=True, slots=True)
class HubModel:
    """A model at one commit: `source` the repository, `revision` the commit, `files` its safetensors.

    `folder` holds its small files. Fits `kvasir_node.sources.PinnedFiles`.
    """

    source: str
    revision: str
    files: tuple[PlanFile, ...]
    folder: Path


def parse_model(text: str) -> HubReference | Path:
    """What the operator named: a folder, `hf://OWNER/NAME[@REVISION]`, or `OWNER/NAME[@REVISION]`.

    A name that is a folder here is that folder. Raises `ConfigError` for a malformed `hf://` name.
    """
    wanted = text.removeprefix(_SCHEME)
    match = _REFERENCE.fullmatch(wanted)
    if text.startswith(_SCHEME) and match is None:
        raise ConfigError(f"{text!r} is not hf://OWNER/NAME or hf://OWNER/NAME@REVISION")
    if match is None or (not text.startswith(_SCHEME) and Path(text).expanduser().exists()):
        return Path(text)
    if ".." in wanted:
        return Path(text)
    return HubReference(match["repository"], match["revision"] or "main")


def open_model(
    reference: HubReference, access: HubAccess, home: Path, *, ended: threading.Event | None = None
) -> HubModel:
    """Pin the model to a commit and bring its small files under `home`. Blocks; seconds.

    What an earlier start brought is used again; with a commit in the reference the hub is then not asked
    at all. Raises `ConfigError` for what the operator must change (no such model, a token or its consent
    missing, no safetensors), `Unreachable` or `Refused` where the hub is away or busy, at once when `ended`
    is set.
    """
    base = home / reference.repository.replace("/", "--")
    if reference.pinned and (known := _remembered(base / reference.revision)) is not None:
        return known
    ended = ended or threading.Event()
    info = _ask(lambda: _info(reference, access), reference, access, ended)
    commit = str(info.sha or "")
    if _COMMIT.fullmatch(commit) is None:
        raise ConfigError(f"the hub names no commit for {reference.text}; it is no hub that Kvasir can use")
    folder = base / commit
    if (known := _remembered(folder)) is not None:
        return known
    sizes = {str(file.rfilename): file.size for file in info.siblings or ()}
    _fetch_small(reference, commit, sizes, access, folder, ended)
    files = _safetensors(reference, folder, sizes)
    model = HubModel(reference.repository, commit, files, folder)
    _remember(model)
    _log.info("hub.pinned", repository=reference.repository, asked=reference.revision, commit=commit)
    return model


# --- the hub's API --------------------------------------------------------------------------------------


def _info(reference: HubReference, access: HubAccess) -> Any:
    from huggingface_hub import HfApi

    api = HfApi(endpoint=access.endpoint, token=access.token or False)
    return api.model_info(
        reference.repository, revision=reference.revision, files_metadata=True, timeout=_TIMEOUT_S
    )


def _fetch_small(
    reference: HubReference,
    commit: str,
    sizes: Mapping[str, int | None],
    access: HubAccess,
    folder: Path,
    ended: threading.Event,
) -> None:
    """The configuration, the tokenizer and the index; nothing else, and no code."""
    from huggingface_hub import hf_hub_download

    for name, size in sorted(sizes.items()):
        wanted = "/" not in name and name.endswith(_SMALL) and _FILE.fullmatch(name)
        if not wanted or name.startswith(".") or (size or 0) > MAX_SMALL_BYTES:
            continue

        def fetch(name: str = name) -> str:
            return hf_hub_download(
                reference.repository,
                name,
                revision=commit,
                local_dir=folder,
                endpoint=access.endpoint,
                token=access.token or False,
                etag_timeout=_TIMEOUT_S,
            )

        _ask(fetch, reference, access, ended)


def _ask(call: Callable[[], _T], reference: HubReference, access: HubAccess, ended: threading.Event) -> _T:
    """One call of `huggingface_hub`, its errors in our words; asked again where that can help."""
    from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError, OfflineModeIsEnabled

    for attempt in range(1, ATTEMPTS + 1):
        try:
            return call()
        except OfflineModeIsEnabled as error:
            raise ConfigError(f"{reference.text} is on the hub, and HF_HUB_OFFLINE is set: {error}") from None
        except HfHubHTTPError as error:
            status = getattr(error.response, "status_code", 0)
            failure, wait = _failure(error, status, reference, access)
        except LocalEntryNotFoundError as error:
            cause = error.__cause__
            status = getattr(getattr(cause, "response", None), "status_code", 0)
            failure, wait = _failure(cause or error, status, reference, access)
        except _network_errors() as error:
            failure, wait = Unreachable(f"the hub at {access.endpoint} does not answer: {error}"), None
        if isinstance(failure, ConfigError) or attempt == ATTEMPTS or ended.is_set():
            raise failure
        if wait is None:
            wait = min(16.0, 0.5 * 2.0**attempt) * random.uniform(0.5, 1.0)
        _log.warning("hub.busy", reason=str(failure), retry_s=round(min(wait, MAX_WAIT_S), 1))
        if ended.wait(min(wait, MAX_WAIT_S)):
            raise failure
    raise AssertionError("unreachable")


def _network_errors() -> tuple[type[Exception], ...]:
    from huggingface_hub.errors import HTTPError  # type: ignore[attr-defined]  # of its HTTP library

    return (HTTPError, OSError)


def _failure(
    error: BaseException, status: int, reference: HubReference, access: HubAccess
) -> tuple[KvasirError, float | None]:
    """What an error of the hub means, and for how long it asks to be left alone."""
    text, hint = reference.text, _first_line(error)
    if status == 401 or (status == 404 and access.token is None):
        needed = "" if access.token is None else " of an account that may read it"
        return ConfigError(
            f"{text}: there is no such model or revision at {access.endpoint}, or it is private: check the "
            f"name, or set HF_TOKEN to a token{needed} ({hint})"
        ), None
    if status == 403:
        return ConfigError(
            f"{text} is gated: accept its conditions at {access.endpoint}/{reference.repository} with the "
            f"account of HF_TOKEN ({hint})"
        ), None
    if 400 <= status < 500 and status != 429:
        return ConfigError(
            f"{text}: the hub answers {status}: check the name and the revision ({hint})"
        ), None
    if status == 429:
        headers = getattr(getattr(error, "response", None), "headers", {})
        wait = retry_after_s(headers.get("Retry-After"))
        return Refused("overloaded", f"the hub answers 429: too many requests ({hint})"), wait
    return Unreachable(f"the hub at {access.endpoint} fails ({status or hint})"), None


def _first_line(error: BaseException) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0][:200]


# --- what is there --------------------------------------------------------------------------------------


def _safetensors(
    reference: HubReference, folder: Path, sizes: Mapping[str, int | None]
) -> tuple[PlanFile, ...]:
    """The safetensors files that the index names, or all of them, with the sizes that the hub gives."""
    index = folder / INDEX_NAME
    if index.is_file():
        names = index_names(index)
    else:
        names = sorted(name for name in sizes if name.endswith(".safetensors") and "/" not in name)
    if not names:
        raise ConfigError(
            f"{reference.text} has no .safetensors files: only checkpoints in safetensors can be served"
        )
    files = []
    for name in names:
        size = sizes.get(name)
        if name not in sizes or not _FILE.fullmatch(name):
            raise ConfigError(f"the index of {reference.text} names {name}, which is not in the repository")
        if not isinstance(size, int) or size <= 0:
            raise ConfigError(f"the hub gives no size for {name} of {reference.text}")
        files.append(PlanFile(name, size))
    return tuple(files)


def _remember(model: HubModel) -> None:
    fields = {"v": 1, "source": model.source, "revision": model.revision}
    files = [asdict(file) for file in model.files]
    staging = model.folder / ".kvasir-hub.new"
    staging.write_text(json.dumps(fields | {"files": files}), encoding="utf-8")
    staging.replace(model.folder / _MEMORY)


def _remembered(folder: Path) -> HubModel | None:
    """What an earlier start noted of that commit; None where it did not get so far."""
    try:
        found = json.loads((folder / _MEMORY).read_text(encoding="utf-8"))
        if found["v"] != 1 or found["revision"] != folder.name:
            return None
        files = tuple(PlanFile(str(file["name"]), int(file["size"])) for file in found["files"])
        return HubModel(str(found["source"]), str(found["revision"]), files, folder)
    except (OSError, ValueError, KeyError, TypeError):
        return None


_MEMORY: Final = "kvasir-hub.json"
