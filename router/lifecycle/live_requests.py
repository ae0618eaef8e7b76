"""The requests that one router serves of one model, and what the ledger says of those that it does not. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from common.errors import Reason, RequestError
from router.lifecycle.events import (
    AdoptedElsewhere,
    Event,
    GiveUp,
    Leave,
    NoExecutor,
    Release,
    ResubmitAnswered,
    ResubmitDue,
    Submit,
    SubmitAnswered,
    SubmitOutcome,
    TurnAway,
    WithdrawDue,
)
from router.lifecycle.lifecycle import Effects, Forget, Lifecycle, Resubmit, SettleUnused, Stray
from router.request.errors import duplicate, refusal
from router.request.ids import client_id
from router.store.types import Duplicate, Ending, LeaseLapsed, Lost, Placement, Refused, StoreEvent, TakenOver


class LiveRequests:
    """The requests by id."""

    def __init__(self, no_executor_grace_s: float) -> None:
        self._no_executor_grace_s = no_executor_grace_s
        self._served: dict[str, Lifecycle] = {}
        self.served: Mapping[str, Lifecycle] = MappingProxyType(self._served)
        # Left in the queue for another router, which has their clients: what the ledger tells of them is not for us.
        self._left: set[str] = set()
        self._draining: RequestError | None = None
        # Those that wait for their turn to be submitted again, and since when the ledger answers that there is no
        # executor.
        self._to_resubmit: dict[Lifecycle, None] = {}
        self._no_executor_since: float | None = None

    def waiting(self) -> list[Lifecycle]:
        """The requests that are in the queue, as far as this router knows."""
        return [life for life in self._served.values() if life.is_in_queue]

    def submit(self, life: Lifecycle) -> Effects:
        """A client's request. Raises `RequestError` where one of its id is served."""
        if life.request_id in self._served:
            raise duplicate(client_id(life.request_id))
        self._served[life.request_id] = life
        return self.tell(life, Submit())

    def adopt(self, life: Lifecycle, event: AdoptedElsewhere) -> Effects:
        """Goes on with a request that another router began."""
        before = self._served.get(life.request_id)
        effects = [] if before is None else self.tell(before, TakenOver(life.request_id))
        self._served[life.request_id] = life
        return effects + self.tell(life, event)

    def tell(self, life: Lifecycle, event: Event) -> Effects:
        """Has a request take an event in."""
        effects = life.handle(event)
        for effect in tuple(effects):
            kind = type(effect)
            if kind is Forget:
                if self._served.get(life.request_id) is life:
                    del self._served[life.request_id]
                if type(event) in (TurnAway, Leave):
                    self._left.add(life.request_id)
            elif isinstance(effect, Resubmit):
                if not (effect.is_retry or self._to_resubmit):
                    self._no_executor_since = None
                self._to_resubmit[life] = None
            elif isinstance(effect, Stray):
                effects.remove(effect)
                effects += self.on_store_event(effect.outcome)
        return effects

    def release(self, life: Lifecycle) -> Effects:
        """The client wants no more. Safe to repeat, also after the request's end."""
        return self.tell(life, Release()) if self._served.get(life.request_id) is life else []

    def submit_answered(self, life: Lifecycle, outcome: SubmitOutcome) -> Effects:
        """The ledger's answer to a first submit."""
        effects = self.tell(life, SubmitAnswered(outcome))
        if self._draining is not None and life.is_served:
            effects += self.tell(life, TurnAway(self._draining))
        return effects

    def resubmit_due(self, life: Lifecycle) -> Effects:
        """It is a request's turn to be submitted again."""
        self._to_resubmit.pop(life, None)
        return self.tell(life, ResubmitDue())

    def resubmit_answered(self, life: Lifecycle, outcome: SubmitOutcome, now: float) -> Effects:
        """The ledger's answer to a later submit."""
        effects = self.tell(life, ResubmitAnswered(outcome))
        if not isinstance(outcome, RequestError | Refused | Duplicate):
            self._no_executor_since = None
        elif isinstance(outcome, Refused) and outcome.reason is Reason.NO_EXECUTOR and life.is_resubmit_queued:
            effects += self._give_up_without_executor(refusal(outcome), now)
        return effects

    def withdraw_due(self, life: Lifecycle) -> Effects:
        """It is a request's turn to be taken out of the queue."""
        return self.tell(life, WithdrawDue(self._served.get(life.request_id, life) is not life))

    def turn_away_waiting(self, error: RequestError) -> Effects:
        """This router drains: what waits ends now, and what comes to wait. A request that can be repeated keeps its
        place in the queue."""
        self._draining = error
        return self._tell_all(TurnAway(error))

    def leave_all(self, error: RequestError) -> Effects:
        """This router stops."""
        return self._tell_all(Leave(error))

    def no_executor(self, error: RequestError) -> Effects:
        """No executor has been linked for the grace period. Requests with a deadline wait until that."""
        return self._tell_all(NoExecutor(error))

    def on_store_event(self, event: StoreEvent) -> Effects:
        """What the ledger tells without being asked. Placements of requests that are not served are settled."""
        if isinstance(event, LeaseLapsed):
            return self._tell_all(event)
        life = self._served.get(event.request_id)
        if life is not None:
            return self.tell(life, event)
        if event.request_id not in self._left:
            match event:
                case Placement(request_id, attempt):
                    return [SettleUnused(Ending(request_id, attempt, 0, 0, cancelled=True))]
                case Lost(request_id, attempt):
                    return [SettleUnused(Ending(request_id, attempt, cancelled=True))]
        return []

    def _tell_all(self, event: Event) -> Effects:
        effects: Effects = []
        for life in tuple(self._served.values()):
            effects += self.tell(life, event)
        return effects

    def _give_up_without_executor(self, error: RequestError, now: float) -> Effects:
        """When the ledger has known no executor for the grace period: ends the requests still to be submitted again,
        except those that have a deadline to wait for."""
        if self._no_executor_since is None:
            self._no_executor_since = now
        effects: Effects = []
        if now - self._no_executor_since > self._no_executor_grace_s:
            for life in tuple(self._to_resubmit):
                if life.deadline is None or now > life.deadline:
                    del self._to_resubmit[life]
                    effects += self.tell(life, GiveUp(error))
        return effects
