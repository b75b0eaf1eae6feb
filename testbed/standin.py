"""The C side of simulated GPUs: where the library is, its layouts (nvml_standin/control.h), and broken copies of it."""

from __future__ import annotations

import ctypes
import errno
import functools
import os
import platform
from collections.abc import Callable
from pathlib import Path
from typing import Final

BUILT_LIBRARY: Final = Path(__file__).resolve().parent.parent / "build/nvml_standin/libnvidia-ml.so.1"


class GpuSpec(ctypes.Structure):
    _fields_ = (
        ("uuid", ctypes.c_char * 48),
        ("pci", ctypes.c_char * 32),
        ("minor", ctypes.c_uint32),
        ("min_mw", ctypes.c_uint32),
        ("max_mw", ctypes.c_uint32),
        ("default_mw", ctypes.c_uint32),
        ("effect_us", ctypes.c_uint32),
        ("tau_ms", ctypes.c_uint32),
        ("idle_w", ctypes.c_double),
    )


class GpuView(ctypes.Structure):
    _fields_ = (
        ("mono_ns", ctypes.c_int64),
        ("uuid", ctypes.c_char * 48),
        ("job", ctypes.c_char * 64),
        ("minor", ctypes.c_uint32),
        ("index", ctypes.c_uint32),
        ("requested_mw", ctypes.c_uint32),
        ("effective_mw", ctypes.c_uint32),
        ("default_mw", ctypes.c_uint32),
        ("bmc_mw", ctypes.c_uint32),
        ("owner_pid", ctypes.c_int32),
        ("demands", ctypes.c_uint32),
        ("draw_w", ctypes.c_double),
        ("energy_j", ctypes.c_double),
        ("work_s", ctypes.c_double),
        ("clock", ctypes.c_double),
    )


class FaultSpec(ctypes.Structure):
    _fields_ = (
        ("function", ctypes.c_char * 64),
        ("gpu", ctypes.c_int32),
        ("kind", ctypes.c_int32),
        ("code", ctypes.c_int32),
        ("after", ctypes.c_int32),
        ("count", ctypes.c_int32),
        ("field", ctypes.c_int32),
        ("delay_us", ctypes.c_int64),
        ("value", ctypes.c_double),
    )


_LAYOUTS: Final = (GpuSpec, GpuView, FaultSpec)


def library_path() -> Path:
    """The stand-in library: PFI_STANDIN_LIB, else the one that make built."""
    return Path(os.environ.get("PFI_STANDIN_LIB") or BUILT_LIBRARY)


@functools.cache
def load(path: Path) -> ctypes.CDLL:
    """The library with its signatures. Raises OSError when it is not built, or built from other sources."""
    if not path.exists():
        raise FileNotFoundError(errno.ENOENT, "the stand-in is not built; run `make native`", str(path))
    library = ctypes.CDLL(str(path), use_errno=True)
    text, handle, number = ctypes.c_char_p, ctypes.c_void_p, ctypes.c_int
    signatures: dict[str, tuple[object, tuple[object, ...]]] = {
        "pfi_layout": (number, (ctypes.POINTER(ctypes.c_uint32),) * len(_LAYOUTS)),
        "pfi_create": (number, (text, text, text, ctypes.POINTER(GpuSpec), ctypes.c_uint32)),
        "pfi_open": (handle, (text,)),
        "pfi_close": (None, (handle,)),
        "pfi_snapshot": (number, (handle, ctypes.POINTER(GpuView), ctypes.c_uint32)),
        "pfi_poke": (number, (handle, number, text, ctypes.c_double)),
        "pfi_fault": (number, (handle, ctypes.POINTER(FaultSpec))),
        "pfi_reset": (number, (handle, number)),
        "pfi_set_mig": (number, (handle, number, number)),
        "pfi_replace": (number, (handle, number, text)),
        "pfi_clear_faults": (number, (handle,)),
        "pfi_faults_fired": (ctypes.c_int64, (handle,)),
    }
    for name, (result, arguments) in signatures.items():
        function = getattr(library, name)
        function.restype, function.argtypes = result, arguments
    sizes = [ctypes.c_uint32() for _ in _LAYOUTS]
    library.pfi_layout(*(ctypes.byref(size) for size in sizes))
    if [size.value for size in sizes] != [ctypes.sizeof(layout) for layout in _LAYOUTS]:
        raise OSError(errno.EINVAL, "the stand-in was built from other sources; run `make native`", str(path))
    return library


# ------------------------------------------------------------------------------------------------ broken libraries


def library_without(*symbols: str) -> Callable[[Path], Path]:
    """A library as of an older driver, which lacks these functions."""

    def make(folder: Path) -> Path:
        data = library_path().read_bytes()
        for symbol in symbols:
            data = _rename(data, symbol, "x" + symbol[1:])
        return _write(folder, data)

    return make


def no_library(folder: Path) -> Path:
    """An empty folder."""
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def truncated_library(folder: Path) -> Path:
    """A file that is cut off inside its header."""
    return _write(folder, library_path().read_bytes()[:40])


def library_of_other_architecture(folder: Path) -> Path:
    """A library of another machine type."""
    machine = 62 if platform.machine() == "aarch64" else 183  # ELF's numbers of x86-64 and aarch64
    data = library_path().read_bytes()
    return _write(folder, data[:18] + machine.to_bytes(2, "little") + data[20:])


def library_with_undefined_symbol(folder: Path) -> Path:
    """A library that wants a function which no other library has."""
    name = "pthread_mutexattr_setrobust"
    return _write(folder, _rename(library_path().read_bytes(), name, name[:-1] + "X"))


def _rename(data: bytes, old: str, new: str) -> bytes:
    """Rename a dynamic symbol: the first occurrence is in the linker's string table, ahead of code and constants."""
    name = b"\0" + old.encode() + b"\0"
    if name not in data:
        raise ValueError(f"the stand-in has no symbol {old}")
    return data.replace(name, b"\0" + new.encode() + b"\0", 1)


def _write(folder: Path, data: bytes) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "libnvidia-ml.so.1").write_bytes(data)
    return folder
