"""Limits, draw and energy of one device in as few calls as the device allows.

Each NVML call may take 10..20 ms, and newer drivers answer many quantities in one call by number. A limit is taken by
number only where the number once said the same as the function that is made for it (within 1 W): budgets are kept
with these values.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import pynvml

from .codes import Raw, Reader, lacks, within
from .device import DeviceError, UnsupportedError

ROUNDING_MW: Final = 1000
"""Boards may round a limit; a read-back within 1 W is what was asked for."""

MAX_DRAW_MW: Final = 2_000_000
"""No board draws 2 kW (the largest today is 1.4 kW); such a reading is garbage that came with SUCCESS."""

MAX_LIMIT_MW: Final = 10_000_000
MAX_ENERGY_MJ: Final = 2_000_000 * 86_400 * 365 * 30
"""2 kW for 30 years, above which an energy counter is a sentinel or garbage. mW x s = mJ."""

_SCOPE_MODULE: Final = 1


@dataclass(frozen=True, slots=True)
class Quantity:
    """One quantity: its number in a field-values call, the function that gives it too, and what is plausible."""

    number: int
    function: str
    low: int
    high: int


# The numbers are written out because older bindings do not name all of them.
MIN: Final = Quantity(187, "", 1, MAX_LIMIT_MW)
MAX: Final = Quantity(188, "", 1, MAX_LIMIT_MW)
REQUESTED: Final = Quantity(192, "nvmlDeviceGetPowerManagementLimit", 1, MAX_LIMIT_MW)
ENFORCED: Final = Quantity(190, "nvmlDeviceGetEnforcedPowerLimit", 1, MAX_LIMIT_MW)
INSTANT: Final = Quantity(186, "", 0, MAX_DRAW_MW)
AVERAGE: Final = Quantity(185, "nvmlDeviceGetPowerUsage", 0, MAX_DRAW_MW)
ENERGY: Final = Quantity(83, "nvmlDeviceGetTotalEnergyConsumption", 0, MAX_ENERGY_MJ)

_LIMITS: Final = (MIN, MAX, REQUESTED, ENFORCED)
_READINGS: Final = (INSTANT, AVERAGE, ENERGY)


class PowerReader:
    """What one device gives by number. Used by one thread at a time."""

    def __init__(self) -> None:
        self._numbered = set(_READINGS)

    def compare(self, reader: Reader, known_mw: dict[Quantity, int]) -> None:
        """Find out which limits the device gives by number, beside what its functions have just said."""
        self._numbered = {*_READINGS, *_LIMITS}
        numbers = self._by_number(reader, _LIMITS)
        for quantity in _LIMITS:
            value = numbers.get(quantity)
            if value is None or abs(value - known_mw[quantity]) > ROUNDING_MW:
                self._numbered.discard(quantity)

    def read(self, reader: Reader, *wanted: Quantity) -> dict[Quantity, int | None]:
        """These quantities; None where the device does not give one, or gives nonsense.

        Where a board has no instant draw, its average of about 1 s stands for it.
        """
        found: dict[Quantity, int | None] = dict.fromkeys(wanted)
        found |= self._by_number(reader, tuple(one for one in wanted if one in self._numbered))
        for quantity in wanted:
            if found[quantity] is None and quantity.function:
                found[quantity] = _number(reader.get(quantity.function))
        if INSTANT in found and found[INSTANT] is None:
            found[INSTANT] = found[AVERAGE] if AVERAGE in found else _number(reader.get(AVERAGE.function))
        if MIN in found and MAX in found and (found[MIN] is None or found[MAX] is None):
            found[MIN], found[MAX] = reader.get("nvmlDeviceGetPowerManagementLimitConstraints") or (
                None,
                None,
            )
        return {quantity: within(value, quantity.low, quantity.high) for quantity, value in found.items()}

    def _by_number(self, reader: Reader, wanted: tuple[Quantity, ...]) -> dict[Quantity, int]:
        if not wanted:
            return {}
        fields = reader.attempt("nvmlDeviceGetFieldValues", [one.number for one in wanted])
        if isinstance(fields, DeviceError):
            if isinstance(fields, UnsupportedError):
                self._numbered.clear()
            return {}
        values = {}
        for quantity, field in zip(wanted, fields, strict=True):
            # A call that succeeds may still carry an error in its entry.
            if field.nvmlReturn == pynvml.NVML_SUCCESS:
                values[quantity] = _value(field)
            elif lacks(field.nvmlReturn):
                self._numbered.discard(quantity)
        return values


def module_scope(reader: Reader) -> bool | None:
    """Whether a limit of the whole module (GH200) may rule below the device's own; None where it cannot be told."""
    fields = reader.get("nvmlDeviceGetFieldValues", [(ENFORCED.number, _SCOPE_MODULE)])
    if fields is None:
        return None
    code = int(fields[0].nvmlReturn)
    if code == pynvml.NVML_SUCCESS:
        return True
    return False if lacks(code) else None


def _number(value: Raw) -> int | None:
    return None if value is None else int(value)


def _value(field: Raw) -> int:
    wide = (pynvml.NVML_VALUE_TYPE_UNSIGNED_LONG, pynvml.NVML_VALUE_TYPE_UNSIGNED_LONG_LONG)
    return int(field.value.ullVal if field.valueType in wide else field.value.uiVal)
