"""The error of the embedded runner."""


class UpError(RuntimeError):
    """The system cannot start or go on; the message says why and what to do."""
