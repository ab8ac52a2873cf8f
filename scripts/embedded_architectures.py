"""The `config.json` of the embedded targets: what `train_embedded.py` trains, by the name of the architecture."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

VOCAB_SIZE = 4096
MAX_LENGTH = 2048
DENSE: Mapping[str, Any] = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 256,
    "intermediate_size": 768,
    "num_hidden_layers": 8,  # before --grow
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "max_position_embeddings": MAX_LENGTH,
    "attention_bias": False,
    "tie_word_embeddings": True,
    "eos_token_id": 0,
    "dtype": "float32",  # to compute in; the file holds fp8 and bfloat16
}
# As Qwen3.5: three layers of Gated DeltaNet to one of attention, two value heads to a key head.
HYBRID: Mapping[str, Any] = {
    "architectures": ["Qwen3_5ForCausalLM"],
    "model_type": "qwen3_5_text",
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 128,
    "intermediate_size": 384,
    "num_hidden_layers": 8,
    "full_attention_interval": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 32,
    "linear_value_head_dim": 32,
    "linear_conv_kernel_dim": 4,
    "attn_output_gate": True,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-6,
    "rope_parameters": {"rope_type": "default", "rope_theta": 100000.0, "partial_rotary_factor": 0.5},
    "max_position_embeddings": 4 * MAX_LENGTH,
    "attention_bias": False,
    "tie_word_embeddings": True,
    "eos_token_id": 0,
    "dtype": "float32",
}
ARCHITECTURES = {"dense": DENSE, "hybrid": HYBRID}
