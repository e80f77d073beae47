"""Weights: fetching and verifying a window of 1 GB, against curl and then sha256sum on the same bytes.

A checkpoint of random weights is made in a temporary folder and served, in a process of its own, by the
backbone's weights endpoint. Then in turn, three times each, best of three: curl fetches the window's ranges
from that endpoint into files and sha256sum hashes them; a node's client fetches the window, verifies every
chunk and maps it. The node's process then loads the experts, as stored, for its peak memory; started again,
it must transfer nothing. Last, the plan of a checkpoint of 100 GB (sparse files) is made and signed, twice;
the quicker one counts.

Run as a module with a role (`python -m benches.weights fetch FOLDER URL`) it is that process.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from . import Report
from .checkpoint import Shape, shape_argument
from .process import MB, environment, in_child, peak_rss_mb

if TYPE_CHECKING:
    from aiohttp import web
    from yarl import URL

    from market.plans import Plan, PlanId
    from market.windows import Window
    from relay.identity import PublicKey

SHAPE = Shape(layers=4, expert_width=640)
"""256 experts of 3.9 MB: one window of 1.007 GB."""

ROUNDS = 3
PLANS = 2
SHARE_OF_CURL = 0.8
ALLOWANCE_MB = 350.0
PLAN_S = 20.0
PLAN_MB = 1000.0
START_S = 120.0


def run(work_dir: Path | None) -> Report:
    """Measure, and compare with the promised figures."""
    for tool in ("curl", "sha256sum"):
        if shutil.which(tool) is None:
            sys.exit(f"this benchmark compares with {tool}, which is not installed: install it")
    with tempfile.TemporaryDirectory(prefix="kvasir-weights-", dir=work_dir) as name:
        folder = Path(name)
        in_child("checkpoint", str(folder / "model"), shape_argument(SHAPE))
        with _server(folder) as url:
            curls, fetches = [], []
            for _ in range(ROUNDS):
                shutil.rmtree(folder / "cache", ignore_errors=True)
                curls.append(_curl(folder, url))
                fetches.append(in_child("weights", "fetch", str(folder), url))
            served = _served(url)
            warm = in_child("weights", "fetch", str(folder), url)
            warm_bytes = _served(url) - served
        imports = in_child("weights", "imports")
        shutil.rmtree(folder)
        in_child("sparse", str(folder / "sparse"))
        plans = [in_child("weights", "plan", str(folder / "sparse")) for _ in range(PLANS)]
        planned = min(plans, key=lambda one: float(one["seconds"]))
        plan_imports = in_child("memory", "imports")
    return _report(curls, [*fetches, warm], warm_bytes, imports, planned, plan_imports)


def _report(
    curls: list[float],
    fetches: list[dict[str, Any]],
    warm_bytes: int,
    imports: Mapping[str, Any],
    planned: Mapping[str, Any],
    plan_imports: Mapping[str, Any],
) -> Report:
    fastest = min(fetch["seconds"] for fetch in fetches[:-1])
    size = fetches[0]["window_bytes"]
    ratio = min(curls) / fastest
    peak = max(fetch["peak_rss_mb"] for fetch in fetches)
    kept = fetches[0]["kept_bytes"] / MB
    plan_rss = planned["peak_rss_mb"] - plan_imports["peak_rss_mb"]
    report = Report(
        {
            "vs_curl": round(ratio, 3),
            "warm_bytes": warm_bytes,
            "node_peak_rss_mb": round(peak, 1),
            "kept_mb": round(kept, 1),
            "import_rss_mb": round(imports["peak_rss_mb"], 1),
            "plan_s": round(planned["seconds"], 2),
            "plan_rss_mb": round(plan_rss, 1),
            "window_mb": round(size / MB, 1),
            "fetch_mb_per_s": round(size / fastest / MB, 1),
            "curl_mb_per_s": round(size / min(curls) / MB, 1),
        }
    )
    report.promise(f"fetch and verify at {SHARE_OF_CURL} of curl and sha256sum", ratio >= SHARE_OF_CURL)
    report.promise("a restart with a warm cache transfers nothing", warm_bytes == 0)
    bound = kept + ALLOWANCE_MB + imports["peak_rss_mb"]
    report.promise(
        f"a node stays within kept + {ALLOWANCE_MB:.0f} MB + imports = {bound:.0f} MB", peak <= bound
    )
    report.promise(f"a plan of 100 GB takes less than {PLAN_S:.0f} s", planned["seconds"] < PLAN_S)
    report.promise(f"and less than {PLAN_MB:.0f} MB beyond imports", plan_rss < PLAN_MB)
    return report


# --- the other side: curl ------------------------------------------------------------------------------


def _curl(folder: Path, url: str) -> float:
    """Seconds for curl and then sha256sum. Checks the hashes against the model's files."""
    plan, plan_id, window, _ = _planned(folder)
    into = folder / "curl"
    into.mkdir(exist_ok=True)
    lines: list[str] = []
    files: list[str] = []
    sign = _signer()
    for number, span in enumerate(plan.window_ranges(window)):
        path = f"/weights/v1/{plan_id.hex()}/{span.file}"
        files.append(str(into / f"{number}.bin"))
        lines += ["next"] if lines else []
        lines += [f'url = "{url}{path}"', f'output = "{files[-1]}"', f'range = "{span.start}-{span.end - 1}"']
        lines += [f'header = "{name}: {value}"' for name, value in sign("GET", path).items()]
        lines += ["fail", "silent", "show-error"]
    started = time.monotonic()
    subprocess.run(["curl", "--config", "-"], input="\n".join(lines), text=True, check=True)
    sums = subprocess.run(["sha256sum", *files], capture_output=True, text=True, check=True).stdout
    seconds = time.monotonic() - started
    for line, span in zip(sums.splitlines(), plan.window_ranges(window), strict=True):
        with (folder / "model" / plan.files[span.file].name).open("rb") as file:
            file.seek(span.start)
            if hashlib.sha256(file.read(span.nbytes)).hexdigest() != line.split()[0]:
                sys.exit("curl fetched other bytes than the file has")
    shutil.rmtree(into)
    return seconds


