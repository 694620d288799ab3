"""``@autofit.resilient``: training functions that survive running out of memory.

The package is called ``resilience`` so that its import never hides ``autofit.resilient``, which is
the decorator. Importing it imports no torch; calling a decorated function does.
"""

from autofit.resilience.active_plan import ActivePlan
from autofit.resilience.decorator import Resilient, resilient
from autofit.resilience.records import Retry

__all__ = ["ActivePlan", "Resilient", "Retry", "resilient"]
