"""/v1/files: training files, kept in ``<data_dir>/files`` until their owner deletes them."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fastapi import FastAPI, Request, Response
from fastapi.responses import FileResponse
from starlette.datastructures import UploadFile
from starlette.exceptions import HTTPException
from starlette.formparsers import MultiPartException

from services.gateway.access import Principal
from services.gateway.errors import ApiError, bad_value
from services.gateway.routes import caller, exchange_of, json, not_found, page
from shared.jobs import File, new_id, path

if TYPE_CHECKING:
    from services.gateway.service import Gateway

PURPOSES = ("fine-tune",)
BLOCK = 1 << 20
FORM_SLACK = 64 << 10  # boundaries and headers of a multipart body
LONGEST_NAME = 255


class Files:
    """Uploads within a tenant's quota."""

    def __init__(self, gateway: Gateway) -> None:
        self._gateway = gateway
        self._uploading = asyncio.Lock()  # so that two uploads cannot share one quota

    async def store(self, tenant: str, name: str, purpose: str, upload: UploadFile) -> File:
        """Raises ApiError 400, 413, 429."""
        gateway = self._gateway
        async with self._uploading:
            file_id = new_id("file")
            place = path(gateway.settings.data_dir, file_id)
            size = await asyncio.to_thread(_write, upload, place)
            try:
                if size == 0:
                    raise bad_value("file", "the file is empty")
                await gateway.storage.room_for_file(tenant, size)
                file = File(
                    id=file_id,
                    tenant=tenant,
                    filename=name,
                    purpose=purpose,
                    bytes=size,
                    created=gateway.clock(),
                )
                await gateway.jobs.add(file)
            except BaseException:
                place.unlink(missing_ok=True)
                raise
        return file

    async def find(self, file_id: str, who: Principal) -> File:
        """Raises ApiError 404, also for another tenant's."""
        file = await self._gateway.jobs.get(File, file_id) if _is_id(file_id) else None
        if file is None or (who.sees is not None and file.tenant != who.sees):
            raise not_found("file", file_id[:64])
        return file

    async def delete(self, file: File) -> None:
        await self._gateway.jobs.forget(File, file.id)
        place = path(self._gateway.settings.data_dir, file.id)
        await asyncio.to_thread(place.unlink, missing_ok=True)


def _is_id(text: str) -> bool:
    return text.startswith("file-") and text[5:].isalnum()


def _write(upload: UploadFile, place: Path) -> int:
    """Bytes written. The file appears whole or not at all."""
    place.parent.mkdir(parents=True, exist_ok=True)
    beside = place.with_name(f".{place.name}")
    size = 0
    try:
        with open(beside, "xb") as out:
            while block := upload.file.read(BLOCK):
                out.write(block)
                size += len(block)
        os.replace(beside, place)
    finally:
        beside.unlink(missing_ok=True)
    return size


def shown(file: File) -> dict[str, Any]:
    """The file object of OpenAI's API."""
    return {
        "id": file.id,
        "object": "file",
        "bytes": file.bytes,
        "created_at": int(file.created),
        "expires_at": None,
        "filename": file.filename,
        "purpose": file.purpose,
        "status": "processed",
        "status_details": None,
    }


async def _receive(request: Request, gateway: Gateway) -> File:
    """The multipart body of an upload. Raises ApiError 400, 413, 429."""
    limit = gateway.settings.max_file_bytes
    bounded = Request(request.scope, exchange_of(request).bounded(limit + FORM_SLACK))
    if not request.headers.get("content-type", "").startswith("multipart/form-data"):
        raise bad_value("file", "a multipart/form-data body with file and purpose expected")
    try:
        async with bounded.form(max_files=1, max_fields=20) as form:
            purpose, part = form.get("purpose"), form.get("file")
            if not isinstance(part, UploadFile):
                raise bad_value("file", "the form has no file")
            if purpose not in PURPOSES:
                raise bad_value("purpose", f"purpose: one of {', '.join(PURPOSES)} expected")
            if part.size is not None and part.size > limit:
                raise ApiError(413, f"the file is larger than {limit} bytes", param="file")
            name = Path(part.filename or "").name[:LONGEST_NAME] or "file.jsonl"
            tenant = caller(request).tenant
            return await gateway.files.store(tenant, name, str(purpose), part)
    except (MultiPartException, HTTPException) as e:
        detail = e.message if isinstance(e, MultiPartException) else e.detail
        raise bad_value("file", f"not a multipart body: {detail}") from None


def add(app: FastAPI, gateway: Gateway) -> None:
    files = gateway.files

    @app.post("/v1/files")
    async def upload(request: Request) -> Response:
        return json(shown(await _receive(request, gateway)))

    @app.get("/v1/files")
    async def listing(request: Request) -> Response:
        found = await gateway.jobs.all(File, caller(request).sees)
        if purpose := request.query_params.get("purpose"):
            found = [f for f in found if f.purpose == purpose]
        if request.query_params.get("order") == "asc":
            found.reverse()
        return page([shown(f) for f in found], request)

    @app.get("/v1/files/{file_id}")
    async def one(request: Request, file_id: str) -> Response:
        return json(shown(await files.find(file_id, caller(request))))

    @app.get("/v1/files/{file_id}/content")
    async def content(request: Request, file_id: str) -> Response:
        file = await files.find(file_id, caller(request))
        place = path(gateway.settings.data_dir, file.id)
        if not place.is_file():
            raise not_found("file content", file.id)
        return FileResponse(place, media_type="application/octet-stream")

    @app.delete("/v1/files/{file_id}")
    async def delete(request: Request, file_id: str) -> Response:
        file = await files.find(file_id, caller(request))
        await files.delete(file)
        return json({"id": file.id, "object": "file", "deleted": True})
