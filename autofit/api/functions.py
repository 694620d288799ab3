"""The functions ``autofit.search``, ``best``, ``run``, ``explain`` and ``fit``."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from autofit.analysis import ranking
from autofit.analysis.result import Result
from autofit.api import scripts
from autofit.api.study import Study
from autofit.api.values import parse
from autofit.exceptions import UsageError
from autofit.export.load import load_plan
from autofit.flags import ValueKind, flags_of
from autofit.inspection.explanation import Explanation
from autofit.inspection.fitting import Fit
from autofit.inspection.options import ExplainOptions, FitOptions
from autofit.launch_lines import differing
from autofit.plan import Plan
from autofit.strategies import Fidelity
from autofit.tuning.options import SearchOptions
from autofit.view.render import renderer, tell
from autofit.worker.records.trials import HORIZON


def search(
    script: str | os.PathLike[str] | Sequence[str],
    args: Sequence[str] = (),
    *,
    module: bool = False,
    cwd: str | os.PathLike[str] | None = None,
    memory: int | str | None = None,
    allow: str | Fidelity = "rounding",
    prefer: str = "fidelity",
    trials: int | None = None,
    timeout: float | str | None = None,
    only: str | Iterable[str] = (),
    without: str | Iterable[str] = (),
    horizon: int = HORIZON,
    sampler: str = "autofit",
    headroom: float = 5.0,
    gpus: int | None = None,
    gpus_per_trial: int | None = None,
    device: str | None = None,
    storage: str | os.PathLike[str] | None = None,
    address: str | None = None,
    fresh: bool = False,
    server: str | None = None,
    shared: bool = False,
    priority: int = 0,
    deadline: str | None = None,
    quiet: bool = False,
) -> Study:
    """Find the fastest plan that fits the budget, store it, and return the study.

    The parameters are the options of ``autofit search``::

        study = autofit.search("train.py", ["--epochs", "3"], memory="24GiB", timeout="10m")
        print(study.best.plan, study.best.measurement.samples_per_second)
        study.report("report.html")

    Args:
        script: The path of the script, or the words of a launch line:
            ``["torchrun", "--nproc-per-node", "2", "train.py"]``.
        args: Arguments of the script.
        module: ``script`` is the name of a module, as for ``python -m``.
        cwd: The script's working directory; by default the present one.
        memory: Budget per device, in bytes or as ``"24GiB"``; by default what is free.
        allow: The most a plan may change: ``"exact"``, ``"redraw"``, ``"rounding"``, ``"recipe"``.
        prefer: Of plans that are equally fast: ``"fidelity"`` for what changes least, ``"memory"``
            for the lowest peak, ``"speed"`` for what measured fastest.
        trials: The search ends after so many trials.
        timeout: The search ends after so many seconds, or ``"10m"``.
        only: Strategies to try; by default all.
        without: Strategies to leave out.
        horizon: Optimizer steps over which the time to compile is charged.
        sampler: What chooses the plans: ``"autofit"``, ``"tpe"``, ``"gp"``, ``"random"``, or
            ``"module:Class"``.
        headroom: Percent of the device to leave free if ``memory`` is not given.
        gpus: GPUs that may be used.
        gpus_per_trial: GPUs each training spans.
        device: ``"cpu"`` where no GPU is visible, so that ``gpus`` counts processes on the CPU.
        storage: A file or an SQLAlchemy URL; by default ``$AUTOFIT_STORAGE`` or ``autofit.db``.
        address: A running Ray cluster.
        fresh: Open a new study; the old one is kept.
        server: The URL of a service (``autofit serve``) that searches. ``storage`` gets a copy of
            the study.
        shared: The service sees ``cwd``, so that it is not uploaded.
        priority: Searches of the service with a higher priority start first.
        deadline: The time in which the service has to end the search, such as ``"2h"``; it includes
            the wait.
        quiet: Show no progress.

    Raises:
        UsageError: A value is not allowed, or there is no such script.
        ScriptError: The script fails without a plan.
        NothingFits: No plan fits the budget.
        StorageError: The store cannot be used.
        WorkerError: A worker broke.
    """
    from autofit.client.search import search as search_there
    from autofit.tuning.controller import search as search_plans

    given = _options(locals(), SearchOptions)
    options = scripts.search_options(scripts.launch(script, args, module=module, cwd=cwd), given)
    with contextlib.ExitStack() as stack:
        listener = (lambda notice: None) if quiet else stack.enter_context(renderer(stderr=False))
        if server is None:
            result = search_plans(options, listener)
        else:
            result = search_there(
                server,
                options,
                given,
                listener,
                shared=shared,
                priority=priority,
                deadline=deadline,
            )
    return Study.read(options.storage, result.study)


def best(
    script: str | os.PathLike[str] | Sequence[str] | None = None,
    args: Sequence[str] = (),
    *,
    module: bool = False,
    cwd: str | os.PathLike[str] | None = None,
    memory: int | str | None = None,
    storage: str | os.PathLike[str] | None = None,
    quiet: bool = False,
) -> Result:
    """Return the best stored result for a script, as ``autofit best`` does.

    ::

        result = autofit.best("train.py", memory="16GiB")
        print(result.plan.levels, result.measurement.peak_device)

    Args:
        script: As for ``search``; by default the script of the newest study.
        args: Arguments of the script.
        module: As for ``search``.
        cwd: As for ``search``.
        memory: Budget per device: the result is the fastest known plan within it.
        storage: As for ``search``.
        quiet: Do not say which study was used, and what differs from it.

    Raises:
        UsageError: No plan is stored.
        NothingFits: No known plan fits ``memory``.
    """
    launch = None if script is None else scripts.launch(script, args, module=module, cwd=cwd)
    say = _say(quiet)
    result, note = ranking.best(
        scripts.url(storage),
        None if launch is None else launch.script,
        ranks=None if launch is None else launch.ranks,
        memory=parse("memory", memory, ValueKind.SIZE),
        say=say,
    )
    say(note)
    return result


def run(
    script: str | os.PathLike[str] | Sequence[str],
    args: Sequence[str] = (),
    *,
    module: bool = False,
    cwd: str | os.PathLike[str] | None = None,
    plan: Plan | Mapping[str, str] | str | os.PathLike[str] | None = None,
    memory: int | str | None = None,
    resume_arg: str | None = None,
    gpus_per_trial: int | None = None,
    address: str | None = None,
    verify_only: bool = False,
    storage: str | os.PathLike[str] | None = None,
    quiet: bool = False,
) -> int:
    """Run a script to its end under its best plan, and return its exit code.

    The parameters are the options of ``autofit run``::

        code = autofit.run("train.py", ["--epochs", "3"], plan={"precision": "bf16"})

    Args:
        script: As for ``search``.
        args: Arguments of the script.
        module: As for ``search``.
        cwd: As for ``search``.
        plan: A plan, its levels by technique, or the path of an exported plan; by default the best
            stored one.
        memory: Limit on each device, in bytes or as ``"24GiB"``.
        resume_arg: Arguments to add when the script is started again after it ran out of memory,
            such as ``"--resume {checkpoint}"``.
        gpus_per_trial: Ranks to start.
        address: A Ray cluster, such as ``"auto"``, over whose hosts the plan's ranks are spread.
        verify_only: Verify the plan in a short launch and stop; the result is 1 if it fails.
        storage: As for ``search``.
        quiet: Say nothing; the script's own output stays.

    Returns:
        The script's exit code, or 128 + N if signal N ended it.

    Raises:
        UsageError: No plan is stored, or the given one cannot be used.
    """
    from autofit.running.run import run as run_script

    launch, say = scripts.launch(script, args, module=module, cwd=cwd), _say(quiet)
    ranks = parse("gpus_per_trial", gpus_per_trial, ValueKind.COUNT)
    for line in (*launch.lines, *(differing(launch, ranks) if ranks else ())):
        say(line)
    return run_script(
        launch.script,
        plan=_plan(plan),
        storage=scripts.url(storage),
        memory=parse("memory", memory, ValueKind.SIZE),
        resume=resume_arg,
        ranks=ranks or launch.ranks,
        address=address,
        verify_only=verify_only,
        say=say,
    )


def explain(
    script: str | os.PathLike[str] | Sequence[str],
    args: Sequence[str] = (),
    *,
    module: bool = False,
    cwd: str | os.PathLike[str] | None = None,
    memory: int | str | None = None,
    gpu: str | None = None,
    leak: bool = False,
    snapshot: str | os.PathLike[str] | None = None,
    storage: str | os.PathLike[str] | None = None,
    quiet: bool = False,
) -> Explanation:
    """Run a script for a few steps, and return what held its memory, as ``autofit explain`` does.

    ::

        found = autofit.explain("train.py", leak=True)
        for kind, size in found.by_kind.items():
            print(kind, size)
        for each in found.techniques:
            print(each.plan, each.freed, each.basis)

    Args:
        script: As for ``search``.
        args: Arguments of the script.
        module: As for ``search``.
        cwd: As for ``search``.
        memory: Budget of the device, in bytes or as ``"24GiB"``; by default what is free.
        gpu: Predict it for a card that is not here, such as ``"H100"``.
        leak: Follow more steps, and find the lines that keep tensors from step to step.
        snapshot: A file for PyTorch's memory snapshot, which ``memory_viz`` shows; GPUs only.
        storage: As for ``search``; measurements of earlier searches replace predictions.
        quiet: Show no progress.

    Raises:
        UsageError: A value is not allowed, or there is no such script.
        ScriptError: The script fails, or does not train.
        WorkerError: A worker broke.
    """
    from autofit.inspection.explanation import explain as explain_script

    given = _options(locals(), ExplainOptions)
    launch = scripts.launch(script, args, module=module, cwd=cwd)
    return explain_script(scripts.explain_options(launch, given), _say(quiet))


def fit(
    script: str | os.PathLike[str] | Sequence[str],
    args: Sequence[str] = (),
    *,
    module: bool = False,
    cwd: str | os.PathLike[str] | None = None,
    gpu: str | None = None,
    memory: int | str | None = None,
    flops: int | None = None,
    quiet: bool = False,
) -> Fit:
    """Predict which GPUs a script fits and under which plan, on a machine that needs no GPU.

    The script runs for two optimizer steps with tensors that have no memory::

        found = autofit.fit("train.py", gpu="RTX 4090,A100-40GB")
        for card in found.cards:
            print(card.name, card.as_it_is.peak, card.plan and card.plan.plan)

    Args:
        script: As for ``search``.
        args: Arguments of the script.
        module: As for ``search``.
        cwd: As for ``search``.
        gpu: Names of cards, separated by commas; by default all that are known.
        memory: Budget in bytes or as ``"24GiB"``; by default each card's memory less 5 %.
        flops: TFLOP/s in bfloat16 of a card that is not in the table, beside its ``memory``; by
            default those of an H100.
        quiet: Show no progress.

    Raises:
        UsageError: A value is not allowed, or there is no such script.
        ScriptError: The script fails, or does not train.
        WorkerError: A worker broke.
    """
    from autofit.inspection.fitting import fitting

    given = _options(locals(), FitOptions)
    launch = scripts.launch(script, args, module=module, cwd=cwd)
    return fitting(scripts.fit_options(launch, given), _say(quiet))


def _options(given: Mapping[str, Any], options: type) -> dict[str, Any]:
    """Return the values of all options that the command line has too."""
    return {
        each.name: parse(each.name, given[each.name], flag.kind) for each, flag in flags_of(options)
    }


def _plan(given: object) -> Plan | None:
    if given is None or isinstance(given, Plan):
        return given
    if isinstance(given, Mapping):
        return Plan.of(given)
    if isinstance(given, str | os.PathLike):
        return load_plan(Path(given))
    raise UsageError(f"plan={given!r}: write a plan, its levels by technique, or a file's path")


def _say(quiet: bool) -> Callable[[str], None]:
    return (lambda line: None) if quiet else tell
