"""CRC-64/NVME of many equally long pieces at once, written from its definition and with numpy: no code of Forebay."""

from __future__ import annotations

import functools
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

POLYNOMIAL = 0x9A6C9329AC4BC9B5  # reflected
LANE_BYTES = 4096
ONES = (1 << 64) - 1

Words = NDArray[np.uint64]


def _table() -> list[int]:
    table = []
    for byte in range(256):
        register = byte
        for _ in range(8):
            register = register >> 1 ^ (POLYNOMIAL if register & 1 else 0)
        table.append(register)
    return table


TABLE = _table()


def checksum(piece: bytes) -> int:
    """Of one piece, slowly."""
    register = ONES
    for byte in piece:
        register = register >> 8 ^ TABLE[register & 0xFF ^ byte]
    return register ^ ONES


def checksums(pieces: Sequence[bytes]) -> list[int]:
    """Of pieces of one length, in order.

    Zeros before a message do not change a register that begins at zero, so all pieces are filled up to whole lanes; the
    register that begins with ones is added by its own way through as many zeros.
    """
    if not pieces:
        return []
    length = len(pieces[0])
    lanes = max(1, -(-length // LANE_BYTES))
    filled = np.zeros((len(pieces), lanes * LANE_BYTES), np.uint8)
    for row, piece in zip(filled, pieces, strict=True):
        row[len(row) - length :] = np.frombuffer(piece, np.uint8)
    registers = _through(filled.reshape(-1, LANE_BYTES)).reshape(len(pieces), lanes)
    whole = np.zeros(len(pieces), np.uint64)
    for lane in range(lanes):
        whole = _shifted(whole, _lane_shift()) ^ registers[:, lane]
    outset = np.uint64(_after_zeros(length) ^ ONES)
    return [int(register) for register in whole ^ outset]


def _through(rows: NDArray[np.uint8]) -> Words:
    """The register after each row, from zero, eight bytes at a time."""
    words = np.ascontiguousarray(rows.view("<u8").T)
    register = np.zeros(words.shape[1], np.uint64)
    for word in words:
        register = _shifted(register ^ word, _eight())
    return register


def _shifted(registers: Words, tables: Words) -> Words:
    """A linear map of 64 bits, given by its images of the eight bytes."""
    parts = registers.astype("<u8").view(np.uint8).reshape(len(registers), 8)
    shifted: Words = tables[0][parts[:, 0]]
    for byte in range(1, 8):
        shifted ^= tables[byte][parts[:, byte]]
    return shifted


@functools.cache
def _zeros(count: int) -> Words:
    """The map of a register through so many zero bytes."""
    registers = np.array([value << 8 * byte for byte in range(8) for value in range(256)], np.uint64)
    table = np.array(TABLE, np.uint64)
    for _ in range(count):
        registers = (registers >> np.uint64(8)) ^ table[(registers & np.uint64(0xFF)).astype(np.intp)]
    return registers.reshape(8, 256)


def _eight() -> Words:
    return _zeros(8)


def _lane_shift() -> Words:
    return _zeros(LANE_BYTES)


@functools.cache
def _after_zeros(count: int) -> int:
    register = ONES
    for _ in range(count):
        register = register >> 8 ^ TABLE[register & 0xFF]
    return register
