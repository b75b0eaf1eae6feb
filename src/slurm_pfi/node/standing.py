"""What stands in the way of capping this node's GPUs for as long as nobody changes it: told in every report."""

from __future__ import annotations

from .state import NS_PER_S, Gpu, State

UNSETTABLE = (
    "its limit cannot be set: the driver gives this process no right to, or the board has none to set"
)


def standing_faults(state: State) -> tuple[str, ...]:
    """One line each: how much of the node can be capped, and which GPUs may lose their caps by themselves."""
    return tuple(text for text in (_enforceable(state), _persistence(state)) if text)


def _enforceable(state: State) -> str:
    """Empty where every GPU follows a plan, as far as that can be found out without setting one."""
    known = tuple(state.gpus.values())
    able = sum(gpu.settable is not False and not gpu.blocked for gpu in known)
    if able == len(known):
        return ""
    if able == 0:
        again_min = state.settings.survey_ns / (60 * NS_PER_S)
        return (
            f"cannot enforce: no limit can be set on any of {len(known)} GPUs, which count at the limits they have; "
            f"run the agent as root with CAP_SYS_ADMIN; looked at again within {again_min:g} min"
        )
    return (
        f"partly enforceable: limits can be set on {able} of {len(known)} GPUs, "
        "the others count at the limits they have"
    )


def _persistence(state: State) -> str:
    off = [gpu for gpu in state.gpus.values() if gpu.persistence is not True]
    if not off:
        return ""
    first = off[0]
    how = "off" if first.persistence is False else "not known"
    return (
        f"persistence mode is {how} on {len(off)} GPUs, {_name(first)} the first: a cap ends there as soon as no "
        "program holds the GPU, so they count at their default limits; run nvidia-persistenced"
    )


def _name(gpu: Gpu) -> str:
    return gpu.uuid if gpu.position is None else f"position {gpu.position}"
