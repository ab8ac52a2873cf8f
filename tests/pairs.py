"""Small models for tests: golden pairs, one that recites, and random ones written as checkpoint folders."""

import json
from functools import partial
from pathlib import Path

import jax.numpy as jnp
import numpy as np
from safetensors.numpy import save_file
from tokenizers import Tokenizer, decoders, pre_tokenizers
from tokenizers.models import BPE

from dflash_jax import LLM, SamplingParams
from dflash_jax.engine.host.inputs import mode_of_all
from dflash_jax.engine.programs.planner import PlannedRound
from dflash_jax.engine.programs.store import Program
from dflash_jax.spec import DraftConfig, TargetConfig, draft_config, target_config
from dflash_jax.weights.tables import checkpoint_shape, checkpoint_table
from tests.dense_kv import DenseKVCache

GOLDEN = Path(__file__).parent / "data" / "golden"
RECITER = Path(__file__).parent / "pair"  # knows the licence of this repository by heart
GOLDEN_PAIRS = ("qwen3_full", "qwen3_swa_tied", "llama_full")

TARGET = {
    "architectures": ["Qwen3ForCausalLM"],
    "vocab_size": 61,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 5,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "max_position_embeddings": 512,
    "tie_word_embeddings": False,
    "dtype": "float32",
}
HYBRID = {  # as published: the language model beside what images need, and head sizes that all differ
    "architectures": ["Qwen3_5ForConditionalGeneration"],
    "model_type": "qwen3_5",
    "text_config": {
        "vocab_size": 61,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 5,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "rms_norm_eps": 1e-6,
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": 10000.0,
            "partial_rotary_factor": 0.25,
            "mrope_section": [1, 1, 0],
            "mrope_interleaved": True,
        },
        "max_position_embeddings": 512,
        "layer_types": ["linear_attention"] * 3 + ["full_attention", "linear_attention"],
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 6,
        "linear_key_head_dim": 8,
        "linear_value_head_dim": 4,
        "linear_conv_kernel_dim": 4,
        "attn_output_gate": True,
        "output_gate_type": "swish",
        "eos_token_id": 1,
        "dtype": "float32",
    },
    "vision_config": {"model_type": "qwen3_5", "depth": 1, "hidden_size": 16},
    "image_token_id": 59,
    "tie_word_embeddings": False,
}
DRAFT = TARGET | {
    "architectures": ["DFlashDraftModel"],
    "num_hidden_layers": 2,
    "block_size": 6,
    "num_target_layers": 5,
    "dflash_config": {"target_layer_ids": [1, 3], "mask_token_id": 60},
}
TWO_LAYERS = TARGET | {"num_hidden_layers": 2}  # for tests that compile it, and look at no layer in particular
OF_TWO_LAYERS = DRAFT | {"num_target_layers": 2, "dflash_config": {"target_layer_ids": [0, 1], "mask_token_id": 60}}


def random_tensors(config: TargetConfig | DraftConfig, seed: int, scale: float = 0.25) -> dict[str, np.ndarray]:
    """Random tensors under the names and shapes of the checkpoint, large enough for decided logits."""
    rng = np.random.default_rng(seed)
    tensors = {}
    for name, axes in checkpoint_table(config).items():
        shape = checkpoint_shape(axes, config)
        if name == "d2t":  # every third token of the target's vocabulary
            tensors[name] = 2 * np.arange(shape[0], dtype=np.int64)
            continue
        is_centered = config.zero_centered_norms and not name.endswith("linear_attn.norm.weight")
        center = 1.0 if name.endswith("norm.weight") and not is_centered else 0.0
        tensors[name] = (center + scale * rng.standard_normal(shape)).astype(np.float32)
        if name.endswith("A_log"):
            tensors[name] = np.log(rng.uniform(1, 16, shape)).astype(np.float32)
        if name.endswith("dt_bias"):  # the inverse of softplus, of 0.001 to 0.1
            step = np.exp(rng.uniform(np.log(1e-3), np.log(0.1), shape))
            tensors[name] = (step + np.log(-np.expm1(-step))).astype(np.float32)
    return tensors


def draft_config_of(raw: dict) -> DraftConfig:
    """Read a drafter's configuration; one that names no taps gets as many as it has layers."""
    names_taps = "aux_hidden_state_layer_ids" in raw or "target_layer_ids" in raw.get("dflash_config", {})
    features = None if names_taps else raw["num_hidden_layers"] * raw["hidden_size"]
    return draft_config(raw, num_target_layers=TARGET["num_hidden_layers"], fc_inputs=features)


