"""Plans to start from: the fastest that an earlier study of the same model has measured.

The earlier study may have had another budget, another version of the script, or another user.
"""

from __future__ import annotations

import itertools
from collections.abc import Hashable

from autofit.analysis.frontier import frontier
from autofit.facts import Facts
from autofit.plan import Plan
from autofit.storage import Store, StudyRecord


def known_plans(store: Store, study: StudyRecord) -> tuple[StudyRecord, tuple[Plan, ...]] | None:
    """Return the newest such study and its fastest plans; ``None`` without one.

    The first plan is the fastest of all, if a trial can fit its numbers to the budget of ``study``.
    The last one is the fastest that fitted that budget. The model of ``study`` has to be known.
    Both studies have the same GPU model.
    """
    if study.facts is None or not study.facts.roots:
        return None
    for other in store.studies():
        facts, same = other.facts, other.hardware.name == study.hardware.name
        if other.id == study.id or facts is None or not same:
            continue
        if _model(facts) == _model(study.facts) and (plans := _plans(store, other, study.budget)):
            return other, plans
    return None


def _plans(store: Store, study: StudyRecord, budget: int) -> tuple[Plan, ...]:
    points = [each for each in frontier(store, study) if not each.plan.neutral]
    first = [each.plan.searched for each in points[:1] if each.plan.searched.open]
    fitted = (e.plan.searched for e in points if e.measurement.peak_device <= budget)
    return tuple(dict.fromkeys([*first, *itertools.islice(fitted, 1)]))


def _model(facts: Facts) -> tuple[Hashable, ...]:
    """Return what two studies of one model have in common."""
    roots = tuple((each.name, each.parameters, each.trainable, each.blocks) for each in facts.roots)
    return facts.framework, *roots
