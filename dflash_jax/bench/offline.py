"""`bench offline`: the workload of `bench serve` through `LLM`, in process.

All requests are there from the start and the engine runs `--max-num-seqs` at a time, so that TTFT and E2EL hold the
wait for a slot. Compare throughput, TPOT and ITL with `bench serve`.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Sequence
from typing import Any

from dflash_jax.bench import acceptance as accepted
from dflash_jax.bench import report, workload
from dflash_jax.bench.stats import RequestRecord
from dflash_jax.bench.workload import SampleRequest
from dflash_jax.config import EngineArgs
from dflash_jax.config.engine import DTYPES, KV_CACHE_DTYPES
from dflash_jax.core import Prompt, RequestOutput, SamplingParams
from dflash_jax.errors import DFlashError
from dflash_jax.llm import LLM

HELP = "run a workload through the engine in process and measure throughput and acceptance"
ENGINE = (
    "dtype",
    "kv_cache_dtype",
    "draft_kv_cache_dtype",
    "max_model_len",
    "max_num_seqs",
    "max_num_batched_tokens",
    "num_speculative_tokens",
    "tensor_parallel_size",
    "page_size",
    "enable_prefix_caching",
    "gpu_memory_utilization",
    "kv_cache_memory_bytes",
    "compile_at_start",
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of the command: the engine's, the workload's and the report's."""
    default, on_off = EngineArgs(), argparse.BooleanOptionalAction
    group = parser.add_argument_group("engine")
    add = group.add_argument
    add("--model", help="folder or Hugging Face Hub id; without it, the embedded pair")
    add("--draft-model", help="the same of its DFlash drafter; without it, one token a pass")
    add("--dtype", default=default.dtype, choices=["auto", *DTYPES], help="of parameters and activations")
    kv_dtypes = ["auto", *KV_CACHE_DTYPES]
    add("--kv-cache-dtype", default=default.kv_cache_dtype, choices=kv_dtypes, help="of stored K and V")
    add("--draft-kv-cache-dtype", default=default.draft_kv_cache_dtype, choices=kv_dtypes, help="the drafter's")
    add("--max-model-len", type=int, help="tokens of prompt and completion")
    add("--max-num-seqs", type=int, default=default.max_num_seqs, help="most sequences that run side by side")
    add("--max-num-batched-tokens", type=int, default=default.max_num_batched_tokens, help="prompt tokens a step")
    add("--num-speculative-tokens", type=int, help="drafts verified each round; without it, as many as pay")
    add("--tensor-parallel-size", type=int, default=default.tensor_parallel_size, help="devices that share the model")
    add("--page-size", type=int, default=default.page_size, help="tokens a page of the KV cache")
    add(
        "--enable-prefix-caching", action=on_off, default=default.enable_prefix_caching, help="keep past prompts' pages"
    )
    add("--gpu-memory-utilization", type=float, default=default.gpu_memory_utilization, help="share of its memory")
    add("--kv-cache-memory-bytes", type=int, help="memory for the KV cache; overrides the share")
    add("--compile-at-start", action=on_off, default=True, help="compile every step before the warm-ups")
    workload.add_arguments(parser)
    report.add_arguments(parser)


def run(args: argparse.Namespace) -> int:
    """Measure, print, write; returns the exit status.

    Raises:
        DFlashError: an option is wrong, the model cannot be loaded, or a prompt cannot be served.
    """
    path = report.output_path(args)
    load = workload.load(args, as_text=False)
    options = {name: getattr(args, name) for name in ENGINE}
    llm = LLM(args.model, args.draft_model, seed=args.seed, **options)
    if load.warmups:
        with report.progress(len(load.warmups), "warming up") as advance:
            records, _ = complete_all(llm, load.warmups, args, advance)
        for record in records:
            if record.error_kind is not None:
                raise DFlashError(f"a warm-up request failed: {record.error}")
    with report.progress(len(load.requests), "measuring") as advance:
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
    """Complete all requests; their records, times counting from the start, and their outputs."""
    prompts = [_prompt(llm, request) for request in requests]
    params = [
        SamplingParams(temperature=args.temperature, max_tokens=request.output_len, ignore_eos=args.ignore_eos)
        for request in requests
    ]
    outputs = llm.stream(prompts, params)  # which checks and tokenises them
    clock = time.perf_counter()
    records: dict[str, RequestRecord] = {}
    last: dict[str, RequestOutput] = {}
    for output in outputs:
        record = records.setdefault(output.request_id, RequestRecord(0))
        _note(record, output, time.perf_counter() - clock)
        if output.finished:
            last[output.request_id] = output
            advance(record)
    order = sorted(records, key=int)  # `LLM` numbers its requests as they are given
    for number, request in zip(order, requests, strict=True):
        records[number].output_len = request.output_len
    return [records[number] for number in order], [last[number] for number in order]


def _note(record: RequestRecord, output: RequestOutput, now: float) -> None:
    """Add to a record what an output has gained."""
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


def _acceptance(llm: LLM, outputs: Sequence[RequestOutput]) -> accepted.Acceptance | None:
    """Of all rounds; None without a drafter."""
    if not llm.config.num_speculative_tokens:
        return None
    lengths = [length for output in outputs for length in output.metrics.acceptance_lengths]
    return accepted.of_engine(lengths, sum(sum(output.metrics.draft_lengths) for output in outputs))
