"""Batches from text and arrays: every window once per epoch, the same from any position."""

from __future__ import annotations

import itertools
from pathlib import Path

import numpy as np
import pytest
import torch

from tierplan.runtime.data.text import DataError, TokenBatches, fingerprint, read_tokens
from tierplan.runtime.job import learning_rate


def test_every_window_comes_once_per_epoch() -> None:
    batches = TokenBatches(np.arange(103), batch=2, length=10)
    first_epoch = [b["input_ids"][:, 0].tolist() for b in itertools.islice(batches, 5)]
    assert sorted(x for row in first_epoch for x in row) == list(range(0, 100, 10))
    assert all(torch.equal(b["input_ids"], b["labels"]) for b in itertools.islice(batches, 2))


@pytest.mark.parametrize("position", [0, 1, 7, 23])
def test_any_position_can_be_gone_to(position: int) -> None:
    batches = TokenBatches(np.arange(103), batch=3, length=10, seed=4)
    walked = list(itertools.islice(batches, position, position + 3))
    jumped = list(itertools.islice(batches.starting_at(position), 3))
    assert all(torch.equal(a["input_ids"], b["input_ids"]) for a, b in zip(walked, jumped, strict=True))


def test_text_becomes_bytes(tmp_path: Path) -> None:
    (tmp_path / "b.txt").write_text("hé")
    (tmp_path / "sub").mkdir()
    (tmp_path / "sub" / "c.py").write_text("x")
    (tmp_path / "a.bin2").write_bytes(b"\xff\xfe\x00")
    out = tmp_path / "out"
    tokens = read_tokens(tmp_path, vocab_size=256, cache_dir=out)
    assert tokens.tolist() == [*"hé".encode(), 0, ord("x"), 0]
    (out / "log.txt").write_text("of the run, not of the data")
    again = read_tokens(tmp_path, vocab_size=256, cache_dir=out)
    assert isinstance(again, np.memmap)
    assert again.tolist() == tokens.tolist()
    assert fingerprint(again) == fingerprint(tokens) == fingerprint(tokens.astype(np.uint16))


def test_what_was_kept_of_other_text_is_not_taken(tmp_path: Path) -> None:
    text = tmp_path / "a.txt"
    text.write_text("one")
    before = read_tokens(text, vocab_size=256, cache_dir=tmp_path / "out")
    text.write_text("other")
    after = read_tokens(text, vocab_size=256, cache_dir=tmp_path / "out")
    assert bytes(after.astype(np.uint8)[:-1]) == b"other"
    assert fingerprint(after) != fingerprint(before)


@pytest.mark.parametrize("at", ["magic", "type", "shape", "token", "token beyond the vocabulary"])
def test_damage_of_what_was_kept_is_named(at: str, tmp_path: Path) -> None:
    """And not blamed on the text, wherever in the file it is; without the file, tokens are made again."""
    text, out = tmp_path / "a.txt", tmp_path / "out"
    text.write_text("some text")
    before = read_tokens(text, vocab_size=128, cache_dir=out).tolist()
    (kept,) = out.glob("tokens-*.npy")
    content = bytearray(kept.read_bytes())
    places = {"magic": 0, "type": content.index(b"<i4") + 1, "shape": content.index(b"(10,)") + 2}
    position = places.get(at, len(content) - 4)
    content[position] ^= 8 if at == "shape" else 128 if at.endswith("vocabulary") else 1
    kept.write_bytes(content)
    with pytest.raises(DataError, match=f"{kept.name} is damaged: .* delete it"):
        fingerprint(read_tokens(text, vocab_size=128, cache_dir=out))
    kept.unlink()
    assert read_tokens(text, vocab_size=128, cache_dir=out).tolist() == before


class Letters:
    """A tokenizer of two letters."""

    eos_token_id = None

    def __init__(self, letters: str) -> None:
        self.letters = letters

    def get_vocab(self) -> dict[str, int]:
        return {letter: k for k, letter in enumerate(self.letters)}

    def __call__(self, text: str, **_: object) -> dict[str, list[int]]:
        return {"input_ids": [self.letters.index(letter) for letter in text]}


def test_what_was_kept_of_another_tokenizer_is_not_taken(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("aba")
    for letters, expected in (("ab", [0, 1, 0]), ("ba", [1, 0, 1]), ("ab", [0, 1, 0])):
        found = read_tokens(tmp_path / "a.txt", vocab_size=256, tokenizer=Letters(letters), cache_dir=tmp_path / "out")
        assert found.tolist() == expected
    assert (
        bytes(read_tokens(tmp_path / "a.txt", vocab_size=256, cache_dir=tmp_path / "out").astype(np.uint8)) == b"aba\0"
    )


def test_files_that_are_passed_over_are_named(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "a.txt").write_text("text")
    assert not caplog.records
    (tmp_path / "latin.txt").write_text("caf\xe9", encoding="latin-1")
    read_tokens(tmp_path, vocab_size=256)
    assert f"{tmp_path}: 1 of 2 files hold no text in UTF-8 and are left out: latin.txt" in caplog.text


def test_arrays_are_mapped(tmp_path: Path) -> None:
    np.save(tmp_path / "t.npy", np.arange(50, dtype=np.int64))
    np.arange(50, dtype=np.uint16).tofile(tmp_path / "t.bin")
    for name in ("t.npy", "t.bin"):
        tokens = read_tokens(tmp_path / name, vocab_size=50)
        assert isinstance(tokens, np.memmap)
        assert tokens.tolist() == list(range(50))


def test_bad_data_is_explained(tmp_path: Path) -> None:
    np.save(tmp_path / "t.npy", np.arange(50))
    np.save(tmp_path / "f.npy", np.ones((2, 2)))
    with pytest.raises(DataError, match="has token 49, but the model knows 0 to 39"):
        read_tokens(tmp_path / "t.npy", vocab_size=40)
    with pytest.raises(DataError, match=r"float64 of shape \(2, 2\)"):
        read_tokens(tmp_path / "f.npy", vocab_size=40)
    with pytest.raises(DataError, match="does not exist"):
        read_tokens(tmp_path / "none", vocab_size=40)
    (tmp_path / "empty").mkdir()
    with pytest.raises(DataError, match="holds no text"):
        read_tokens(tmp_path / "empty", vocab_size=256)
    with pytest.raises(DataError, match="one sequence takes 64"):
        TokenBatches(np.arange(50), batch=1, length=64)


@pytest.mark.parametrize("name", ["constant", "linear", "cosine"])
def test_learning_rates_against_transformers(name: str) -> None:
    from transformers import get_scheduler

    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=0.3)
    scheduler = get_scheduler(
        "constant_with_warmup" if name == "constant" else name, optimizer, num_warmup_steps=4, num_training_steps=20
    )
    ours = learning_rate(name, 0.3, num_steps=20, warmup_steps=4)
    for step in range(20):
        assert ours(step) == pytest.approx(scheduler.get_last_lr()[0], abs=1e-15)
        optimizer.step()
        scheduler.step()


def test_bad_schedules_are_explained() -> None:
    with pytest.raises(ValueError, match="'square' is unknown"):
        learning_rate("square", 1.0, num_steps=1)
    with pytest.raises(ValueError, match="warm-up of 9 steps does not fit into 5"):
        learning_rate("linear", 1.0, num_steps=5, warmup_steps=9)
