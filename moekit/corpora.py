"""Text and token files to a corpus of token ids, and a 3-gram baseline for text.

Files are a mapping of names to texts, or to arrays of token ids: read them, split them by name, join them::

    train, held_out = split_files(standard_library())
    corpus = corpus_of_text(train, byte_tokenizer())
"""

import hashlib
import importlib
import os
import sysconfig
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TypeVar

import numpy as np
from jaxtyping import Int, UInt
from tokenizers import Tokenizer as HFTokenizer

File = TypeVar("File")
TokenIds = UInt[np.ndarray, " _"]

# --- Tokenizers -----------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Tokenizer:
    """Functions between texts and token ids below ``vocab_size``; ``eos`` is the id that ends a document."""

    encode_batch: Callable[[list[str]], Sequence[Sequence[int] | np.ndarray]]
    decode: Callable[[Iterable[int]], str]
    eos: int
    vocab_size: int

    def encode(self, text: str) -> list[int]:
        """Return the ids of one text, without ``eos``."""
        return [int(i) for i in self.encode_batch([text])[0]]


def byte_tokenizer() -> Tokenizer:
    """Return the tokenizer of UTF-8 bytes: ids 0 to 255, and 256 for the end of a text.

    Examples
    --------
    >>> tokenizer = byte_tokenizer()
    >>> tokenizer.encode("Ah")
    [65, 104]
    >>> tokenizer.decode([65, 104, tokenizer.eos])
    'Ah'
    """
    return Tokenizer(
        encode_batch=lambda texts: [np.frombuffer(text.encode(), np.uint8) for text in texts],
        decode=lambda ids: bytes(i for i in map(int, ids) if i < 256).decode(errors="replace"),
        eos=256,
        vocab_size=257,
    )


def load_tokenizer(path: str | Path, *, eos: str | None = None) -> Tokenizer:
    """Load a JSON file of Hugging Face's ``tokenizers``; the name "bytes" stands for `byte_tokenizer`.

    No special tokens are added, and the name of one inside a text is encoded as ordinary text, so that no
    text can forge the end of a document. ``eos`` is the token that ends one; by default the first of
    ``<|endoftext|>``, ``<|end_of_text|>``, ``</s>``, ``<eos>`` that the file has.

    Raises
    ------
    ValueError
        If there is no such file, it is no tokenizer, or it lacks the token.
    """
    if str(path) == "bytes" and eos is None:
        return byte_tokenizer()
    try:
        hf = HFTokenizer.from_file(str(path))
    except Exception as error:  # the library raises bare Exception
        raise ValueError(
            "load_tokenizer needs 'bytes' (without eos) or the path of a JSON file that `tokenizers` wrote, "
            f"got {str(path)!r} and {eos=}: {error}"
        ) from error
    hf.encode_special_tokens = True
    vocab = hf.get_vocab(with_added_tokens=True)
    names = [eos] if eos else ["<|endoftext|>", "<|end_of_text|>", "</s>", "<eos>"]
    found = [vocab[name] for name in names if name in vocab]
    if not found:
        special = [token.content for token in hf.get_added_tokens_decoder().values()][:20]
        raise ValueError(f"load_tokenizer needs one of {names} in {path}, got {special}; name one as eos=")
    return Tokenizer(
        encode_batch=lambda texts: [e.ids for e in hf.encode_batch_fast(texts, add_special_tokens=False)],
        decode=lambda ids: hf.decode([int(i) for i in ids]),
        eos=found[0],
        vocab_size=max(vocab.values()) + 1,
    )


# --- Files ----------------------------------------------------------------------------