def write_model(folder: Path, raw: dict, seed: int, scale: float = 0.25) -> Path:
    """Write a random target or drafter; the tensors follow the raw config's own reading."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(raw))
    is_draft = raw.get("speculators_model_type") or raw["architectures"][0].startswith("DFlash")
    config = draft_config_of(raw) if is_draft else target_config(raw)
    save_file(random_tensors(config, seed, scale), folder / "model.safetensors")
    return folder


def empty_cache(config: TargetConfig | DraftConfig, slots: int) -> DenseKVCache:
    """A dense float32 cache for one sequence."""
    shape = (1, slots, config.num_key_value_heads, config.head_dim)
    return DenseKVCache.zeros(config.num_hidden_layers, shape, jnp.float32)


def prompt(*token_ids: int) -> dict:
    return {"prompt_token_ids": list(token_ids)}


def golden_llm(name: str, *, drafter: bool = True, **options) -> LLM:
    """A golden pair; every round verifies the whole block, as the reference implementation does.

    Programs depend on the number of slots: with the same one everywhere, most tests find theirs compiled.
    """
    folder = GOLDEN / name
    options.setdefault("max_num_seqs", 2)
    if not drafter:
        return LLM(folder / "target", dtype="float32", **options)
    raw = json.loads((folder / "draft" / "config.json").read_text())
    options.setdefault("num_speculative_tokens", (raw | raw["dflash_config"])["block_size"] - 1)
    return LLM(folder / "target", folder / "draft", dtype="float32", **options)


def reciter(**options) -> LLM:
    """The pair that recites; every round verifies the whole block."""
    return LLM(RECITER / "target", RECITER / "draft", num_speculative_tokens=15, **options)


def golden_cases(name: str) -> list[dict]:
    return json.loads((GOLDEN / name / "cases.json").read_text())["prompts"]


def greedy(max_tokens: int, **options) -> SamplingParams:
    return SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True, **options)


def in_parts(llm: LLM, prompts: list, params: SamplingParams | list[SamplingParams], most: int = 2) -> list:
    """Outputs of at most so many requests at a time: an engine compiles a round of each number of rows."""
    of_each = params if isinstance(params, list) else [params] * len(prompts)
    parts = [slice(start, start + most) for start in range(0, len(prompts), most)]
    return [output for part in parts for output in llm.generate(prompts[part], of_each[part])]


def tokens_of(outputs) -> list[list[int]]:
    return [completion.token_ids for output in outputs for completion in output.outputs]


def around_step(monkeypatch, name, call) -> None:
    """Let `call(program, *arguments)` stand where engines call a program of the step of that name."""
    original = Program.__call__

    def called(program, *arguments):
        run = partial(original, program)
        return call(run, *arguments) if program.step == name else run(*arguments)

    monkeypatch.setattr(Program, "__call__", called)


def choose_lengths(monkeypatch, engine, choose) -> None:
    """Let the rounds of an engine verify `choose(running sequences)` tokens."""

    def next_round(running):
        rows, mode = engine.shapes.batch(len(running)), mode_of_all([r.sequence for r in running])
        length = choose(running)
        return PlannedRound(running, rows, length, mode, engine.planner.programs(running, rows, length, mode))

    monkeypatch.setattr(engine.planner, "round", next_round)


def assert_empty(engine) -> None:
    """Nothing runs, and every page is free."""
    assert engine.is_idle
    engine.scheduler.check_integrity()
    for pool in engine.scheduler.pools:
        assert pool.num_free == pool.num_pages


EOS, MASK = 256, 257  # of the byte tokenizer
BYTE_VOCABULARY = 258
CHAT_TEMPLATE = (
    "{% for m in messages %}{% if not m.role %}{{ raise_exception('no role') }}{% endif %}"
    "<{{ m.role }}>{{ m.content }}{% endfor %}{% if add_generation_prompt %}<{{ name or 'assistant' }}>{% endif %}"
)


def write_byte_tokenizer(folder: Path) -> Path:
    """A tokenizer whose tokens are bytes, so that characters may span several tokens."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(BPE(vocab={symbol: i for i, symbol in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<|end|>", "<|mask|>"])
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    options = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<|end|>", "chat_template": CHAT_TEMPLATE}
    (folder / "tokenizer_config.json").write_text(json.dumps(options))
    return folder
