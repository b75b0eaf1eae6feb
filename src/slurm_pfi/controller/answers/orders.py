"""What the command line may ask of the controller, and who may ask it."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

import msgspec
import structlog

from ...bus.asking import NO, Reply, Request, refusal
from ...bus.unix import Peer
from ...model import LimitClass, LimitStep
from ...store.limits import LimitError, ScheduleStep
from ...store.sealed import UnreadableError
from ...units import MW_PER_W, format_duration, format_power
from ..budget import look
from ..rebound import release_s
from ..shares import Shares, candidates, share
from ..state import LimitsChanged
from ..views import limit_view, site_view
from .forecast_orders import FORECASTS, Forecasts
from .fresh import Fresh
from .jobs import ANSWERS, Answers
from .privacy import Asker, asker_of, is_admin, private_status
from .window_report import COMMANDS as REPORTS
from .window_report import Reports

if TYPE_CHECKING:
    from ..shell import Controller

MAX_REFUSED_UIDS = 1024

log = structlog.get_logger("controller")


class LimitOrder(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """``limit set``. Without a start it begins now, without an end it stays until it is cleared."""

    id: str
    class_: LimitClass = msgspec.field(name="class")
    limit_mw: int
    start_unix_s: float | None = None
    end_unix_s: float | None = None


class ClearOrder(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """``limit clear``: one id, or all of them with None."""

    id: str | None


class Orders:
    """Answers requests. Orders are for root, the controller's own user and the admins.

    Reading is for everyone, as far as Slurm's PrivateData lets a user see the jobs of others.
    """

    def __init__(self, controller: Controller) -> None:
        self._controller = controller
        self._refused_uids: set[int] = set()
        self._forecasts = Forecasts(controller)
        self._answers = Answers(controller)
        self._site = Fresh(self._site_now)
        self._reports = Reports(controller)

    async def handle(self, request: Request, peer: Peer) -> Reply:
        """One request. What is wrong with it is said in the reply; nothing is half done."""
        if request.command == "limit_show":
            return self._limit_show()
        asker = asker_of(peer.uid, self._controller.config, self._controller.private_data.words)
        if request.command == "status":
            return self._status(asker)
        if request.command in ANSWERS:
            return await self._answers.answer(request, asker)
        if request.command in FORECASTS:
            return await self._forecasts.answer(request, asker)
        if request.command in REPORTS:
            return await self._reports.answer(request, asker)
        writers = {
            "limit_set": self._limit_set,
            "limit_clear": self._limit_clear,
            "off": self._off,
            "on": self._on,
        }
        writer = writers.get(request.command)
        if writer is None:
            return refusal(f"the controller knows no command {request.command!r}")
        if not is_admin(peer.uid, self._controller.config):
            self._log_refused(request.command, peer)
            return refusal(
                f"uid {peer.uid} may not change limits: root, the controller's user and controller.admins may",
                exit_code=NO,
            )
        try:
            return writer(request.args, peer)
        except msgspec.ValidationError as error:
            return refusal(f"{request.command}: {error}")
        except LimitError as error:
            return refusal(str(error))
        except (UnreadableError, OSError) as error:
            return refusal(f"nothing was changed: {error}", exit_code=NO)

    def _log_refused(self, command: str, peer: Peer) -> None:
        """Once for each user: who asks a thousand times shall not fill the log."""
        if peer.uid not in self._refused_uids and len(self._refused_uids) < MAX_REFUSED_UIDS:
            self._refused_uids.add(peer.uid)
            log.warning(f"uid {peer.uid} (pid {peer.pid}) may not change limits; refused: {command}")

    # ------------------------------------------------------------------------------------------- reading

    def _status(self, asker: Asker) -> Reply:
        return Reply(ok=True, data=private_status(self._site.get(), asker))

    def _site_now(self) -> dict[str, Any]:
        control = self._controller
        data = site_view(control.state, control.config, time.monotonic_ns(), time.time())
        if data["window"] is not None:
            data["window"]["id"] = control.recorder.window_id
        data["tags"] = control.tag_view()
        return data

    def _limit_show(self) -> Reply:
        state = self._controller.state
        window = state.window
        data = {
            "known": state.limits_known,
            "limits": [limit_view(limit) for limit in state.limits],
            "binding": None
            if window is None or window.rebound
            else {"limit_mw": window.limit_mw, "ids": list(window.limit_ids)},
        }
        return Reply(ok=True, data=data)

    # ------------------------------------------------------------------------------------------- orders

    def _limit_set(self, args: dict[str, Any], peer: Peer) -> Reply:
        order = msgspec.convert(args, LimitOrder)
        control = self._controller
        now_s = time.time()
        start_s = now_s if order.start_unix_s is None else order.start_unix_s
        if order.end_unix_s is not None and order.end_unix_s <= now_s:
            raise LimitError("the limit has ended already")
        steps = [LimitStep(start_unix_s=start_s, limit_mw=order.limit_mw)]
        if order.end_unix_s is not None:
            steps.append(LimitStep(start_unix_s=order.end_unix_s, limit_mw=None))
        limit = control.limits.set_limit(
            order.id, class_=order.class_, source=f"uid {peer.uid}", steps=steps, now_unix_s=now_s
        )
        self._tell("set", msgspec.to_builtins(limit), peer, now_s)
        control.take(LimitsChanged(limits=control.limits.limits))
        message = (
            f"limit {limit.id} revision {limit.revision}: {format_power(order.limit_mw)} ({limit.class_})\n"
            f"{self._meaning(order, now_s)}"
        )
        return Reply(ok=True, message=message, data=limit_view(limit))

    def _meaning(self, order: LimitOrder, now_s: float) -> str:
        """What this limit alone asks of the site as it is now."""
        control = self._controller
        state, config, science = control.state, control.config, control.core.science
        if state.off:
            return "nothing is enforced: 'slurm-pfi off' was said; 'slurm-pfi on' ends that"
        ahead = order.start_unix_s is not None and order.start_unix_s > now_s
        site = look(state, config, time.monotonic_ns())
        if order.limit_mw >= site.uncapped_worst_mw:
            binds = "it would bind nothing" if ahead else "it binds nothing"
            return f"{binds}: the site as it is now draws at most {format_power(site.uncapped_worst_mw)} without caps"
        asking = candidates(state, config, science, site)

        def shares(*, emergency: bool) -> Shares:
            step = ScheduleStep(0.0, order.limit_mw, order.limit_mw if emergency else None)
            return share(asking, config.policy.name, site, step, science.knowledge(state))

        emergency = order.class_ == "emergency"
        found = shares(emergency=emergency)
        silent = f"; counted at their worst, not answering: {', '.join(site.silent)}" if site.silent else ""
        if found.shortfall_mw:
            when = "at its start, as the site is now:\n" if ahead else "now: "
            how = "as low as it goes" if emergency else "at its floor"
            short = f"{format_power(found.shortfall_mw)} short, with every run {how}{silent}"
            return f"it CANNOT be held {when}{short}\n{self._way_out(order, shares(emergency=True))}"
        caps = zip(found.demands, found.allocation.caps_mw, strict=True)
        written = (
            "" if any(node.mode == "enforce" for node in state.nodes.values()) else "; observe: none is set"
        )
        past = sum(1 for demand, cap_mw in caps if cap_mw < demand.floor_mw)
        floors = f"; {past} {'runs pass their' if past > 1 else 'run passes its'} floor" if past else ""
        when = "at its start, as the site is now:\n" if ahead else ""
        return (
            f"{when}all GPU caps together: {format_power(order.limit_mw - site.fixed_mw)}, "
            f"without a limit {format_power(site.uncapped_mw)}{floors}{written}{silent}"
        )

    def _way_out(self, order: LimitOrder, emergency: Shares) -> str:
        """What to do about a limit that cannot be held."""
        limit = f"{order.limit_mw / MW_PER_W:.10g}W"
        if order.class_ == "emergency":
            return f"'slurm-pfi what-if {limit} --emergency' shows the lowest limit that can be"
        if emergency.shortfall_mw:
            return f"'slurm-pfi what-if {limit}' shows the lowest limit that can be"
        return (
            "with --emergency, which passes floors, it could be held:\n"
            f"'slurm-pfi what-if {limit} --emergency' shows at whose cost"
        )

    def _limit_clear(self, args: dict[str, Any], peer: Peer) -> Reply:
        order = msgspec.convert(args, ClearOrder)
        control = self._controller
        now_s = time.time()
        if order.id is None and not control.state.limits_known:
            aside = control.limits.set_aside(now_unix_s=now_s)
            control.take(LimitsChanged(limits=control.limits.limits))
            return Reply(ok=True, message=f"the damaged limits were put aside as {aside}; no limit is set")
        wanted = [limit.id for limit in control.limits.limits] if order.id is None else [order.id]
        cleared: list[str] = []
        for limit_id in wanted:
            limit = control.limits.clear_limit(limit_id, now_unix_s=now_s)
            if limit is not None:
                cleared.append(limit_id)
                self._tell("clear", msgspec.to_builtins(limit), peer, now_s)
        if not cleared and order.id is not None:
            return refusal(f"there is no limit {order.id!r}; 'slurm-pfi limit show' lists them", exit_code=NO)
        open_now = control.state.window is not None and not control.state.window.rebound
        control.take(LimitsChanged(limits=control.limits.limits))
        rebound_s = control.config.times.rebound_s
        slowly = (
            f"\ncaps rise slowly if no other limit binds: no new peak for {format_duration(rebound_s)} "
            f"(times.rebound_s),\nthen the rest within {format_duration(release_s(control.config))}; "
            "'slurm-pfi off' would lift them at once"
        )
        message = f"cleared: {', '.join(cleared) or 'nothing'}{slowly if open_now and rebound_s else ''}"
        return Reply(ok=True, message=message, data=cleared)

    def _off(self, _args: dict[str, Any], peer: Peer) -> Reply:
        but = self._controller.switch(off=True, uid=peer.uid)
        return Reply(
            ok=True,
            message=f"off: every GPU goes back to its prior limit; 'slurm-pfi on' enforces again{but}",
        )

    def _on(self, _args: dict[str, Any], peer: Peer) -> Reply:
        but = self._controller.switch(off=False, uid=peer.uid)
        return Reply(ok=True, message=f"on: limits are enforced{but}")

    def _tell(self, action: str, limit: dict[str, Any], peer: Peer, now_s: float) -> None:
        """The audit entry, with the steps in the monotonic clock that every record carries."""
        now_ns = time.monotonic_ns()
        steps = [
            [now_ns + round((step["start_unix_s"] - now_s) * 1e9), step["limit_mw"]]
            for step in limit["steps"]
        ]
        fields = {
            "action": action,
            "id": limit["id"],
            "revision": limit["revision"],
            "class": limit["class"],
            "source": limit["source"],
            "uid": peer.uid,
            "steps": steps,
        }
        self._controller.audit.write("limit", fields)
        self._controller.recorder.audit("limit", fields, now_s)
