"""Tokenizing into a cache: which tokens, when again, and what a crash costs."""

import itertools
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import numpy as np
import pytest
from fulgurite.errors import ConfigurationError, DataError
from fulgurite_data import TextFiles, tokenize


class Encoding:
    def __init__(self, ids):
        self.ids = ids


class Bytes:
    """A tokenizer of bytes. Token 256 is an end; each call is noted in a file, if there is one."""

    truncation = None
    padding = None

    def __init__(self, log=None, size=257):
        self.log = log
        self.size = size

    def encode_batch(self, input):
        if self.log is not None:
            with open(self.log, "a") as file:
                file.writelines(f"{text}\n" for text in input)
        return [Encoding(list(text.encode())) for text in input]

    def get_vocab_size(self):
        return self.size

    def token_to_id(self, token):
        return 256 if token == "<end>" else None

    def to_str(self):
        return "bytes"


def read_documents(paths):
    documents = []
    for path in paths:
        tokens, offsets = np.load(path), np.load(path.with_suffix(".offsets.npy"))
        assert offsets.dtype == np.int64 and offsets[-1] == len(tokens)
        documents += [tokens[low:high].tolist() for low, high in itertools.pairwise(offsets)]
    return documents


TEXTS = ["one", "", "zwölf", "three"]


def test_documents_become_their_tokens_and_an_end(tmp_path):
    paths = tokenize(TEXTS, Bytes(), tmp_path, end="<end>", shard_size=3)
    assert read_documents(paths) == [[*text.encode(), 256] for text in TEXTS]
    assert [np.load(path).dtype for path in paths] == [np.uint16, np.uint16]
    wide = tokenize(TEXTS, Bytes(size=2**16 + 1), tmp_path)
    assert np.load(wide[0]).dtype == np.uint32
    assert read_documents(wide) == [list(text.encode()) for text in TEXTS]


def test_nothing_is_tokenized_twice_unless_content_or_settings_differ(tmp_path):
    log = tmp_path / "log"

    def count(texts, **settings):
        log.write_text("")
        tokenize(texts, Bytes(log), tmp_path / "cache", shard_size=2, **settings)
        return len(log.read_text().splitlines())

    assert count(TEXTS) == 4
    assert count(TEXTS) == 0
    assert count(list(TEXTS)) == 0
    assert count([{"text": text} for text in TEXTS]) == 0
    assert count([{"body": text} for text in TEXTS], column="body") == 0
    assert count([*TEXTS[:3], "four"]) == 4
    assert count(["on", "e", *TEXTS[2:]]) == 4
    assert count(TEXTS, end="<end>") == 4
    assert count(TEXTS, fingerprint="version 1") == 4
    assert count(["anything"] * 4, fingerprint="version 1") == 0


def test_truncated_shard_is_written_again_and_the_others_are_not(tmp_path):
    log = tmp_path / "log"
    paths = tokenize(TEXTS, Bytes(log), tmp_path / "cache", shard_size=1)
    expected = read_documents(paths)
    paths[2].write_bytes(paths[2].read_bytes()[:-1])
    paths[3].with_suffix(".json").unlink()
    log.write_text("")
    assert read_documents(tokenize(TEXTS, Bytes(log), tmp_path / "cache", shard_size=1)) == expected
    assert log.read_text().splitlines() == ["zwölf", "three"]


PROGRAM = """
import sys, time
sys.path.insert(0, {tests!r})
from test_tokenize import Bytes
from fulgurite_data import tokenize


class Slow(Bytes):
    def encode_batch(self, input):
        encodings = super().encode_batch(input)
        if self.log and input[0] == "document 5":
            print("ready", flush=True)
            time.sleep(600)
        return encodings


if __name__ == "__main__":
    log = sys.argv[2] if sys.argv[2] != "-" else None
    documents = [f"document {{number}}" for number in range(8)]
    processes = int(sys.argv[3])
    tokenize(documents, Slow(log), sys.argv[1], shard_size=1, processes=processes)
"""


