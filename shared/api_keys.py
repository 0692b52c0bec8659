"""The file of API keys: who may call the gateway, as which tenant, in which role.

Keys are 256 random bits, so their plain SHA-256 is safe to store; the key itself is shown once
and kept nowhere. The file is JSON, written whole or not at all, readable by its owner only.
"""

from __future__ import annotations

import hashlib
import hmac
import os
import re
import secrets
import time
from pathlib import Path
from typing import Literal

import msgspec

PREFIX = "sk-collm-"
TENANT = re.compile(r"[a-z0-9][a-z0-9_-]{0,62}")


class KeysError(ValueError):
    """The keys file or a tenant's name is unusable; says what is wrong with it."""


class Key(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One key, without the key."""

    id: str
    hash: str  # SHA-256, hexadecimal
    tenant: str
    role: Literal["user", "admin"] = "user"
    created: float = 0.0  # Unix seconds
    note: str = ""


class KeyFile(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The whole file."""

    keys: tuple[Key, ...] = ()

    def find(self, secret: bytes) -> Key | None:
        """The entry of a key. All entries are compared, each in constant time, by their hashes:
        how long it takes says nothing about any key."""
        digest = hashlib.sha256(secret).hexdigest()
        found = None
        for key in self.keys:
            if hmac.compare_digest(key.hash, digest):
                found = key
        return found


def read(path: Path) -> KeyFile:
    """Raises KeysError naming the file and the fault."""
    try:
        return msgspec.json.decode(path.read_bytes(), type=KeyFile)
    except OSError as e:
        raise KeysError(f"{path}: {e.strerror or e}") from e
    except (msgspec.DecodeError, UnicodeDecodeError) as e:
        raise KeysError(f"{path}: not a keys file: {e}") from e


def create(
    path: Path, tenant: str, role: Literal["user", "admin"] = "user", note: str = ""
) -> tuple[Key, str]:
    """Add a key (and the file, if there is none); returns its entry and, once, the key itself.

    Raises KeysError.
    """
    if not TENANT.fullmatch(tenant):
        raise KeysError(
            f"tenant {tenant!r}: 1 to 63 lower-case letters, digits, '-' or '_' expected"
        )
    known = read(path) if path.exists() else KeyFile()
    secret = PREFIX + secrets.token_urlsafe(32)
    key = Key(
        id=f"key-{secrets.token_hex(4)}",
        hash=hashlib.sha256(secret.encode()).hexdigest(),
        tenant=tenant,
        role=role,
        created=time.time(),
        note=note,
    )
    _write(path, KeyFile(keys=(*known.keys, key)))
    return key, secret


def revoke(path: Path, key_id: str) -> Key:
    """Remove a key by its id; a running gateway notices within a second. Raises KeysError."""
    known = read(path)
    for key in known.keys:
        if key.id == key_id:
            _write(path, KeyFile(keys=tuple(k for k in known.keys if k is not key)))
            return key
    raise KeysError(f"{path}: no key {key_id!r}")


def _write(path: Path, content: KeyFile) -> None:
    beside = path.with_name(f".{path.name}.{secrets.token_hex(4)}")
    raw = msgspec.json.format(msgspec.json.encode(content), indent=2)
    descriptor = os.open(beside, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(raw + b"\n")
        os.replace(beside, path)
    finally:
        beside.unlink(missing_ok=True)