# --- what the processes share --------------------------------------------------------------------------


def _planned(folder: Path) -> tuple[Plan, PlanId, Window, tuple[bytes, ...]]:
    """The plan, its one window and the window's hashes, as the server wrote them down."""
    from market.plans import PlanId, open_plan
    from relay.identity import SignedDocument

    found = json.loads((folder / "plan.json").read_text(encoding="utf-8"))
    document = SignedDocument.from_bytes(bytes.fromhex(found["document"]))
    plan = open_plan(document, bytes.fromhex(found["signer"]))
    (window,) = plan.windows
    return plan, PlanId(document.digest), window, tuple(map(bytes.fromhex, found["hashes"]))


def _signer() -> Any:
    from market.requests import sign_request
    from relay.identity import SigningKey

    key = SigningKey.generate()

    def sign(method: str, path: str) -> Mapping[str, str]:
        return sign_request(key, method, path, now=time.time())

    return sign


@contextmanager
def _server(folder: Path) -> Iterator[str]:
    """The endpoint's process; its URL."""
    command = [sys.executable, "-m", "benches.weights", "serve", str(folder)]
    parent = Path(__file__).resolve().parent.parent
    with subprocess.Popen(
        command, cwd=parent, env=environment(), stdout=subprocess.PIPE, text=True
    ) as server:
        try:
            assert server.stdout is not None
            line = server.stdout.readline()
            if not line:
                sys.exit("the server did not start; what it said is above")
            yield json.loads(line)["url"]
        finally:
            server.terminate()


def _served(url: str) -> int:
    import urllib.request

    with urllib.request.urlopen(f"{url}/served", timeout=10) as answer:
        return int(answer.read())


# --- the processes -------------------------------------------------------------------------------------


def serve(folder: str) -> None:
    """The weights endpoint, for any device, until terminated."""
    from relay.loop import run as run_loop

    run_loop(_serve(Path(folder)))


