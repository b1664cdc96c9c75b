"""Micro-batches from text files, folders or arrays of tokens; the same for the same seed, from any position.

Shapes: `b` sequences, `t` tokens.

DataError(ValueError)   data that cannot be used: missing, too short, tokens that the model does not know
"""

from __future__ import annotations

import hashlib
import io
import logging
import os
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from tierplan.sim.trace import write_atomically

log = logging.getLogger(__name__)

ARRAY_SUFFIXES = (".npy", ".bin")
KEPT = re.compile(r"tokens-[0-9a-f]+-([0-9a-f]+)\.npy")
"""What is kept of a text, by name: which files and tokenizer, and the fingerprint of the tokens."""
PIECE = 1 << 22
"""Tokens that are looked at together."""


class DataError(ValueError):
    """Data that cannot be used. Says which and what is wanted."""


@dataclass(frozen=True, slots=True)
class TokenBatches:
    """An endless row of micro-batches: windows of `length` tokens, every window once per epoch, in random order."""

    tokens: np.ndarray
    batch: int
    length: int
    seed: int = 0
    first: int = 0
    """Micro-batches to pass over."""

    def __post_init__(self) -> None:
        if len(self.tokens) < self.length:
            raise DataError(
                f"the data has {len(self.tokens):,} tokens, but one sequence takes {self.length:,}; give more text, or "
                "plan for shorter sequences"
            )

    @property
    def num_windows(self) -> int:
        return len(self.tokens) // self.length

    def starting_at(self, first: int) -> TokenBatches:
        """The same row from micro-batch `first` on."""
        return TokenBatches(self.tokens, self.batch, self.length, self.seed, first)

    def __iter__(self) -> Iterator[dict[str, torch.Tensor]]:
        number = self.first * self.batch
        epoch, order = -1, np.empty(0, dtype=np.int64)
        while True:
            rows_bt = []
            for _ in range(self.batch):
                if number // self.num_windows != epoch:
                    epoch = number // self.num_windows
                    order = np.random.default_rng([self.seed, epoch]).permutation(self.num_windows)
                at = int(order[number % self.num_windows]) * self.length
                rows_bt.append(np.asarray(self.tokens[at : at + self.length], dtype=np.int64))
                number += 1
            ids_bt = torch.from_numpy(np.stack(rows_bt))
            yield {"input_ids": ids_bt, "labels": ids_bt}


def read_tokens(
    source: str | os.PathLike[str], *, vocab_size: int, tokenizer: Any = None, cache_dir: Path | None = None
) -> np.ndarray:
    """The tokens of a text file, of all text files below a folder, or of an array file, as one row.

    `.npy` holds whole numbers in one dimension, `.bin` unsigned 16-bit ones. Text goes through `tokenizer`, or becomes
    its bytes without one; `cache_dir` keeps the result of these very files, mapped into memory rather than read.
    """
    path = Path(source)
    if not path.exists():
        raise DataError(f"{path} does not exist; give a text file, a folder of them, or tokens in .npy or .bin")
    if path.suffix in ARRAY_SUFFIXES:
        tokens = _array(path)
    else:
        tokens = _from_text(path, tokenizer, cache_dir)
    for k in range(0, len(tokens), PIECE):
        for token in (int(tokens[k : k + PIECE].min()), int(tokens[k : k + PIECE].max())):
            if not 0 <= token < vocab_size:
                fingerprint(tokens)
                raise DataError(
                    f"{path} has token {token}, but the model knows 0 to {vocab_size - 1}; use the tokenizer that "
                    "belongs to it"
                )
    return tokens


def _array(path: Path) -> np.ndarray:
    """The tokens of an array file, mapped into memory."""
    try:
        tokens = np.load(path, mmap_mode="r") if path.suffix == ".npy" else np.memmap(path, dtype=np.uint16, mode="r")
    except (ValueError, EOFError) as error:
        raise DataError(f"{path} holds no tokens: {error}; write whole numbers in one row") from error
    if not isinstance(tokens, np.ndarray) or tokens.ndim != 1 or not np.issubdtype(tokens.dtype, np.integer):
        what = f"{tokens.dtype} of shape {tokens.shape}" if isinstance(tokens, np.ndarray) else "several arrays"
        raise DataError(f"{path} holds {what}; tokens are whole numbers in one row")
    return tokens


