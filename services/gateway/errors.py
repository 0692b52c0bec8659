"""Errors as HTTP answers in OpenAI's shape: ``{"error": {message, type, param, code}}``."""

from __future__ import annotations

import orjson

from shared.messages import Failed

Headers = list[tuple[bytes, bytes]]


class ApiError(Exception):
    """An answer that is an error. ``retry_after`` in seconds; ``retry=False`` tells the
    OpenAI client not to repeat the call by itself."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        type: str = "invalid_request_error",
        code: str | None = None,
        param: str | None = None,
        retry_after: float | None = None,
        retry: bool | None = None,
    ) -> None:
        super().__init__(message)
        self.status, self.message, self.type = status, message, type
        self.code, self.param = code, param
        self.retry_after, self.retry = retry_after, retry

    def content(self) -> dict[str, object]:
        return {
            "error": {
                "message": self.message,
                "type": self.type,
                "param": self.param,
                "code": self.code,
            }
        }

    def body(self) -> bytes:
        return orjson.dumps(self.content())

    def headers(self) -> Headers:
        found: Headers = []
        if self.retry_after is not None:
            found.append((b"retry-after", str(max(1, round(self.retry_after))).encode()))
        if self.retry is not None:
            found.append((b"x-should-retry", b"true" if self.retry else b"false"))
        return found


class ClientGone(Exception):
    """The client closed its connection; nobody reads an answer any more."""


def bad_value(param: str, message: str, code: str | None = "invalid_value") -> ApiError:
    return ApiError(400, message, param=param, code=code)


def unsupported(param: str, message: str = "") -> ApiError:
    """A parameter that would change the answer and that this server does not implement."""
    text = f"parameter {param!r} is not supported by this server"
    return ApiError(
        400, f"{text}: {message}" if message else text, param=param, code="unsupported_parameter"
    )


def model_not_found(name: str) -> ApiError:
    return ApiError(
        404,
        f"The model {name!r} does not exist; GET /v1/models lists what is served",
        param="model",
        code="model_not_found",
    )


def overloaded(message: str, retry_after: float) -> ApiError:
    """Refused without having been started. The client's own quick repetition would not help."""
    return ApiError(
        503,
        message,
        type="service_unavailable_error",
        code="server_is_overloaded",
        retry_after=retry_after,
        retry=False,
    )


def unavailable(message: str, retry_after: float) -> ApiError:
    """A part of the system is away and expected back."""
    return ApiError(
        503,
        message,
        type="service_unavailable_error",
        code="service_unavailable",
        retry_after=retry_after,
    )


def timed_out(seconds: float) -> ApiError:
    return ApiError(
        504,
        f"no complete answer within the server's hard limit of {seconds:g} s",
        type="timeout_error",
        retry=False,
    )


def from_failed(failed: Failed) -> ApiError:
    """What a replica or the dispatcher says about a request it will not finish."""
    return ApiError(
        failed.status,
        failed.message,
        type=failed.type,
        code=failed.code,
        param=failed.param,
        retry_after=failed.retry_after,
        retry=False if failed.status in (429, 503) else None,
    )
