#!/usr/bin/env python3
# SPDX-License-Identifier: MIT
"""Text to tokens: writes PREFIX.bin and PREFIX.idx, which data.data_kind=megatron reads. Needs the tokenizers package.

MODEL is a tokenizer.json or a folder that has one. FILES are JSON lines (.jsonl: a document per line, its text under
--key) and text in UTF-8 (any other name: a file is a document); of a folder every file, in the order of names.
Every document ends with the end-of-text token (--eod; otherwise tokenizer_config.json's eos_token). No other special
token is added. A text file that is not UTF-8 is left out with a message; a broken line of JSON is an error.

PREFIX.json says how the tokens were made and how many there are; training checks its vocab_size against the model's.
The tokenizer uses all cores (RAYON_NUM_THREADS limits them). A run that was interrupted goes on where the last block
ended, if the same command is given again and no file was written since.

  scripts/preprocess_data.py Qwen3-30B-A3B books.jsonl notes/ --out data/books
  fp8flow train CONFIG --set data.data_kind=megatron --set data.data_path=[data/books]
Exit status 0; 2 for bad arguments or input.
"""

import argparse
import array
import hashlib
import json
import os
import struct
import sys
import time

BLOCK = 4 << 20  # bytes of text that are tokenised and written at once
TYPES = {"H": 8, "i": 4}  # array's codes, Megatron's: u16, i32


def fail(message):
    print(f"{os.path.basename(sys.argv[0])}: {message}", file=sys.stderr)
    sys.exit(2)


def files_of(names):
    for name in names:
        if os.path.isdir(name):
            for folder, folders, files in os.walk(name):
                folders.sort()
                yield from (os.path.join(folder, file) for file in sorted(files) if not file.startswith("."))
        elif os.path.isfile(name):
            yield name
        else:
            fail(f"{name}: no such file or folder")


def documents(path, position, key, json_lines):
    """(text, position after it) of every document from a position on; the text is None where the file is left out."""
    with open(path, "rb") as file:
        if not (json_lines or path.endswith(".jsonl")):
            data = file.read() if position == 0 else b""
            try:
                if data:
                    yield data.decode(), len(data)
            except UnicodeDecodeError as error:
                print(f"left out: {path}: not UTF-8 from byte {error.start} on", file=sys.stderr)
                yield None, len(data)
            return
        file.seek(position)
        for line in file:
            position += len(line)
            if not line.strip():
                continue
            try:
                text = json.loads(line)[key]
                text.encode()  # JSON can hold half of a surrogate pair, which is no text
            except (ValueError, TypeError, KeyError, AttributeError):
                fail(f"{path}: the line that ends at byte {position} is no JSON object with a string under '{key}' (--key)")
            yield text, position


def blocks(paths, start, key, json_lines):
    """([text, ...], files left out, (file, position) after them), of about BLOCK bytes."""
    texts, size, left_out, at = [], 0, 0, start
    for number in range(start[0], len(paths)):
        for text, position in documents(paths[number], start[1] if number == start[0] else 0, key, json_lines):
            if text is None:
                left_out += 1
            else:
                texts.append(text)
                size += len(text)
            at = (number, position)
            if size >= BLOCK:
                yield texts, left_out, at
                texts, size, left_out = [], 0, 0
    yield texts, left_out, (len(paths), 0)


def tokenizer_of(model):
    try:
        import tokenizers
    except ImportError:
        fail("the tokenizers package is missing: pip install tokenizers")
    path = os.path.join(model, "tokenizer.json") if os.path.isdir(model) else model
    if not os.path.isfile(path):
        fail(f"{path}: no such file; MODEL is a tokenizer.json or a folder with one")
    try:
        tokenizer = tokenizers.Tokenizer.from_file(path)
    except Exception as error:  # the package has no class of its own
        fail(f"{path}: no tokenizer: {error}")
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return tokenizer


def load_tokenizer(model, eod):
    """(tokenizer, id of the token at the end of a document)"""
    tokenizer = tokenizer_of(model)
    folder = model if os.path.isdir(model) else os.path.dirname(model)
    settings = os.path.join(folder, "tokenizer_config.json")
    if eod is None and os.path.isfile(settings):
        with open(settings) as file:
            eod = json.load(file).get("eos_token")
        eod = eod["content"] if isinstance(eod, dict) else eod
    if eod is None:
        fail(f"{folder or '.'}: no tokenizer_config.json with an eos_token: name the token that ends a document with --eod")
    if tokenizer.token_to_id(eod) is None:
        fail(f"'{eod}' (--eod) is no token of {model}")
    return tokenizer, tokenizer.token_to_id(eod)


def write_json(path, values):
    with open(path + ".new", "w") as file:
        json.dump(values, file, indent=1)
        file.write("\n")
    os.replace(path + ".new", path)


