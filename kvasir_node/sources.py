"""Where weights come from: a backbone, a plain HTTP mirror, or the Hugging Face hub. One range at a time.

A source answers `Range` requests on the model's original files. What it sends is checked by SHA-256
elsewhere; here are the rules of the answer itself: 206, the exact range, the plan's file size, an ETag that
does not change, no content coding, redirects only where a source may have them.

Knows HTTP. Knows no chunks, no hashes and no files on disk.
"""

from __future__ import annotations

import contextlib
import email.utils
import ipaddress
import json
import re
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final, Literal, Protocol
from urllib.parse import quote

import aiohttp
from yarl import URL

from market.plans import ByteRange, PlanFile, PlanId
from relay.errors import KvasirError, RemoteProtocolError, Unreachable

HUB: Final = "https://huggingface.co"
"""The hub's endpoint unless the configuration names another."""

MAX_REDIRECTS: Final = 5
_CONTENT_RANGE: Final = re.compile(r"bytes (\d+)-(\d+)/(\d+)")
_REDIRECTS: Final = frozenset({301, 302, 303, 307, 308})
_READ_BUFFER: Final = 1 << 20
_GAP: Final = 64 * 1024
"""Bytes between two ranges that are fetched and thrown away rather than asked around, where allowed."""

Signer = Callable[[str, URL], Mapping[str, str]]
"""(method, url) -> headers that authenticate one request; called anew for each."""


class PinnedFiles(Protocol):
    """The files of one model at one revision; a `Plan` is one. `source` is "local" or a hub repository."""

    @property
    def source(self) -> str: ...
    @property
    def revision(self) -> str: ...
    @property
    def files(self) -> Sequence[PlanFile]: ...


class WaitAsked(KvasirError):  # noqa: N818 - an answer, not a failure of ours
    """429 or 503: the source wants to be asked again after `retry_after_s` (None: it did not say)."""

    code = "overloaded"

    def __init__(self, message: str, retry_after_s: float | None) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


@dataclass(frozen=True, slots=True)
class WeightSource:
    """One place to fetch from. `url(file)` is where the plan's file number `file` lies.

    `kind` decides about redirects: a backbone may not redirect (requests are signed), mirrors and the
    hub may. `headers(method, url)` are sent to the origin of that URL only, never to another host or port.
    A source of a higher `rank` is asked only while none of a lower rank is well. Up to `gap_bytes` between
    two wanted ranges may be asked for as well, to make one request of them.
    """

    name: str
    kind: Literal["backbone", "mirror", "hub"]
    url: Callable[[int], URL]
    headers: Signer = field(default=lambda method, url: {})
    rank: int = 0
    gap_bytes: int = 0


def backbone_source(base: str, plan_id: PlanId, sign: Signer, *, rank: int = 0) -> WeightSource:
    """The weights endpoint of a backbone: `GET {base}/weights/v1/{plan}/{file}`, each request signed."""
    root = URL(base)
    return WeightSource(
        name=f"backbone {root.host}:{root.port}",
        kind="backbone",
        url=lambda file: root / "weights" / "v1" / plan_id.hex() / str(file),
        headers=sign,
        rank=rank,
    )


def mirror_source(base: str, plan: PinnedFiles) -> WeightSource:
    """A plain HTTP server with the model's files under `base`, by the names that the plan gives them."""
    return WeightSource(
        name=f"mirror {URL(base).host}",
        kind="mirror",
        url=lambda file: URL(f"{base.rstrip('/')}/{quote(plan.files[file].name)}", encoded=True),
        gap_bytes=_GAP,
    )


def hub_source(plan: PinnedFiles, *, endpoint: str = HUB, token: str | None = None) -> WeightSource:
    """The Hugging Face hub at the plan's pinned revision. `token` goes to the hub alone, never onwards."""
    base = f"{endpoint.rstrip('/')}/{quote(plan.source)}/resolve/{quote(plan.revision, safe='')}"
    return WeightSource(
        name=f"hub {plan.source}",
        kind="hub",
        url=lambda file: URL(f"{base}/{quote(plan.files[file].name)}", encoded=True),
        headers=lambda method, url: {"Authorization": f"Bearer {token}"} if token else {},
        gap_bytes=_GAP,
    )


