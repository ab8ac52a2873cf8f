"""Snapshots of recurrent states on the device hold the states that the host says they hold."""

import copy
import shutil

import jax.numpy as jnp
import numpy as np

from dflash_jax import LLM
from dflash_jax.engine.engine import Engine
from dflash_jax.engine.host.snapshots import Snapshots
from dflash_jax.parallel.mesh import Mesh
from tests.pairs import DRAFT, HYBRID, RECITER, greedy, prompt, write_model

PROMPTS = [prompt(5, 6, 7, 8, 9, 2), prompt(*[3 + i % 50 for i in range(70)])]  # no length of one is one of the other


def hybrid(folder):
    """A hybrid with a tokenizer, its drafter, and room for one snapshot."""
    raw = copy.deepcopy(HYBRID) | {"image_token_id": 1023}
    raw["text_config"] |= {"vocab_size": 1024, "eos_token_id": 0}
    target, draft = (
        write_model(folder / "target", raw, 1),
        write_model(folder / "draft", DRAFT | {"vocab_size": 1024}, 2),
    )
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(RECITER / "target" / name, target / name)
    options = {"max_num_seqs": 2, "max_model_len": 192, "page_size": 4, "num_speculative_tokens": 5}
    llm = LLM(target, draft, dtype="float32", kv_cache_memory_bytes=2 << 20, state_cache_fraction=0.01, **options)
    assert llm.engine.layout.groups[llm.engine.layout.snapshots].num_units == 1
    return llm


def draft_right(monkeypatch, runner, running, answers):
    """Draft what the target says, so that rounds pass boundaries of pages."""
    drafted = runner.draft

    def draft(tables):
        block, slots = np.array(drafted(tables)), np.asarray(runner.slots.packed)
        for row, slot in enumerate(np.asarray(tables.rows)):
            for sequence in [r.sequence for r in running() if r.slot == slot]:
                emitted = slots[slot, 2]
                tokens = answers[len(sequence.prompt_token_ids)][emitted : emitted + block.shape[1] - 1]
                block[row, 1 : 1 + len(tokens)] = tokens
        return jnp.asarray(block)

    monkeypatch.setattr(runner, "draft", draft)


def test_beside_a_constrained_round_no_state_is_copied_that_is_gone(monkeypatch, tmp_path):
    """A constraint has earlier rounds read while the next verifies: the device has gone beyond what they tell."""
    monkeypatch.setattr(Mesh, "is_cpu", False)  # as accelerators run rounds
    llm = hybrid(tmp_path)
    engine, params = llm.engine, greedy(60, bad_words=["zzzq"])
    answers = {len(o.prompt_token_ids): o.outputs[0].token_ids for o in llm.generate(PROMPTS, greedy(60))}
    draft_right(monkeypatch, engine.runner, lambda: engine.scheduler.running, answers)
    for _ in range(2):  # programs for both are compiled meanwhile
        llm.generate(PROMPTS, params)
        engine.runner.finish_compiling()
    engine.scheduler.flush_cache()
    late, copied, taken = [], [], engine.snapshots.num_taken
    after_read, copy_states = Snapshots.after_read, Engine._copy_states

    def after_read_and_note(self, running):
        moves = after_read(self, running)
        late.extend(moves)
        return moves

    def copy_and_look(self, moves):
        copy_states(self, moves)
        lengths = np.asarray(self.runner.caches.states.folded)
        copied.extend((m.length, lengths[m.target]) for m in moves if any(m is move for move in late))

    monkeypatch.setattr(Snapshots, "after_read", after_read_and_note)
    monkeypatch.setattr(Engine, "_copy_states", copy_and_look)
    outputs = llm.generate(PROMPTS, params)
    assert [max(o.metrics.acceptance_lengths) for o in outputs] == [6, 6]
    assert engine.snapshots.num_taken > taken
    assert all(length == there for length, there in copied), copied
