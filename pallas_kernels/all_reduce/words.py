"""Rows between the registers of a warpgroup and memory, word by word, in PTX: Mosaic has no operations for this."""

from __future__ import annotations

from typing import Any

import numpy as np
from jax.experimental.mosaic.gpu import FragmentedArray, utils
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, gpu, llvm, vector

from pallas_kernels.all_reduce.peers import EMPTY, THREADS

_INSTEAD = 0x7FFFFFFF  # sent for a word that would be EMPTY: both are NaN, in float32 and in two 16-bit numbers
_WIDTH = {1: "", 2: ".v2", 4: ".v4"}  # PTX suffix of an access by its number of words


def integer(value: int) -> Any:
    """A 32-bit constant."""
    return utils.c(value, ir.IntegerType.get_signless(32))


def long(value: Any) -> Any:
    """An int, or an unsigned 32-bit value, in 64 bits."""
    i64 = ir.IntegerType.get_signless(64)
    return utils.c(value, i64) if isinstance(value, int) else arith.extui(i64, value)


def thread() -> Any:
    """Number of the thread in the CTA's only warpgroup."""
    return arith.index_cast(ir.IntegerType.get_signless(32), gpu.thread_id(gpu.Dimension.x))


def place(address: Any, register: int, words: int) -> Any:
    """Address of a thread's register in a row at ``address``; neighbouring threads have neighbouring addresses."""
    offset = arith.muli(long(thread()), long(4 * words))
    return arith.addi(arith.addi(address, offset), long(register * THREADS * 4 * words))


def _words(array: FragmentedArray) -> list[list[Any]]:
    """The registers of a thread as 32-bit words, a list for each register."""
    i32 = ir.IntegerType.get_signless(32)
    registers = []
    for register in array.registers.flat:
        count = utils.bitwidth(register.type) // 32
        cast = vector.bitcast(ir.VectorType.get((count,), i32), register)
        registers.append([vector.extract(cast, dynamic_position=[], static_position=[i]) for i in range(count)])
    return registers


def send(array: FragmentedArray, address: Any) -> None:
    """Store a row; words that would be EMPTY are replaced by another NaN."""
    for i, words in enumerate(_words(array)):
        sendable = []
        for word in words:
            is_empty = arith.cmpi(arith.CmpIPredicate.eq, word, utils.c(EMPTY, word.type))
            sendable.append(arith.select(is_empty, utils.c(_INSTEAD, word.type), word))
        store(sendable, place(address, i, len(words)))


def store(words: list[Any], address: Any) -> None:
    """Store 1, 2 or 4 words at an address, visible to all devices."""
    values = _vector([f"${i + 1}" for i in range(len(words))])
    operands = [("l", address), *(("r", word) for word in words)]
    ptx(f"st.relaxed.sys.global{_WIDTH[len(words)]}.b32 [$0], {values};", [], operands)


def _vector(names: list[str]) -> str:
    return f"{{{', '.join(names)}}}" if len(names) > 1 else names[0]


def receive(addresses: list[Any], like: FragmentedArray) -> list[FragmentedArray]:
    """Poll the rows at the addresses until no word is EMPTY, and return them in ``like``'s layout.

    Each poll issues the loads of all rows at once, so that their latencies overlap.
    """
    registers = like.registers.size
    words = utils.bitwidth(like.registers.flat[0].type) // 32
    count = len(addresses) * registers * words
    lines = []
    for load in range(len(addresses) * registers):
        slot, register = divmod(load, registers)
        into = _vector([f"${load * words + i}" for i in range(words)])
        address = f"${count + slot} + {register * THREADS * 4 * words}"
        lines.append(f"ld.relaxed.sys.global{_WIDTH[words]}.b32 {into}, [{address}];")
    lines.append(f"setp.eq.b32 empty, $0, {EMPTY:#x};")
    lines += [f"setp.eq.or.b32 empty, ${i}, {EMPTY:#x}, empty;" for i in range(1, count)]
    text = "{\n.reg .pred empty;\nagain:\n" + "\n".join(lines) + "\n@empty bra again;\n}"
    inputs = [("l", place(address, 0, words)) for address in addresses]
    loaded = ptx(text, ["r"] * count, inputs)
    i32 = ir.IntegerType.get_signless(32)
    arrays = []
    for slot in range(len(addresses)):
        filled = np.empty(like.registers.shape, dtype=object)
        for register in range(registers):
            first = (slot * registers + register) * words
            packed = vector.from_elements(ir.VectorType.get((words,), i32), loaded[first : first + words])
            filled.flat[register] = vector.bitcast(like.registers.flat[0].type, packed)
        arrays.append(FragmentedArray(_registers=filled, _layout=like.layout, _is_signed=like.is_signed))
    return arrays


def ptx(text: str, outputs: list[str], inputs: list[tuple[str, Any]]) -> list[Any]:
    """Inline instructions with side effects.

    Args:
        text: of the instructions; ``$0`` and on are the outputs, then the inputs.
        outputs: constraint letters of the outputs, which are 32-bit words.
        inputs: constraint letters and values.
    """
    i32 = ir.IntegerType.get_signless(32)
    constraints = ",".join([f"={kind}" for kind in outputs] + [kind for kind, _ in inputs])
    result: Any = ir.Type.parse("!llvm.void")
    if outputs:
        result = llvm.StructType.get_literal([i32] * len(outputs)) if len(outputs) > 1 else i32
    packed: Any = llvm.inline_asm(result, [value for _, value in inputs], text, constraints, has_side_effects=True)
    if len(outputs) > 1:
        return [llvm.extractvalue(i32, packed, [i]) for i in range(len(outputs))]
    return [packed] if outputs else []