class RangeReader:
    """Fetches ranges from one source and holds it to its word about each file's length and ETag.

    Where a redirect led is remembered by file, so that a hub is not asked again for each range; an answer
    other than 206 from there sends the next request back to the source.
    """

    def __init__(
        self,
        source: WeightSource,
        plan: PinnedFiles,
        http: aiohttp.ClientSession,
        *,
        connect_timeout_s: float,
        read_timeout_s: float,
    ) -> None:
        self.source = source
        self._plan = plan
        self._http = http
        self._timeout = aiohttp.ClientTimeout(
            total=None, sock_connect=connect_timeout_s, sock_read=read_timeout_s
        )
        self._etags: dict[int, str] = {}
        self._targets: dict[int, URL] = {}

    @contextlib.asynccontextmanager
    async def open(self, wanted: ByteRange) -> AsyncIterator[aiohttp.StreamReader]:
        """The body of one range request, headers checked.

        Raises `WaitAsked` (429, 503), `Unreachable` (no connection, other statuses; worth another try)
        or `RemoteProtocolError` (the rules are broken, or it will never be allowed: do not ask again).
        """
        response = await self._ask(wanted)
        try:
            await self._check(response, wanted)
            yield response.content
        finally:
            response.close()

    async def _ask(self, wanted: ByteRange) -> aiohttp.ClientResponse:
        """The answer after all redirects."""
        known = self._targets.get(wanted.file)
        if known is not None:
            response = await self._get(known, _range_headers(wanted))
            if response.status == 206:
                return response
            response.release()  # signed addresses expire: start again from the source
            del self._targets[wanted.file]
        url = self.source.url(wanted.file)
        headers = dict(self.source.headers("GET", url))
        for hop in range(MAX_REDIRECTS + 1):
            response = await self._get(url, {**headers, **_range_headers(wanted)})
            try:
                if self.source.kind == "hub":
                    await self._check_hub(response, wanted.file, hop)
                if response.status not in _REDIRECTS:
                    if hop and response.status == 206:
                        self._targets[wanted.file] = url
                    return response
                target = self._follow(url, response)
            except BaseException:
                response.close()
                raise
            response.release()
            if target.origin() != url.origin():
                headers = {}
            url = target
        raise RemoteProtocolError(f"{self.source.name} redirects more than {MAX_REDIRECTS} times")

    async def _get(self, url: URL, headers: Mapping[str, str]) -> aiohttp.ClientResponse:
        try:
            return await self._http.get(
                url,
                headers=headers,
                allow_redirects=False,
                auto_decompress=False,
                timeout=self._timeout,
                read_bufsize=_READ_BUFFER,
            )
        except (aiohttp.ClientError, OSError, TimeoutError) as error:
            raise Unreachable(f"{self.source.name}: {error or type(error).__name__}") from None

    def _follow(self, url: URL, response: aiohttp.ClientResponse) -> URL:
        if self.source.kind == "backbone":
            raise RemoteProtocolError(f"{self.source.name} redirects a signed request")
        try:
            target = url.join(URL(response.headers.get("Location", "")))
        except ValueError:
            raise RemoteProtocolError(f"{self.source.name} redirects to no URL") from None
        check_redirect(url, target)
        return target

    async def _check_hub(self, response: aiohttp.ClientResponse, file: int, hop: int) -> None:
        """What the hub's own headers say of the file: the pinned commit, its size, its hash."""
        name, path = self.source.name, self._plan.files[file].name
        commit = response.headers.get("X-Repo-Commit")
        if commit is not None and commit != self._plan.revision:
            raise RemoteProtocolError(f"{name} serves commit {commit[:40]}, not {self._plan.revision}")
        size = response.headers.get("X-Linked-Size")
        if size is not None and size != str(self._plan.files[file].size):
            raise RemoteProtocolError(
                f"{name}: {path} has {size[:20]} bytes there, {self._plan.files[file].size} in the plan"
            )
        self._same_etag(file, response.headers.get("X-Linked-Etag"))
        if hop == 0 and response.status in _DENIED:
            raise RemoteProtocolError(
                f"{name} answers {response.status} for {path}: {_DENIED[response.status]}"
                + await _reason(response)
            )

    def _same_etag(self, file: int, etag: str | None) -> None:
        if etag is not None and self._etags.setdefault(file, etag) != etag:
            raise RemoteProtocolError(
                f"{self.source.name}: the file changed during the download (ETag {self._etags[file]} -> "
                f"{etag[:80]})"
            )

    async def _check(self, response: aiohttp.ClientResponse, wanted: ByteRange) -> None:
        name = self.source.name
        if response.status in (429, 503):
            raise WaitAsked(
                f"{name} is busy ({response.status})", retry_after_s(response.headers.get("Retry-After"))
            )
        if response.status == 200:
            raise RemoteProtocolError(f"{name} ignores Range: it would send the whole file")
        if response.status != 206:
            raise Unreachable(f"{name} answered {response.status}{await _reason(response)}")
        if response.headers.get("Content-Encoding", "identity") != "identity":
            raise RemoteProtocolError(f"{name} encodes the bytes ({response.headers['Content-Encoding']})")
        match = _CONTENT_RANGE.fullmatch(response.headers.get("Content-Range", ""))
        if match is None:
            raise RemoteProtocolError(f"{name} answers 206 without a Content-Range")
        start, last, size = map(int, match.groups())
        if size != self._plan.files[wanted.file].size:
            raise RemoteProtocolError(
                f"{name}: {self._plan.files[wanted.file].name} has {size} bytes there, "
                f"{self._plan.files[wanted.file].size} in the plan"
            )
        if (start, last + 1) != (wanted.start, wanted.end):
            raise RemoteProtocolError(f"{name} sends bytes {start}-{last}, not the range asked for")
        if response.content_length not in (None, wanted.nbytes):
            raise RemoteProtocolError(f"{name} announces {response.content_length} bytes for {wanted.nbytes}")
        if self.source.kind != "hub":  # behind a hub many stores may answer, each with an ETag of its own
            self._same_etag(wanted.file, response.headers.get("ETag"))


