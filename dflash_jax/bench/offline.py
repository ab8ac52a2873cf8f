"""`bench offline`: the workload of `bench serve` through `LLM`, in process.

All requests arrive at the start and the engine runs `--max-num-seqs` at a time, so TTFT and E2EL include the wait for a
slot. Compare throughput, TPOT and ITL with `bench serve`.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Sequence
from typing import Any

from dflash_jax.base.acceptance import Acceptance, of_engine
from dflash_jax.base.errors import DFlashError
from dflash_jax.base.outputs import RequestOutput
from dflash_jax.base.values import Prompt, SamplingParams
from dflash_jax.bench import report, workload
from dflash_jax.bench.options import FEW_RANDOM, MOST_RANDOM
from dflash_jax.bench.stats import RequestRecord
from dflash_jax.llm import LLM
from dflash_jax.loading import find_models, load_llm
from dflash_jax.options.flags import add_engine_arguments
from dflash_jax.parallel.platform import runs_on_cpus
from dflash_jax.progress import phase
from dflash_jax.text.request_files import SampleRequest

HELP = "run a workload through the engine in process and measure throughput and acceptance"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the flags of the command: those of the engine, the workload and the report."""
    add_engine_arguments(parser, compile_at_start=None)
    workload.add_arguments(parser)
    report.add_arguments(parser)


def run(args: argparse.Namespace) -> int:
    """Measure, print and write; returns the exit status.

    Raises:
        DFlashError: an option is wrong, the model cannot be loaded, or a prompt cannot be served.
    """
    path = report.output_path(args)
    with phase("making the workload"):
        number = FEW_RANDOM if runs_on_cpus() else MOST_RANDOM
        load = workload.load(args, as_text=False, num_random=number)
    llm = load_llm(args, find_models(args), seed=args.seed)
    if args.compile_at_start is None:
        with phase("preparing") as now:
            prompts, params = ask(llm, [*load.warmups, *load.requests], args)
            llm.compile(prompts, params, within=now.within)
    if load.warmups:
        with report.counting("warming up", len(load.warmups)) as advance:
            records, _ = complete_all(llm, load.warmups, args, advance)
        for record in records:
            if record.error_kind is not None:
                raise DFlashError(f"a warm-up request failed: {record.error}")
    with report.counting("measuring", len(load.requests)) as advance:
        records, outputs = complete_all(llm, load.requests, args, advance)
    result = report.build_result(
        args,
        records,
        model=args.model,
        server=None,
        acceptance=_acceptance(llm, outputs),
        generator=None,
        warnings=load.warnings,
    )
    return report.finish(result, path)


def complete_all(
    llm: LLM,
    requests: Sequence[SampleRequest],
    args: argparse.Namespace,
    advance: Callable[[RequestRecord], None],
) -> tuple[list[RequestRecord], list[RequestOutput]]:
    """Complete all requests.

    Args:
        llm: the engine.
        requests: of the workload.
        args: of the command.
        advance: called with the record of each request that ends.

    Returns:
        Records, whose times count from the start, and final outputs, in the order of the requests.
    """
    outputs = llm.stream(*ask(llm, requests, args))  # checks and tokenises them before the clock starts
    clock = time.perf_counter()
    records: dict[str, RequestRecord] = {}
    last: dict[str, RequestOutput] = {}
    for output in outputs:
        record = records.setdefault(output.request_id, RequestRecord(0))
        _note(record, output, time.perf_counter() - clock)
        if output.finished:
            last[output.request_id] = output
            advance(record)
    order = sorted(records, key=int)  # `LLM` numbers requests in their order
    for number, request in zip(order, requests, strict=True):
        records[number].output_len = request.output_len
    return [records[number] for number in order], [last[number] for number in order]


def ask(
    llm: LLM, requests: Sequence[SampleRequest], args: argparse.Namespace
) -> tuple[list[Prompt], list[SamplingParams]]:
    """Prompts and sampling parameters of requests."""
    prompts = [_prompt(llm, request) for request in requests]
    params = [
        SamplingParams(temperature=args.temperature, max_tokens=request.output_len, ignore_eos=args.ignore_eos)
        for request in requests
    ]
    return prompts, params


def _note(record: RequestRecord, output: RequestOutput, now: float) -> None:
    """Add the tokens that an output has gained to its record."""
    completion = output.outputs[0]
    gained = len(completion.token_ids) - record.completion_tokens
    if gained:
        record.arrivals.append((now, gained))
    record.end = now
    record.prompt_tokens, record.completion_tokens = len(output.prompt_token_ids), len(completion.token_ids)
    record.finish_reason = completion.finish_reason
    if completion.error is not None:
        record.error_kind, record.error = "engine", completion.error


def _prompt(llm: LLM, request: SampleRequest) -> Prompt:
    prompt: Any = request.prompt
    if request.is_chat:
        return llm.frontend.chat_prompt(prompt)
    return prompt if request.is_text else {"prompt_token_ids": prompt}


def _acceptance(llm: LLM, outputs: Sequence[RequestOutput]) -> Acceptance | None:
    """Acceptance over all rounds; None without a drafter."""
    if not llm.config.num_speculative_tokens:
        return None
    lengths = [length for output in outputs for length in output.metrics.acceptance_lengths]
    return of_engine(lengths, sum(sum(output.metrics.draft_lengths) for output in outputs))