def standard_library() -> dict[str, str]:
    """Read the source of the running Python's standard library and the topics of its ``help()``.

    About 9 MB in 530 files, in the order of their names. Left out: installed packages, tests, IDLE, lib2to3
    and generated tables (encodings, build configuration). Another Python version has another text.
    """
    root = Path(sysconfig.get_path("stdlib"))
    skip = {
        "site-packages",
        "dist-packages",
        "test",
        "tests",
        "idlelib",
        "lib2to3",
        "turtledemo",
        "ensurepip",
    }
    skip |= {"encodings", "pydoc_data"}
    files = {}
    for folder, inner, names in os.walk(root):
        inner[:] = set(inner) - skip  # not entered: installed packages may be many
        for path in (Path(folder, name) for name in names if name.endswith(".py")):
            name = path.relative_to(root)
            if not name.parts[0].startswith(("config-", "_sysconfigdata")):
                files[name.as_posix()] = path.read_bytes().decode()
    if not files:
        raise ValueError(f"standard_library needs Python's own source, got no .py file in {root}")
    topics = importlib.import_module("pydoc_data.topics").topics
    return dict(
        sorted((files | {f"pydoc_data/topics/{name}": text for name, text in topics.items()}).items())
    )


def _paths(who: str, path: str | Path, pattern: str) -> dict[str, Path]:
    root = Path(path)
    if root.is_file():
        return {root.name: root}
    names = sorted(p.relative_to(root).as_posix() for p in root.glob(pattern) if p.is_file())
    names = [name for name in names if not any(part.startswith(".") for part in name.split("/"))]
    if not names:
        came = f"a folder without any that match {pattern=}" if root.is_dir() else "no such path"
        raise ValueError(
            f"{who} needs a file, or a folder with files that are not hidden, got {came}: {root}"
        )
    return {name: root / name for name in names}


def text_files(path: str | Path, *, pattern: str = "**/*") -> dict[str, str]:
    """Read a UTF-8 text file, or those in a folder that match a glob pattern, in the order of their names.

    Raises
    ------
    ValueError
        If the path is missing, nothing matches, a file is not UTF-8 text, or no file has any text.
    """
    files = {}
    for name, file in _paths("text_files", path, pattern).items():
        try:
            files[name] = file.read_bytes().decode()
        except UnicodeDecodeError as error:
            raise ValueError(
                f"text_files needs UTF-8 text, got {file}: {error}; leave it out by a pattern like '**/*.txt'"
            ) from error
    if not any(text.strip() for text in files.values()):
        raise ValueError(f"text_files needs text, got {len(files)} files without any in {path}")
    return files


def token_files(path: str | Path, *, dtype: str | None = None, pattern: str = "**/*") -> dict[str, TokenIds]:
    """Memory-map a token file, or those in a folder that match a glob pattern, in the order of their names.

    Parameters
    ----------
    path : str or Path
        ``.npy`` files of one dimension, or raw files of little-endian ids.
    dtype : str, optional
        "uint16" or "uint32". Raw files need it; ``.npy`` files say it themselves.
    pattern : str
        Which files of a folder.

    Raises
    ------
    ValueError
        If the path is missing, nothing matches, or a file is empty, cut short or of another dtype.
    """
    if dtype not in (None, "uint16", "uint32"):
        raise ValueError(f"token_files needs dtype 'uint16' or 'uint32', got {dtype!r}")
    files = {}
    for name, file in _paths("token_files", path, pattern).items():
        size, item = file.stat().st_size, np.dtype(dtype or "uint32").itemsize
        if file.suffix == ".npy":
            try:
                tokens = np.load(file, mmap_mode="r", allow_pickle=False)
            except (ValueError, OSError, EOFError) as error:
                raise ValueError(
                    f"token_files needs a whole .npy file of ids, got {file}: {error}"
                ) from error
            if tokens.ndim != 1 or tokens.dtype not in ([dtype] if dtype else ["uint16", "uint32"]):
                raise ValueError(
                    f"token_files needs one dimension of {dtype or 'uint16 or uint32'}, got {tokens.dtype} "
                    f"{tokens.shape} in {file}; convert it by np.save(path, ids.astype(np.uint32))"
                )
        elif dtype is None or not size or size % item:
            raise ValueError(
                f"token_files needs the dtype of a raw file, and a multiple of its {item} bytes, got "
                f"{dtype=} and {size} bytes in {file}; pass 'uint16' or 'uint32', or check if it is cut short"
            )
        else:
            tokens = np.memmap(file, dtype=np.dtype(dtype).newbyteorder("<"), mode="r")
        files[name] = tokens
    return files


