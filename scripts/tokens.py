#!/usr/bin/env python3
# SPDX-License-Identifier: MIT
"""Text to token ids and back, for fp8flow generate. Needs the tokenizers package. MODEL has a tokenizer.json.

  scripts/tokens.py encode MODEL "Once upon a time"     prints 7454,2402,257,640
  scripts/tokens.py decode MODEL < IDS                  prints the text of the last line, or of ids given as an argument

  fp8flow generate RUN --tokens $(scripts/tokens.py encode MODEL "Once upon a time") | scripts/tokens.py decode MODEL
Exit status 0; 2 for bad arguments or input.
"""

import argparse
import sys

from preprocess_data import fail, tokenizer_of


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("action", choices=["encode", "decode"])
    parser.add_argument("model", metavar="MODEL")
    parser.add_argument("text", metavar="TEXT", nargs="?", help="default: standard input")
    options = parser.parse_args()
    tokenizer = tokenizer_of(options.model)
    text = sys.stdin.read() if options.text is None else options.text
    if options.action == "encode":
        try:
            text.encode()
        except UnicodeEncodeError:
            fail("the text is not UTF-8")
        print(*tokenizer.encode(text, add_special_tokens=False).ids, sep=",")
        return
    lines = text.strip().splitlines() or [""]
    try:
        print(tokenizer.decode([int(word) for word in lines[-1].split(",") if word]))
    except (ValueError, OverflowError):
        fail(f"'{lines[-1]}' is no list of token ids: 1,2,3")


if __name__ == "__main__":
    main()
