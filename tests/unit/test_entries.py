import pytest

from services.dispatcher.entries import BadEntry, of_generate, parse
from shared.entries import request_values
from shared.messages import Generate, Sampling, decode
from shared.slo import Slo


def request(**changes) -> Generate:
    values = {
        "id": "r.0",
        "gateway": "g",
        "model": "m",
        "prompt": (1, 2, 3),
        "sampling": Sampling(max_tokens=5),
        "slo": Slo(e2e_ms=500, tpot_ms=12.5),
        "arrival": 1700000000.25,
        "deadline": 1700000000.75,
    }
    return Generate(**{**values, **changes})


def raw(request: Generate) -> dict[bytes, bytes]:
    flat = [v if isinstance(v, bytes) else v.encode() for v in request_values(request)]
    return dict(zip(flat[::2], flat[1::2], strict=True))


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"adapter": "a", "adapter_version": "v1", "generated": (7,), "attempt": 2},
        {"slo": Slo(), "deadline": None},
        {"slo": Slo(ttft_ms=200), "tenant": "t", "priority": 3},
    ],
)
def test_the_plain_fields_tell_a_policy_what_the_whole_request_does(changes):
    """Waiting requests are read from their fields, those in flight from their bodies."""
    whole = request(**changes)
    fields = raw(whole)
    assert decode(fields[b"body"], Generate) == whole
    assert parse(b"1-0", fields, 5.0) == of_generate(whole, b"1-0", fields[b"body"], 5.0)


def test_tokens_that_were_delivered_count_as_prompt():
    entry = parse(b"1-0", raw(request(generated=(7,))), 5.0)
    assert (entry.request.prompt_tokens, entry.request.max_tokens) == (4, 4)
    assert (entry.request.arrival, entry.request.deadline) == (1700000000.25, 1700000000.75)


def test_a_request_without_limits_or_adapter_has_none():
    seen = parse(b"1-0", raw(request(slo=Slo(), deadline=None)), 5.0).request
    assert (seen.adapter, seen.deadline, seen.ttft_deadline, seen.tpot) == (None,) * 4


def test_a_missing_field_is_named():
    fields = raw(request())
    del fields[b"arrival"]
    with pytest.raises(BadEntry, match="'arrival' is missing"):
        parse(b"1-0", fields, 5.0)
