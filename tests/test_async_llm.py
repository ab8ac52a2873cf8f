"""Many callers at once: each gets its own answer, may leave at any time, and is told when there is no room."""

import asyncio
import threading
from itertools import pairwise

import pytest

from dflash_jax import LLM, AsyncLLM, EngineDeadError, QueueFullError, RequestError, SamplingParams
from dflash_jax.engine.host import request as request_module
from tests.pairs import GOLDEN, assert_empty, golden_cases, golden_llm, greedy, prompt, tokens_of

PAIR = "qwen3_swa_tied"
CASES = golden_cases(PAIR)


def engine(**options):
    folder = GOLDEN / PAIR
    options = {"compile_at_start": False, "max_num_seqs": 2, "page_size": 8, "num_speculative_tokens": 15} | options
    return AsyncLLM(folder / "target", folder / "draft", dtype="float32", **options)


def run(scenario, **options):
    """A scenario with an engine, which must be empty at the end."""

    async def body():
        async with engine(**options) as llm:
            await scenario(llm)
            while not llm.engine.is_idle:
                await asyncio.sleep(0.01)
            assert_empty(llm.engine)

    asyncio.run(asyncio.wait_for(body(), 240))


async def last(stream):
    return [output async for output in stream][-1]


def test_answers_are_those_of_llm():
    params = [greedy(80), SamplingParams(temperature=0.8, seed=1, n=2, max_tokens=30, ignore_eos=True)]
    prompts = [prompt(*case["input_ids"]) for case in CASES]
    alone = LLM(GOLDEN / PAIR / "target", dtype="float32", max_num_seqs=2)
    expected = [tokens_of([output]) for one in params for output in alone.generate(prompts, one)]

    async def scenario(llm):
        outputs = await asyncio.gather(*(last(llm.generate(p, one)) for one in params for p in prompts))
        assert [tokens_of([output]) for output in outputs] == expected
        assert all(output.finished for output in outputs)

    run(scenario)


def test_outputs_grow():
    async def scenario(llm):
        seen = [o.outputs[0].token_ids async for o in llm.generate(prompt(*CASES[0]["input_ids"]), greedy(80))]
        assert len(seen) > 2
        assert all(longer[: len(shorter)] == shorter for shorter, longer in pairwise(seen))
        assert seen[-1] == CASES[0]["output_ids"]

    run(scenario)


def test_leaving_aborting_and_cancelling():
    async def scenario(llm):
        one_prompt = prompt(*CASES[0]["input_ids"])
        leaving = llm.generate(one_prompt, greedy(80))
        async for _ in leaving:
            break
        await leaving.aclose()

        aborted = llm.generate(one_prompt, greedy(80), request_id="mine")
        await anext(aborted)
        await llm.abort("mine")
        output = await last(aborted)
        assert output.outputs[0].finish_reason == "abort"
        assert output.outputs[0].token_ids == CASES[0]["output_ids"][: len(output.outputs[0].token_ids)]
        await llm.abort("nobody's")

        async def cancelled_midway():
            async for _ in llm.generate(one_prompt, greedy(80)):
                asyncio.current_task().cancel()

        with pytest.raises(asyncio.CancelledError):
            await asyncio.create_task(cancelled_midway())
        assert tokens_of([await last(llm.generate(one_prompt, greedy(80)))]) == [CASES[0]["output_ids"]]

    run(scenario)


def test_bad_requests_and_full_queues_hurt_nobody():
    async def scenario(llm):
        one_prompt = prompt(*CASES[0]["input_ids"])
        running = llm.generate(one_prompt, greedy(80), request_id="first")
        await anext(running)
        with pytest.raises(RequestError, match="'first' is taken"):
            await last(llm.generate(one_prompt, greedy(4), request_id="first"))
        with pytest.raises(RequestError, match="vocabulary"):
            await last(llm.generate(prompt(10**6), greedy(4)))
        with pytest.raises(QueueFullError, match="max_num_queued_seqs=2"):
            await last(llm.generate(one_prompt, greedy(4, n=5)))
        assert len((await last(llm.generate(one_prompt, greedy(4, n=3)))).outputs) == 3  # one has a slot at once
        assert (await last(running)).outputs[0].token_ids == CASES[0]["output_ids"]

    run(scenario, max_num_queued_seqs=2)


