"""The costs of a request as clients read them: OpenAI's usage, vLLM's metrics, and which tokens were drafted."""

from __future__ import annotations

import time
from typing import Any, Literal

from dflash_jax.serve.answers.jobs import Job, Round
from dflash_jax.serve.answers.server_state import ServerState
from dflash_jax.serve.engine_link.link_messages import CompletionDelta


def costs(
    state: ServerState, job: Job, *, with_reasoning: bool = False, with_meta_info: bool = False
) -> dict[str, Any]:
    """The fields `usage` and `metrics` of a complete answer, and SGLang's `meta_info` if it is wanted."""
    args = state.args
    usage = usage_of(job, with_cached=args.enable_prompt_tokens_details, with_reasoning=with_reasoning)
    metrics = metrics_of(job, args.per_request_spec_decode_metrics, state.ready.num_speculative_tokens)
    costs: dict[str, Any] = {"usage": usage} | ({} if metrics is None else {"metrics": metrics})
    if with_meta_info and job.num_completions == 1:
        costs["meta_info"] = {
            "id": job.id,
            "finish_reason": {"type": job.finish_reasons[0]} if job.finish_reasons else None,
            "prompt_tokens": job.num_prompt_tokens,
            "completion_tokens": job.num_tokens,
            "cached_tokens": job.num_cached_tokens,
            "e2e_latency": time.perf_counter() - job.started,
        } | sglang_speculation_of(job.rounds, state.ready.num_speculative_tokens)
    return costs


def usage_of(job: Job, *, with_cached: bool, with_reasoning: bool = False) -> dict[str, Any]:
    """OpenAI's `usage` of what has come so far."""
    prompt, completion = job.num_prompt_tokens, 0 if job.is_echo_only else job.num_tokens
    usage: dict[str, Any] = {
        "prompt_tokens": prompt,
        "completion_tokens": completion,
        "total_tokens": prompt + completion,
    }
    if with_cached:
        usage["prompt_tokens_details"] = {"cached_tokens": job.num_cached_tokens}
    if with_reasoning:
        usage["completion_tokens_details"] = {"reasoning_tokens": job.num_reasoning_tokens}
    return usage


def metrics_of(
    job: Job, detail: Literal["none", "summary", "detailed"], num_speculative_tokens: int
) -> dict[str, Any] | None:
    """The `metrics` of a request as in vLLM; None if it has several completions, for which vLLM defines none."""
    if detail == "none" or job.num_completions != 1 or job.first_token is None:
        return None
    seconds = time.perf_counter() - job.started
    decode = max(seconds - job.first_token, 1e-9)
    metrics: dict[str, Any] = {
        "time_to_first_token_ms": 1e3 * job.first_token,
        "generation_time_ms": 1e3 * decode,
        "queue_time_ms": None if job.queue is None else 1e3 * job.queue,
        "mean_itl_ms": 1e3 * decode / (job.num_tokens - 1) if job.num_tokens > 1 else None,
        "tokens_per_second": job.num_tokens / max(seconds, 1e-9),
    }
    if num_speculative_tokens:
        metrics["speculative_decoding"] = speculation_of(job.rounds, num_speculative_tokens, detail == "detailed")
    return metrics


def speculation_of(rounds: list[Round], num_speculative_tokens: int, with_steps: bool) -> dict[str, Any]:
    """The `speculative_decoding` of vLLM's metrics, over the rounds that verified drafts.

    The last token that a round emits counts as the target's own, even if the text ended within accepted drafts.
    """
    steps = [(drafted, emitted - 1) for drafted, emitted in rounds if drafted and emitted]
    histogram = [0] * (num_speculative_tokens + 1)
    for _, accepted in steps:
        histogram[accepted] += 1
    drafted, accepted = sum(d for d, _ in steps), sum(a for _, a in steps)
    summary = {
        "mean_acceptance_length": 1 + accepted / len(steps) if steps else None,
        "draft_acceptance_rate": accepted / drafted if drafted else None,
        "acceptance_histogram": histogram,
        "num_spec_steps": len(steps),
        "num_accepted_draft_tokens": accepted,
        "num_draft_tokens": drafted,
        "num_spec_tokens": num_speculative_tokens,
    }
    if with_steps:
        summary["per_step_accepted"] = [a for _, a in steps]
        summary["per_step_drafted"] = [d for d, _ in steps]
    return summary


def sglang_speculation_of(rounds: list[Round], num_speculative_tokens: int) -> dict[str, Any]:
    """SGLang's numbers; none without a drafter.

    Clients divide tokens by `spec_verify_ct`, so it counts rounds without drafts too.
    """
    if not num_speculative_tokens:
        return {}
    spec = speculation_of(rounds, num_speculative_tokens, with_steps=False)
    num_rounds = sum(1 for _, emitted in rounds if emitted)
    num_undrafted = num_rounds - spec["num_spec_steps"]
    accepted, (none_accepted, *histogram) = spec["num_accepted_draft_tokens"], spec["acceptance_histogram"]
    return {
        "spec_verify_ct": num_rounds,
        "spec_accept_length": 1 + accepted / num_rounds if num_rounds else None,
        "spec_accept_rate": spec["draft_acceptance_rate"],
        "spec_accepted_drafts": accepted,
        "spec_proposed_drafts": spec["num_draft_tokens"],
        "spec_accept_histogram": [none_accepted + num_undrafted, *histogram],
    }


def drafted_flags(completion: CompletionDelta) -> list[bool]:
    """For each token of a delta, whether the drafter had proposed it."""
    flags: list[bool] = []
    for _, emitted in completion.rounds:
        if emitted:
            flags += [True] * (emitted - 1) + [False]
    return [False] * (len(completion.token_ids) - len(flags)) + flags
