import json
import math
import os
import sysconfig
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, strategies as st
from tokenizers import AddedToken, Tokenizer as HFTokenizer, decoders, models, pre_tokenizers

from moekit.corpora import (
    byte_tokenizer,
    corpus_of_text,
    corpus_of_tokens,
    load_corpus,
    load_tokenizer,
    split_files,
    standard_library,
    text_files,
    token_files,
    trigram_bits_per_byte,
)


@pytest.fixture(scope="module")
def library():
    return standard_library()


@pytest.fixture
def hf_file(tmp_path):
    """A byte-level BPE without merges: the ids are a permutation of the bytes, then the special token 400."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {c: i for i, c in enumerate(alphabet)} | {f"unused{i}": i for i in range(256, 400)}
    hf = HFTokenizer(models.BPE(vocab=vocab, merges=[]))
    hf.pre_tokenizer, hf.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    hf.add_special_tokens([AddedToken("<|endoftext|>", special=True)])
    hf.save(str(tmp_path / "tokenizer.json"))
    return tmp_path / "tokenizer.json"


# --- Tokenizers


@given(st.text())
def test_bytes_decode_to_the_text_and_end_with_256(text):
    tokenizer = byte_tokenizer()
    ids = tokenizer.encode(text)
    assert ids == list(text.encode())
    assert tokenizer.decode(torch.tensor([*ids, tokenizer.eos])) == text
    assert tokenizer.eos == 256 and tokenizer.vocab_size == 257


def test_a_tokenizers_file_decodes_to_the_text(hf_file):
    tokenizer = load_tokenizer(hf_file)
    text = "def f(x): # ünïcode\n\treturn x"
    assert tokenizer.decode(tokenizer.encode(text)) == text
    assert tokenizer.eos == 400 and tokenizer.vocab_size == 401


def test_a_text_cannot_forge_the_end_of_a_document(hf_file):
    corpus = corpus_of_text({"a": "one<|endoftext|>two"}, load_tokenizer(hf_file))
    assert corpus.document_ends().tolist() == [len(corpus)]


def test_the_token_that_ends_documents_can_be_named(hf_file):
    assert load_tokenizer(hf_file, eos="unused300").eos == 300
    with pytest.raises(ValueError, match=r"needs one of \['</none>'\].*got \['<\|endoftext\|>'\]"):
        load_tokenizer(hf_file, eos="</none>")


def test_an_unknown_tokenizer_is_refused(tmp_path):
    assert load_tokenizer("bytes").vocab_size == 257
    (tmp_path / "config.json").write_text(json.dumps({"hidden_size": 64}))
    for unknown in ("gpt5", tmp_path / "config.json", tmp_path):
        with pytest.raises(ValueError, match="load_tokenizer needs 'bytes'"):
            load_tokenizer(unknown)
    with pytest.raises(ValueError, match="without eos"):
        load_tokenizer("bytes", eos="x")


# --- Files


def test_the_standard_library_is_megabytes_of_text_in_a_fixed_order(library):
    assert list(library) == sorted(library)
    assert sum(map(len, library.values())) > 5e6
    assert "class JSONDecoder" in library["json/decoder.py"]
    assert library["pydoc_data/topics/for"].startswith('The "for" statement')
    assert {"site-packages", "test", "tests"}.isdisjoint(part for name in library for part in name.split("/"))


def test_installed_packages_are_no_part_of_the_standard_library_and_are_not_even_listed(
    tmp_path, monkeypatch
):
    files = ("a.py", "email/b.py", "email/c.txt", "site-packages/d/e.py", "email/test/f.py", "config-3/g.py")
    for name in files:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).touch()
    listed, scandir = [], os.scandir
    monkeypatch.setattr(os, "scandir", lambda path: listed.append(Path(path).name) or scandir(path))
    monkeypatch.setattr(sysconfig, "get_path", lambda name: str(tmp_path))
    names = [name for name in standard_library() if not name.startswith("pydoc_data/topics/")]
    assert names == ["a.py", "email/b.py"]
    assert sorted(listed) == sorted([tmp_path.name, "email", "config-3"])


def test_a_file_stays_on_its_side_of_the_split_whatever_else_there_is(library):
    train, held_out = split_files(library)
    assert train.keys() | held_out.keys() == library.keys() and not train.keys() & held_out.keys()
    assert 0.05 < len(held_out) / len(library) < 0.15
    some = dict(list(reversed(library.items()))[::2])
    assert split_files(some)[1].keys() == held_out.keys() & some.keys()
    assert split_files(library, held_out=0.3)[1].keys() > held_out.keys()
    assert list(split_files(dict.fromkeys("abcdefghijklmnop"))[1]) == ["d", "j", "p"]  # on every machine


def test_a_split_with_an_empty_side_is_refused():
    with pytest.raises(ValueError, match=r"got 0 and 1 of 1 at held_out=0.1"):
        split_files({"a": "text"})


def test_a_folder_is_read_in_order_without_hidden_files(tmp_path):
    (tmp_path / "sub").mkdir()
    for name, text in {"b.txt": "two\r\n", "sub/a.md": "ünï", ".hidden": "no", "a.txt": "one"}.items():
        (tmp_path / name).write_bytes(text.encode())
    assert list(text_files(tmp_path).items()) == [("a.txt", "one"), ("b.txt", "two\r\n"), ("sub/a.md", "ünï")]
    assert list(text_files(tmp_path, pattern="*.txt")) == ["a.txt", "b.txt"]
    assert text_files(tmp_path / "a.txt") == {"a.txt": "one"}


def test_folders_without_text_are_refused(tmp_path):
    with pytest.raises(ValueError, match=r"text_files needs a file, or a folder.*no such path.*none"):
        text_files(tmp_path / "none")
    with pytest.raises(ValueError, match="got a folder without any that match"):
        text_files(tmp_path)
    (tmp_path / "blank.txt").write_text(" \n")
    with pytest.raises(ValueError, match="text_files needs text, got 1 files without any"):
        text_files(tmp_path)
    (tmp_path / "image.png").write_bytes(b"\x89PNG")
    with pytest.raises(ValueError, match=r"needs UTF-8 text, got .*image\.png.*pattern"):
        text_files(tmp_path)
    with pytest.raises(ValueError, match="needs text, got 1 files without any"):
        corpus_of_text({"a": ""}, byte_tokenizer())


@pytest.mark.parametrize("dtype", ["uint16", "uint32"])
def test_token_files_are_mapped_and_hold_what_was_written(tmp_path, dtype):
    ids = np.arange(1000, dtype=dtype)
    np.save(tmp_path / "a.npy", ids)
    ids[::-1].astype(np.dtype(dtype).newbyteorder("<")).tofile(tmp_path / "b.bin")
    files = token_files(tmp_path, dtype=dtype)
    assert all(isinstance(tokens, np.memmap) for tokens in files.values())
    assert np.array_equal(files["a.npy"], ids) and np.array_equal(files["b.bin"], ids[::-1])
    assert list(token_files(tmp_path, pattern="*.npy")) == ["a.npy"]


@pytest.mark.parametrize("dtype", ["float32", "int64", "int32", "uint8", ">u2"])
def test_npy_files_of_another_dtype_are_refused(tmp_path, dtype):
    np.save(tmp_path / "a.npy", np.arange(8).astype(dtype))
    with pytest.raises(ValueError, match=r"needs one dimension of uint16 or uint32, got .*a\.npy; convert"):
        token_files(tmp_path)


def test_broken_token_files_are_refused(tmp_path):
    np.save(tmp_path / "a.npy", np.arange(8, dtype=np.uint16))
    with pytest.raises(ValueError, match=r"needs one dimension of uint32, got uint16"):
        token_files(tmp_path, dtype="uint32")
    np.save(tmp_path / "a.npy", np.zeros((2, 2), np.uint16))
    with pytest.raises(ValueError, match=r"got uint16 \(2, 2\)"):
        token_files(tmp_path)
    whole = (tmp_path / "a.npy").read_bytes()
    for broken in (whole[:-1], whole[:20], b""):
        (tmp_path / "a.npy").write_bytes(broken)
        with pytest.raises(ValueError, match=r"needs a whole \.npy file"):
            token_files(tmp_path / "a.npy")
    for size, dtype in ((6, "uint32"), (0, "uint16"), (8, None)):
        (tmp_path / "a.bin").write_bytes(bytes(size))
        with pytest.raises(ValueError, match=f"got dtype={dtype!r} and {size} bytes"):
            token_files(tmp_path / "a.bin", dtype=dtype)
    with pytest.raises(ValueError, match="'uint16' or 'uint32', got 'int8'"):
        token_files(tmp_path / "a.bin", dtype="int8")
    with pytest.raises(ValueError, match="no such path"):
        token_files(tmp_path / "none.npy")


# --- Corpus


@given(st.lists(st.lists(st.integers(0, 4), max_size=12), min_size=1, max_size=5), st.sampled_from([0, None]))
def test_any_window_of_a_corpus_has_its_tokens_and_documents(parts, eos):
    flat = [i for part in parts for i in part]
    if not flat or eos not in (*flat, None):
        with pytest.raises(ValueError, match="needs tokens, and eos among them"):
            corpus_of_tokens(uint16(*parts), eos=eos, vocab_size=5)
        return
    corpus = corpus_of_tokens(uint16(*parts), eos=eos, vocab_size=5)
    document, documents = 0, []
    for part in parts:
        for at, i in enumerate(part):
            documents.append(document)
            document += i == eos or at + 1 == len(part)
    ends = [at + 1 for at, x in enumerate(documents) if documents[at + 1 : at + 2] != [x]]
    assert len(corpus) == len(flat) and corpus.document_ends().tolist() == ends
    for start in range(len(flat)):
        for stop in range(start + 1, len(flat) + 3):
            tokens, numbers = corpus.read(start, stop)
            assert tokens.tolist() == flat[start:stop]
            assert numbers.tolist() == [x - documents[start] for x in documents[start:stop]]


def uint16(*parts):
    return {str(i): np.array(part, np.uint16) for i, part in enumerate(parts)}


@pytest.mark.parametrize("dtype", [np.int64, np.float32])
def test_ids_that_could_be_negative_or_broken_are_refused(dtype, unchecked):
    with pytest.raises(ValueError, match=f"needs unsigned ids, got {np.dtype(dtype)} in 'a'"):
        corpus_of_tokens({"a": np.array([-1, 2], dtype)}, eos=None, vocab_size=5)


def test_an_id_that_the_model_lacks_is_found_anywhere_in_the_file():
    ids = np.zeros(2**22 + 10, np.uint32)
    ids[-1] = 257
    with pytest.raises(ValueError, match=r"needs ids below vocab_size=257, got 257 in 'late\.npy'.*uint32"):
        corpus_of_tokens({"late.npy": ids}, eos=0, vocab_size=257)
    assert len(corpus_of_tokens({"late.npy": ids}, eos=0, vocab_size=258)) == len(ids)


def test_the_fingerprint_changes_with_a_token_the_files_and_the_separator():
    def fingerprint(*parts, eos=0):
        return corpus_of_tokens(uint16(*parts), eos=eos, vocab_size=9).fingerprint

    assert fingerprint([1, 0, 2]) == fingerprint([1, 0, 2])
    others = [fingerprint([1, 0, 3]), fingerprint([1, 0], [2]), fingerprint([1, 0, 2], eos=2)]
    assert len({fingerprint([1, 0, 2]), *others}) == 4


def test_a_text_corpus_is_each_text_and_its_end(hf_file):
    corpus = corpus_of_text({"a": "xy", "empty": "", "b": "z"}, byte_tokenizer())
    assert corpus.parts[0].tolist() == [120, 121, 256, 122, 256] and corpus.parts[0].dtype == np.uint16
    texts = {str(i): "word " * (i % 7) + "." for i in range(600)}  # more than one piece of work
    tokenizer = load_tokenizer(hf_file)
    (ids,) = corpus_of_text(texts, tokenizer).parts
    documents = np.split(ids, np.flatnonzero(ids == tokenizer.eos) + 1)[:-1]
    assert [tokenizer.decode(document[:-1]) for document in documents] == list(texts.values())


# --- Baseline


def test_the_baseline_is_the_smoothed_frequency_of_each_byte():
    counts = {"": {"a": 1}, "a": {"b": 1}, "ab": {"a": 1}, "ba": {"c": 1}}  # of "abac", by the two before
    steps = [("", "a"), ("a", "b"), ("ab", "c"), ("bc", "d")]  # of "abcd"
    expected = 0.0
    for context, symbol in steps:
        seen = counts.get(context, {})
        expected -= math.log2((seen.get(symbol, 0) + 1) / (sum(seen.values()) + 256)) / len(steps)
    assert trigram_bits_per_byte(["abac"], ["abcd"]) == pytest.approx(expected, abs=1e-12)
    assert trigram_bits_per_byte([], ["any text"]) == 8
    with pytest.raises(ValueError, match="needs held-out text, got none"):
        trigram_bits_per_byte(["abc"], [])


def test_the_baseline_knows_the_standard_library(library):
    train, held_out = split_files(library)
    score = trigram_bits_per_byte(train.values(), held_out.values())
    assert 2.4 < score < 3.0  # 2.67 for Python 3.11


@pytest.mark.parametrize("n", [2, 5, 10, 20])
def test_a_few_files_are_split_too(n):
    files = {f"chapter{i}.txt": "text" for i in range(n)}
    train, rest = split_files(files, held_out=0.001)
    assert len(rest) == 1 and train | rest == files
    assert split_files(dict(reversed(files.items())), held_out=0.001)[1] == rest


def test_a_corpus_of_token_files_or_of_the_standard_library(tmp_path):
    np.array([1, 2, 9, 3, 9], dtype="<u4").tofile(tmp_path / "a.bin")
    corpus = load_corpus(tmp_path, eos=9, vocab_size=10)
    assert corpus.eos == 9 and corpus.vocab_size == 10
    with pytest.raises(ValueError, match="needs token files for an eos"):
        load_corpus(None, eos=9, vocab_size=1000)
    with pytest.raises(ValueError, match="257 ids of the model for bytes"):
        load_corpus(None, vocab_size=256)
