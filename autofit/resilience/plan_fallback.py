"""The plans that ``@autofit.resilient`` tries on ``train(plan, ...)``, in order."""

from __future__ import annotations

import json
import logging
import os
import sys
from collections.abc import Mapping
from dataclasses import replace

from autofit.analysis.fallback import FallbackContext, next_fallback
from autofit.analysis.ranking import best
from autofit.exceptions import AutofitError, UsageError
from autofit.plan import Plan
from autofit.resilience.active_plan import ON_OPTIMIZERS, ActivePlan, staying
from autofit.resilience.fallback import Fallback
from autofit.resilience.records import TriedSetting
from autofit.storage import default_url
from autofit.storage.url import exists
from autofit.strategies import AS_IS, Fidelity, RootFacts
from autofit.worker import meter
from autofit.worker.records.trials import Script

log = logging.getLogger("autofit.resilient")

UNKNOWN = RootFacts(name="", parameters=0, parameter_bytes=0, trainable=0, dtype="float32")
"""Stands for a model of which nothing is known yet."""


class Plans(Fallback):
    """Starts with the given plan, or the best stored plan of the running script; then leaner ones.

    ``given``: the first plan. ``storage``: where to look for a stored plan. ``allow``: the highest
    fidelity of a level that is added. ``effective_batch``: samples in an optimizer step.
    """

    def __init__(
        self,
        given: Plan | None = None,
        *,
        storage: str | None = None,
        allow: Fidelity = Fidelity.REDRAW,
        effective_batch: int | None = None,
    ) -> None:
        self._given = given
        self._storage = storage
        self._allow = allow
        self._effective_batch = effective_batch
        self._context: FallbackContext | None = None
        self._refused: set[tuple[str, str]] = set()

    def start(self, remembered: Mapping[str, int | str] | None) -> TriedSetting:
        """Return the plan that fitted before, else the given one, else the best stored one."""
        if remembered is not None:
            try:
                return self._setting(Plan.of(json.loads(str(remembered["plan"]))))
            except (UsageError, ValueError, KeyError):
                pass  # another version of autofit stored it
        return self._setting(self._given if self._given is not None else self._stored())

    def when_off(self) -> TriedSetting:
        """Return the given plan, else the plan that changes nothing."""
        return self._setting(self._given or Plan())

    def leaner(self, setting: TriedSetting) -> TriedSetting | None:
        """Return the next plan that changes a strategy which the function uses.

        After a refusal, it is the same plan without the refused level.
        """
        active = setting.values[0]
        assert isinstance(active, ActivePlan)
        plan, short = active.reached, active.short
        if active.refused is not None:
            strategy, level, _ = active.refused
            self._refused.add((strategy, level))
            plan = self._allowed(active.plan)
            if plan not in short:
                return self._setting(plan, short)
        short |= {plan, active.plan} if active.refused is None else {plan}
        context, skipped = self._found(active), set(short)
        while (following := next_fallback(plan, context, skipped)) is not None:
            changed = {name for name in following.levels if following[name] != plan[name]}
            follows = changed & active.used and changed & ON_OPTIMIZERS <= active.used
            if follows and following == self._allowed(following):
                return self._setting(following, short)
            skipped.add(following)
        return None

    def clean_up(self, setting: TriedSetting) -> None:
        """Remove the plan from the models and optimizers of the attempt."""
        active = setting.values[0]
        assert isinstance(active, ActivePlan)
        active.end()

    def is_refused(self, setting: TriedSetting) -> bool:
        """Return whether a technique of the plan was refused for the model."""
        active = setting.values[0]
        return isinstance(active, ActivePlan) and active.refused is not None

    def to_remember(self, setting: TriedSetting) -> Mapping[str, int | str]:
        """Return the plan at the end of the attempt, its final micro-batch size included."""
        active = setting.values[0]
        assert isinstance(active, ActivePlan)
        return {"plan": json.dumps(dict(active.reached.changes), sort_keys=True)}

    def _setting(self, plan: Plan, short: frozenset[Plan] = frozenset()) -> TriedSetting:
        """Return the setting of a plan; ``short``: plans that ran out of memory in this call."""
        plan = self._allowed(plan)
        active = ActivePlan(plan, self._effective_batch, short)
        return TriedSetting(values=(active,), label=f"plan: {plan}")

    def _allowed(self, plan: Plan) -> Plan:
        """Return the plan without refused levels and without levels that cannot be undone."""
        refused = [name for name, level in plan.changes if (name, level) in self._refused]
        stays = [name for name, _ in staying(plan).changes]
        return plan.replace(**dict.fromkeys((*refused, *stays), AS_IS))

    def _found(self, active: ActivePlan) -> FallbackContext:
        """Return the context for choosing the next plan, with the facts of this attempt."""
        if self._context is None:
            device = meter.default_device()
            self._context = FallbackContext(hardware=meter.hardware(device), allow=self._allow)
        facts = active.facts
        batch = facts.batch or self._effective_batch
        roots = facts.roots or (UNKNOWN,)
        known = replace(facts, roots=(replace(roots[0], batch=batch), *roots[1:]))
        return replace(self._context, facts=known)

    def _stored(self) -> Plan:
        """Return the best stored plan of the running script; without one, the neutral plan.

        Levels that need a whole process of their own are left out, with a warning.
        """
        script = running_script()
        if script is None or not exists(self._storage):
            return Plan()
        try:
            result, _ = best(self._storage or default_url(), script)
        except AutofitError:
            return Plan()
        self._effective_batch = self._effective_batch or result.measurement.effective_batch
        early = [s.name for s, level in result.plan if s.environment(level)]
        left = {*early, *(name for name, _ in staying(result.plan).changes)}
        if left:
            log.warning(
                "the stored plan is used without %s, which must be set before the process starts"
                " or cannot be undone: use `autofit run` for it",
                Plan.of({name: result.plan[name] for name in left}),
            )
        return result.plan.replace(**dict.fromkeys(left, AS_IS))


def running_script() -> Script | None:
    """Return the script of this process; ``None`` in an interactive session."""
    file = getattr(sys.modules["__main__"], "__file__", None)
    if file is None:
        return None
    return Script(target=os.path.abspath(file), args=tuple(sys.argv[1:]), cwd=os.getcwd())
