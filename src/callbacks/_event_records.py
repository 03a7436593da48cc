"""TensorBoard's event files: many steps' scalars as finished records, computed for all steps at once.

A record is `[length, 8 bytes][its checksum, 4][event][its checksum, 4]`, all little-endian. The checksum is a masked
CRC-32C (tensorboard/summary/writer/record_writer.py). An event is a protobuf message (event.proto, summary.proto). The
events of steps with the same keys differ in a few bytes, so one event is encoded, and numpy fills in the others. The CRC
of a message is linear in its bytes: each byte at its distance from the end adds a term of its own, by exclusive or.
"""

import functools
from collections.abc import Sequence

import numpy
from numpy.typing import NDArray
from tensorboard.compat.proto.event_pb2 import Event
from tensorboard.compat.proto.summary_pb2 import Summary

Bytes = NDArray[numpy.uint8]
_POLYNOMIAL, _INVERTED, _MASK = 0x82F63B78, 0xFFFFFFFF, 0xA282EAD8  # of CRC-32C, reflected; and TensorBoard's mask
_TIME = slice(1, 9)  # the wall time is the event's first field: a tag of one byte, then a double


def event_records(keys: Sequence[str], steps: Sequence[int], values: NDArray[numpy.float32], wall_time: float) -> bytes:
    """Records of one event a step.

    Args:
        keys: the names of the scalars, of shape (K,).
        steps: of shape (N,), at least 1.
        values: of shape (N, K).
        wall_time: seconds since 1970, for all of them.
    """
    lengths = numpy.array([_varint_length(step) for step in steps])  # a step of more digits makes a longer event
    borders = numpy.flatnonzero(numpy.diff(lengths)) + 1
    parts = zip(numpy.split(numpy.array(steps), borders), numpy.split(values, borders), strict=True)
    return b"".join(_records(tuple(keys), of_part, values_of_part, wall_time) for of_part, values_of_part in parts)


def _records(keys: tuple[str, ...], steps: NDArray, values: NDArray[numpy.float32], wall_time: float) -> bytes:
    """Records of steps whose numbers take the same number of bytes."""
    digits = _varint_length(int(steps[0]))
    template, value_at = _template(keys, digits)
    head, size = 12, len(template)
    records = numpy.empty((len(steps), head + size + 4), numpy.uint8)
    records[:, :head] = _header(size)
    events = records[:, head:-4]
    events[:] = template
    events[:, _TIME] = numpy.frombuffer(numpy.float64(wall_time).tobytes(), numpy.uint8)
    for digit in range(digits):
        more = 0x80 if digit + 1 < digits else 0
        events[:, 10 + digit] = steps >> 7 * digit & 0x7F | more
    events[:, value_at] = numpy.ascontiguousarray(values, "<f4").view(numpy.uint8)
    changing = numpy.concatenate([numpy.arange(1, 9), 10 + numpy.arange(digits), value_at])
    records[:, -4:] = _masked(_crc(events, changing, template)).astype("<u4").view(numpy.uint8).reshape(-1, 4)
    return records.tobytes()


@functools.lru_cache(maxsize=64)
def _template(keys: tuple[str, ...], digits: int) -> tuple[Bytes, NDArray]:
    """An event with these keys, all of whose numbers are 0, and where the bytes of its values stand."""
    summary = Summary(value=[Summary.Value(tag=key, simple_value=0.0) for key in keys])
    event = Event(wall_time=1.0, step=1 << 7 * (digits - 1), summary=summary).SerializeToString()
    ends = numpy.cumsum([len(Summary(value=[value]).SerializeToString()) for value in summary.value])
    value_at = (ends[:, None] + len(event) - ends[-1] + numpy.arange(-4, 0)).reshape(-1)
    template = numpy.frombuffer(event, numpy.uint8).copy()
    template[_TIME] = template[10 : 10 + digits] = template[value_at] = 0
    return template, value_at


def _varint_length(number: int) -> int:
    return max(1, -(-number.bit_length() // 7))


def _header(size: int) -> Bytes:
    """The length of an event, and the checksum of the length."""
    length = numpy.frombuffer(size.to_bytes(8, "little"), numpy.uint8)
    crc = _masked(_crc(length[None], numpy.arange(8), numpy.zeros(8, numpy.uint8)))
    return numpy.concatenate([length, crc.astype("<u4").view(numpy.uint8)])


def _crc(messages: Bytes, changing: NDArray, template: Bytes) -> NDArray[numpy.uint32]:
    """CRC-32C of each message, which differ in the `changing` bytes; those of `template` are 0. Shape (N, size) → (N,)."""
    size = messages.shape[1]
    terms = _terms(1 << size.bit_length())  # few sizes, so that few tables are kept
    constant = numpy.bitwise_xor.reduce(terms[numpy.arange(size - 1, -1, -1), template])
    # The initial value of all ones is the same as inverting the first four bytes; a byte of 0 has the term 0.
    constant ^= numpy.bitwise_xor.reduce(terms[numpy.arange(size - 1, size - 5, -1), 0xFF])
    found = numpy.bitwise_xor.reduce(terms[size - 1 - changing, messages[:, changing]], axis=1)
    return found ^ constant ^ numpy.uint32(_INVERTED)


@functools.lru_cache(maxsize=4)
def _terms(size: int) -> NDArray[numpy.uint32]:
    """What a byte adds to the CRC, by its distance from the end and its value. Shape (size, 256)."""
    table = numpy.arange(256, dtype=numpy.uint32)
    for _ in range(8):
        table = numpy.where(table & 1, table >> 1 ^ numpy.uint32(_POLYNOMIAL), table >> 1)
    terms = numpy.empty((size, 256), numpy.uint32)
    terms[0] = table
    for distance in range(1, size):
        terms[distance] = terms[distance - 1] >> 8 ^ table[terms[distance - 1] & 0xFF]
    return terms


def _masked(crc: NDArray[numpy.uint32]) -> NDArray[numpy.uint32]:
    return numpy.add(crc >> 15 | crc << 17, _MASK, dtype=numpy.uint32)
