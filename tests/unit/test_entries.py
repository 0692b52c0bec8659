import pytest

from shared.entries import request_entry, request_values
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


def test_a_request_entry_tells_what_the_request_says():
    entry = request_entry(raw(request(adapter="a", adapter_version="v1", generated=(7,))))
    assert (entry.id, entry.adapter, entry.adapter_version) == ("r.0", "a", "v1")
    assert (entry.arrival, entry.deadline) == (1700000000.25, 1700000000.75)
    assert entry.slo == Slo(e2e_ms=500, tpot_ms=12.5)
    assert (entry.prompt_tokens, entry.max_tokens, entry.generated_tokens) == (3, 5, 1)
    assert decode(entry.body, Generate).prompt == (1, 2, 3)


def test_a_request_without_limits_or_adapter_has_none():
    entry = request_entry(raw(request(slo=Slo(), deadline=None)))
    assert entry.adapter is None
    assert entry.deadline is None
    assert not entry.slo


def test_a_missing_field_is_named():
    fields = raw(request())
    del fields[b"attempt"]
    with pytest.raises(ValueError, match="attempt"):
        request_entry(fields)
