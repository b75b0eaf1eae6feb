"""What a device's failure means to an admin, and what to do about it."""

from __future__ import annotations

import re
from typing import Final

from ..gpu.device import DeadlineError, LostError, NeedsResetError
from ..model import GpuId

GONE_KINDS: Final = frozenset({LostError.__name__, NeedsResetError.__name__})
"""The device cannot answer, so that nothing that was read of it holds."""

NOT_LISTED: Final = "list of "
"""Before a UUID, the name of the node's fault that a GPU which is still read could not be listed."""

_CODE: Final = re.compile(r"\(code ([0-9]{1,6})\)", re.ASCII)
_NO_ANSWER_S: Final = re.compile(r"no answer(?: from NVML)? in ([0-9.]{1,9}) s\Z", re.ASCII)


def device_fault(uuid: GpuId, kind: str, message: str, *, capped: bool) -> str:
    """One line without the GPU's name. It begins alike for one kind of failure, whichever NVML function told of it.

    ``capped``: a limit of ours is on record for this GPU.
    """
    message = bare(uuid, message)
    code = _CODE.search(message)
    how = f"NVML code {code[1]}" if code else message
    record = "; its cap stays on record" if capped else ""
    if kind == LostError.__name__:
        return f"off the bus ({how}){record}; look for Xid in dmesg, reset it or drain the node"
    if kind == NeedsResetError.__name__:
        return f"needs a reset ({how}){record}; drain the node and reset it: nvidia-smi --gpu-reset"
    if kind == DeadlineError.__name__ and (late := _NO_ANSWER_S.search(message)):
        return f"an NVML call hangs ({late[1]} s){record}; tried again by itself; if it lasts: dmesg, reboot"
    return f"{kind}: {message}"


def bare(uuid: GpuId, message: str) -> str:
    """The message without the UUID that it may begin with."""
    return message.removeprefix(f"{uuid}: ") if uuid else message


def kind_of(fault: str) -> str:
    """What stays the same while one fault of a GPU lasts: the words before any detail."""
    return re.split(r"[(:;]", fault, maxsplit=1)[0].strip()
