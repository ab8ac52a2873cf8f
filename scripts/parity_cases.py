"""Configurations of the reference vectors that `make_parity_vectors.py` makes: small models of every kind."""

from __future__ import annotations

from typing import Any

QWEN3 = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "hidden_size": 32,
    "intermediate_size": 44,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "vocab_size": 83,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-6,
    "hidden_act": "silu",
    "tie_word_embeddings": False,
    "attention_bias": False,
    "eos_token_id": 1,
}
LLAMA = {
    **{name: value for name, value in QWEN3.items() if name not in ("head_dim", "attention_bias")},
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "rms_norm_eps": 1e-5,
}
QWEN35 = {
    "architectures": ["Qwen3_5ForCausalLM"],
    "model_type": "qwen3_5_text",
    "hidden_size": 20,
    "intermediate_size": 28,
    "num_hidden_layers": 3,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 16,
    "linear_num_key_heads": 1,
    "linear_num_value_heads": 2,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 6,
    "linear_conv_kernel_dim": 4,
    "vocab_size": 37,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-6,
    "hidden_act": "silu",
    "attn_output_gate": True,
    "attention_bias": False,
    "tie_word_embeddings": False,
    "mamba_ssm_dtype": "float32",
    "eos_token_id": 1,
}
VISION = {  # as small as its classes allow: nothing here reads it
    "model_type": "qwen3_5_vision",
    "depth": 1,
    "hidden_size": 8,
    "intermediate_size": 8,
    "num_heads": 1,
    "patch_size": 2,
    "spatial_merge_size": 2,
    "temporal_patch_size": 1,
    "num_position_embeddings": 4,
}


def conditional(text: dict[str, Any], **outer: Any) -> dict[str, Any]:
    """The `config.json` of a Qwen3.5 as published, which keeps that of its language model in `text_config`."""
    return {
        "architectures": ["Qwen3_5ForConditionalGeneration"],
        "model_type": "qwen3_5",
        "text_config": {name: value for name, value in text.items() if name != "architectures"},
        "vision_config": {**VISION, "out_hidden_size": text["hidden_size"]},
        **outer,
    }


