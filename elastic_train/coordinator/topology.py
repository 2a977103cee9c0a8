"""JAX's topology messages: turning one worker's local topology into the global one of all node ids.

A worker publishes a `LocalTopologyProto` and waits for a `GlobalTopologyProto`, which joins the local
topologies of *all* node ids. With node ids that are used once, most of those nodes do not exist yet; but all
workers have the same devices, so one message tells what the others will be. XLA's protobuf classes are not in
jaxlib, hence the few lines of wire format here. Fields that are not named here are copied untouched.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import NamedTuple

# LocalTopologyProto
PROCESS_ID = 1
DEVICES = 3
# DeviceProto
LOCAL_DEVICE_ORDINAL = 1
GLOBAL_DEVICE_ID = 4
PARTITION_INDEX = 5
# GlobalTopologyProto
PROCESSES = 1

MAX_CPU_DEVICES_PER_PROCESS = 2048
"""XLA numbers CPU devices in blocks of this size, one per process."""

VARINT, FIXED64, BYTES, FIXED32 = 0, 1, 2, 5


class Field(NamedTuple):
    """One field of a protobuf message on the wire: `value` is an int if `wire_type` is VARINT, else bytes."""

    number: int
    wire_type: int
    value: int | bytes


def decode(message: bytes) -> list[Field]:
    """The fields of `message`, in order. Raises ValueError if it is no protobuf message."""
    fields = []
    position = 0
    while position < len(message):
        key, position = _read_varint(message, position)
        number, wire_type = key >> 3, key & 7
        value: int | bytes
        if wire_type == VARINT:
            value, position = _read_varint(message, position)
        else:
            if wire_type == BYTES:
                size, position = _read_varint(message, position)
            elif wire_type in (FIXED32, FIXED64):
                size = 4 if wire_type == FIXED32 else 8
            else:
                raise ValueError(f"field {number} has wire type {wire_type}, which protobuf 3 does not use")
            value = message[position : position + size]
            if len(value) != size:
                raise ValueError(f"field {number} should have {size} bytes, but the message ends after {len(value)}")
            position += size
        fields.append(Field(number, wire_type, value))
    return fields


def encode(fields: Iterable[Field]) -> bytes:
    """The inverse of `decode`."""
    message = bytearray()
    for number, wire_type, value in fields:
        message += _varint(number << 3 | wire_type)
        if isinstance(value, int):
            message += _varint(value)
        else:
            if wire_type == BYTES:
                message += _varint(len(value))
            message += value
    return bytes(message)


def cpu_device_id(node: int, ordinal: int, num_local: int) -> int:
    """XLA's own numbering of CPU devices."""
    if num_local > MAX_CPU_DEVICES_PER_PROCESS:
        raise ValueError(f"a process has at most {MAX_CPU_DEVICES_PER_PROCESS} CPU devices, not {num_local}")
    return node * MAX_CPU_DEVICES_PER_PROCESS + ordinal


def gpu_device_id(node: int, ordinal: int, num_local: int) -> int:
    """GPU devices are numbered without gaps."""
    return node * num_local + ordinal


def global_topology(local: bytes, num_nodes: int, device_id: Callable[[int, int, int], int]) -> bytes:
    """The `GlobalTopologyProto` in which each of `num_nodes` processes has the devices of `local`.

    Args:
      local: a `LocalTopologyProto` as any worker published it.
      num_nodes: number of node ids, 0 included.
      device_id: (node, local ordinal, devices per node) -> global device id.
    """
    fields = decode(local)
    num_local = sum(field.number == DEVICES for field in fields)
    processes = []
    for node in range(num_nodes):
        process = [Field(PROCESS_ID, VARINT, node)]
        for field in fields:
            if field.number == DEVICES:
                process.append(Field(DEVICES, BYTES, _device(field.value, node, num_local, device_id)))
            elif field.number != PROCESS_ID:
                process.append(field)
        processes.append(Field(PROCESSES, BYTES, encode(process)))
    return encode(processes)


def _device(device: int | bytes, node: int, num_local: int, device_id: Callable[[int, int, int], int]) -> bytes:
    if isinstance(device, int):
        raise ValueError(f"a device should be a message, but is the number {device}")
    fields = [field for field in decode(device) if field.number not in (GLOBAL_DEVICE_ID, PARTITION_INDEX)]
    # Protobuf leaves out numbers that are zero.
    ordinal = next((f.value for f in fields if f.number == LOCAL_DEVICE_ORDINAL and isinstance(f.value, int)), 0)
    fields.append(Field(GLOBAL_DEVICE_ID, VARINT, device_id(node, ordinal, num_local)))
    fields.append(Field(PARTITION_INDEX, VARINT, 0))
    return encode(fields)


def _varint(number: int) -> bytes:
    encoded = bytearray()
    while number > 0x7F:
        encoded.append(number & 0x7F | 0x80)
        number >>= 7
    encoded.append(number)
    return bytes(encoded)


def _read_varint(message: bytes, position: int) -> tuple[int, int]:
    number = shift = 0
    while position < len(message) and shift < 64:
        byte = message[position]
        position += 1
        number |= (byte & 0x7F) << shift
        if byte < 0x80:
            return number, position
        shift += 7
    raise ValueError(f"a number is cut off or too long at byte {position} of {len(message)}")
