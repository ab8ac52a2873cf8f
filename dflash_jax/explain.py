"""Print which kernel serves each operation of an engine, and why the others do not: `python -m dflash_jax.explain`.

It reads the models' `config.json` alone. Neither their weights nor the device that is asked about need be there.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from dflash_jax.base.errors import ConfigError, DFlashError
from dflash_jax.options import EngineArgs, EngineConfig
from dflash_jax.options.dtypes import DRAFT_QUANTIZATIONS, DTYPES, KV_CACHE_DTYPES
from dflash_jax.options.flags import CommandParser
from dflash_jax.spec import (
    DecoderConfig,
    DraftConfig,
    Experts,
    GatedDelta,
    LayerMask,
    TargetConfig,
    read_json,
    target_config,
)
from dflash_jax.state.recurrent import shapes_of
from dflash_jax.weights.drafter import read_draft_config
from dflash_jax.weights.folder import resolve_folders
from dflash_jax.weights.formats.screened import is_worth_it, shapes_of_screen
from dflash_jax.weights.tables import sizes
from pallas_kernels.add_norm import ADD_NORM
from pallas_kernels.experts import FewBits, Shared
from pallas_kernels.experts import operation_of as experts_operation_of
from pallas_kernels.gated_delta import FOLD, PREFILL, VERIFY, Kept, Weights
from pallas_kernels.gated_norm import GATED_NORM
from pallas_kernels.largest_product import APPROXIMATE_LARGEST, LARGEST_PRODUCT, SCREENED_LARGEST, WHOLE
from pallas_kernels.lib import int4_kv
from pallas_kernels.lib.measured import MAX_STREAM_TOKENS
from pallas_kernels.lib.timing import table
from pallas_kernels.paged_attention import PAGED_ATTENTION
from pallas_kernels.paged_attention.arguments import checked
from pallas_kernels.product import PRODUCT, PRODUCT_BESIDE
from pallas_kernels.quantize import QUANTIZE_GATED, QUANTIZE_ROWS
from pallas_kernels.quantized_product import QUANTIZED_PRODUCT_BESIDE, QUANTIZED_SWIGLU, operation_of
from pallas_kernels.registry import Call, Device, Explanation, explain
from pallas_kernels.route import ROUTE
from pallas_kernels.swiglu import FP8_SWIGLU, SWIGLU
from pallas_kernels.write_attend import WRITE_ATTEND, call_of
from pallas_kernels.write_kv import WRITE_CONTEXT, WRITE_KV

Struct = jax.ShapeDtypeStruct
E4M3 = jnp.dtype(jnp.float8_e4m3fn)
GROUP = 128  # inputs that share a scale in most checkpoints
WIDE = ("in_proj_ba", "gate")  # what most quantised checkpoints leave at 16 bits


@dataclass(frozen=True)
class Step:
    """One step of a model on one device, of which `calls` gives the operations.

    Attributes:
        model: the target, or a drafter.
        batch: B.
        tokens: T of each sequence.
        context: tokens that a page table can name.
        page_size: S.
        dtype: of activations and weights.
        kv_dtype: of the pages.
        is_quantized: whether the weights, those of a drafter, are in fp8.
        bits: of a target's matrices, as its checkpoint says, or of an int4 drafter's: 4, 8, or None for 16.
        head_rows: rows of the vocabulary that the head has.
        has_copy: whether the target's head has an 8-bit copy, from which drafts come, too.
        device: that the step runs on.
    """

    model: DecoderConfig
    batch: int
    tokens: int
    context: int
    page_size: int
    dtype: Any
    kv_dtype: Any
    is_quantized: bool
    bits: int | None
    head_rows: int
    has_copy: bool
    device: Device

    @property
    def is_draft(self) -> bool:
        return isinstance(self.model, DraftConfig)

    def calls(self) -> Iterator[Call]:
        """The operations whose implementation the registry chooses, in the order of a layer, the head last."""
        letters = sizes(self.model)
        D, F, N, K, H = (letters[name] for name in "DFNKH")
        yield Call(ADD_NORM, "norms", (self._rows(D),))
        if self.is_quantized:
            features = letters["C"]  # of all captured layers
            inputs = {"input of fc": features, "input of projections": D, "input of o_proj": N * H}
            yield from (Call(QUANTIZE_ROWS, name, (width,)) for name, width in inputs.items())
            yield self._product("fc", D, features)
            projections = {"qkv_proj": (N + 2 * K) * H}
            projections["context_kv_proj"] = self.model.num_hidden_layers * 2 * K * H
        else:
            fused = {"qkv_proj": (N + 2 * K + (N if self.model.has_gated_attention else 0)) * H}
            projections = {"q_proj": N * H, "kv_proj": 2 * K * H} if self.is_draft else fused
        for name, outputs in projections.items():
            yield self._product(name, outputs, D)
        yield self._product("o_proj", D, N * H)
        if F:
            yield from self._mlp("", letters["E"], letters["I"], D)
        if self.model.experts is not None:
            yield from self._experts(self.model.experts, D)
        yield from self._attentions(N, K, H)
        if self.model.gated_delta is not None:
            yield from self._gated_delta(self.model.gated_delta, D)
        yield from self._head(D)

    def _mlp(self, of: str, parts: int, width: int, D: int) -> Iterator[Call]:
        """A dense MLP of `parts` parts of its width, or the shared expert."""
        F = parts * width
        if self.bits is not None:
            values, scales = self._few_bits(parts, 2, width, D)
            label = f"{of}gate_up_proj {self.bits} bits {[parts, 2, width, D]}"
            yield Call(QUANTIZED_SWIGLU, label, (self._rows(D), values, scales, None, self.dtype))
        else:
            gate_up = Struct((parts, 2, width, D), self._weight_dtype)
            label, operands = f"{of}gate_up_proj {_text(gate_up)}", (self._rows(D, self._weight_dtype), gate_up)
            yield Call(FP8_SWIGLU if self.is_quantized else SWIGLU, label, operands)
            if self.is_quantized and FP8_SWIGLU.choose(operands, self.device).name == "apart":
                yield self._product(f"{of}gate_up_proj", 2 * F, D)
                yield Call(QUANTIZE_GATED, "hidden units", (F,))
            elif self.is_quantized:
                yield Call(QUANTIZE_ROWS, "hidden units", (F,))
        yield self._product(f"{of}down_proj", D, F)

    def _experts(self, experts: Experts, D: int) -> Iterator[Call]:
        letters, X, M = sizes(self.model), experts.count, experts.width
        yield self._product("gate", X, D, jnp.float32)
        logits = Struct((1, self.batch, self.tokens, X), jnp.float32)
        yield Call(ROUTE, f"the largest {experts.per_token} of {_text(logits)}", (logits,))
        gate_up, down = self._stack(X, 2, M, D), self._stack(X, D, M)
        chosen = Struct((self.batch, self.tokens, experts.per_token), jnp.int32)
        kind = jnp.dtype(self.dtype).name if self.bits is None else f"{self.bits} bits "
        label = f"{experts.per_token} of experts {kind}{[X, 2, M, D]}"
        shared = [] if experts.shared_width is None else [self._shared(letters["SE"], letters["SI"], D)]
        yield Call(experts_operation_of(gate_up, down), label, (self._rows(D), gate_up, down, chosen, *shared))
        if experts.shared_width is not None and self.batch * self.tokens > MAX_STREAM_TOKENS:  # else they are one call
            yield from self._mlp("shared_expert.", letters["SE"], letters["SI"], D)

    def _shared(self, parts: int, units: int, D: int) -> Shared:
        """The expert that every token sees, in as many bits as the others."""
        shapes, of_tokens = ((parts, 2, units, D), (D, parts * units)), Struct((self.batch, self.tokens), jnp.float32)
        plain, few = partial(Struct, dtype=self.dtype), lambda shape: FewBits(*self._few_bits(*shape))
        return Shared._make((*map(plain if self.bits is None else few, shapes), of_tokens))

    def _stack(self, *shape: int) -> Struct | FewBits:
        """The matrices of all experts."""
        if self.bits is None:
            return Struct(shape, self.dtype)
        *outputs, inputs = shape
        values, scales = self._few_bits(*shape)
        of_words: Any = values if self.bits == 4 else Struct((*outputs, inputs // 2), jnp.int16)
        return FewBits(of_words, scales)

    def _few_bits(self, *shape: int) -> tuple[Any, Any]:
        """Numbers and scales of a weight of the target's bits."""
        *outputs, inputs = shape
        values = Struct((*outputs, inputs // 4), jnp.uint16) if self.bits == 4 else Struct(shape, E4M3)
        return values, Struct((*outputs, max(1, inputs // GROUP)), jnp.bfloat16)

    def _attentions(self, N: int, K: int, H: int) -> Iterator[Call]:
        pages = -(-self.context // self.page_size)
        # The size of the pools is not known before an engine plans its memory; they count as small here.
        shape = (1, K, self.page_size, H)
        pool = int4_kv.shapes(shape) if self.kv_dtype == int4_kv.DTYPE else Struct(shape, self.kv_dtype)
        name = f"pages {_text(pool)}"
        ints, page_table = Struct((self.batch,), jnp.int32), Struct((self.batch, pages), jnp.int32)
        q = Struct((self.batch, self.tokens, N, H), self.dtype)
        for mask in dict.fromkeys(self.model.layers[i].mask for i in self.model.attention_layers):
            args = jax.eval_shape(partial(_arguments, mask=mask), q, pool, page_table, ints)
            label = f"{_text(q)} over {pages} {name}, {_mask(mask)}"
            yield Call(WRITE_ATTEND, label, call_of(args, self.device))
            yield Call(PAGED_ATTENTION, label, (args,))
        yield Call(WRITE_KV, name, (pool,))
        if self.is_draft:
            yield Call(WRITE_CONTEXT, name, (pool,))

    def _gated_delta(self, delta: GatedDelta, D: int) -> Iterator[Call]:
        channels, values = delta.channels_per_key, delta.values_per_key * delta.value_dim
        inputs = self._product("in_proj", delta.key_heads * (channels + values), D)
        gates = self._product("in_proj_ba", 2 * delta.value_heads, D)
        beside = PRODUCT_BESIDE if inputs.operation is PRODUCT else QUANTIZED_PRODUCT_BESIDE
        (*operands, _), other = inputs.arguments, gates.arguments[1]
        yield Call(beside, f"{inputs.label} and in_proj_ba {_text(other)}", (*operands, other))
        yield self._product("out_proj", D, delta.key_heads * values)
        state, *tape = shapes_of(delta, self.batch, self.tokens, self.dtype)
        heads = Struct((delta.value_heads,), jnp.float32)
        conv = Struct((delta.key_heads, channels, delta.conv_width), self.dtype)
        arguments = (Kept._make((state, *tape)), Weights._make((conv, heads, heads)))
        label = f"states {_text(state)}, tape of {self.tokens} tokens"
        yield Call(VERIFY, label, arguments)
        yield Call(FOLD, label, arguments)
        yield Call(PREFILL, label, arguments)
        outputs = Struct((self.batch, self.tokens, delta.value_heads, delta.value_dim), self.dtype)
        yield Call(GATED_NORM, f"gates of {_text(outputs)}", (outputs,))

    def _head(self, D: int) -> Iterator[Call]:
        """The argmax of the logits; a drafter has no logits of its anchor."""
        rows = self.batch * (self.tokens - 1 if self.is_draft else self.tokens)
        hidden, head = (Struct(shape, self._weight_dtype) for shape in ((rows, D), (self.head_rows, D)))
        label = f"{_text(hidden)} x head {_text(head)}"
        if self.has_copy:
            copy, of_copy = shapes_of_screen(self.head_rows, D), f"{label}, by its 8-bit copy if memory has room for it"
            if self.is_draft:
                yield Call(APPROXIMATE_LARGEST, of_copy, (Struct((rows, D), self.dtype), copy))
                return
            call = Call(SCREENED_LARGEST, of_copy, (hidden, head, copy))
            yield call
            if SCREENED_LARGEST.choose(call.arguments, self.device).name != WHOLE:
                return
        yield Call(LARGEST_PRODUCT, label, (hidden, head))

    def _product(self, name: str, outputs: int, inputs: int, dtype: Any = None) -> Call:
        if self.bits is not None and name not in WIDE:
            values, scales = self._few_bits(outputs, inputs)
            label = f"{_text(self._rows(inputs))} x {name} {self.bits} bits [{outputs}, {inputs}]"
            return Call(operation_of(values), label, (self._rows(inputs), values, scales, None, self.dtype))
        x, weight = self._rows(inputs, self._weight_dtype), Struct((outputs, inputs), self._weight_dtype)
        return Call(PRODUCT, f"{_text(x)} x {name} {_text(weight)}", (x, weight, dtype or self.dtype))

    @property
    def _weight_dtype(self) -> Any:
        return E4M3 if self.is_quantized else self.dtype

    def _rows(self, width: int, dtype: Any = None) -> Struct:
        return Struct((self.batch, self.tokens, width), dtype or self.dtype)


def _arguments(q: Any, pool: Any, page_table: Any, kv_length: Any, *, mask: LayerMask) -> Any:
    options: dict[str, Any] = {"scale": None, "k_scale": 1.0, "v_scale": 1.0, "valid_from": None}
    return checked(q, pool, pool, page_table, kv_length, None, mask=mask.mask, window=mask.window, **options)


def _text(array: Any) -> str:
    return f"{jnp.dtype(array.dtype).name}{list(array.shape)}"


def _mask(mask: LayerMask) -> str:
    return mask.mask if mask.window is None else f"{mask.mask} window {mask.window}"


def read_configs(model: str | None, draft_model: str | None) -> tuple[TargetConfig, DraftConfig | None]:
    """The configurations of target and drafter, from their `config.json`.

    Args:
        model: folder, alias or Hub id; None is the embedded pair.
        draft_model: likewise; None is the alias's drafter, or none.

    Raises:
        CheckpointError: one is neither a folder nor a repository that can be reached.
        ConfigError: an unknown architecture, or a drafter that does not fit.
    """
    folder, draft_folder = resolve_folders(model, draft_model)
    target = target_config(read_json(folder / "config.json"), str(folder / "config.json"))
    return target, None if draft_folder is None else read_draft_config(draft_folder, target)


def steps_of(args: argparse.Namespace, device: Device) -> Iterator[Step]:
    """The steps of rounds of each batch size: the target verifies a block of each sequence, and the drafter fills it.

    Args:
        args: the command line.
        device: that the steps run on.

    Raises:
        CheckpointError, ConfigError: as `read_configs`, or an option is impossible.
    """
    target, draft = read_configs(args.model, args.draft_model)
    names = ("dtype", "kv_cache_dtype", "draft_kv_cache_dtype", "draft_quantization", "page_size")
    options = EngineArgs(**{name: getattr(args, name) for name in names})
    config = EngineConfig.of(options, target, draft, on_cpu=device.platform == "cpu")
    for batch in args.batch_size:
        of_target = Step(
            target,
            batch=batch,
            tokens=config.num_speculative_tokens + 1,
            context=args.context,
            page_size=config.page_size,
            dtype=config.dtype,
            kv_dtype=config.kv_cache_dtype,
            is_quantized=False,
            bits=bits if (bits := target.quantization and target.quantization.bits) in (4, 8) else None,
            head_rows=target.vocab_size,
            has_copy=is_worth_it(target.vocab_size, target.hidden_size, config.dtype, device),
            device=device,
        )
        yield of_target
        if draft is not None:
            yield replace(
                of_target,
                model=draft,
                bits=4 if config.draft_quantization == "int4" else None,
                dtype=config.draft_dtype,
                kv_dtype=config.draft_kv_cache_dtype,
                is_quantized=config.draft_quantization == "fp8",
                head_rows=draft.draft_vocab_size or target.vocab_size,
                has_copy=of_target.has_copy and draft.draft_vocab_size is None,
            )


def row_of(step: Step, explanation: Explanation) -> dict[str, Any]:
    """A row of the table: a call of a step, what serves it, and a sentence for each implementation that does not."""
    return {
        "batch": step.batch,
        "model": "drafter" if step.is_draft else "target",
        "operation": explanation.call.operation.name,
        "call": explanation.call.label,
        "served by": explanation.chosen,
        "others": " ".join(f"{name}: {reason}" for name, reason in explanation.others.items()),
    }


def parse_args(arguments: list[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = CommandParser(
        prog="python -m dflash_jax.explain",
        description="Print which implementation serves each operation of a round on one device, and why the others do "
        "not. It reads the models' config.json alone; the device need not be there.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    add = parser.add_argument
    add("--model", help="folder, alias or Hub id of the target; without it, the embedded pair")
    add("--draft-model", help="folder or Hub id of the drafter")
    add("--dtype", default="auto", choices=["auto", *DTYPES], help="of activations and weights; auto is config.json's")
    kv_dtypes = ["auto", *KV_CACHE_DTYPES]
    add("--kv-cache-dtype", default="auto", choices=kv_dtypes, help="of stored K and V")
    add("--draft-kv-cache-dtype", default="auto", choices=kv_dtypes, help="of the drafter's stored K and V")
    add("--draft-quantization", choices=DRAFT_QUANTIZATIONS, help="of the drafter's matrix products")
    add("--batch-size", type=_positive, nargs="+", default=[1, 16, 64], help="sequences of a round, a block each")
    add("--context", type=_positive, default=4096, help="tokens that a sequence's page table can name")
    add("--page-size", type=_positive, default=EngineArgs().page_size, help="tokens a page of the KV cache")
    add("--platform", choices=["cpu", "cuda", "rocm", "tpu"], help="of the device; without it, this machine's device")
    add("--compute-capability", type=_generation, metavar="X.Y", help="of an NVIDIA GPU, such as 9.0; implies cuda")
    return parser.parse_args(arguments)


def _positive(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} must be an integer of at least 1.")
    return int(text)


def _generation(text: str) -> tuple[int, int]:
    major, _, minor = text.partition(".")
    if not (major.isdecimal() and minor.isdecimal()):
        raise argparse.ArgumentTypeError(f"{text!r} must be a compute capability such as 9.0.")
    return int(major), int(minor)


def device_of(args: argparse.Namespace) -> Device:
    """The device that the command line asks about.

    Raises:
        ConfigError: a compute capability without an NVIDIA GPU, or such a GPU without one.
    """
    platform, generation = args.platform, args.compute_capability
    if generation is None and platform is None:
        return Device.default()
    if (generation is not None) != (platform in (None, "cuda")):
        raise ConfigError(
            f"--platform {platform} and --compute-capability {generation} do not belong together; give a compute "
            "capability for cuda, and only for cuda."
        )
    return Device(platform or "cuda", generation)


def main(arguments: list[str] | None = None) -> int:
    args = parse_args(arguments)
    try:
        device = device_of(args)
        steps = list(steps_of(args, device))
    except DFlashError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    rows = [row_of(step, explanation) for step in steps for explanation in explain(*device, step.calls())]
    print(f"On {device}:\n\n{table(rows)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
