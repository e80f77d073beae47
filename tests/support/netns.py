"""A small internet in network namespaces: a public segment, home routers with NAT, and hosts behind them.

Needs Linux, root, `ip` (iproute2) and `iptables`. Everything is removed at the end, whatever happened.
"""

from __future__ import annotations

import itertools
import json
import os
import shutil
import subprocess
import sys
import threading
from pathlib import Path
from types import TracebackType
from typing import Any

ROOT = Path(__file__).resolve().parent.parent.parent
_labs = itertools.count()


def missing() -> str | None:
    """Why there can be no namespaces here, or None."""
    if not hasattr(os, "geteuid") or os.geteuid() != 0:
        return "optional: network namespaces need root"
    for tool in ("ip", "iptables"):
        if shutil.which(tool) is None:
            return f"{tool} is not installed"
    probe = f"kvprobe{os.getpid()}"
    if subprocess.run(["ip", "netns", "add", probe], capture_output=True, check=False).returncode:
        return "optional: network namespaces are not allowed here"
    nat = ["ip", "netns", "exec", probe, "iptables", "-t", "nat", "-A", "POSTROUTING", "-j", "MASQUERADE"]
    allowed = subprocess.run(nat, capture_output=True, check=False).returncode == 0
    subprocess.run(["ip", "netns", "del", probe], capture_output=True, check=False)
    return None if allowed else "optional: this kernel has no NAT for namespaces"


class Lab:
    """The namespaces of one test; a context. `public` is a switch; hosts and routers plug into it."""

    def __init__(self) -> None:
        self._prefix = f"kv{os.getpid() % 10_000}{next(_labs)}"
        self._spaces: list[str] = []
        self._links = itertools.count()
        self._processes: list[Process] = []

    def __enter__(self) -> Lab:
        try:
            self._space("public")
            self._inside("public", "ip link add br0 type bridge")
            self._inside("public", "ip link set br0 up")
        except BaseException:
            self._remove()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._remove()

    # --- building ---

    def host(self, name: str, address: str) -> None:
        """A host with a public address, such as 203.0.113.1."""
        self._space(name)
        self._plug("public", name, "eth0", address)

    def router(self, name: str, address: str, lan: str = "192.168.1.1") -> None:
        """A home router: public `address` outside, `lan` inside, NAT between; nothing comes in by itself."""
        self._space(name)
        self._plug("public", name, "wan", address)
        self._inside(name, "ip link add br0 type bridge")
        self._inside(name, f"ip addr add {lan}/24 dev br0")
        self._inside(name, "ip link set br0 up")
        self._inside(name, "sysctl -qw net.ipv4.ip_forward=1")
        self._inside(name, "iptables -t nat -A POSTROUTING -o wan -j MASQUERADE")
        self._inside(name, "iptables -A FORWARD -i wan -m state --state ESTABLISHED,RELATED -j ACCEPT")
        self._inside(name, "iptables -A FORWARD -i wan -j DROP")

    def behind(self, router: str, name: str, address: str, gateway: str = "192.168.1.1") -> None:
        """A host on the LAN of `router`."""
        self._space(name)
        self._plug(router, name, "eth0", address)
        self._inside(name, f"ip route add default via {gateway}")

    # --- changing ---

    def address(self, name: str, old: str, new: str, gateway: str = "192.168.1.1") -> None:
        """A host gets another address, as after a new lease."""
        self._inside(name, f"ip addr del {old}/24 dev eth0")
        self._inside(name, f"ip addr add {new}/24 dev eth0")
        self._inside(name, f"ip route replace default via {gateway}")

    def part(self, first: tuple[str, str], second: tuple[str, str]) -> None:
        """From now on what two hosts (name, address) send each other vanishes on the way."""
        for (name, _), (_, other) in ((first, second), (second, first)):
            self._inside(name, f"iptables -A INPUT -s {other} -j DROP")

    def unplug(self, name: str) -> None:
        """Pull a host's cable."""
        self._inside(name, "ip link set eth0 down")

    def plug_in(self, name: str, gateway: str | None = "192.168.1.1") -> None:
        """Put the cable back."""
        self._inside(name, "ip link set eth0 up")
        if gateway is not None:
            self._inside(name, f"ip route replace default via {gateway}")

    # --- running ---

    def start(self, name: str, *arguments: str) -> Process:
        """Run `python -m tests.support.netns_peers ARGUMENTS` at `name`."""
        command = ["ip", "netns", "exec", self._full(name), sys.executable, "-m", "tests.support.netns_peers"]
        process = Process([*command, *arguments])
        self._processes.append(process)
        return process

    def _full(self, name: str) -> str:
        return f"{self._prefix}{name}"

    def _space(self, name: str) -> None:
        _run(f"ip netns add {self._full(name)}")
        self._spaces.append(name)
        self._inside(name, "ip link set lo up")

    def _plug(self, switch: str, name: str, device: str, address: str) -> None:
        number = next(self._links)
        left, right = f"{self._prefix}a{number}", f"{self._prefix}b{number}"
        _run(f"ip link add {left} type veth peer name {right}")
        _run(f"ip link set {left} netns {self._full(switch)}")
        _run(f"ip link set {right} netns {self._full(name)}")
        self._inside(switch, f"ip link set {left} master br0")
        self._inside(switch, f"ip link set {left} up")
        self._inside(name, f"ip link set {right} name {device}")
        self._inside(name, f"ip addr add {address}/24 dev {device}")
        self._inside(name, f"ip link set {device} up")

    def _inside(self, name: str, command: str) -> None:
        _run(f"ip netns exec {self._full(name)} {command}")

    def _remove(self) -> None:
        for process in self._processes:
            process.stop()
        for name in self._spaces:
            subprocess.run(["ip", "netns", "del", self._full(name)], capture_output=True, check=False)


class Process:
    """A peer's process; what it prints, a JSON object a line, is on record."""

    def __init__(self, command: list[str]) -> None:
        self.events: list[dict[str, Any]] = []
        self._process = subprocess.Popen(
            command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            self.events.append(json.loads(line))

    def say(self, line: str) -> None:
        """A line to its input."""
        assert self._process.stdin is not None
        self._process.stdin.write(line + "\n")
        self._process.stdin.flush()

    def of(self, event: str) -> list[dict[str, Any]]:
        """What it printed of that kind."""
        return [found for found in list(self.events) if found["event"] == event]

    def stop(self) -> None:
        """End it."""
        self._process.kill()
        self._process.wait()
        self._reader.join(5.0)
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None:
                pipe.close()


def _run(command: str) -> None:
    done = subprocess.run(command.split(), capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"{command}: {done.stderr.strip()}")
