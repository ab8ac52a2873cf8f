"""Decode the same samples with the drafter and without, with one engine after another."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from dflash_jax.base.values import SEED_LIMIT, SamplingParams
from dflash_jax.eval.acceptance import Acceptance, acceptance_of
from dflash_jax.eval.conversations import Run, converse, is_instruct, joined, opening, prompt_of
from dflash_jax.eval.datasets import Sample
from dflash_jax.llm import LLM
from dflash_jax.progress import Begin, Phase, phase

BATCHES = 4  # batches of max_num_seqs samples that are decoded with the drafter, or without, before the other turn
WARMUP_TOKENS = 16  # of each answer


@dataclass(frozen=True)
class Sampling:
    """Sampling of answers, without the temperature.

    Attributes:
        max_tokens: limit of tokens of an answer.
        seed: of the first sample; later ones count on from it.
        style: of prompts, as in `conversations.opening`.
    """

    max_tokens: int
    seed: int
    style: str

    def params(self, temperature: float, num: int, *, speculation: bool) -> list[SamplingParams]:
        """Parameters of each sample, seeded so that an answer is the same with the drafter and without."""
        return [
            SamplingParams(
                temperature=temperature,
                max_tokens=self.max_tokens,
                seed=(self.seed + i) % (SEED_LIMIT // 2),
                speculation=speculation,
            )
            for i in range(num)
        ]


@dataclass(frozen=True)
class Cell:
    """One data set at one temperature and block length.

    Attributes:
        dataset: its name.
        temperature: of sampling.
        num_speculative_tokens: drafts that each round verified, or "auto".
        run: with the drafter.
        plain: without the drafter; None if it was not asked for.
        acceptance: figures of `run`.
    """

    dataset: str
    temperature: float
    num_speculative_tokens: int | str
    run: Run
    plain: Run | None
    acceptance: Acceptance

    @property
    def speedup(self) -> float | None:
        """Tokens/s with the drafter / tokens/s without; None without `plain`."""
        return None if self.plain is None else self.run.tokens_per_second / self.plain.tokens_per_second

    @property
    def differences(self) -> tuple[int, int] | None:
        """Number of answers that differ from those without the drafter, and number of answers compared.

        A later turn is compared only where the conversation before it is the same.
        """
        return None if self.plain is None else differing(self.run, self.plain)


def differing(run: Run, plain: Run) -> tuple[int, int]:
    """Among answers to equal prompts of the same samples: number of those with other tokens, and number of all."""
    pairs = [(mine.output, other.output) for mine, other in zip(run.answers, plain.answers, strict=True)]
    same_prompt = [pair for pair in pairs if pair[0].prompt_token_ids == pair[1].prompt_token_ids]
    differ = sum(mine.outputs[0].token_ids != other.outputs[0].token_ids for mine, other in same_prompt)
    return differ, len(same_prompt)


def measure_engine(
    llm: LLM,
    num_speculative_tokens: int | str,
    datasets: Mapping[str, Sequence[Sample]],
    temperatures: Sequence[float],
    sampling: Sampling,
    *,
    plain: bool,
) -> Iterator[Cell]:
    """Measure the cells of one engine.

    Decoding with and without the drafter takes turns, since the speed of a machine changes with time.

    Args:
        llm: with a drafter.
        num_speculative_tokens: that the engine was loaded with.
        datasets: samples by the name of their data set.
        temperatures: of sampling.
        sampling: its other parameters.
        plain: whether to decode without the drafter, too.

    Yields:
        A cell for each data set and temperature.
    """
    ways = (False, True) if plain else (True,)
    for name, samples in datasets.items():
        for temperature in temperatures:
            cell = f"{name} at temperature {temperature:g}, {num_speculative_tokens} drafts"
            with phase(f"warming up for {cell}"):
                warm_up(llm, samples, temperature, sampling)
            parts: dict[bool, list[Run]] = {way: [] for way in ways}
            size = BATCHES * llm.config.max_num_seqs
            answers = len(ways) * sum(1 + len(sample.follow_ups) for sample in samples)
            with phase(f"answering {cell}", answers) as now:
                for first in range(0, len(samples), size):
                    for way in ways:
                        part = slice(first, first + size)
                        parts[way].append(_run(llm, samples, part, temperature, sampling, way, now))
            runs = {way: joined(parts[way]) for way in ways}
            acceptance = acceptance_of(runs[True].outputs)
            yield Cell(name, temperature, num_speculative_tokens, runs[True], runs.get(False), acceptance)


def compile_programs(
    llm: LLM,
    datasets: Mapping[str, Sequence[Sample]],
    temperatures: Sequence[float],
    sampling: Sampling,
    *,
    plain: bool,
    within: Begin,
) -> None:
    """Compile what `measure_engine` needs for the same arguments, so that it compiles nothing while it measures."""
    instruct = is_instruct(llm.frontend)
    for samples in datasets.values():
        prompts = [prompt_of(opening(s, sampling.style, instruct=instruct), llm.frontend, "warm-up") for s in samples]
        if any(sample.follow_ups for sample in samples):  # their prompts hold answers that are not known yet
            longest = llm.config.max_model_len - sampling.max_tokens
            chunks = [chunk for chunk in llm.engine.shapes.chunks if chunk <= longest]
            prompts += [{"prompt_token_ids": [0] * chunk} for chunk in chunks]
        for temperature in temperatures:
            for way in (False, True) if plain else (True,):
                llm.compile(prompts, sampling.params(temperature, len(prompts), speculation=way), within=within)


def warm_up(llm: LLM, samples: Sequence[Sample], temperature: float, sampling: Sampling) -> None:
    """Answer some samples briefly, with and without the drafter, so that first runs are not timed."""
    first = samples[: llm.config.max_num_seqs]
    brief = Sampling(min(WARMUP_TOKENS, sampling.max_tokens), sampling.seed, sampling.style)
    for speculation in (False, True):
        converse(
            llm,
            [Sample(sample.id, sample.prompt, sample.question) for sample in first],
            brief.params(temperature, len(first), speculation=speculation),
            style=sampling.style,
            salt="warm-up",
        )


def _run(
    llm: LLM,
    samples: Sequence[Sample],
    part: slice,
    temperature: float,
    sampling: Sampling,
    speculation: bool,
    now: Phase,
) -> Run:
    params = sampling.params(temperature, len(samples), speculation=speculation)
    now.note = f"{'with' if speculation else 'without'} the drafter"
    salt = f"{temperature} {now.note}"
    return converse(llm, samples[part], params[part], style=sampling.style, salt=salt, use_tqdm=now.tqdm)