@pytest.mark.full
def test_killed_process_costs_the_shard_that_it_was_at(tmp_path):
    program = tmp_path / "program.py"
    program.write_text(PROGRAM.format(tests=str(Path(__file__).parent)))
    log = tmp_path / "log"
    command = [sys.executable, str(program), str(tmp_path / "cache"), str(log), "0"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None and process.stdout.readline() == "ready\n"
        os.kill(process.pid, signal.SIGKILL)
    log.write_text("")
    documents = [f"document {number}" for number in range(8)]
    paths = tokenize(documents, Bytes(log), tmp_path / "cache", shard_size=1)
    assert log.read_text().splitlines() == documents[5:]
    assert read_documents(paths) == [list(document.encode()) for document in documents]


@pytest.mark.slow
def test_several_processes_write_the_same_files(tmp_path):
    program = tmp_path / "program.py"
    program.write_text(PROGRAM.format(tests=str(Path(__file__).parent)))
    for name, processes in (("one", "0"), ("two", "2")):
        command = [sys.executable, str(program), str(tmp_path / name), "-", processes]
        subprocess.run(command, check=True, timeout=300)
    files = {
        name: {
            str(path.relative_to(tmp_path / name)): path.read_bytes()
            for path in (tmp_path / name).rglob("*.npy")
        }
        for name in ("one", "two")
    }
    assert len(files["one"]) == 16
    assert files["one"] == files["two"]


@pytest.mark.full
def test_process_that_dies_is_an_error(tmp_path):
    with pytest.raises(DataError, match="a process that tokenizes has died"):
        tokenize(["a"], Deadly(), tmp_path, processes=1)


class Deadly(Bytes):
    def encode_batch(self, input):
        os.kill(os.getpid(), signal.SIGKILL)
        return []


def test_one_process_waits_for_another_that_writes(tmp_path, capsys):
    class Waiting(Bytes):
        def encode_batch(self, input):
            started.set()
            assert release.wait(60)
            return super().encode_batch(input)

    started, release = threading.Event(), threading.Event()
    first = threading.Thread(target=tokenize, args=(TEXTS, Waiting(), tmp_path))
    first.start()
    assert started.wait(60)
    second = threading.Thread(target=tokenize, args=(TEXTS, Failing(), tmp_path))
    second.start()
    while "waiting for another process" not in capsys.readouterr().err:
        time.sleep(0.01)
    release.set()
    first.join(60)
    second.join(60)
    assert not first.is_alive() and not second.is_alive()


class Failing(Bytes):
    def encode_batch(self, input):
        raise RuntimeError("out of order")


def test_fingerprint_stands_for_content_and_not_for_the_column_or_the_length(tmp_path):
    documents = [{"text": "abc", "title": "xy"}]
    paths = [
        tokenize(source, Bytes(), tmp_path, column=column, fingerprint="1 March")
        for source, column in (
            (documents, "text"),
            (documents, "title"),
            (documents * 2, "text"),
            (documents, "text"),
        )
    ]
    contents = [[[*b"abc"]], [[*b"xy"]], [[*b"abc"]] * 2, [[*b"abc"]]]
    assert [*map(read_documents, paths)] == contents
    assert paths[0] == paths[3]


def test_tokenizer_that_raises_says_at_which_documents(tmp_path):
    with pytest.raises(RuntimeError, match="out of order") as caught:
        tokenize(TEXTS, Failing(), tmp_path)
    assert "documents 0 to 3" in caught.value.__notes__[0]


@pytest.mark.parametrize(
    ("documents", "message"),
    [
        ([], "no document"),
        (["a", 3], "document 1 is a int; it must be a string"),
        ([{"body": "a"}], "document 0 has no 'text', and has: body"),
    ],
)
def test_what_is_no_document_is_refused(documents, message, tmp_path):
    with pytest.raises(DataError, match=message):
        tokenize(documents, Bytes(), tmp_path)


def test_tokenizer_that_would_change_documents_is_refused(tmp_path):
    class Truncating(Bytes):
        truncation = "at 8 tokens"

    with pytest.raises(ConfigurationError, match=r"no_truncation\(\)"):
        tokenize(TEXTS, Truncating(), tmp_path)
    with pytest.raises(ConfigurationError, match="'<stop>', which the tokenizer does not know"):
        tokenize(TEXTS, Bytes(), tmp_path, end="<stop>")
    with pytest.raises(DataError, match="document 2 has the token 65537"):
        tokenize(TEXTS, Wrong(), tmp_path)


class Wrong(Bytes):
    def encode_batch(self, input):
        return [Encoding([2**16 + 1 if text == "zwölf" else 5]) for text in input]


def test_files_of_a_folder_are_documents_in_the_order_of_their_names(tmp_path):
    for name, text in (("b.txt", "second"), ("a.txt", "first"), ("c/d.txt", "third"), ("e.md", "")):
        path = tmp_path / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(text)
    files = TextFiles(tmp_path)
    assert list(files) == files[:] == ["first", "second", "third"]
    assert list(TextFiles(tmp_path, "*.md")) == [""]
    with pytest.raises(DataError, match=r"no file in .* matches \*\.rst"):
        TextFiles(tmp_path, "*.rst")
    text = "Größe, 大きさ, مقاس, 🙂 e\u0301"
    (tmp_path / "a.txt").write_bytes(b"\xef\xbb\xbf" + text.encode())  # as some editors do
    assert files[0] == text
    (tmp_path / "a.txt").write_bytes(b"\xff")
    with pytest.raises(DataError, match=r"a\.txt cannot be read as text"):
        files[0]


def test_trained_tokenizer_gives_back_the_text(tmp_path):
    tokenizers = pytest.importorskip("tokenizers")
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE())
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    alphabet = tokenizers.pre_tokenizers.ByteLevel.alphabet()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=280, special_tokens=["<end>"], initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator(TEXTS * 10, trainer)
    documents = read_documents(tokenize(TEXTS, tokenizer, tmp_path, end="<end>"))
    assert [tokenizer.decode(document) for document in documents] == TEXTS
    assert all(document[-1] == tokenizer.token_to_id("<end>") for document in documents)


def test_documents_that_are_no_sequence_are_refused(tmp_path: Path):
    with pytest.raises(ConfigurationError, match=r"is a generator; .*list\(documents\)"):
        tokenize((text for text in "ab"), Bytes(), tmp_path)  # type: ignore[arg-type]
    with pytest.raises(ConfigurationError, match="is a str; it must be a sequence of documents"):
        tokenize("abc", Bytes(), tmp_path)


@pytest.mark.parametrize("processes", [-1, 1.5, True])
def test_numbers_of_processes_that_make_no_sense_are_refused(processes, tmp_path):
    with pytest.raises(ConfigurationError, match=f"tokenize: processes is {processes}"):
        tokenize(TEXTS, Bytes(), tmp_path, processes=processes)