CASES: dict[str, dict[str, Any]] = {
    "qwen3_gqa_wide_heads": {**QWEN3, "head_dim": 32, "rope_theta": 1_000_000.0, "rope_scaling": None},
    "qwen3_mha_tied_bias": {
        **QWEN3,
        "num_attention_heads": 3,
        "num_key_value_heads": 3,
        "vocab_size": 89,
        "rms_norm_eps": 1e-3,
        "tie_word_embeddings": True,
        "attention_bias": True,
        "rope_parameters": {"rope_type": "default", "rope_theta": 500.0},
    },
    "qwen3_mqa_yarn": {
        **QWEN3,
        "num_key_value_heads": 1,
        "head_dim": 32,
        "rope_theta": 10_000.0,
        "rope_scaling": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128},
    },
    "qwen3_yarn_without_original": {
        **QWEN3,
        "rope_parameters": {"rope_type": "yarn", "factor": 3.0, "rope_theta": 1000.0},
    },
    "qwen3_yarn_original_twice": {
        **QWEN3,
        "original_max_position_embeddings": 64,
        "rope_theta": 1000.0,
        "rope_scaling": {"type": "yarn", "factor": None, "original_max_position_embeddings": 256},
    },
    "llama_yarn_attention_factor": {
        **LLAMA,
        "head_dim": 24,
        "rope_parameters": {
            "rope_type": "yarn",
            "rope_theta": 10_000.0,
            "factor": 8.0,
            "original_max_position_embeddings": 64,
            "attention_factor": 1.5,
            "beta_fast": 12.0,
            "beta_slow": 0.5,
        },
    },
    "llama_yarn_mscale_untruncated": {
        **LLAMA,
        "head_dim": 32,
        "rope_theta": 10_000.0,
        "rope_scaling": {
            "rope_type": "yarn",
            "factor": 4.0,
            "original_max_position_embeddings": 128,
            "mscale": 2.0,
            "mscale_all_dim": 0.5,
            "truncate": False,
        },
    },
    "qwen3_linear_both_spellings": {
        **QWEN3,
        "rope_theta": 2000.0,
        "rope_scaling": {"type": "linear", "factor": 2.5},
        "rope_parameters": {"rope_type": "default", "rope_theta": 100.0},
    },
    "qwen3_layer_types": {
        **QWEN3,
        "num_hidden_layers": 4,
        "layer_types": ["sliding_attention", "full_attention", "sliding_attention", "full_attention"],
        "use_sliding_window": True,
        "sliding_window": 7,
        "max_window_layers": 4,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10_000.0},
    },
    "qwen3_max_window_layers": {
        **QWEN3,
        "use_sliding_window": True,
        "sliding_window": 5,
        "max_window_layers": 1,
        "rope_theta": 10_000.0,
    },
    "qwen3_all_sliding_sharded": {
        **QWEN3,
        "num_key_value_heads": 1,
        "use_sliding_window": True,
        "sliding_window": 2,
        "max_window_layers": 0,
        "rope_theta": 10_000.0,
    },
    "qwen3_window_switched_off": {
        **QWEN3,
        "use_sliding_window": False,
        "sliding_window": 3,
        "max_window_layers": 0,
        "tie_word_embeddings": True,
        "rope_parameters": {"rope_type": "linear", "factor": 1.5, "rope_theta": 10_000.0},
    },
    "llama_biases": {
        **LLAMA,
        "head_dim": 6,
        "attention_bias": True,
        "mlp_bias": True,
        "rope_theta": 10_000.0,
        "rms_norm_eps": 1e-2,
    },
    "llama_defaults_tied": {
        **{name: value for name, value in LLAMA.items() if name != "num_key_value_heads"},
        "vocab_size": 67,
        "tie_word_embeddings": True,
    },
    "llama_llama3_old_spelling": {
        **LLAMA,
        "head_dim": 32,
        "rope_theta": 500_000.0,
        "rope_scaling": {
            "rope_type": "llama3",
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 64,
        },
    },
    "llama_llama3_mqa": {
        **LLAMA,
        "num_key_value_heads": 1,
        "sliding_window": 3,  # Llama has no windows: the field must have no effect
        "rope_parameters": {
            "rope_type": "llama3",
            "rope_theta": 1000.0,
            "factor": 4.0,
            "low_freq_factor": 2.0,
            "high_freq_factor": 5.0,
            "original_max_position_embeddings": 128,
        },
    },
}
HYBRID_CASES: dict[str, dict[str, Any]] = {
    "qwen35_published": conditional(
        {
            **QWEN35,
            "linear_num_value_heads": 3,
            "layer_types": ["linear_attention", "full_attention", "linear_attention"],
            "output_gate_type": "swish",
            "partial_rotary_factor": 0.25,
            "rope_parameters": {
                "rope_type": "default",
                "rope_theta": 1000.0,
                "partial_rotary_factor": 0.5,
                "mrope_section": [2, 1, 1],
                "mrope_interleaved": True,
            },
        },
        tie_word_embeddings=False,
    ),
    "qwen35_tied_interval_yarn": {
        **QWEN35,
        "num_hidden_layers": 4,
        "full_attention_interval": 2,
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 2,
        "linear_value_head_dim": 10,
        "tie_word_embeddings": True,
        "partial_rotary_factor": 0.5,
        "rope_theta": 1000.0,
        "rope_scaling": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64},
    },
    "qwen35_sigmoid_short_convolution": {
        **QWEN35,
        "num_hidden_layers": 2,
        "layer_types": ["full_attention", "linear_attention"],
        "linear_conv_kernel_dim": 3,
        "linear_num_value_heads": 4,
        "linear_value_head_dim": 4,
        "output_gate_type": "sigmoid",
        "rms_norm_eps": 1e-3,
    },
}
CASES |= HYBRID_CASES
HYBRID_LENGTH = 66  # tokens; longer than a chunk of the recurrence, which has 64
FLOAT32_CASES = ("llama_biases",)  # weights of the other cases are stored in bfloat16
SHARDED_CASES = ("qwen3_all_sliding_sharded",)