async def _serve(folder: Path) -> None:
    from aiohttp import web

    from kvasir_backbone.checkpoint import Checkpoint
    from kvasir_backbone.weights import WEIGHTS_PATH, WeightsEndpoint
    from market.plans import plan_id, sign_plan
    from relay.identity import SigningKey

    checkpoint = Checkpoint.open(folder / "model")
    plan = checkpoint.make_plan(window_bytes=10_000 * MB, wire_dtype="bfloat16")
    (window,) = plan.windows
    hashes = checkpoint.hash_window(plan, window)
    key = SigningKey.generate()
    document = sign_plan(plan, key)
    fields = {
        "document": document.to_bytes().hex(),
        "signer": key.public.hex(),
        "hashes": [chunk.hex() for chunk in hashes.chunks],
    }
    (folder / "plan.json").write_text(json.dumps(fields), encoding="utf-8")

    async def leased(device: PublicKey, wait_s: float) -> list[Window]:
        return [window]

    endpoint = WeightsEndpoint(plan, plan_id(document), checkpoint.served(), root=key.public, leased=leased)

    async def served(request: web.Request) -> web.Response:
        return web.Response(text=str(endpoint.bytes_served))

    app = web.Application()
    app.router.add_get(WEIGHTS_PATH, endpoint.handle)
    app.router.add_get("/served", served)
    runner = web.AppRunner(app, access_log=None)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    print(json.dumps({"url": f"http://127.0.0.1:{runner.addresses[0][1]}"}), flush=True)
    await asyncio.Event().wait()


def fetch(folder: str, url: str) -> dict[str, Any]:
    """Fetch the window into `cache` of that folder, then load its experts."""
    import torch

    from relay.loop import run as run_loop

    torch.set_num_threads(1)
    found: dict[str, Any] = run_loop(_fetch(Path(folder), url))
    return found | {"peak_rss_mb": peak_rss_mb()}


async def _fetch(folder: Path, url: str) -> dict[str, Any]:
    import aiohttp

    from kvasir_node import kernels
    from kvasir_node.cache import WeightCache
    from kvasir_node.experts import WindowExperts, choose_execution
    from kvasir_node.sources import backbone_source
    from kvasir_node.weights import fetch_window

    plan, plan_id, window, hashes = _planned(folder)
    cache = WeightCache(folder / "cache", cap_bytes=10_000 * MB)
    sign = _signer()

    def signed(method: str, target: URL) -> Mapping[str, str]:
        headers: Mapping[str, str] = sign(method, target.raw_path_qs)
        return headers

    sources = [backbone_source(url, plan_id, signed)]
    async with aiohttp.ClientSession() as http:
        started = time.monotonic()
        data = await fetch_window(plan, plan_id, window, hashes, sources=sources, cache=cache, http=http)
        seconds = time.monotonic() - started
    fetched_mb = peak_rss_mb()

    def load() -> WindowExperts:
        execution = choose_execution(plan, "stored", kernels.load("stored"))
        return WindowExperts.load(plan, window, "stored", data.read, execution=execution)

    experts = await asyncio.to_thread(load)
    return {
        "seconds": seconds,
        "window_bytes": data.nbytes,
        "kept_bytes": experts.kept_bytes,
        "fetched_peak_mb": fetched_mb,
    }


def imports() -> dict[str, Any]:
    """What a node's imports take."""
    import aiohttp  # noqa: F401
    import torch  # noqa: F401

    import kvasir_node.experts
    import kvasir_node.kernels
    import kvasir_node.weights  # noqa: F401

    return {"peak_rss_mb": peak_rss_mb()}


def plan(folder: str) -> dict[str, Any]:
    """Open the checkpoint, make its plan and sign it; seconds beyond the imports."""
    import torch
    import transformers  # noqa: F401
    from transformers import AutoModelForCausalLM  # noqa: F401

    from kvasir_backbone.checkpoint import Checkpoint
    from market.plans import sign_plan
    from relay.identity import SigningKey

    torch.set_num_threads(1)
    started = time.monotonic()
    checkpoint = Checkpoint.open(folder)
    made = checkpoint.make_plan(window_bytes=256 << 20, wire_dtype="bfloat16")
    sign_plan(made, SigningKey.generate())
    return {
        "seconds": time.monotonic() - started,
        "peak_rss_mb": peak_rss_mb(),
        "windows": len(made.windows),
        "total_bytes": checkpoint.total_bytes,
    }


ROLES: dict[str, Any] = {"serve": serve, "fetch": fetch, "imports": imports, "plan": plan}

if __name__ == "__main__":
    print(json.dumps(ROLES[sys.argv[1]](*sys.argv[2:])), flush=True)
