"""The result of a check as JUnit XML, which CI systems show.

Format: https://github.com/testmoapp/junitxml
"""

from __future__ import annotations

from pathlib import Path
from xml.etree import ElementTree

from autofit.exceptions import UsageError
from autofit.printable import printable


def write_junit(
    path: str, *, script: str, name: str, line: str, details: str, failed: str, seconds: float
) -> None:
    """Write a suite with one test case.

    Args:
        path: The file, which is replaced.
        script: Name of the class of the test case.
        name: Name of the test case.
        line: The result in one line.
        details: Further lines.
        failed: ``"failure"`` if the script does not fit, ``"error"`` if it could not be checked,
            empty if it fits.
        seconds: How long the check took.

    Raises ``UsageError`` if the file cannot be written.
    """
    counts = {"tests": "1", "failures": "0", "errors": "0", "time": f"{seconds:.3f}"}
    if failed:
        counts["failures" if failed == "failure" else "errors"] = "1"
    suites = ElementTree.Element("testsuites", counts)
    suite = ElementTree.SubElement(suites, "testsuite", {"name": "autofit check", **counts})
    attributes = {"classname": printable(script), "name": printable(name)}
    case = ElementTree.SubElement(suite, "testcase", {**attributes, "time": counts["time"]})
    text = printable(f"{line}\n{details}".rstrip(), keep="\n")
    if failed:
        message = {"message": printable(line)}
        ElementTree.SubElement(case, failed, message).text = text
    else:
        ElementTree.SubElement(case, "system-out").text = text
    ElementTree.indent(suites)
    try:
        ElementTree.ElementTree(suites).write(path, encoding="utf-8", xml_declaration=True)
    except OSError as error:
        reason = error.strerror or error
        raise UsageError(f"--junit {Path(path)}: cannot be written: {reason}") from None
