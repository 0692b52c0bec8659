"""Every decoder against bytes that nobody meant: its own error or a value, nothing else.

FUZZ_EXAMPLES sets the inputs for each decoder (`make fuzz EXAMPLES=20000` for a long run).
"""

import json
import os
import string

import msgspec
import orjson
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from collm.models import ModelError, resolve
from loadgen.trace import TraceError
from loadgen.trace import read as read_trace
from services.dispatcher.entries import BadEntry
from services.dispatcher.entries import parse as parse_entry
from services.replica.adapters import read_folder
from services.replica.checkpoint import WeightsError
from services.replica.engines.base import AdapterError
from services.replica.weights import open_fused
from shared import entries
from shared.adapter_files import BadFolder, BadName, check_name, read_card
from shared.messages import DecodeError, Generate, Sampling, decode_any, encode
from shared.profile import ProfileError
from shared.profile import load as load_profile
from shared.records import ReplicaRecord
from shared.settings import Settings, SettingsError
from shared.settings import load as load_settings
from shared.training_data import DataError
from shared.training_data import load as load_data

EXAMPLES = int(os.environ.get("FUZZ_EXAMPLES", "100"))
fuzz = settings(
    max_examples=EXAMPLES,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
pytestmark = pytest.mark.timeout(3600 if EXAMPLES > 1000 else 120)

REQUEST = Generate(
    id="r.0",
    gateway="g",
    model="m",
    prompt=tuple(range(40)),
    sampling=Sampling(max_tokens=5, stop_token_ids=(2,)),
    arrival=12.5,
)
json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=20),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner),
    max_leaves=12,
)


@st.composite
def damaged(draw, whole: bytes):
    """Something right with some bytes changed, cut out or put in."""
    raw = bytearray(whole)
    for _ in range(draw(st.integers(1, 4))):
        at = draw(st.integers(0, len(raw)))
        kind = draw(st.sampled_from(("set", "cut", "insert", "end")))
        if kind == "set" and at < len(raw):
            raw[at] = draw(st.integers(0, 255))
        elif kind == "cut":
            del raw[at : at + draw(st.integers(1, 8))]
        elif kind == "insert":
            raw[at:at] = draw(st.binary(min_size=1, max_size=8))
        else:
            del raw[at:]
    return bytes(raw)


@fuzz
@given(st.binary(max_size=200) | damaged(encode(REQUEST)))
def test_a_message_decodes_or_says_why_not(raw):
    try:
        message = decode_any(raw)
    except DecodeError as e:
        assert e.raw == raw
    else:
        assert decode_any(encode(message)) == message or b"nan" in repr(message).encode()


FLAT = [v if isinstance(v, bytes) else v.encode() for v in entries.request_values(REQUEST)]
FIELDS = dict(zip(FLAT[::2], FLAT[1::2], strict=True))


@fuzz
@given(
    st.dictionaries(st.sampled_from(sorted(FIELDS)), st.binary(max_size=12), max_size=6),
    st.sets(st.sampled_from(sorted(FIELDS)), max_size=4),
)
def test_a_stream_entry_parses_or_is_refused(changed, missing):
    fields = {k: v for k, v in {**FIELDS, **changed}.items() if k not in missing}
    try:
        entry = parse_entry(b"1-0", fields, 1.0)
    except BadEntry as e:
        assert str(e)
    else:
        assert entry.id
        assert entry.request.max_tokens >= 1


@fuzz
@given(st.dictionaries(st.sampled_from(ReplicaRecord.__struct_fields__), st.text(max_size=12)))
def test_a_replica_record_reads_or_raises_what_it_names(values):
    raw = {k.encode(): v.encode("utf-8", "surrogatepass") for k, v in values.items()}
    try:
        record = ReplicaRecord.from_hash(raw)
    except (msgspec.ValidationError, orjson.JSONDecodeError, UnicodeDecodeError) as e:
        assert str(e)
    else:
        assert isinstance(record.b, int)


TRACE = (
    b"TIMESTAMP,ContextTokens,GeneratedTokens\r\n"
    b"2023-11-16 18:17:03.9799600,4808,10\r\n2023-11-16 18:17:04.0319600,3180,8\r\n"
    b"2024-05-10 00:00:00.009930+00:00,2162,5"
)


