"""A whole swarm on this machine: one backbone, N nodes, a real model, text.

    python3 scripts/demo.py --prompt "And the king said"      stays up; prints the API address and a command
    python3 scripts/demo.py --once --json                     one text, then the facts as JSON, last
    python3 scripts/demo.py --once --relay-only               the same text, every call through the relay
    python3 scripts/demo.py --once --weighted                 partial sums come back: less upload at the nodes
    python3 scripts/demo.py --nodes 2 --model /models/OLMoE   any local Hugging Face MoE checkpoint

Every part is the real one, in a process of its own: `kvasir-backbone up` and N times `kvasir-node run`. They
keep their state in a temporary folder, or in --state-dir, where a second run finds its weights again. The
text is greedy and in fp32, and is compared token for token with stock transformers in another process.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from _env import ROOT, enter
from _processes import Children, Failed

if TYPE_CHECKING:
    from _stream import Written
    from rich.console import Console

CREDIT_DEADLINE_S = 30.0
"""Receipts are signed every 10 s."""

REFERENCE_DEADLINE_S = 600.0
NODE_FACTS = ("wallet", "windows", "calls", "carried_bytes", "credit", "path")


def parse(arguments: list[str]) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(prog="demo.py", description="A whole swarm on this machine.")
    parser.add_argument("--nodes", type=int, default=3, metavar="N", help="how many (default: %(default)s)")
    parser.add_argument("--prompt", default="And the king said unto him, Why hast thou", metavar="P")
    parser.add_argument("--max-tokens", type=int, default=64, metavar="N", help="default: %(default)s")
    parser.add_argument("--once", action="store_true", help="stop after the first text")
    parser.add_argument("--json", action="store_true", help="print the facts as one line of JSON, last")
    parser.add_argument("--relay-only", action="store_true", help="no direct path: every call by the relay")
    parser.add_argument("--weighted", action="store_true", help="nodes send one sum a row, not one an expert")
    parser.add_argument("--model", type=Path, help="folder of a checkpoint (default: the bundled model)")
    parser.add_argument("--state-dir", type=Path, help="keep keys, ledger and weights here for the next run")
    options = parser.parse_args(arguments)
    if not 1 <= options.nodes <= 16:
        parser.error("--nodes is 1 to 16 on one machine")
    if options.max_tokens < 1:
        parser.error("--max-tokens is at least 1")
    return options


class Demo:
    """One run of it, said aloud on `console`. `started` is when the script began, in unix seconds."""

    def __init__(
        self, options: argparse.Namespace, folder: Path, children: Children, console: Console, started: float
    ) -> None:
        from _swarm import LocalSwarm

        from kvasir_backbone.bundled import bundled_model_path

        self.options = options
        self.model: Path = options.model or bundled_model_path()
        self.children = children
        self.console = console
        self.started = started
        self.swarm = LocalSwarm(folder, children, self.say, relay_only=options.relay_only)

    def say(self, text: str, style: str = "") -> None:
        """One line, with the seconds since the start."""
        from rich.text import Text

        line = Text.assemble((f"{time.time() - self.started:6.1f} s  ", "dim"), (text, style))
        self.console.print(line, soft_wrap=True)

    def write(self, text: str, style: str) -> None:
        """A piece of running text."""
        from rich.text import Text

        self.console.print(Text(text, style=style), end="", soft_wrap=True)

    def run(self) -> dict[str, Any]:
        """Start everything, write one text, compare it; the facts, named as in the README."""
        self.start()
        covered = self.children.wait_for(
            "every window with a proven owner, and every node serving",
            self.swarm.covered,
            timeout=120,
            pause=0.2,
        )
        self.say(f"All {len(covered['windows'])} windows have a proven owner. Asking for text:\n", "bold")
        written = self.ask_for_text(covered)
        self.say(f"{len(written.token_ids)} tokens, numerics {written.numerics}", "bold")
        after = self.swarm.ask("status")
        matches = self.compare(written)
        status, ledger = self.children.wait_for(
            "credit for all that was carried", self.swarm.credited, timeout=CREDIT_DEADLINE_S, pause=0.25
        )
        self.show_nodes(status["nodes"])
        self.say(f"The ledger is {'balanced' if ledger['balanced'] else 'NOT balanced'}.")
        return {
            "text": written.text,
            "tokens": len(written.token_ids),
            "matches_local": matches,
            "coverage": after["coverage"],
            "fallback_rows": status["fallback_rows"],
            "nodes": [{name: node[name] for name in NODE_FACTS} for node in status["nodes"]],
            "ledger_balanced": ledger["balanced"],
            "first_token_s": round(written.first_at - self.started, 3),
            "tokens_per_s": None if written.tokens_per_s is None else round(written.tokens_per_s, 2),
        }

    def start(self) -> None:
        """Backbone first, then the nodes as soon as its port is open."""
        from _swarm import cut_of

        cut = cut_of(self.model, self.options.nodes)
        if cut is not None:
            name, windows = self.model.resolve().name, len(cut.windows)
            self.say(f"{name}: experts cut into {windows} windows for {self.options.nodes} nodes")
        self.say("Starting the backbone, with market and relay on one port ...")
        more = ["--weighted"] if self.options.weighted else []
        status = self.swarm.start_backbone(self.model, cut, more=more)
        self.say(f"It listens at {status['url']}; the swarm's key is {status['fingerprint']}.")
        budget = None if cut is None else cut.budget
        self.swarm.start_nodes(self.options.nodes, status["join"], budget)
        limit = "" if budget is None else f", {budget / 1e6:.1f} MB of memory each"
        self.say(f"Started {self.options.nodes} nodes{limit}.")

    def ask_for_text(self, status: dict[str, Any]) -> Written:
        """One completion, shown as it comes."""
        from _stream import complete

        self.write(self.options.prompt, "dim")
        show = lambda text: self.write(text, "bold green")  # noqa: E731
        written = complete(
            status["url"], status["model"], self.options.prompt, self.options.max_tokens, show, timeout=120
        )
        self.console.print("\n")
        return written

    def compare(self, written: Written) -> bool | None:
        """Whether stock transformers writes the same; None where it cannot be run here."""
        self.say("Stock transformers writes the same prompt on, in a process of its own ...")
        asked = {
            "prompt": written.prompt_ids,
            "tokens": written.token_ids,
            "max_tokens": self.options.max_tokens,
        }
        done = subprocess.run(
            [sys.executable, str(ROOT / "scripts" / "_reference.py"), str(self.model)],
            input=json.dumps(asked),
            capture_output=True,
            text=True,
            timeout=REFERENCE_DEADLINE_S,
            check=False,
        )
        if done.returncode:
            raise Failed(f"stock transformers failed on this model:\n{done.stderr[-2000:]}")
        found = json.loads(done.stdout.splitlines()[-1])
        styles = {True: "bold green", False: "bold red", None: "yellow"}
        self.say(f"Compared with it: {found['reason']}.", styles[found["matches"]])
        matches: bool | None = found["matches"]
        return matches

    def show_nodes(self, nodes: list[dict[str, Any]]) -> None:
        """The table of nodes."""
        from rich.box import SIMPLE
        from rich.table import Table

        table = Table(title="The nodes", title_justify="left", box=SIMPLE)
        table.add_column("node")
        table.add_column("wallet", overflow="fold", min_width=11)
        table.add_column("windows", no_wrap=True)
        for name in ("calls", "carried bytes", "credit"):
            table.add_column(name, justify="right")
        table.add_column("path")
        for node in sorted(nodes, key=lambda node: self.swarm.owner_of.get(node["wallet"], "")):
            table.add_row(
                self.swarm.owner_of.get(node["wallet"], ""),
                node["wallet"],
                "\n".join(node["windows"]),
                f"{node['calls']:,}",
                f"{node['carried_bytes']:,}",
                f"{node['credit']:.6f}",
                node["path"],
            )
        self.console.print(table)

    def stay(self) -> None:
        """Keep the swarm up until Ctrl-C, saying what happens to it."""
        status = self.swarm.ask("status")
        body = json.dumps({"model": status["model"], "prompt": self.options.prompt, "max_tokens": 40})
        self.console.print(f"\nThe API: {status['url']}/v1    Try:\n", soft_wrap=True, highlight=False)
        command = (
            f"curl {status['url']}/v1/completions -H 'Content-Type: application/json' -d '{_quoted(body)}'"
        )
        self.console.print(f"  {command}\n", soft_wrap=True, highlight=False, markup=False)
        self.console.print(f"Join from this machine: kvasir-node run '{status['join']}'", soft_wrap=True)
        self.console.print("Ctrl-C ends the swarm.")
        while True:
            for name in self.children.ended():
                self.say(f"{name} ended. Its last words:\n{self.children.tail(name, 5)}", "yellow")
                if name == "backbone":
                    raise Failed("without its backbone there is no swarm")
            for name in self.swarm.names:
                self.swarm.tell(name, self.swarm.node_status(name))
            time.sleep(0.5)


def _quoted(body: str) -> str:
    return body.replace("'", "'\\''")


@contextlib.contextmanager
def state_folder(chosen: Path | None) -> Iterator[Path]:
    """`chosen`, or a temporary folder that is removed at the end unless something failed."""
    if chosen is not None:
        chosen.mkdir(parents=True, exist_ok=True, mode=0o700)
        yield chosen.resolve()
        return
    folder = Path(tempfile.mkdtemp(prefix="kvasir-demo-"))
    try:
        yield folder
    except Failed:
        raise  # its logs are kept for a look
    except BaseException:
        shutil.rmtree(folder, ignore_errors=True)
        raise
    shutil.rmtree(folder, ignore_errors=True)


def main(arguments: list[str]) -> int:
    """Run the demo; 0 if all is as it should be."""
    import psutil
    from rich.console import Console

    started = psutil.Process().create_time()
    options = parse(arguments)
    console = Console(stderr=options.json, highlight=False)
    facts: dict[str, Any] = {}
    try:
        with state_folder(options.state_dir) as folder, Children(folder) as children:
            demo = Demo(options, folder, children, console, started)
            facts = demo.run()
            if not options.once:
                demo.stay()
            demo.say("Stopping ...")
    except Failed as error:
        console.print(f"\ndemo.py: {error}", style="red", markup=False)
        return 1
    except KeyboardInterrupt:
        console.print("\nStopped.")
        if not facts:
            return 130
    if options.json:
        print(json.dumps(facts), flush=True)
    fine = facts["matches_local"] is not False and facts["coverage"] == 1.0 and facts["ledger_balanced"]
    return 0 if fine else 1


if __name__ == "__main__":
    enter("backbone")
    sys.exit(main(sys.argv[1:]))