def fingerprint(tokens: np.ndarray) -> str:
    """The same for the same tokens, wherever they come from. Raises `DataError` for what was kept of a text and is not
    what was written any more."""
    digest = hashlib.blake2b(digest_size=16)
    for k in range(0, len(tokens), PIECE):
        digest.update(np.asarray(tokens[k : k + PIECE], dtype=np.int64).tobytes())
    kept = KEPT.fullmatch(Path(getattr(tokens, "filename", None) or "").name)
    if kept is not None and kept[1] != digest.hexdigest():
        raise DataError(_damaged(Path(tokens.filename)))  # type: ignore[attr-defined]
    return digest.hexdigest()


def _damaged(cache: Path) -> str:
    return (
        f"{cache} is damaged: its tokens are not those that were made of the text; delete it, and they are made again"
    )


def _from_text(path: Path, tokenizer: Any, cache_dir: Path | None) -> np.ndarray:
    files = sorted(p for p in path.rglob("*") if p.is_file()) if path.is_dir() else [path]
    if cache_dir is not None:  # a run's own files are not its data
        files = [f for f in files if not f.resolve().is_relative_to(cache_dir.resolve())]
    listing = _listing(files, tokenizer) if cache_dir is not None else ""
    for cache in cache_dir.glob(f"tokens-{listing}-*.npy") if cache_dir is not None else ():
        try:
            return _array(cache)
        except DataError as error:
            raise DataError(_damaged(cache)) from error
    encode, end = _encoder(tokenizer)
    parts: list[np.ndarray] = []
    others: list[str] = []
    for file in files:
        try:
            text = file.read_text(encoding="utf-8")
        except UnicodeDecodeError:
            others.append(file.name)
            continue
        if text:
            parts += [encode(text), end]
    if not parts:
        raise DataError(f"{path} holds no text in UTF-8; give a text file, a folder of them, or tokens in .npy or .bin")
    if others:
        named = ", ".join(others[:3]) + ", ..." * (len(others) > 3)
        log.warning(
            "%s: %d of %d files hold no text in UTF-8 and are left out: %s", path, len(others), len(files), named
        )
    tokens = np.concatenate(parts)
    if cache_dir is not None:
        header = io.BytesIO()
        np.lib.format.write_array_header_1_0(header, np.lib.format.header_data_from_array_1_0(tokens))
        cache = cache_dir / f"tokens-{listing}-{fingerprint(tokens)}.npy"
        write_atomically(cache, header.getvalue(), tokens.data.cast("B"))
    return tokens


def _listing(files: list[Path], tokenizer: Any) -> str:
    """Another one when a file is written, added or taken away, and for another tokenizer."""
    listed: list[object] = [(str(f.resolve()), f.stat().st_size, f.stat().st_mtime_ns) for f in files]
    if tokenizer is not None:
        whole = getattr(tokenizer, "backend_tokenizer", None)
        rules = sorted(tokenizer.get_vocab().items()) if whole is None else whole.to_str()
        listed.append((type(tokenizer).__name__, tokenizer.eos_token_id, rules))
    return hashlib.blake2b(repr(listed).encode(), digest_size=6).hexdigest()


def _encoder(tokenizer: Any) -> tuple[Callable[[str], np.ndarray], np.ndarray]:
    """How text becomes tokens, and what ends a text."""
    if tokenizer is None:
        return lambda text: np.frombuffer(text.encode(), dtype=np.uint8).astype(np.int32), np.zeros(1, dtype=np.int32)
    end = [] if tokenizer.eos_token_id is None else [tokenizer.eos_token_id]

    def encode(text: str) -> np.ndarray:
        return np.asarray(tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"], dtype=np.int32)

    return encode, np.asarray(end, dtype=np.int32)