@fuzz
@given(st.binary(max_size=200) | damaged(TRACE))
def test_a_trace_reads_or_names_file_and_line(tmp_path, raw):
    path = tmp_path / "trace.csv"
    path.write_bytes(raw)
    try:
        rows = list(read_trace(path))
    except TraceError as e:
        assert "trace.csv" in str(e)
    else:
        assert all(r.prompt_tokens >= 0 and r.output_tokens >= 0 for r in rows)


CHAT = json.dumps(
    {
        "messages": [
            {"role": "user", "content": "question"},
            {"role": "assistant", "content": "answer", "weight": 1},
        ]
    }
).encode()


@fuzz
@given(
    st.lists(st.binary(max_size=60) | damaged(CHAT) | st.just(CHAT), min_size=1, max_size=4),
    st.sampled_from((".jsonl", ".json")),
)
def test_training_data_loads_or_names_file_and_line(tmp_path, lines, suffix):
    path = tmp_path / f"data{suffix}"
    path.write_bytes(b"\n".join(lines))
    try:
        loaded = load_data(path)
    except DataError as e:
        assert "data" in str(e)
    else:
        assert all(c.messages for c in loaded.chats)


CONFIG = json.dumps({"peft_type": "LORA", "r": 4, "lora_alpha": 8, "target_modules": ["q_proj"]})


@pytest.fixture(scope="module")
def adapter_tensors() -> bytes:
    import numpy as np
    from safetensors.numpy import save

    base = "base_model.model.model.layers.0.self_attn.q_proj"
    return save(
        {
            f"{base}.lora_A.weight": np.ones((4, 64), np.float32),
            f"{base}.lora_B.weight": np.ones((64, 4), np.float32),
        }
    )


SHAPES = {"model.layers.0.self_attn.q_proj": (64, 64)}


@fuzz
@given(st.data())
def test_an_adapter_folder_loads_or_names_what_is_wrong(tmp_path, adapter_tensors, data):
    config = data.draw(damaged(CONFIG.encode()) | st.just(CONFIG.encode()), "config")
    tensors = data.draw(damaged(adapter_tensors[:300]).map(lambda h: h + adapter_tensors[300:]))
    (tmp_path / "adapter_config.json").write_bytes(config)
    (tmp_path / "adapter_model.safetensors").write_bytes(tensors)
    try:
        modules = read_folder(tmp_path, SHAPES)
    except AdapterError as e:
        assert str(tmp_path) in str(e)
    else:
        assert modules is not None
    try:
        card = read_card(tmp_path)
    except BadFolder as e:
        assert str(e)
    else:
        assert card.rank >= 1


@fuzz
@given(st.data())
def test_a_checkpoint_opens_or_says_what_is_wrong(tmp_path_factory, tiny_model, data):
    folder = tmp_path_factory.mktemp("checkpoint")
    for name in ("config.json", "model.safetensors"):
        raw = (tiny_model / name).read_bytes()
        head = data.draw(damaged(raw[:200]), name)
        (folder / name).write_bytes(head + raw[200:])
    try:
        found = open_fused(folder, "float32")
    except WeightsError as e:
        assert str(e)
    else:
        assert found.views


@fuzz
@given(st.binary(max_size=64).map(lambda tail: b"GGUF" + tail) | st.binary(min_size=4, max_size=64))
def test_a_file_that_is_no_gguf_is_refused_before_it_is_converted(tmp_path, raw):
    path = tmp_path / "model.gguf"
    path.write_bytes(raw)
    if raw[:4] == b"GGUF":
        return  # the converter's process takes over; it has its own tests
    with pytest.raises(ModelError, match="no GGUF"):
        resolve(str(path))


@fuzz
@given(st.text(alphabet=string.printable, max_size=40))
def test_an_adapter_name_is_safe_or_refused(name):
    try:
        checked = check_name(name)
    except BadName as e:
        assert str(e)
    else:
        assert "/" not in checked
        assert ".." not in checked
        assert checked == name


@fuzz
@given(json_values)
def test_a_configuration_file_loads_or_says_what_is_wrong(tmp_path, content):
    path = tmp_path / "collm.yaml"
    path.write_text(json.dumps(content), encoding="utf-8")
    try:
        load_settings(Settings, {"COLLM_CONFIG": str(path)})
    except SettingsError as e:
        assert str(e)
    else:
        assert content is None or isinstance(content, dict) or not content


@fuzz
@given(st.binary(max_size=120))
def test_a_profile_loads_or_says_what_is_wrong(tmp_path, raw):
    path = tmp_path / "profile.yaml"
    path.write_bytes(raw)
    with pytest.raises(ProfileError):
        load_profile(str(path))
