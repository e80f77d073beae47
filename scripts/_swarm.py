"""A swarm of real processes on this machine: `kvasir-backbone up` and some `kvasir-node run`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from _env import venv_command
from _processes import Children, Failed
from _sizing import QUANTISED_GROWTH, Cut, choose_cut, expert_count, is_quantised, layer_bytes

DEADLINE_S = 120.0
"""For each wait. On a quiet machine all of them together take some ten seconds."""

# One thread a process: two spinning OpenMP pools on few cores are far slower than one thread each.
ENVIRONMENT = {"OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false", "HF_HUB_OFFLINE": "1"}


class LocalSwarm:
    """Starts the processes and asks them. `say` takes each thing that a watching person should know."""

    def __init__(
        self, folder: Path, children: Children, say: Callable[[str], None], *, relay_only: bool = False
    ) -> None:
        self.folder = folder
        self.children = children
        self.relay_only = relay_only
        self.names: list[str] = []
        self.owner_of: dict[str, str] = {}
        """Wallet address -> name of its node."""
        self._commands: dict[str, list[str]] = {}
        self._say = say
        self._said: set[tuple[str, ...]] = set()

    def start_backbone(
        self, model: Path, cut: Cut | None, *, dtype: str = "float32", more: Sequence[str] = ()
    ) -> dict[str, Any]:
        """Start it, with `more` arguments, and wait for its port; its first status."""
        command = [venv_command("kvasir-backbone"), "up", "--model", str(model), "--port", "0"]
        command += ["--state-dir", str(self.folder / "backbone"), "--dtype", dtype, *more]
        command += ["--relay-only"] if self.relay_only else []
        if cut is not None:
            command += ["--window-bytes", str(cut.window_bytes)]
        self.children.start("backbone", command, ENVIRONMENT)
        return self.children.wait_for("the backbone's port", self.try_status, timeout=DEADLINE_S)

    def start_nodes(
        self, count: int, join: str | Sequence[str], budget: int | None, *, more: Sequence[str] = ()
    ) -> None:
        """Start that many nodes, each with a budget in bytes (None: what it finds right).

        `join` is one link for all, or one for each; `more` are further arguments.
        """
        self.names = []
        for link in [join] * count if isinstance(join, str) else join:
            self.add_node(link, budget, more=more)

    def add_node(self, join: str, budget: int | None, *, more: Sequence[str] = ()) -> str:
        """Start one more node; its name."""
        name = f"node-{len(self.names) + 1}"
        command = [venv_command("kvasir-node"), "run", join, "--name", name, "--json-logs", *more]
        command += ["--state-dir", str(self.folder / name), "--precision", "stored"]
        command += ["--on-battery", "--on-metered"]  # whoever starts this wants to see it now
        command += [] if budget is None else ["--budget", str(budget)]
        command += ["--no-direct"] if self.relay_only else []
        self._commands[name] = command
        self.children.start(name, command, ENVIRONMENT)
        self.names.append(name)
        return name

    def restart_node(self, name: str) -> None:
        """Start a node that has ended again, with the same state and arguments."""
        self.children.start(name, self._commands[name], ENVIRONMENT)

    def ask(self, question: str) -> dict[str, Any]:
        """The backbone's answer to its operator: "status", "credits". Raises `KvasirError` or `Failed`."""
        import http.client
        import json
        from urllib.parse import urlsplit

        from kvasir_backbone.addresses import find_door

        door = find_door(self.folder / "backbone")
        parts = urlsplit(door.url)
        connection = http.client.HTTPConnection(parts.hostname or "", parts.port, timeout=10)
        try:
            headers = {"Authorization": f"Bearer {door.token}"}
            connection.request("GET", f"/backbone/v1/{question}", headers=headers)
            response = connection.getresponse()
            answer = json.loads(response.read())
        except (OSError, http.client.HTTPException, ValueError) as error:
            raise Failed(f"the backbone does not answer its operator: {error}") from error
        finally:
            connection.close()
        if response.status != 200:
            raise Failed(f"the backbone refuses to say its {question}: {answer}")
        assert isinstance(answer, dict)
        return answer

    def try_status(self) -> dict[str, Any] | None:
        """The backbone's status, or None while it does not answer."""
        from relay.errors import KvasirError

        try:
            return self.ask("status")
        except (KvasirError, Failed):
            return None

    def node_status(self, name: str) -> dict[str, Any] | None:
        """A node's own status, or None while it does not answer."""
        from kvasir_node.control import ask_daemon
        from relay.errors import KvasirError

        try:
            return ask_daemon(self.folder / name, "GET", "/status")
        except KvasirError:
            return None

    def covered(self) -> dict[str, Any] | None:
        """The backbone's status once every window has a proven owner and every node one window; else None."""
        serving = [self.tell(name, self.node_status(name)) for name in self.names]
        status = self.try_status()
        if status is None or status["phase"] != "serving" or status.get("coverage") != 1.0:
            return None
        working = [node for node in status["nodes"] if node["windows"] and node["path"] != "none"]
        return status if all(serving) and len(working) >= len(self.names) else None

    def tell(self, name: str, status: dict[str, Any] | None) -> bool:
        """Say what is new with a node; whether it serves."""
        if status is None:
            return False
        self._once(f"{name}: {status['phase']}", name, status["phase"])
        if status["wallet"]:
            self.owner_of[status["wallet"]] = name
            self._once(f"{name}: its wallet is {status['wallet']}", name, "wallet")
        for window in status["windows"]:
            place = window["window"]
            self._once(f"{name}: claimed {place} ({window['reason']})", name, place, "claimed")
        for notice in status["notices"]:
            self._once(f"{name}: {notice['text']}", name, notice["text"])
        return bool(status["phase"] == "serving")

    def credited(self) -> tuple[dict[str, Any], dict[str, Any]] | None:
        """Status and ledger once every carried byte was posted as credit; else None."""
        status, ledger = self.ask("status"), self.ask("credits")
        by_wallet: dict[str, int] = {}
        for node in status["nodes"]:
            by_wallet[node["wallet"]] = by_wallet.get(node["wallet"], 0) + node["carried_bytes"]
        posted = {row["wallet"]: round(row["credit"] * 1_000_000) for row in ledger["wallets"]}
        settled = all(posted.get(wallet, 0) >= carried for wallet, carried in by_wallet.items())
        seen = {node["wallet"]: round((node["credit"] or 0) * 1_000_000) for node in status["nodes"]}
        shown = all(seen[wallet] >= carried > 0 for wallet, carried in by_wallet.items())
        return (status, ledger) if by_wallet and settled and shown else None

    def _once(self, text: str, *key: str) -> None:
        if key not in self._said:
            self._said.add(key)
            self._say(text)


def cut_of(model: Path, nodes: int) -> Cut | None:
    """How to cut that checkpoint for so many nodes; None where its experts are not recognised.

    Raises `Failed` for a folder that is no checkpoint, and for more nodes than the model can be cut for.
    """
    if not (model / "config.json").is_file():
        raise Failed(f"{model} is not the folder of a Hugging Face checkpoint: it has no config.json")
    sizes, experts = layer_bytes(model), expert_count(model)
    if not sizes or not experts:
        return None  # the backbone knows more forms, and says what is wrong where there is none
    try:
        return choose_cut(sizes, experts, nodes, growth=QUANTISED_GROWTH if is_quantised(model) else 1)
    except ValueError as error:
        raise Failed(f"{error}: give a smaller --nodes") from None
