"""Flags of vLLM and SGLang that the server leaves out on purpose."""

from __future__ import annotations

# Names of flags, without dashes, and why the server has none of them and what to do instead.
REASONS: tuple[tuple[tuple[str, ...], str], ...] = (
    (("trust-remote-code",), "no code is taken from a model folder; leave it out"),
    (
        ("tokenizer", "tokenizer-path", "tokenizer-mode", "skip-tokenizer-init"),
        "the tokenizer is that of the model folder; put another one's files there",
    ),
    (
        ("revision", "code-revision", "tokenizer-revision"),
        "a Hub id means its newest revision; download another and give its folder",
    ),
    (("download-dir",), "the Hub's files are kept where HF_HOME says; set that instead"),
    (("load-format",), "weights are safetensors; convert others first"),
    (
        ("hf-overrides", "rope-scaling", "rope-theta", "json-model-override-args"),
        "the model is what its config.json says; edit a copy of that",
    ),
    (
        (
            "enforce-eager",
            "compilation-config",
            "cc",
            "O",
            "optimization-level",
            "cudagraph-capture-sizes",
            "disable-cuda-graph",
            "cuda-graph-max-bs",
            "enable-torch-compile",
        ),
        "XLA compiles every step; leave it out, or start sooner with --no-compile-at-start",
    ),
    (
        (
            "attention-backend",
            "attention-config",
            "mm-attention-backend",
            "sampling-backend",
            "speculative-attention-mode",
        ),
        "the device decides which kernels run; leave it out",
    ),
    (
        ("swap-space", "cpu-offload-gb", "kv-offloading-size", "kv-transfer-config"),
        "nothing is moved to the host's memory; lower --max-model-len or --max-num-seqs if the device's is short",
    ),
    (("num-gpu-blocks-override", "max-total-tokens"), "the KV cache is sized in bytes; give --kv-cache-memory-bytes"),
    (("data-parallel-size", "dp", "dp-size"), "a server is one replica; start several and put a router before them"),
    (
        ("pipeline-parallel-size", "pp", "pp-size"),
        "layers are not spread over devices; share them with --tensor-parallel-size",
    ),
    (("enable-expert-parallel", "ep", "ep-size"), "there are no experts in the models that are served; leave it out"),
    (
        ("nnodes", "node-rank", "master-addr", "master-port", "dist-init-addr", "distributed-executor-backend"),
        "a server uses the devices of one host; leave it out",
    ),
    (("device",), "JAX takes the accelerator that it finds; set JAX_PLATFORMS to choose"),
    (
        ("enable-lora", "lora-modules", "lora-paths", "max-loras", "max-lora-rank"),
        "adapters are not served; merge them into the weights",
    ),
    (("limit-mm-per-prompt", "mm-processor-kwargs"), "only text is served; leave it out"),
    (("runner", "task", "convert", "is-embedding"), "only text generation is served; leave it out"),
    (
        ("middleware", "tool-parser-plugin", "reasoning-parser-plugin", "logits-processors", "worker-cls"),
        "no code is loaded by name; leave it out",
    ),
    (
        ("structured-outputs-config", "guided-decoding-backend", "grammar-backend"),
        "structured outputs are llguidance's; leave it out",
    ),
    (
        ("enable-chunked-prefill",),
        "prompts are always processed in chunks; give their size as --max-num-batched-tokens",
    ),
    (
        ("async-scheduling", "enable-overlap-schedule", "disable-overlap-schedule"),
        "the host is always one round behind; leave it out",
    ),
    (("scheduling-policy", "schedule-policy"), "requests are served as they come; leave it out"),
    (
        ("speculative-num-steps", "speculative-eagle-topk", "speculative-dflash-block-size"),
        "a drafter drafts its whole block in one pass; give --num-speculative-tokens to verify less of it",
    ),
    (("preferred-sampling-params",), "sampling defaults are vLLM's flag here; give --override-generation-config"),
    (
        ("disable-log-requests", "disable-uvicorn-access-log"),
        "requests are logged only with --enable-log-requests; leave it out",
    ),
    (("uvicorn-log-level", "log-level-http"), "one level is for all; give --log-level"),
    (("enable-metrics",), "/metrics is always served; leave it out"),
    (("profiler-config",), "traces are jax.profiler's; give --profile-dir"),
    (("otlp-traces-endpoint",), "no traces are exported; read /metrics, or profile with --profile-dir"),
    (
        ("h11-max-incomplete-event-size", "h11-max-header-count"),
        "headers are bounded in bytes; give --max-header-bytes",
    ),
    (("ssl-ciphers", "enable-ssl-refresh"), "TLS is Python's default; put a proxy in front for more"),
)

ABSENT = {name: reason for names, reason in REASONS for name in names}
