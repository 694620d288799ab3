"""The Python interface: the functions of ``import autofit`` that search, choose and run.

They take what the command line takes: ``memory="24GiB"`` is ``--memory 24GiB``.
"""