def split_files(
    files: Mapping[str, File], *, held_out: float = 0.1
) -> tuple[dict[str, File], dict[str, File]]:
    """Split files into those to train on and those held out, about ``held_out`` of their number.

    Pure. A hash of its name alone decides about a file, so neither other files nor the machine matter; where
    it would hold out none, the file of the smallest hash is.

    Raises
    ------
    ValueError
        If either would be empty.
    """

    def rank(name: str) -> int:
        return int.from_bytes(hashlib.sha256(name.encode()).digest()[:8], "big")

    def is_held_out(name: str) -> bool:
        return rank(name) < held_out * 2**64

    chosen = set(filter(is_held_out, files)) or set(sorted(files, key=rank)[:1])
    train = {name: file for name, file in files.items() if name not in chosen}
    rest = {name: file for name, file in files.items() if name not in train}
    if not train or not rest:
        raise ValueError(
            f"split_files needs files to train on and files to hold out, got {len(train)} and {len(rest)} of "
            f"{len(files)} at {held_out=}; pass more files or another share"
        )
    return train, rest


# --- Corpus ---------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True, eq=False)
class Corpus:
    """Token ids of documents one after the other, in parts that may be memory maps.

    A document ends after each ``eos`` (if that is not None) and at the end of a part. ``fingerprint`` is a
    hash of all of it.
    """

    parts: tuple[TokenIds, ...]
    eos: int | None
    vocab_size: int
    fingerprint: str

    @cached_property
    def offsets(self) -> Int[np.ndarray, " _"]:
        """Where each part begins, and at the end the number of tokens."""
        return np.cumsum([0, *map(len, self.parts)])

    def __len__(self) -> int:
        return int(self.offsets[-1])

    def read(self, start: int, stop: int) -> tuple[Int[np.ndarray, " n"], Int[np.ndarray, " n"]]:
        """Return the tokens in [start, stop) that there are, and the number of each one's document from 0."""
        first, last = np.searchsorted(self.offsets, [start + 1, stop]) - (1, 0)
        window = zip(self.parts[first:last], self.offsets[first:last], strict=False)
        tokens = np.concatenate([part[max(start - at, 0) : stop - at] for part, at in window]).astype(
            np.int64
        )
        ends = np.zeros(len(tokens), bool) if self.eos is None else tokens == self.eos
        ends[self.offsets[first + 1 : last] - start - 1] = True
        return tokens, np.concatenate([[0], ends[:-1].cumsum()])

    def document_ends(self) -> Int[np.ndarray, " _"]:
        """Return the position after each document's last token; reads the whole corpus once, in pieces."""
        ends = [self.offsets[1:]]
        for part, offset in zip(self.parts, self.offsets, strict=False):
            ends += [offset + at + np.flatnonzero(ids == self.eos) + 1 for at, ids in _pieces(part)]
        return np.unique(np.concatenate(ends))


def _pieces(part: TokenIds) -> Iterator[tuple[int, TokenIds]]:
    return ((at, part[at : at + 2**22]) for at in range(0, len(part), 2**22))


def corpus_of_tokens(files: Mapping[str, TokenIds], *, eos: int | None, vocab_size: int) -> Corpus:
    """Make a corpus of token files; reads them once, in pieces, to check and to hash them (1 s per GB).

    Parameters
    ----------
    files : mapping of str to UInt[ndarray, "n"]
        uint16 or uint32 ids, as from `token_files`.
    eos : int or None
        The id that ends a document; None if each file is a single document.
    vocab_size : int
        That of the model; every id must be below it.

    Raises
    ------
    ValueError
        If there is no token, ids are not unsigned and below ``vocab_size``, or ``eos`` never occurs.
    """
    digest, found = hashlib.sha256(str(eos).encode()), eos is None
    for name, part in files.items():
        if part.dtype.kind != "u":
            raise ValueError(
                f"corpus_of_tokens needs unsigned ids, got {part.dtype} in {name!r}; ids.astype(np.uint32)"
            )
        digest.update(f"{part.dtype.str} {len(part)}".encode())
        for _, ids in _pieces(part):
            if (top := int(ids.max())) >= vocab_size:
                raise ValueError(
                    f"corpus_of_tokens needs ids below {vocab_size=}, got {top} in {name!r}; check the "
                    f"model's vocab_size, the tokenizer that wrote the file, and its dtype {part.dtype}"
                )
            found = found or bool((ids == eos).any())
            digest.update(ids.tobytes())
    parts = tuple(part for part in files.values() if len(part))
    if not parts or not found:
        raise ValueError(
            f"corpus_of_tokens needs tokens, and eos among them, got {len(files)} files with "
            f"{sum(map(len, parts))} tokens and {eos=}; pass the tokenizer's, or None if each is one document"
        )
    return Corpus(parts=parts, eos=eos, vocab_size=vocab_size, fingerprint=digest.hexdigest()[:16])


