"""Settings of torch's CUDA allocator that reduce fragmentation."""

from __future__ import annotations

from autofit.facts import Hardware
from autofit.strategies.base import AS_IS, ByHand, Level, Memory, ScriptPart, Strategy, Waste

EXPANDABLE = "expandable"


class ExpandableSegments(Strategy):
    """Segments of torch's allocator grow, so freed memory serves requests of other sizes.

    The setting is an environment variable, which torch reads once when the process starts.
    Settings of the user are kept.
    """

    name = "allocator"
    summary = "how torch's allocator holds the device's memory"
    source = "https://docs.pytorch.org/docs/stable/notes/cuda.html"
    lowers = frozenset({Memory.WORKSPACE})
    remedies = Waste.FRAGMENTATION
    levels = (
        Level(name=AS_IS, summary="the allocator as the environment has it"),
        Level(
            name=EXPANDABLE,
            summary="segments that grow: less is lost to fragmentation",
            slowdown=1.01,
            keeps=0.3,
            undo=False,
        ),
    )

    def describe(self, level: str) -> str:
        """Return ``"expandable segments"``."""
        return f"{level} segments"

    def unavailable(self, level: str, hardware: Hardware) -> str | None:
        """Only CUDA's allocator has segments."""
        if hardware.device != "cuda":
            return "only the CUDA allocator has segments"
        return None

    def by_hand(self, level: str) -> ByHand:
        """The setting is an environment variable."""
        variables = " ".join(f"{name}={value}" for name, value in self.environment(level).items())
        return ByHand(setting=f"set {variables} before Python starts", part=ScriptPart.SCRIPT)

    def environment(self, level: str) -> dict[str, str]:
        """Set expandable segments, by the variable that torch reads first since 2.9."""
        return {"PYTORCH_ALLOC_CONF": "expandable_segments:True"}
