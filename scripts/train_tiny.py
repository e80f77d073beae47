"""Train the bundled model `kvasir-tiny` again, from its text to its files.

    python3 scripts/train_tiny.py --out DIR              train (an hour or so) and write the model to DIR
    python3 scripts/train_tiny.py --out DIR --resume     go on after an interruption
    python3 scripts/train_tiny.py --evaluate DIR         only the held-out loss of a model

The text, the King James Bible, is fetched when the script runs: with the `bible` command, else from the
Debian packages bible-kjv and bible-kjv-text, unpacked without root; on other systems give it with --text.
The loss of the model on the held-out 3 % of the text should be within 0.1 of the bundled model's 3.551.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

from _env import enter

if TYPE_CHECKING:
    from tiny_model.training import Run

CHECKPOINT_EVERY = 100
"""Steps from one checkpoint to the next."""


def parse(arguments: list[str]) -> argparse.Namespace:
    """The command line. Ends the process with status 2 where it makes no sense."""
    parser = argparse.ArgumentParser(prog="train_tiny.py", description="Train the bundled model again.")
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("--out", type=Path, metavar="DIR", help="train and write the model to this folder")
    what.add_argument("--evaluate", type=Path, metavar="DIR", help="only the held-out loss of a model")
    parser.add_argument(
        "--steps", type=int, default=2811, help="updates (default: 2811, the bundled model's)"
    )
    parser.add_argument("--seed", type=int, default=0, help="of parameters and batches (default: 0)")
    parser.add_argument(
        "--threads", type=int, default=os.cpu_count() or 1, help="torch threads (default: all)"
    )
    parser.add_argument(
        "--text", type=Path, metavar="FILE", help="output of the bible command, or another text"
    )
    parser.add_argument("--resume", action="store_true", help="go on from the checkpoint in --out, if any")
    parser.add_argument("--json", action="store_true", help="print the result as one line of JSON, last")
    options = parser.parse_args(arguments)
    if options.steps < 1 or options.threads < 1 or options.seed < 0:
        parser.error("--steps and --threads must be 1 or more, --seed 0 or more")
    return options


class Progress:
    """Prints losses and time left, saves checkpoints, stops the run after a signal."""

    def __init__(self, folder: Path, run: Run) -> None:
        self._folder, self._run = folder, run
        self._began, self._first = time.monotonic(), run.step
        self._stopped = False
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, self._stop)

    def _stop(self, *_: object) -> None:
        self._stopped = True
        signal.signal(signal.SIGINT, signal.default_int_handler)  # a second one does not wait for the step

    def after(self, step: int, loss: float) -> bool:
        """After each step: whether to go on."""
        from tiny_model.files import save_checkpoint

        steps = self._run.recipe.steps
        if step % 50 == 0 or step in (1, 5, 10, 20) or step == steps:
            pace = (time.monotonic() - self._began) / (step - self._first)
            left = (steps - step) * pace / 60
            print(
                f"step {step}/{steps}  loss {loss:.3f}  {pace:.2f} s a step  {left:.0f} min left", flush=True
            )
        if step % CHECKPOINT_EVERY == 0 or step == steps or self._stopped:
            save_checkpoint(self._folder, self._run)
        return not self._stopped


def train(options: argparse.Namespace) -> bool:
    """Train and write the model. False where a signal ended the run before its last step."""
    from tiny_model.files import CHECKPOINT, FilesError, load_checkpoint, write_model
    from tiny_model.text import fetch_text, read_text
    from tiny_model.training import Recipe, Run, make_corpus

    folder: Path = options.out
    folder.mkdir(parents=True, exist_ok=True)
    saved = (folder / CHECKPOINT).exists()
    if saved and not options.resume:
        raise FilesError(f"{folder} holds an unfinished run: add --resume, or name another folder.")
    text = read_text(options.text) if options.text else fetch_text()
    recipe = Recipe(steps=options.steps, seed=options.seed)
    corpus = make_corpus(text, recipe)
    print(
        f"text: {len(text):,} characters, {len(corpus.train):,} tokens to train on, "
        f"{len(corpus.heldout):,} held out",
        flush=True,
    )
    run = Run(recipe, corpus)
    if saved:
        load_checkpoint(folder, run)
        print(f"resumed after step {run.step}", flush=True)
    if not run.finish(Progress(folder, run).after):
        print(f"stopped after step {run.step}; --resume goes on from there", flush=True)
        return False
    write_model(folder, run)
    (folder / CHECKPOINT).unlink()
    return True


def report(folder: Path, steps: int | None, as_json: bool) -> None:
    """Evaluate the model in a folder and print its loss beside the bundled model's."""
    from tiny_model.files import evaluate, same_preparation
    from tiny_model.training import REFERENCE_LOSS, WINDOW

    from kvasir_backbone.bundled import bundled_model_path

    loss = evaluate(folder)
    comparable = same_preparation(folder, bundled_model_path())
    difference = round(loss - REFERENCE_LOSS, 4) if comparable else None
    print(f"held-out loss {loss:.4f} nats a token, windows of {WINDOW}, bf16 weights computed in fp32")
    if comparable:
        print(
            f"text and tokenizer are the bundled model's, whose loss is {REFERENCE_LOSS}: {difference:+.4f}"
        )
    else:
        print("held-out text or tokenizer differ from the bundled model's: the losses cannot be compared")
    if as_json:
        figures = {
            "steps": steps,
            "heldout_loss": round(loss, 4),
            "reference_loss": REFERENCE_LOSS,
            "difference": difference,
            "same_text": comparable,
        }
        print(json.dumps(figures), flush=True)


def main(arguments: list[str]) -> int:
    """Train or evaluate. 0 where it was done, 1 where it could not be, 130 where a signal ended it."""
    options = parse(arguments)
    import torch
    from tiny_model.files import FilesError
    from tiny_model.text import TextError
    from transformers.utils import logging

    torch.set_num_threads(options.threads)
    logging.disable_progress_bar()
    try:
        if options.evaluate is None and not train(options):
            return 130
        folder: Path = options.evaluate or options.out
        report(folder, None if options.evaluate else options.steps, options.json)
    except (FilesError, TextError, ValueError) as problem:
        print(f"train_tiny.py: {problem}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    enter("backbone")
    try:
        sys.exit(main(sys.argv[1:]))
    except KeyboardInterrupt:
        sys.exit(130)
