"""Make a folder of training data: prompts, then responses of the model, shard by shard."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from hashlib import sha256
from pathlib import Path
from typing import Any

from dflash_jax.base.outputs import CompletionOutput
from dflash_jax.llm import LLM
from dflash_jax.progress import phase
from dflash_jax.text.repetition import repeated_ngrams
from dflash_jax.text.tokenizer import TOKENIZER_FILES
from dflash_jax.train.data.complete import Part, complete_parts
from dflash_jax.train.data.folder import DataFolder
from dflash_jax.train.data.options import DataOptions, shards_of
from dflash_jax.train.data.prompts import TokenizedPrompt, drop_duplicates, read_prompts, tokenize_prompts
from dflash_jax.train.data.self_prompts import make_prompts
from dflash_jax.train.data.shards import Response

TEXT_FILES = (*TOKENIZER_FILES, "chat_template.jinja", "generation_config.json", "special_tokens_map.json")
Job = tuple[TokenizedPrompt, float]  # what to answer, at which temperature


def make_data(llm: LLM, options: DataOptions, folder: DataFolder) -> None:
    """Make all that the folder lacks.

    The answer to a prompt depends on its own seed only, as long as the engine's arithmetic does not depend on what runs
    beside it. With bfloat16 on GPUs it does a little, so that a resumed run may differ in places from one that never
    stopped.

    Args:
        llm: the engine.
        options: of the data.
        folder: that it is made in.

    Raises:
        ConfigError: a prompt cannot be served, the model cannot make prompts, or a file cannot be written.
    """
    prompts, counts = _prompts(llm, options, folder)
    folder.note_prompts(counts)
    temperatures = options.temperatures
    shards = shards_of(len(prompts) * len(temperatures), options.shard_size)
    names = [f"shard-{number:05d}.jsonl" for number in range(len(shards))]
    missing = [(n, numbers) for n, numbers in zip(names, shards, strict=True) if n not in folder.manifest.shards]

    def jobs_of(numbers: range) -> list[Job]:
        return [(prompts[i // len(temperatures)], temperatures[i % len(temperatures)]) for i in numbers]

    def part_of(numbers: range) -> Part:
        jobs = zip(numbers, jobs_of(numbers), strict=True)
        return [prompt.token_ids for prompt, _ in jobs_of(numbers)], [options.answer_params(t, i) for i, (_, t) in jobs]

    with phase("answering", sum(len(numbers) for _, numbers in missing)) as now:
        completed = complete_parts(llm, (part_of(numbers) for _, numbers in missing), now.advance)
        for (name, numbers), outputs in zip(missing, completed, strict=True):
            folder.add_shard(name, *responses_of(jobs_of(numbers), outputs, options))
    folder.finish()


def _prompts(llm: LLM, options: DataOptions, folder: DataFolder) -> tuple[list[TokenizedPrompt], dict[str, int]]:
    """All prompts to answer, and counts of what became of those that were read or made."""
    if options.self_prompts:
        unique, counts = make_prompts(llm, options, folder)
    else:
        with phase("reading the prompts"):
            read = read_prompts(options.prompts)
            unique = drop_duplicates(read)
        counts = {"prompts_read": len(read), "prompts_duplicate": len(read) - len(unique)}
    prompts, tokenized = tokenize_prompts(
        unique, llm.frontend, max_prompts=options.max_prompts, chat_template_kwargs=options.chat_template_kwargs
    )
    total = Counter(prompts=len(prompts))
    for part in (counts, tokenized):
        total.update(part)
    return prompts, dict(total)


def responses_of(
    jobs: Sequence[Job], outputs: Sequence[CompletionOutput], options: DataOptions
) -> tuple[list[Response], dict[str, int]]:
    """The responses of a shard that pass the filters, and counts of what became of all of them.

    Args:
        jobs: prompt and temperature of each output.
        outputs: of the engine.
        options: hold the filters.
    """
    responses: list[Response] = []
    counts = Counter(dict.fromkeys(("failed", "too_short", "repetitive", "prompt_tokens", "response_tokens"), 0))
    for (prompt, temperature), output in zip(jobs, outputs, strict=True):
        dropped = reason_to_drop(output, options)
        if dropped is not None:
            counts[dropped] += 1
            continue
        counts["prompt_tokens"] += len(prompt.token_ids)
        counts["response_tokens"] += len(output.token_ids)
        reason = output.finish_reason or ""
        responses.append(Response(prompt.token_ids, output.token_ids, temperature, reason, prompt.source))
    return responses, {"answered": len(jobs), "responses": len(responses), **counts}


def reason_to_drop(output: CompletionOutput, options: DataOptions) -> str | None:
    """Why an output is dropped: "failed", "too_short" or "repetitive"; None keeps it."""
    if output.finish_reason not in ("stop", "length"):
        return "failed"
    if len(output.token_ids) < options.min_tokens:
        return "too_short"
    if options.max_repetition is not None and repeated_ngrams(output.token_ids) > options.max_repetition:
        return "repetitive"
    return None


def fingerprint(folder: Path) -> Mapping[str, Any]:
    """Hashes that tell a model from others without reading its weights.

    They are the sha256 of its configuration, of names, sizes and headers of its weight files, and of the files of its
    tokenizer and chat template.
    """
    return {
        "config_sha256": _sha256_of_files([folder / "config.json"]),
        "weights_sha256": _sha256_of_headers(sorted(folder.glob("*.safetensors"))),
        "tokenizer_sha256": _sha256_of_files([folder / name for name in TEXT_FILES]),
    }


def _sha256_of_files(paths: Sequence[Path]) -> str:
    digest = sha256()
    for path in paths:
        if path.is_file():
            content = path.read_bytes()
            digest.update(f"{path.name} {len(content)}\n".encode() + content)
    return digest.hexdigest()


def _sha256_of_headers(paths: Sequence[Path]) -> str:
    digest = sha256()
    for path in paths:
        size = path.stat().st_size
        with path.open("rb") as stream:
            header = stream.read(min(int.from_bytes(stream.read(8), "little"), size))
        digest.update(f"{path.name} {size}\n".encode() + header)
    return digest.hexdigest()
