"""Make training data of drafters, or prompts for it, from the corpus of `python_corpus.py`.

    python scripts/code_prompts.py files --corpus build/corpus --tokenizer build/embedded/target --out prompts.jsonl
    python scripts/code_prompts.py chat --corpus build/corpus --out code_prompts_chat.jsonl
    python scripts/code_prompts.py pieces --corpus build/corpus --out text.jsonl

`files` cuts prompts out of training files for a model that completes them: {"prompt": text}, from the begin of a file,
class or function to the end of a line. `chat` writes what a person would ask an instruct model about documented
functions: {"messages": [{"role": "user", "content": text}]}. `pieces` writes pieces of the files themselves: {"text":
text}, for a drafter that learns from the text that its target was trained on. Held-out files are never read.
"""

from __future__ import annotations

import argparse
import ast
import json
import re
import textwrap
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
from tokenizers import Tokenizer
from train_embedded import read_texts

PIECE = (300, 2400)  # characters of a piece: limits
LENGTHS = (32, 512)  # tokens of a prompt to complete: limits
BEGINNINGS = re.compile(r"^[ \t]*(?:(?:async )?def|class|@\w)", re.MULTILINE)
WHOLE_FILES = 0.2  # share of prompts that begin where their file begins
LINES = (3, 40)  # lines of a function: limits
DOCSTRING = (40, 800)  # characters of a docstring: limits
BUGS = {" == ": " != ", " < ": " >= ", " > ": " <= ", " + ": " - ", " not ": " ", " and ": " or ", "[0]": "[1]"}


def cut_prompt(text: str, tokenizer: Tokenizer, rng: np.random.Generator) -> str | None:
    """A prompt cut out of a file, or None if the rest of the file is too short. Half of them end in a newline."""
    beginning = BEGINNINGS.search(text, int(rng.integers(len(text)))) if rng.random() >= WHOLE_FILES else None
    start = beginning.start() if beginning else 0
    shortest, longest = LENGTHS
    wanted = int(np.exp(rng.uniform(np.log(shortest), np.log(longest))))
    rest = text[start : start + 8 * wanted]
    ends = [end for _, end in tokenizer.encode(rest, add_special_tokens=False).offsets]
    if len(ends) < shortest:
        return None
    end = rest.rfind("\n", ends[shortest - 1], ends[min(wanted, len(ends)) - 1])
    if end < 0:
        return None
    return rest[: end + int(rng.integers(2))]


def file_prompts(texts: list[str], tokenizer: Tokenizer, rng: np.random.Generator) -> Iterator[str]:
    """Prompts without end, each different; files are chosen in proportion to their lengths."""
    lengths = np.array([len(text) for text in texts], np.float64)
    seen: set[str] = set()
    while True:
        for index in rng.choice(len(texts), 1024, p=lengths / lengths.sum()):
            prompt = cut_prompt(texts[index], tokenizer, rng)
            if prompt is not None and prompt not in seen:
                seen.add(prompt)
                yield prompt


def file_pieces(texts: list[str], rng: np.random.Generator) -> Iterator[str]:
    """Pieces of all files in random order; each begins at a line.

    Pieces of a file adjoin, and the first of them is shorter.
    """
    shortest, longest = PIECE
    pieces = []
    for text in texts:
        for start in range(-int(rng.integers(longest)), len(text) - shortest, longest):
            piece = text[text.find("\n", start) + 1 if start > 0 else 0 : start + longest]
            if len(piece) >= shortest:
                pieces.append(piece)
    return (pieces[i] for i in rng.permutation(len(pieces)))


@dataclass(frozen=True)
class Function:
    """A documented function of the corpus, without its indentation."""

    name: str
    head: str  # signature and docstring
    body: str
    docstring: str

    @property
    def summary(self) -> str:
        """The first sentence of the docstring."""
        return " ".join(self.docstring.split("\n\n")[0].split())


def functions(text: str) -> list[Function]:
    """The documented functions and methods of a file that are neither trivial nor long."""
    lines, documented = text.splitlines(), []
    for node in ast.walk(parse(text)):
        if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) or len(node.body) < 2:
            continue
        if node.name.startswith("__"):
            continue  # special methods mean little without their class
        docstring, end = ast.get_docstring(node) or "", node.end_lineno or 0
        if not (within(LINES, end - node.lineno + 1) and within(DOCSTRING, len(docstring)) and docstring.isascii()):
            continue
        source = textwrap.dedent("\n".join(lines[node.lineno - 1 : end])).split("\n")
        if source[0].startswith((" ", "\t")):
            continue  # a string in it has less indentation than its code
        first = node.body[1].lineno - node.lineno
        head, body = ("\n".join(part) for part in (source[:first], source[first:]))
        documented.append(Function(node.name, head.rstrip(), body, docstring))
    return documented


def parse(text: str) -> ast.Module:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", SyntaxWarning)
        return ast.parse(text)


def within(bounds: tuple[int, int], value: int) -> bool:
    return bounds[0] <= value <= bounds[1]