def corpus_of_text(files: Mapping[str, str], tokenizer: Tokenizer) -> Corpus:
    """Encode texts, one document a file, each ended by ``tokenizer.eos``; empty texts are left out.

    The ids are held in memory, 2 or 4 bytes each. Encode a large corpus once, and save it by
    ``np.save("tokens.npy", corpus.parts[0])`` for `token_files`.

    Raises
    ------
    ValueError
        If there is no text.
    """
    texts = [text for text in files.values() if text]
    if not texts:
        raise ValueError(f"corpus_of_text needs text, got {len(files)} files without any")
    dtype = np.dtype(np.uint16 if tokenizer.vocab_size <= 2**16 else np.uint32)
    pieces = []
    for at in range(0, len(texts), 256):
        for ids in tokenizer.encode_batch(texts[at : at + 256]):
            pieces += [np.asarray(ids, dtype), np.array([tokenizer.eos], dtype)]
    tokens = np.concatenate(pieces)
    return corpus_of_tokens({"text": tokens}, eos=tokenizer.eos, vocab_size=tokenizer.vocab_size)


def load_corpus(tokens: str | Path | None, *, eos: int | None = None, vocab_size: int) -> Corpus:
    """Make a corpus of uint32 token files, or by default of the standard library's bytes.

    Parameters
    ----------
    tokens : path, optional
        As for `token_files`.
    eos, vocab_size
        As for `corpus_of_tokens`.

    Raises
    ------
    ValueError
        As `token_files` and `corpus_of_tokens`; for an ``eos`` without tokens, and a model with too few ids
        for bytes.
    """
    if tokens is not None:
        return corpus_of_tokens(token_files(tokens, dtype="uint32"), eos=eos, vocab_size=vocab_size)
    corpus = corpus_of_text(standard_library(), byte_tokenizer())
    if eos is not None or corpus.vocab_size > vocab_size:
        raise ValueError(
            f"load_corpus needs token files for an eos, and {corpus.vocab_size} ids of the model for bytes, "
            f"got {eos=} without files, {vocab_size=}"
        )
    return corpus


# --- Baseline -------------------------------------------------------------------------


def _trigrams(text: str) -> Int[np.ndarray, " _"]:
    x = np.frombuffer(b"\0\0" + text.encode(), np.uint8).astype(np.int64)
    return x[:-2] << 16 | x[1:-1] << 8 | x[2:]


def trigram_bits_per_byte(train: Iterable[str], held_out: Iterable[str]) -> float:
    """Score held-out texts by the frequencies, in other texts, of each byte after the two before it.

    Pure. Add-one smoothing over 256 symbols; two zero bytes stand before each text, so every byte is scored.
    A model over `byte_tokenizer` has as many targets (not the first byte of a text, but its end), so its mean
    loss over ln 2 can stand beside this.

    Parameters
    ----------
    train, held_out : iterable of str
        Texts, scored as UTF-8. The table of counts takes 128 MiB.

    Returns
    -------
    float
        Mean of -log2 p over the bytes of ``held_out``.

    Raises
    ------
    ValueError
        If there is no byte to score.
    """
    counts = np.zeros(256**3, np.int64)
    for text in train:
        np.add.at(counts, _trigrams(text), 1)
    totals = counts.reshape(-1, 256).sum(1)
    ids = np.concatenate([_trigrams(""), *map(_trigrams, held_out)])
    if not len(ids):
        raise ValueError("trigram_bits_per_byte needs held-out text, got none")
    return float(np.log2((totals[ids >> 8] + 256) / (counts[ids] + 1)).mean())
