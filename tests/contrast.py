"""The contrast of text with what is behind it, as WCAG 2.2 defines it.

``FAINT`` is a script for a browser. Its function ``faint(document)`` counts the visible texts, and
returns those whose contrast is below ``LEAST``.
"""

from __future__ import annotations

import re

LEAST = 4.5
"""Least contrast of text of normal size (success criterion 1.4.3)."""


def contrast(one: str, other: str) -> float:
    """Return the contrast of two colours such as ``#1f2328``, 1 to 21."""
    dark, light = sorted((_luminance(one), _luminance(other)))
    return (light + 0.05) / (dark + 0.05)


def _luminance(colour: str) -> float:
    channels = [int(colour[at : at + 2], 16) / 255 for at in (1, 3, 5)]
    linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in channels]
    return sum(share * c for share, c in zip((0.2126, 0.7152, 0.0722), linear, strict=True))


def variables(css: str) -> tuple[dict[str, str], dict[str, str]]:
    """Return the colours of a style sheet by variable: those of light pages, those of dark ones."""
    light, dark = re.findall(r":root \{(.*?)\}", css, re.DOTALL)
    found = [dict(re.findall(r"(--[\w-]+): (#[0-9a-f]{6});", part)) for part in (light, dark)]
    return found[0], found[0] | found[1]


FAINT = """<script>
function faint(page) {
  const numbers = (colour) => colour.match(/[\\d.]+/g).map(Number);
  const luminance = (colour) => numbers(colour).slice(0, 3).map((c) => c / 255)
    .map((c) => (c <= 0.04045 ? c / 12.92 : ((c + 0.055) / 1.055) ** 2.4))
    .reduce((sum, c, at) => sum + c * [0.2126, 0.7152, 0.0722][at], 0);
  const behind = (element) => {
    for (let each = element; each; each = each.parentElement) {
      const colour = getComputedStyle(each).backgroundColor;
      if ((numbers(colour)[3] ?? 1) > 0) return colour;
    }
    return "rgb(255, 255, 255)";
  };
  const found = [];
  let texts = 0;
  for (const element of page.querySelectorAll("body *")) {
    const own = [...element.childNodes].some((n) => n.nodeType === 3 && n.textContent.trim());
    const box = element.getBoundingClientRect();
    if (!own || !box.width || ["SCRIPT", "STYLE"].includes(element.tagName)) continue;
    texts += 1;
    const style = getComputedStyle(element);
    const colour = element instanceof SVGElement ? style.fill : style.color;
    const [dark, light] = [luminance(colour), luminance(behind(element))].sort((a, b) => a - b);
    const contrast = (light + 0.05) / (dark + 0.05);
    if (contrast < 4.5) found.push(`${element.textContent.trim()}: ${contrast.toFixed(2)}`);
  }
  return { texts, found };
}
</script>"""