def fenced(code: str) -> str:
    return f"```python\n{code}\n```"


def with_bug(function: Function, rng: np.random.Generator) -> str:
    """The source of the function with one operator changed, if it has one."""
    places = [(match.start(), wrong) for wrong in BUGS for match in re.finditer(re.escape(wrong), function.body)]
    body = function.body
    if places:
        at, wrong = places[int(rng.integers(len(places)))]
        body = body[:at] + BUGS[wrong] + body[at + len(wrong) :]
    return f"{function.head}\n{body}"


def without_docstring(function: Function) -> str:
    """The source of the function without its docstring, as `ast` writes it."""
    tree = parse(f"{function.head}\n{function.body}")
    (node,) = tree.body
    assert isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
    del node.body[0]
    return ast.unparse(tree)


Phrase = Callable[[Function, np.random.Generator], str]
PHRASES: tuple[Phrase, ...] = (
    lambda f, rng: f"Complete the following Python function:\n\n{fenced(f.head)}",
    lambda f, rng: f"Complete this function. Return only the code.\n\n{fenced(f.head)}",
    lambda f, rng: f"Implement the body of `{f.name}` in Python.\n\n{fenced(f.head)}",
    lambda f, rng: f"{f.head}\n\nFinish this Python function.",
    lambda f, rng: f"Write a Python function `{f.name}` that does the following: {f.summary}",
    lambda f, rng: f"I need a Python function for this:\n\n{f.docstring}\n\nHow would you write it?",
    lambda f, rng: f"Explain what this Python function does.\n\n{fenced(without_docstring(f))}",
    lambda f, rng: f"Explain the following code step by step:\n\n{fenced(without_docstring(f))}",
    lambda f, rng: f"Write a docstring for this function:\n\n{fenced(without_docstring(f))}",
    lambda f, rng: f"Find the bug in this function and fix it:\n\n{fenced(with_bug(f, rng))}",
    lambda f, rng: f"`{f.name}` gives wrong results. What is wrong with it?\n\n{fenced(with_bug(f, rng))}",
    lambda f, rng: f"Write unit tests for this function:\n\n{fenced(without_docstring(f))}",
    lambda f, rng: f"Rewrite this function so that it is easier to read:\n\n{fenced(without_docstring(f))}",
)


def chat_prompts(texts: list[str], rng: np.random.Generator) -> Iterator[str]:
    """A question about each of at most three functions of a file."""
    for index in rng.permutation(len(texts)):
        candidates = functions(texts[index])
        for position in rng.permutation(len(candidates))[:3]:
            yield PHRASES[int(rng.integers(len(PHRASES)))](candidates[position], rng)


def write_lines(path: Path, values: Iterator[dict[str, Any]]) -> int:
    """Write one object a line; returns the number of lines."""
    lines = [json.dumps(value, ensure_ascii=False) + "\n" for value in values]
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(lines), encoding="utf-8")
    return len(lines)


def run_files(args: argparse.Namespace) -> int:
    """Write prompts that a model is to complete."""
    tokenizer = Tokenizer.from_file(str(args.tokenizer / "tokenizer.json"))
    texts = read_texts(args.corpus / "train.jsonl.xz")
    prompts = file_prompts(texts, tokenizer, np.random.default_rng(args.seed))
    return write_lines(args.out, ({"prompt": prompt} for prompt in islice(prompts, args.count)))


def run_chat(args: argparse.Namespace) -> int:
    """Write questions about functions, for an instruct model."""
    texts = read_texts(args.corpus / "train.jsonl.xz")
    prompts = chat_prompts(texts, np.random.default_rng(args.seed))
    messages = ([{"role": "user", "content": prompt}] for prompt in islice(prompts, args.count))
    return write_lines(args.out, ({"messages": message} for message in messages))


def run_pieces(args: argparse.Namespace) -> int:
    """Write pieces of files, to train on."""
    pieces = file_pieces(read_texts(args.corpus / "train.jsonl.xz"), np.random.default_rng(args.seed))
    return write_lines(args.out, ({"text": piece} for piece in islice(pieces, args.count)))


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    subparsers = parser.add_subparsers(required=True)
    commands = (("files", run_files, 60_000), ("chat", run_chat, 15_000), ("pieces", run_pieces, 16_000))
    for name, run, count in commands:
        command = subparsers.add_parser(name, help=run.__doc__, formatter_class=argparse.ArgumentDefaultsHelpFormatter)
        command.set_defaults(run=run)
        command.add_argument("--corpus", type=Path, default=Path("build/corpus"))
        command.add_argument("--out", type=Path, required=True)
        command.add_argument("--count", type=int, default=count)
        command.add_argument("--seed", type=int, default=0)
        if run is run_files:
            command.add_argument("--tokenizer", type=Path, default=Path("build/embedded/target"), help="a folder")
    args = parser.parse_args(arguments)
    print(f"{args.run(args)} lines in {args.out}")


if __name__ == "__main__":
    main()
