"""A server that speaks the Hugging Face hub's protocol, and the store on another port that it redirects to.

`/api/models/OWNER/NAME/revision/REV` gives the commit and the files with their sizes. `/OWNER/NAME/resolve/
REV/FILE` answers small files itself, with an ETag of their git hash, and sends large ones (LFS) by 302 to a
signed address of the store, with X-Repo-Commit, X-Linked-Size and X-Linked-Etag. Both know HEAD and Range.
https://huggingface.co/docs/hub/api; the headers are those of `huggingface_hub.constants`.

Everything asked is recorded; `trouble` and `store_trouble` may answer in the servers' place.
"""

from __future__ import annotations

import hashlib
import re
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

from aiohttp import web

COMMIT = "0123456789abcdef0123456789abcdef01234567"
REPOSITORY = "kvasir/tiny"

Trouble = Callable[[web.Request], Awaitable[web.StreamResponse | None]]


@dataclass(frozen=True, slots=True)
class Asked:
    """One request: its path, its Range as (first, last + 1) or None, its Authorization header."""

    method: str
    path: str
    span: tuple[int, int] | None
    authorization: str | None


@dataclass
class FakeHub:
    """See the module docstring. `files` by name; those whose names end in .safetensors are large ones.

    `token`, if set, is required; `branches` are names of `commit`. `served` counts the store's bytes by
    file, `ranges` lists what was asked of it.
    """

    files: dict[str, bytes] = field(repr=False)
    repository: str = REPOSITORY
    commit: str = COMMIT
    token: str | None = None
    branches: frozenset[str] = frozenset({"main"})
    trouble: Trouble | None = None
    store_trouble: Trouble | None = None
    url: str = ""
    store_url: str = ""
    asked: list[Asked] = field(default_factory=list)
    ranges: list[tuple[str, int, int]] = field(default_factory=list)
    served: Counter[str] = field(default_factory=Counter)
    signature: int = 0

    @classmethod
    def of_folder(cls, folder: Path, **settings: object) -> FakeHub:
        """A hub with the files of a folder."""
        files = {path.name: path.read_bytes() for path in sorted(folder.iterdir()) if path.is_file()}
        return cls(files, **settings)  # type: ignore[arg-type]

    @property
    def large(self) -> dict[str, bytes]:
        return {name: data for name, data in self.files.items() if name.endswith(".safetensors")}

    def overlap(self, name: str, start: int, end: int) -> int:
        """How many of these bytes of a file the store was asked for, each counted as often as asked."""
        return sum(
            max(0, min(end, last) - max(start, first)) for file, first, last in self.ranges if file == name
        )

    def expire(self) -> None:
        """Signed addresses of the store given so far are no longer good."""
        self.signature += 1

    # --- the hub

    async def api(self, request: web.Request) -> web.StreamResponse:
        if (answer := await self._first(request, self.trouble)) is not None:
            return answer
        if request.match_info["repository"] != self.repository:
            return _refusal(404, "RepoNotFound", "Repository not found")
        revision = request.match_info.get("revision", "main")
        if revision not in self.branches | {self.commit}:
            return _refusal(404, "RevisionNotFound", f"Invalid rev id: {revision}")
        siblings = []
        for name, data in self.files.items():
            sibling: dict[str, object] = {"rfilename": name, "size": len(data), "blobId": _git_hash(data)}
            if name in self.large:
                sha = hashlib.sha256(data).hexdigest()
                sibling["lfs"] = {"sha256": sha, "size": len(data), "pointerSize": 135}
            siblings.append(sibling)
        return web.json_response({"id": self.repository, "sha": self.commit, "siblings": siblings})

    async def resolve(self, request: web.Request) -> web.StreamResponse:
        if (answer := await self._first(request, self.trouble)) is not None:
            return answer
        name = request.match_info["file"]
        if request.match_info["repository"] != self.repository:
            return _refusal(404, "RepoNotFound", "Repository not found")
        if request.match_info["revision"] not in self.branches | {self.commit}:
            return _refusal(404, "RevisionNotFound", "Invalid rev id")
        headers = {"X-Repo-Commit": self.commit, "Accept-Ranges": "bytes"}
        if name not in self.files:
            return _refusal(404, "EntryNotFound", "Entry not found")
        data = self.files[name]
        if name not in self.large:
            return _bytes(request, data, headers | {"ETag": f'"{_git_hash(data)}"'})
        sha = hashlib.sha256(data).hexdigest()
        headers |= {"X-Linked-Size": str(len(data)), "X-Linked-Etag": f'"{sha}"'}
        location = f"{self.store_url}/blobs/{name}?signature={self.signature}"
        return web.Response(status=302, headers=headers | {"Location": location})

    # --- the store

    async def blob(self, request: web.Request) -> web.StreamResponse:
        self.asked.append(_asked(request))
        if self.store_trouble is not None and (answer := await self.store_trouble(request)) is not None:
            return answer
        name = request.match_info["file"]
        if request.query.get("signature") != str(self.signature):
            return web.Response(status=403, text="<Error><Code>AccessDenied</Code></Error>")
        data = self.files[name]
        first, last = _span(request) or (0, len(data))
        self.ranges.append((name, first, last))
        self.served[name] += last - first
        return _bytes(request, data, {"ETag": f'"store-{name}"'})

    async def _first(self, request: web.Request, trouble: Trouble | None) -> web.StreamResponse | None:
        self.asked.append(_asked(request))
        if trouble is not None and (answer := await trouble(request)) is not None:
            return answer
        if self.token is not None and request.headers.get("Authorization") != f"Bearer {self.token}":
            return _refusal(401, "", "Invalid username or password.")
        return None


