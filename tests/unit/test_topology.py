"""The wire-format codec and the global topology made from one worker's local one."""

import contextlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from elastic_train.coordinator.topology import (
    BYTES,
    FIXED32,
    FIXED64,
    VARINT,
    Field,
    cpu_device_id,
    decode,
    encode,
    global_topology,
    gpu_device_id,
)

numbers = st.integers(1, 2**29 - 1)
fields = st.lists(
    st.one_of(
        st.builds(Field, numbers, st.just(VARINT), st.integers(0, 2**64 - 1)),
        st.builds(Field, numbers, st.just(BYTES), st.binary(max_size=300)),
        st.builds(Field, numbers, st.just(FIXED32), st.binary(min_size=4, max_size=4)),
        st.builds(Field, numbers, st.just(FIXED64), st.binary(min_size=8, max_size=8)),
    )
)


@given(fields)
def test_decode_inverts_encode(message: list[Field]) -> None:
    assert decode(encode(message)) == message


def test_known_bytes() -> None:
    # The example of protobuf's own documentation: field 1 holds 150, field 2 the text "testing".
    assert decode(b"\x08\x96\x01\x12\x07testing") == [Field(1, VARINT, 150), Field(2, BYTES, b"testing")]


@given(st.binary(max_size=60))
def test_garbage_is_refused_or_read_but_never_hangs(garbage: bytes) -> None:
    with contextlib.suppress(ValueError):
        decode(garbage)


@pytest.mark.parametrize("cut", [b"\x08", b"\x08\x96", b"\x12\x07test", b"\x0b\x00", b"\x0d\x00"])
def test_cut_off_messages_are_refused(cut: bytes) -> None:
    with pytest.raises(ValueError):
        decode(cut)


def device(ordinal: int, name: bytes) -> Field:
    # A device of ordinal 0 has no ordinal field: protobuf leaves zeros out.
    ordinals = [Field(1, VARINT, ordinal)] if ordinal else []
    return Field(3, BYTES, encode([*ordinals, Field(2, BYTES, name), Field(4, VARINT, 77), Field(5, VARINT, 9)]))


@pytest.mark.parametrize("device_id, expected", [(cpu_device_id, [6144, 6145]), (gpu_device_id, [6, 7])])
def test_every_process_gets_its_own_ids_and_everything_else_is_kept(device_id, expected) -> None:
    local = encode(
        [
            Field(1, VARINT, 3),
            Field(2, BYTES, b"boot"),
            device(0, b"a"),
            device(1, b"b"),
            Field(9, FIXED32, b"\1\2\3\4"),
        ]
    )
    processes = decode(global_topology(local, 5, device_id))
    assert [(process.number, process.wire_type) for process in processes] == [(1, BYTES)] * 5
    for node, process in enumerate(processes):
        inner = decode(process.value)
        assert inner[0] == Field(1, VARINT, node)
        assert sum(field.number == 1 for field in inner) == 1
        assert Field(2, BYTES, b"boot") in inner and Field(9, FIXED32, b"\1\2\3\4") in inner
    devices = [decode(field.value) for field in decode(processes[3].value) if field.number == 3]
    assert [[f.value for f in d if f.number == 4] for d in devices] == [[number] for number in expected]
    assert [[f.value for f in d if f.number == 5] for d in devices] == [[0], [0]]
    assert [[f.value for f in d if f.number == 2] for d in devices] == [[b"a"], [b"b"]]


def test_too_many_cpu_devices() -> None:
    with pytest.raises(ValueError, match="at most 2048"):
        cpu_device_id(1, 0, 4096)
