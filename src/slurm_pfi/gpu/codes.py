"""The one place where NVML's return codes and surprises become the typed errors of the seam.

pynvml raises plain NVMLError for codes that it does not know, other exceptions for a library that does not match or
lacks a symbol, and AttributeError where the binding itself is too old. Callers see DeviceErrors only.
"""

from __future__ import annotations

from typing import Any, Final, TypeAlias, TypeVar

import pynvml

from ..model import GpuId
from .device import (
    DeadlineError,
    DeviceError,
    LibraryGoneError,
    LostError,
    NeedsResetError,
    PermissionDeniedError,
    RangeError,
    UnknownDeviceError,
    UnsupportedError,
)

Raw: TypeAlias = Any
"""What the binding hands out: it ships no types."""

WHOLE_DEVICE: Final = (LostError, NeedsResetError, LibraryGoneError, DeadlineError)
"""After one of these nothing else of the device can be had either."""

_KINDS: Final[dict[int, type[DeviceError]]] = {
    pynvml.NVML_ERROR_UNINITIALIZED: LibraryGoneError,
    pynvml.NVML_ERROR_INVALID_ARGUMENT: RangeError,
    pynvml.NVML_ERROR_NOT_SUPPORTED: UnsupportedError,
    pynvml.NVML_ERROR_NO_PERMISSION: PermissionDeniedError,
    pynvml.NVML_ERROR_NOT_FOUND: LostError,
    pynvml.NVML_ERROR_DRIVER_NOT_LOADED: LibraryGoneError,
    pynvml.NVML_ERROR_TIMEOUT: DeadlineError,
    pynvml.NVML_ERROR_LIBRARY_NOT_FOUND: LibraryGoneError,
    pynvml.NVML_ERROR_FUNCTION_NOT_FOUND: UnsupportedError,
    pynvml.NVML_ERROR_GPU_IS_LOST: LostError,
    pynvml.NVML_ERROR_RESET_REQUIRED: NeedsResetError,
    pynvml.NVML_ERROR_OPERATING_SYSTEM: PermissionDeniedError,
    pynvml.NVML_ERROR_LIB_RM_VERSION_MISMATCH: LibraryGoneError,
    pynvml.NVML_ERROR_ARGUMENT_VERSION_MISMATCH: UnsupportedError,
    28: LostError,  # NVML_ERROR_GPU_NOT_FOUND, which older bindings do not name
}

_N = TypeVar("_N", int, float)


def call(function: str, *args: object, uuid: GpuId = "") -> Raw:
    """Call a function of pynvml. Raises a DeviceError for everything that it can raise."""
    where = f"{uuid}: {function}" if uuid else function
    try:
        return getattr(pynvml, function)(*args)
    except pynvml.NVMLError as error:
        code = int(error.value)
        kind = _KINDS.get(code, UnknownDeviceError)
        raise kind(f"{where}: {_code_text(error, code)}", uuid=uuid, code=code) from error
    except pynvml.NVMLLibraryMismatchError as error:  # not an NVMLError
        raise LibraryGoneError(f"{where}: library and driver do not match: {error}", uuid=uuid) from error
    except AttributeError as error:  # the binding has no such function
        raise UnsupportedError(f"{where}: {error}", uuid=uuid) from error
    except Exception as error:
        raise UnknownDeviceError(f"{where}: {type(error).__name__}: {error}", uuid=uuid) from error


def lacks(code: int) -> bool:
    """Whether the code in an entry of field values says that the device or its driver does not know the field."""
    return _KINDS.get(code) in (UnsupportedError, RangeError)


class Reader:
    """Quantities of one device, each on its own: one that is not offered does not hide the others."""

    def __init__(self, uuid: GpuId, handle: Raw) -> None:
        self.uuid = uuid
        self.handle = handle
        self.first_error: DeviceError | None = None
        self.any_answer = False

    def get(self, function: str, *args: object) -> Raw:
        """The value, or None when the device does not give it. Raises when the device as a whole is gone."""
        value = self.attempt(function, *args)
        return None if isinstance(value, DeviceError) else value

    def attempt(self, function: str, *args: object) -> Raw:
        """As ``get``, but the error itself in place of None."""
        try:
            value = call(function, self.handle, *args, uuid=self.uuid)
        except WHOLE_DEVICE:
            raise
        except DeviceError as error:
            self.first_error = self.first_error or error
            return error
        self.any_answer = True
        return value

    def check(self) -> None:
        """Raise what went wrong first when the device gave nothing at all."""
        if self.first_error is not None and not self.any_answer:
            raise self.first_error


def within(value: _N | None, low: _N, high: _N) -> _N | None:
    """The value where it is plausible; None where it is unknown, NaN or absurd."""
    return value if value is not None and low <= value <= high else None


def text(value: str | bytes) -> str:
    return value.decode("ascii", "replace") if isinstance(value, bytes) else value


def _code_text(error: Exception, code: int) -> str:
    try:
        return f"{error} (code {code})"
    except Exception:  # the text of an unknown code is asked of the library itself
        return f"code {code}"
