"""Facts about the project itself: what is packaged, what is pinned, what each command says."""

from __future__ import annotations

import re
import subprocess
import sys
import tomllib
import zipfile
from importlib.metadata import distributions
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).resolve().parent.parent
PACKAGES = {"relay", "market", "kvasir_node", "kvasir_backbone"}
COMMANDS = ("kvasir-node", "kvasir-backbone", "kvasir-market", "kvasir-relay")
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]


def pins() -> dict[str, str]:
    text = (ROOT / "constraints.txt").read_text(encoding="utf-8")
    lines = [line for line in text.splitlines() if line and not line.startswith("#")]
    assert all(re.fullmatch(r"[A-Za-z0-9_.-]+==[A-Za-z0-9.+]+", line) for line in lines)
    return {canonicalize_name(name): version for name, version in (line.split("==") for line in lines)}


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> set[str]:
    """The names in a wheel built from this tree, by the build backend itself and with no network."""
    folder = tmp_path_factory.mktemp("wheel")
    code = f"""
import os, shutil
from setuptools import build_meta
source = {str(folder / "source")!r}
ignore = shutil.ignore_patterns(".*", "*.egg-info", "build", "dist", "__pycache__")
shutil.copytree({str(ROOT)!r}, source, ignore=ignore)
os.chdir(source)
build_meta.build_wheel({str(folder)!r})
"""
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=110, check=False
    )
    assert done.returncode == 0, done.stderr[-3000:]
    (file,) = folder.glob("*.whl")
    return set(zipfile.ZipFile(file).namelist())


def test_the_wheel_holds_the_four_packages_and_nothing_else(wheel: set[str]) -> None:
    tops = {name.split("/")[0] for name in wheel}
    assert {top for top in tops if not top.endswith(".dist-info")} == PACKAGES


def test_the_wheel_holds_the_data(wheel: set[str]) -> None:
    for package in PACKAGES:
        assert f"{package}/py.typed" in wheel
    model = {name for name in wheel if name.startswith("kvasir_backbone/model_data/kvasir-tiny/")}
    assert {Path(name).name for name in model} >= {"config.json", "tokenizer.json", "chat_template.jinja"}
    assert sum(name.endswith(".safetensors") for name in model) == 2
    assert any(name.startswith("market/migrations/") and name.endswith(".py") for name in wheel)
    assert any(name.endswith(".dist-info/licenses/LICENSE") for name in wheel)


def test_every_command_explains_itself() -> None:
    assert set(PROJECT["scripts"]) == set(COMMANDS)
    for target in PROJECT["scripts"].values():
        module, function = target.split(":")
        code = f"import sys; from {module} import {function}; sys.exit({function}(['--help']))"
        done = subprocess.run(
            [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=60, check=False
        )
        assert done.returncode == 0, done.stderr
        assert "usage" in done.stdout.lower()


def test_the_base_install_has_no_torch() -> None:
    base = {Requirement(line).name for line in PROJECT["dependencies"]}
    assert not base & {"torch", "transformers", "numpy", "safetensors"}
    extras = PROJECT["optional-dependencies"]
    assert "torch" in {Requirement(line).name for line in extras["node"]}
    assert "transformers" in {Requirement(line).name for line in extras["backbone"]}
    assert set(extras) >= {"node", "backbone", "dev", "all"}


def test_uvloop_is_never_asked_for_on_windows() -> None:
    (uvloop,) = (Requirement(line) for line in PROJECT["dependencies"] if line.startswith("uvloop"))
    assert uvloop.marker is not None
    assert not uvloop.marker.evaluate({"sys_platform": "win32", "implementation_name": "cpython"})
    assert uvloop.marker.evaluate({"sys_platform": "linux", "implementation_name": "cpython"})


def needed() -> dict[str, str]:
    """Every distribution that this project with all extras needs here, and its installed version."""
    installed = {canonicalize_name(found.name): found for found in distributions()}
    versions: dict[str, str] = {}
    looked: set[tuple[str, str]] = set()
    todo = [("kvasir", ""), ("kvasir", "all")]
    while todo:
        name, extra = todo.pop()
        if (name, extra) in looked or name not in installed:
            continue
        looked.add((name, extra))
        versions[name] = installed[name].version.split("+")[0]
        for requirement in map(Requirement, installed[name].requires or []):
            if requirement.marker is None or requirement.marker.evaluate({"extra": extra}):
                todo += [(canonicalize_name(requirement.name), wish) for wish in ("", *requirement.extras)]
    del versions["kvasir"]
    return versions


def test_everything_that_is_installed_has_its_exact_pin() -> None:
    versions, pinned = needed(), pins()
    assert {"torch", "transformers", "aiohttp", "frozenlist", "psycopg-binary"} <= set(versions)
    assert not set(versions) - set(pinned), "installed, needed and without a pin"
    differing = {name: (pinned[name], found) for name, found in versions.items() if found != pinned[name]}
    assert not differing, "(pinned, installed)"


def test_pins_fit_the_ranges() -> None:
    pinned = pins()
    lines = [
        *PROJECT["dependencies"],
        *(x for group in PROJECT["optional-dependencies"].values() for x in group),
    ]
    for requirement in map(Requirement, lines):
        if requirement.name != "kvasir":
            assert requirement.specifier.contains(pinned[canonicalize_name(requirement.name)]), requirement
