import pytest

from shared.messages import (
    Batch,
    DecodeError,
    Failed,
    Generate,
    Sampling,
    decode,
    decode_any,
    encode,
)
from shared.slo import Slo


def request() -> Generate:
    return Generate(
        id="r.0",
        gateway="g",
        model="m",
        prompt=(1, 2, 3),
        sampling=Sampling(max_tokens=5, stop_token_ids=(2,)),
        slo=Slo(e2e_ms=500),
        arrival=12.5,
        deadline=13.0,
    )


def test_a_message_comes_back_equal():
    assert decode(encode(request()), Generate) == request()


def test_a_batch_carries_bodies_untouched():
    body = encode(request())
    batch = Batch(id="b", released=1.0, queued=(0.5,), requests=(body,))
    assert decode(encode(batch), Batch).requests == (body,)


@pytest.mark.parametrize(
    "raw", [b"", b"\xc1", b"\x81\xa1t\xa3zzz", b"not msgpack", encode(request())[:-3]]
)
def test_bytes_that_are_no_message_raise_with_the_bytes(raw):
    with pytest.raises(DecodeError) as caught:
        decode_any(raw)
    assert caught.value.raw == raw


def test_another_kind_of_message_is_refused_by_name():
    with pytest.raises(DecodeError, match="Failed expected, Generate found"):
        decode(encode(request()), Failed)


def test_a_message_of_another_contract_version_is_refused():
    import msgspec

    raw = msgspec.msgpack.encode({"t": "cancel", "id": "x", "v": 99})
    with pytest.raises(DecodeError, match="version 99"):
        decode_any(raw)
