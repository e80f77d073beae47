"""The control endpoint: a token-guarded HTTP server on loopback, found through a file in the state folder.

`control.json` (mode 0600) holds port, token and process id. Who can read the file may ask for the status
and stop the daemon. Knows HTTP on loopback; nothing of what the status means.
"""

from __future__ import annotations

import contextlib
import hmac
import http.client
import json
import os
import secrets
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from pathlib import Path
from typing import Any, Final

from aiohttp import web

from relay.errors import ConfigError, IdentityError, KvasirError, Refused, Unreachable
from relay.keyfiles import read_secret, write_secret

CONTROL_FILE: Final = "control.json"
_TIMEOUT_S: Final = 5.0
_MAX_ANSWER: Final = 4 << 20


@contextlib.asynccontextmanager
async def control_endpoint(
    folder: Path,
    *,
    status: Callable[[], Mapping[str, Any]],
    stop: Callable[[], None],
    pause: Callable[[bool], None] = lambda wanted: None,
    recompute: Callable[[bytes], Awaitable[Mapping[str, Any]]] | None = None,
) -> AsyncIterator[int]:
    """Serve `GET /status`, `POST /stop`, `/pause`, `/resume` and `/recompute/ID` on 127.0.0.1 while the block
    runs; yields the port.
    """
    token = secrets.token_urlsafe(32)

    def allowed(request: web.Request) -> None:
        offered = request.headers.get("Authorization", "")
        if not hmac.compare_digest(
            offered.encode("utf-8", "surrogateescape"), f"Bearer {token}".encode("ascii")
        ):
            raise web.HTTPUnauthorized(text="the token is in control.json in the state folder")

    async def get_status(request: web.Request) -> web.Response:
        allowed(request)
        return web.json_response(status())

    async def post_stop(request: web.Request) -> web.Response:
        allowed(request)
        stop()
        return web.json_response({"stopping": True})

    async def post_pause(request: web.Request) -> web.Response:
        allowed(request)
        wanted = request.path == "/pause"
        pause(wanted)
        return web.json_response({"pausing": wanted})

    async def post_recompute(request: web.Request) -> web.Response:
        allowed(request)
        try:
            if recompute is None:
                raise Refused("not_found", "the node is starting: ask again")
            record = bytes.fromhex(request.match_info["record"])
            return web.json_response(dict(await recompute(record)))
        except (KvasirError, ValueError) as error:
            return web.json_response({"error": str(error)})

    app = web.Application(client_max_size=4096)
    app.router.add_post("/recompute/{record}", post_recompute)
    app.router.add_post("/pause", post_pause)
    app.router.add_post("/resume", post_pause)
    app.router.add_get("/status", get_status)
    app.router.add_post("/stop", post_stop)
    runner = web.AppRunner(app, access_log=None, shutdown_timeout=1.0)
    await runner.setup()
    path = folder / CONTROL_FILE
    try:
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        port: int = runner.addresses[0][1]
        path.unlink(missing_ok=True)
        content = {"v": 1, "port": port, "token": token, "pid": os.getpid()}
        write_secret(path, json.dumps(content).encode("ascii"))
        try:
            yield port
        finally:
            with contextlib.suppress(OSError):
                path.unlink(missing_ok=True)
    finally:
        await runner.cleanup()


def ask_daemon(folder: Path, method: str, path: str, *, timeout_s: float = _TIMEOUT_S) -> dict[str, Any]:
    """Ask the daemon of that state folder. Blocks for `timeout_s` at most.

    Raises `Unreachable` if none runs there, `ConfigError` for a control file that cannot be trusted.
    """
    try:
        control = json.loads(read_secret(folder / CONTROL_FILE))
        port, token = int(control["port"]), str(control["token"])
    except FileNotFoundError:
        raise Unreachable(
            f"no node runs with the state folder {folder}: start one with `kvasir-node run JOINLINK`"
        ) from None
    except IdentityError as error:
        raise ConfigError(str(error)) from None
    except (ValueError, KeyError, TypeError):
        raise ConfigError(f"{folder / CONTROL_FILE} is damaged: restart the node") from None
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=timeout_s)
    try:
        connection.request(method, path, headers={"Authorization": f"Bearer {token}"})
        response = connection.getresponse()
        body = response.read(_MAX_ANSWER)
        if response.status != 200:
            raise Unreachable(f"the node's control endpoint answered {response.status}: restart the node")
        answer = json.loads(body)
    except (OSError, http.client.HTTPException, ValueError):
        raise Unreachable(
            f"the node of {folder} does not answer: it was killed, or hangs (`kvasir-node logs`)"
        ) from None
    finally:
        connection.close()
    if not isinstance(answer, dict):
        raise Unreachable("the node's control endpoint answered nonsense: restart the node")
    return answer