def write_index(path, code, lengths):
    """Megatron's index: each document is one sequence."""
    width = array.array(code).itemsize
    offsets, at = array.array("q"), 0
    for length in lengths:
        offsets.append(at)
        at += length * width
    with open(path + ".new", "wb") as file:
        file.write(b"MMIDIDX\0\0" + struct.pack("<QBQQ", 1, TYPES[code], len(lengths), len(lengths) + 1))
        lengths.tofile(file)
        offsets.tofile(file)
        array.array("q", range(len(lengths) + 1)).tofile(file)
    os.replace(path + ".new", path)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", metavar="MODEL")
    parser.add_argument("files", metavar="FILES", nargs="+")
    parser.add_argument("--out", metavar="PREFIX", required=True)
    parser.add_argument("--key", default="text", help="of a line of JSON (default: text)")
    parser.add_argument("--json-lines", action="store_true", help="every file has JSON lines, whatever its name")
    parser.add_argument("--eod", metavar="TOKEN", help="ends a document")
    parser.add_argument("--overwrite", action="store_true", help="replaces tokens that are there")
    options = parser.parse_args()

    tokenizer, eod = load_tokenizer(options.model, options.eod)
    vocab_size = max(tokenizer.get_vocab(with_added_tokens=True).values()) + 1
    code = "H" if vocab_size < 65500 else "i"  # as Megatron-LM chooses
    width = array.array(code).itemsize
    paths = list(files_of(options.files))
    sizes = [os.path.getsize(path) for path in paths]
    made_from = {"tokenizer": hashlib.sha256(tokenizer.to_str().encode()).hexdigest(), "eod": eod, "key": options.key,
                 "json_lines": options.json_lines, "files": list(map(list, zip(paths, sizes)))}
    bin_path, length_path, about_path = (options.out + ending for ending in (".bin", ".lengths", ".json"))
    written = [os.path.realpath(path) for path in (bin_path, length_path, about_path, options.out + ".idx")]
    for path in paths:
        if os.path.realpath(path) in written:
            fail(f"{path}: is among FILES, and --out {options.out} would write it: name another --out")
    os.makedirs(os.path.dirname(options.out) or ".", exist_ok=True)

    state = {"at": [0, 0], "documents": 0, "tokens": 0, "bytes": 0, "left_out": 0}
    if os.path.exists(about_path) and not options.overwrite:
        with open(about_path) as file:
            try:
                before = json.load(file)
                before["made_from"], before["state"]
            except (ValueError, TypeError, KeyError):
                fail(f"{about_path}: exists, and is not a file of this script: name another --out")
        if before["made_from"] != made_from and before["state"]["documents"]:
            fail(f"{about_path}: tokens of other files or another tokenizer; --overwrite replaces them")
        if before["made_from"] == made_from:
            state = before["state"]
        for path in paths if state["documents"] else []:
            if os.path.getmtime(path) > os.path.getmtime(about_path):
                fail(f"{path}: was written after {about_path}, of other text perhaps; --overwrite makes all tokens again")
        finished = state["at"][0] == len(paths) and os.path.exists(options.out + ".idx")
        for path, size in ((bin_path, state["tokens"] * width), (length_path, 0 if finished else state["documents"] * 4)):
            if size > (os.path.getsize(path) if os.path.exists(path) else 0):
                fail(f"{path}: has less than {about_path} counts; --overwrite makes all tokens again")
        if finished:
            print(f"{options.out}: finished, {state['documents']} documents, {state['tokens']} tokens")
            return
        if state["documents"]:
            print(f"{options.out}: goes on after {state['documents']} documents", file=sys.stderr)
    elif os.path.exists(bin_path) and not options.overwrite:
        fail(f"{bin_path}: exists; --overwrite replaces it")
    if os.path.exists(options.out + ".idx"):
        os.remove(options.out + ".idx")

    def note():
        write_json(about_path, {"vocab_size": vocab_size, "made_from": made_from, "state": state})

    note()
    total, began = sum(sizes), time.time()
    done_before = sum(sizes[:state["at"][0]]) + state["at"][1]
    with open(bin_path, "ab") as tokens_file, open(length_path, "ab") as lengths_file:
        tokens_file.truncate(state["tokens"] * width)  # what an interrupted run wrote past its last note
        lengths_file.truncate(state["documents"] * 4)
        for texts, left_out, at in blocks(paths, state["at"], options.key, options.json_lines):
            tokens, lengths = array.array(code), array.array("i")
            for encoding in tokenizer.encode_batch_fast(texts, add_special_tokens=False):
                tokens.extend(encoding.ids)
                tokens.append(eod)
                lengths.append(len(encoding.ids) + 1)
            tokens.tofile(tokens_file)
            lengths.tofile(lengths_file)
            for file in (tokens_file, lengths_file):
                file.flush()
                os.fsync(file.fileno())
            state = {"at": list(at), "documents": state["documents"] + len(lengths), "tokens": state["tokens"] + len(tokens),
                     "bytes": state["bytes"] + sum(len(text.encode()) for text in texts), "left_out": state["left_out"] + left_out}
            note()
            done = sum(sizes[:at[0]]) + at[1]
            rate = (done - done_before) / max(time.time() - began, 1e-3)
            print(f"{100 * done / max(total, 1):5.1f} %  {state['documents']} documents, {state['tokens'] / 1e6:.2f} M tokens, "
                  f"{rate / 1e6:.1f} MB/s, ETA {(total - done) / max(rate, 1):.0f} s", file=sys.stderr)
    if state["documents"] == 0:
        fail("the files hold no document")

    lengths = array.array("i")
    with open(length_path, "rb") as file:
        lengths.fromfile(file, state["documents"])
    write_index(options.out + ".idx", code, lengths)
    os.remove(length_path)
    print(f"{options.out}.bin, .idx: {state['documents']} documents, {state['tokens']} tokens of {8 * width} bits, vocabulary of {vocab_size}"
          + (f"; {state['left_out']} files left out" if state["left_out"] else ""))


if __name__ == "__main__":
    main()