def test_ids_that_callers_give_are_in_nobody_s_way():
    async def scenario(llm):
        one_prompt = prompt(*CASES[0]["input_ids"])
        taken = [llm.generate(one_prompt, greedy(80), request_id=str(number)) for number in range(2)]
        for stream in taken:
            await anext(stream)
        assert (await last(llm.generate(one_prompt, greedy(4)))).finished
        for stream in taken:
            await stream.aclose()

    run(scenario)


def test_a_closed_engine_says_so():
    async def scenario():
        llm = engine()
        await asyncio.to_thread(llm.close)
        with pytest.raises(EngineDeadError, match="closed"):
            await last(llm.generate(prompt(1, 2), greedy(4)))

    asyncio.run(scenario())


def test_a_dead_engine_says_so(monkeypatch):
    async def scenario():
        async with engine() as llm:

            def die():
                raise RuntimeError("power cut")

            monkeypatch.setattr(llm.engine, "step", die)
            with pytest.raises(EngineDeadError, match="power cut"):
                await last(llm.generate(prompt(1), greedy(4)))
            with pytest.raises(EngineDeadError, match="power cut"):
                await last(llm.generate(prompt(1), greedy(4)))
            assert llm.is_dead

    asyncio.run(asyncio.wait_for(scenario(), 60))


def test_a_closed_engine_ends_what_runs():
    async def scenario():
        llm = engine()
        running = llm.generate(prompt(*CASES[0]["input_ids"]), greedy(80))
        await anext(running)
        llm.close()
        with pytest.raises(EngineDeadError, match="closed"):
            await last(running)

    asyncio.run(asyncio.wait_for(scenario(), 60))


def test_outputs_are_made_where_they_are_read(monkeypatch):
    """Not in the engine's thread, for which a long answer would cost more each step; and none that nobody reads."""
    makers, make = [], request_module.RequestOutput

    def made(**fields):
        makers.append(threading.current_thread().name)
        return make(**fields)

    monkeypatch.setattr(request_module, "RequestOutput", made)

    async def scenario(llm):
        outputs = [output async for output in llm.generate(prompt(*CASES[0]["input_ids"]), greedy(80))]
        assert outputs[-1].outputs[0].token_ids == CASES[0]["output_ids"]
        assert len(makers) == len(outputs) > 2
        assert set(makers) == {threading.current_thread().name}

    run(scenario)


def test_a_snapshot_is_of_its_time():
    """Whatever is appended to the shared lists between taking it and reading it."""
    llm = golden_llm(PAIR, page_size=8, max_num_seqs=2)
    params = greedy(70, n=2, logprobs=1, prompt_logprobs=1)
    request = llm.frontend.request(prompt(*CASES[0]["input_ids"]), params)
    pairs = [(request.snapshot(), request.output()) for _ in llm.engine.run(request.sequences)]
    assert len(pairs) > 4
    for snapshot, output in pairs:
        late = snapshot.output()
        assert late.outputs == output.outputs
        assert late.prompt_logprobs == output.prompt_logprobs
        assert late.metrics.acceptance_lengths == output.metrics.acceptance_lengths
        assert late.metrics.draft_lengths == output.metrics.draft_lengths
        assert late.finished == output.finished
    assert pairs[-1][1].outputs[0].token_ids == CASES[0]["output_ids"][:70]


def test_books_that_contradict_themselves_end_no_engine(monkeypatch, caplog):
    """What was lost is logged once the last tokens are out, and the engine goes on with books that are right."""

    async def scenario(llm):
        scheduler, events = llm.engine.scheduler, []
        check, publish = scheduler.check_integrity, llm._thread._publish
        monkeypatch.setattr(scheduler, "check_integrity", lambda: (events.append("check"), check()))
        monkeypatch.setattr(llm._thread, "_publish", lambda changed: (publish(changed), events.append("published")))
        one_prompt = prompt(*CASES[0]["input_ids"])
        scheduler.pools[0].take(2)  # that nobody will give back
        assert tokens_of([await last(llm.generate(one_prompt, greedy(80)))]) == [CASES[0]["output_ids"]]
        async with asyncio.timeout(30):  # the engine's thread checks, and then logs
            while "are owned more or less often than counted" not in caplog.text:
                await asyncio.sleep(0.01)
        assert events[-2:] == ["published", "check"]
        assert tokens_of([await last(llm.generate(one_prompt, greedy(80)))]) == [CASES[0]["output_ids"]]
        assert events.count("check") == 1  # not on every idle: it takes time in proportion to all pages
        assert not llm.is_dead

    run(scenario)