def check_redirect(origin: URL, target: URL) -> None:
    """Refuse a redirect that leaves HTTP, drops TLS, or leads from the internet into a private network.

    Raises `RemoteProtocolError`.
    """
    if target.scheme not in ("http", "https") or not target.host:
        raise RemoteProtocolError(
            f"{origin.host} redirects to {target.scheme or 'nothing'}, which is not HTTP"
        )
    if origin.scheme == "https" and target.scheme == "http":
        raise RemoteProtocolError(f"{origin.host} redirects from https to http")
    if _is_private(target.host) and not _is_private(origin.host or ""):
        raise RemoteProtocolError(f"{origin.host} redirects into a private network ({target.host})")


def retry_after_s(value: str | None, now: float | None = None) -> float | None:
    """Seconds that a Retry-After header asks for (RFC 9110 section 10.2.3); None if absent or unreadable."""
    if value is None:
        return None
    with contextlib.suppress(ValueError):
        return max(0.0, float(int(value.strip())))
    with contextlib.suppress(ValueError, TypeError, IndexError):
        date = email.utils.parsedate_to_datetime(value)
        return max(0.0, date.timestamp() - (time.time() if now is None else now))
    return None


_DENIED: Final = {
    401: "it wants a valid token: set HF_TOKEN",
    403: "the token may not read this model: accept its conditions on the hub with the token's account",
    404: "there is no such model, revision or file, or the token may not know of it",
}
"""What a refusal by the hub itself means; asking again does not help."""


def _is_private(host: str) -> bool:
    if host == "localhost" or host.endswith(".localhost"):
        return True
    try:
        address = ipaddress.ip_address(host)
    except ValueError:
        return False
    return not address.is_global


def _range_headers(wanted: ByteRange) -> dict[str, str]:
    return {"Range": f"bytes={wanted.start}-{wanted.end - 1}", "Accept-Encoding": "identity"}


async def _reason(response: aiohttp.ClientResponse) -> str:
    """The message of a JSON error body, bounded; empty if there is none."""
    try:
        body = json.loads(await response.content.read(4096))
        return f": {str(body['error']['message'])[:300]}"
    except (aiohttp.ClientError, TimeoutError, ValueError, KeyError, TypeError):
        return ""
