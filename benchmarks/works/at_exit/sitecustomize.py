"""Lets each Python process that has used a GPU append its peaks of memory to ``GUIDES_PEAKS``.

Python imports this module itself, if its folder is in ``PYTHONPATH``. So a command is measured as
it is printed.
"""

import atexit
import os
import sys


class _AtTorch:
    """Registers the handler when torch is imported.

    The ranks of autofit end without the handlers that were registered before it started.
    """

    @classmethod
    def find_spec(cls, name, path=None, target=None):
        if name == "torch" and cls in sys.meta_path:
            sys.meta_path.remove(cls)
            atexit.register(_append)


def _append() -> None:
    torch = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_initialized():
        peaks = torch.cuda.max_memory_allocated(), torch.cuda.max_memory_reserved()
        with open(os.environ["GUIDES_PEAKS"], "a") as file:
            file.write("{} {}\n".format(*peaks))


if "GUIDES_PEAKS" in os.environ:
    sys.meta_path.insert(0, _AtTorch)
