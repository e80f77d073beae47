"""The laboratory. Each experiment measures one claim about router authority and prints a table.

python3 scripts/lab.py                       the experiments there are
python3 scripts/lab.py divergence            run one
python3 scripts/lab.py divergence --json     its figures as one JSON object on the last line
python3 scripts/lab.py calibrate --plot FILE.svg
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

from _env import enter
from bench import machine


def parser_for(name: str | None) -> argparse.ArgumentParser:
    """The command line; an experiment's own options only once it is named."""
    from labs import LABS, load

    parser = argparse.ArgumentParser(
        prog="lab.py",
        description="Experiments, one at a time.",
        epilog="experiments: " + "; ".join(f"{lab} - {what}" for lab, what in LABS.items()),
    )
    parser.add_argument("lab", nargs="?", choices=sorted(LABS), help="which one; without it they are listed")
    parser.add_argument("--json", action="store_true", help="print the figures as one line of JSON, last")
    parser.add_argument("--plot", type=Path, metavar="FILE", help="write the figure there, as SVG")
    parser.add_argument(
        "--model", type=Path, metavar="PATH", help="folder of a checkpoint (default: the bundled model)"
    )
    parser.add_argument(
        "--short", action="store_true", help="few rows: seconds, not minutes; rougher figures"
    )
    if name in LABS:
        load(name).add_arguments(parser)
    return parser


def main(arguments: list[str]) -> int:
    """Run the experiment that is asked for. It exits 0 whenever it measured, whatever the figures are."""
    from labs import LABS, load

    from relay import logs

    named = next((argument for argument in arguments if argument in LABS), None)
    options = parser_for(named).parse_args(arguments)
    if options.lab is None:
        for name, what in LABS.items():
            print(f"{name:<11} {what}")
        return 0
    logs.configure(json=False, level="error")
    report = load(options.lab).run(options)
    for line in report.lines:
        print(line)
    for name, value in report.figures.items():
        if isinstance(value, int | float | str | None):
            print(f"{name:<36} {value}")
    if options.plot is not None and report.svg:
        options.plot.write_text(report.svg, encoding="utf-8")
        print(f"the figure is in {options.plot}")
    if options.json:
        print(json.dumps({"lab": options.lab, **report.figures, "machine": machine()}), flush=True)
    return 0


if __name__ == "__main__":
    enter("all")
    try:
        sys.exit(main(sys.argv[1:]))
    except KeyboardInterrupt:
        sys.exit(130)
