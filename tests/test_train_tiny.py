"""scripts/train_tiny.py: the text is cleaned as for the bundled model; runs learn, resume, are evaluated."""

from __future__ import annotations

import json
import random
import signal
import stat
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoTokenizer

from kvasir_backbone.bundled import bundled_model_path

SCRIPTS = Path(__file__).resolve().parent.parent / "scripts"
if str(SCRIPTS) not in sys.path:
    sys.path.append(str(SCRIPTS))

import train_tiny  # noqa: E402
from tiny_model import text as texts  # noqa: E402
from tiny_model.files import (  # noqa: E402
    CHECKPOINT,
    FilesError,
    evaluate,
    load_checkpoint,
    same_preparation,
    save_checkpoint,
    write_model,
)
from tiny_model.training import Corpus, Recipe, Run, heldout_loss, make_corpus, make_model  # noqa: E402

TRAILING = " "
"""At the end of some verses in the data; the bundled model's text keeps it."""

PRINTED = f"""
Obadiah

  1 The vision of Obadiah. Thus saith the Lord GOD concerning Edom;
  2 Behold, I have made thee small among the heathen: thou art greatly despised.{TRAILING}

1 John 3

  9 Whosoever is born of God doth not commit sin;
  10 In this the children of God are manifest:
"""

CLEANED = f"""The vision of Obadiah. Thus saith the Lord GOD concerning Edom;
Behold, I have made thee small among the heathen: thou art greatly despised.{TRAILING}

Whosoever is born of God doth not commit sin;
In this the children of God are manifest:
"""

SMALL = Recipe(
    steps=12,
    vocabulary=300,
    hidden=32,
    layers=2,
    experts=8,
    top_k=2,
    expert_width=16,
    heads=2,
    kv_heads=1,
    head_width=16,
    positions=128,
    batch=4,
    length=32,
    warmup=2,
)


def sentences(count: int, seed: int = 1) -> str:
    draw = random.Random(seed)
    names, verbs, things = (
        ("the king", "a child", "my brother"),
        ("saw", "gave", "took"),
        ("bread", "the sea"),
    )
    lines = (f"And {draw.choice(names)} {draw.choice(verbs)} {draw.choice(things)}." for _ in range(count))
    return "\n".join(lines) + "\n"


@pytest.fixture(scope="module")
def corpus() -> Corpus:
    torch.set_num_threads(1)
    return make_corpus(sentences(600), SMALL)


def test_headings_and_numbers_go_and_chapters_are_apart() -> None:
    assert texts.join_chapters(texts.parse_chapters(PRINTED)) == CLEANED


def test_a_line_that_is_neither_heading_nor_verse_is_named() -> None:
    with pytest.raises(texts.TextError, match="line 4 is neither"):
        texts.parse_chapters("\nGenesis 1\n\nIn the beginning\n")


def test_a_verse_before_any_heading_is_refused() -> None:
    with pytest.raises(texts.TextError, match="line 1"):
        texts.parse_chapters("  1 In the beginning\n")


def test_a_part_of_the_command_output_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "part.txt"
    file.write_text(PRINTED, encoding="utf-8")
    with pytest.raises(texts.TextError, match="2 chapters and 4 verses"):
        texts.read_text(file)


def test_another_text_is_used_as_it_is(tmp_path: Path) -> None:
    file = tmp_path / "other.txt"
    file.write_text("Genesis 1\nno verse\n", encoding="utf-8")
    assert texts.read_text(file) == "Genesis 1\nno verse\n"
    file.write_bytes(b"\xff\xfe")
    with pytest.raises(texts.TextError, match="UTF-8"):
        texts.read_text(file)
    file.write_text("\n", encoding="utf-8")
    with pytest.raises(texts.TextError, match="empty"):
        texts.read_text(file)