@asynccontextmanager
async def hub_running(hub: FakeHub) -> AsyncIterator[FakeHub]:
    """The hub and its store on two free loopback ports."""
    api = web.Application()
    api.router.add_get(r"/api/models/{repository:[^/]+/[^/]+}", hub.api)
    api.router.add_get(r"/api/models/{repository:[^/]+/[^/]+}/revision/{revision}", hub.api)
    api.router.add_get(r"/{repository:[^/]+/[^/]+}/resolve/{revision}/{file:.+}", hub.resolve)
    store = web.Application()
    store.router.add_get("/blobs/{file:.+}", hub.blob)
    runners = []
    try:
        for app in (api, store):
            runner = web.AppRunner(app, access_log=None, shutdown_timeout=1.0)
            await runner.setup()
            runners.append(runner)
            await web.TCPSite(runner, "127.0.0.1", 0).start()
        hub.url, hub.store_url = (f"http://127.0.0.1:{runner.addresses[0][1]}" for runner in runners)
        yield hub
    finally:
        for runner in runners:
            await runner.cleanup()


def _asked(request: web.Request) -> Asked:
    return Asked(request.method, request.path, _span(request), request.headers.get("Authorization"))


def _span(request: web.Request) -> tuple[int, int] | None:
    match = re.fullmatch(r"bytes=(\d+)-(\d+)", request.headers.get("Range", ""))
    return None if match is None else (int(match[1]), int(match[2]) + 1)


def _bytes(request: web.Request, data: bytes, headers: dict[str, str]) -> web.StreamResponse:
    span = _span(request)
    if span is None:
        return web.Response(body=data, headers=headers)
    first, last = span[0], min(span[1], len(data))
    headers["Content-Range"] = f"bytes {first}-{last - 1}/{len(data)}"
    return web.Response(status=206, body=data[first:last], headers=headers)


def _git_hash(data: bytes) -> str:
    return hashlib.sha1(b"blob %d\0" % len(data) + data, usedforsecurity=False).hexdigest()


def _refusal(status: int, code: str, message: str) -> web.Response:
    headers = {"X-Error-Message": message} | ({"X-Error-Code": code} if code else {})
    return web.json_response({"error": message}, status=status, headers=headers)