@pytest.mark.skipif(sys.platform == "win32", reason="optional: the stand-in command is a shell script")
def test_the_installed_command_is_asked_for_the_whole_text(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    command = tmp_path / "bible"
    command.write_text(
        f'#!/bin/sh\necho "$@" > "{tmp_path}/asked"\ncat <<END\n{PRINTED}END\n', encoding="utf-8"
    )
    command.chmod(stat.S_IRWXU)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    monkeypatch.setattr(texts, "CHAPTERS", 2)
    monkeypatch.setattr(texts, "VERSES", 4)
    assert texts.fetch_text() == CLEANED
    assert (tmp_path / "asked").read_text(encoding="utf-8").split() == list(texts.ARGUMENTS)


def test_with_no_way_to_fetch_the_message_says_what_to_do(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(texts.TextError, match="--text"):
        texts.fetch_text()


def test_the_rate_warms_up_and_falls_to_its_last_share() -> None:
    recipe = Recipe()
    assert recipe.rate(0) == pytest.approx(3e-3 / 50, rel=1e-3)
    assert recipe.rate(49) == pytest.approx(3e-3, rel=1e-2)
    assert recipe.rate(recipe.steps // 2) == pytest.approx(3e-3 * 0.525, rel=1e-2)
    assert recipe.rate(recipe.steps - 1) == pytest.approx(3e-3 * 0.05, rel=1e-3)


def test_the_recipe_has_the_bundled_models_shape() -> None:
    bundled = json.loads((bundled_model_path() / "config.json").read_text(encoding="utf-8"))
    with torch.device("meta"):
        made = make_model(Recipe()).config.to_dict()
    leave = {"architectures", "dtype", "transformers_version", "num_local_experts", "num_experts"}
    assert {key: made[key] for key in bundled if key not in leave} == {
        key: bundled[key] for key in bundled if key not in leave
    }
    assert Recipe().experts == bundled["num_local_experts"]


def test_the_split_keeps_the_end_for_evaluation(corpus: Corpus) -> None:
    total = len(corpus.train) + len(corpus.heldout)
    assert len(corpus.train) == int(total * 0.97)
    assert sentences(600).endswith(corpus.heldout_text)


def test_a_text_that_is_too_short_is_refused() -> None:
    with pytest.raises(ValueError, match="too short"):
        make_corpus("a few words", SMALL)


def test_a_few_steps_lower_the_heldout_loss(corpus: Corpus) -> None:
    run = Run(SMALL, corpus)
    before = heldout_loss(run.model, corpus.heldout)
    assert run.finish(lambda step, loss: True)
    assert run.step == SMALL.steps
    assert heldout_loss(run.model, corpus.heldout) < before - 0.3


def test_a_resumed_run_takes_the_same_steps(corpus: Corpus, tmp_path: Path) -> None:
    whole: list[float] = []
    first = Run(SMALL, corpus)
    assert first.finish(lambda step, loss: (whole.append(loss), True)[1])

    parts: list[float] = []
    stopped = Run(SMALL, corpus)
    assert not stopped.finish(lambda step, loss: (parts.append(loss), step < 5)[1])
    save_checkpoint(tmp_path, stopped)
    torch.rand(7)  # what else draws random numbers must not matter
    resumed = Run(SMALL, corpus)
    load_checkpoint(tmp_path, resumed)
    assert resumed.step == 5
    assert resumed.finish(lambda step, loss: (parts.append(loss), True)[1])

    assert parts == whole
    ours, theirs = resumed.model.state_dict(), first.model.state_dict()
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)
    assert [path.name for path in tmp_path.iterdir()] == [CHECKPOINT]


def test_a_checkpoint_of_another_run_is_refused(corpus: Corpus, tmp_path: Path) -> None:
    save_checkpoint(tmp_path, Run(SMALL, corpus))
    other = make_corpus(sentences(600, seed=2), SMALL)
    with pytest.raises(FilesError, match="another text"):
        load_checkpoint(tmp_path, Run(SMALL, other))


def test_the_written_model_is_bf16_in_two_shards_and_evaluates_the_same(
    corpus: Corpus, tmp_path: Path
) -> None:
    run = Run(SMALL, corpus)
    run.finish(lambda step, loss: True)
    loss = heldout_loss(run.model, corpus.heldout)
    write_model(tmp_path, run)

    shards = sorted(tmp_path.glob("*.safetensors"))
    assert [shard.name for shard in shards] == [f"model-0000{i}-of-00002.safetensors" for i in (1, 2)]
    index = json.loads((tmp_path / "model.safetensors.index.json").read_text(encoding="utf-8"))["weight_map"]
    tensors = {name: tensor for shard in shards for name, tensor in load_file(shard).items()}
    assert set(index) == set(tensors)
    assert {tensor.dtype for tensor in tensors.values()} == {torch.bfloat16}
    assert "model.layers.1.mlp.experts.7.down_proj.weight" in tensors
    assert evaluate(tmp_path) == pytest.approx(loss, abs=0.01)
    chat = [{"role": "system", "content": "a"}, {"role": "user", "content": "b"}]
    tokenizer = AutoTokenizer.from_pretrained(tmp_path, local_files_only=True)
    assert tokenizer.apply_chat_template(chat, tokenize=False) == "a\nb"
    assert not same_preparation(tmp_path, bundled_model_path())


def test_the_bundled_model_has_its_loss() -> None:
    """3.551 over all 34,599 held-out tokens; 3.6855 over the first 16 windows of 256, which is faster."""
    assert evaluate(bundled_model_path(), tokens=16 * 256) == pytest.approx(3.6855, abs=0.01)


def test_evaluate_says_what_a_folder_lacks(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert train_tiny.main(["--evaluate", str(tmp_path), "--threads", "1"]) == 1
    assert "has no config.json" in capsys.readouterr().err


@pytest.mark.parametrize(
    "wrong",
    [[], ["--out", "a", "--evaluate", "b"], ["--out", "a", "--steps", "0"], ["--out", "a", "--threads", "0"]],
)
def test_options_that_make_no_sense_are_refused(wrong: list[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        train_tiny.parse(wrong)
    assert ended.value.code == 2


@pytest.mark.skipif(sys.platform == "win32", reason="optional: Windows has no SIGTERM to send")
def test_a_terminated_run_leaves_a_checkpoint_that_only_resume_takes_up(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text, out = tmp_path / "text.txt", tmp_path / "model"
    text.write_text(sentences(3000), encoding="utf-8")
    script = [sys.executable, str(SCRIPTS / "train_tiny.py"), "--out", str(out), "--text", str(text)]
    script += ["--threads", "1"]
    with subprocess.Popen(script, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        for line in process.stdout:
            if line.startswith("step 1/"):
                process.send_signal(signal.SIGTERM)
                break
        printed, errors = process.communicate(timeout=100)
    assert process.returncode == 130, errors
    assert "--resume goes on" in printed
    assert (out / CHECKPOINT).exists()
    assert train_tiny.main(script[2:]) == 1
    assert "add --resume" in capsys.readouterr().err
