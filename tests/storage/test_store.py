"""What the store takes is what it gives, and a trial makes legal moves only."""

import dataclasses
import math
import re
import sqlite3
from collections.abc import Callable
from datetime import UTC
from pathlib import Path
from typing import Any

import pytest

from autofit.exceptions import StorageError, UsageError
from autofit.facts import Bandwidth
from autofit.plan import Plan
from autofit.storage import (
    FittedKey,
    MachineKey,
    Owner,
    Purpose,
    State,
    Store,
    StudyKey,
    StudyRecord,
    script_path,
)
from autofit.storage.convert import to_json
from autofit.storage.models import EventRow, StudyRow
from autofit.storage.records import ORIGIN
from autofit.strategies import Facts, Hardware
from autofit.worker.records.traces import Trace, TracedStep
from autofit.worker.records.trials import Script, TrialReport, Verdict

pytestmark = pytest.mark.quick

Open = Callable[..., StudyRecord]
Report = Callable[..., TrialReport]


# --- studies ----------------------------------------------------------------------------------


def test_a_study_comes_back_as_it_was_opened(
    store: Store, study: StudyRecord, key: StudyKey, script: Script, hardware: Hardware
) -> None:
    again = store.study(study.id)
    assert again == study
    assert (again.key, again.script, again.hardware) == (key, script, hardware)
    assert again.id == key.fingerprint[:8]
    assert again.created.tzinfo is UTC


def test_a_study_of_before_the_link_was_read_goes_on(
    location: str, opening: Open, hardware: Hardware
) -> None:
    with Store(location) as store:
        study = opening(store)
        with store.writing() as session:
            row = session.get_one(StudyRow, study.id)
            plain = to_json(row.hardware)
            row.hardware = {name: x for name, x in plain.items() if name != "link"}  # type: ignore[assignment]
        assert store.study(study.id).hardware == hardware
        assert opening(store).id == study.id


def test_the_same_key_resumes_and_another_opens_another(
    store: Store, study: StudyRecord, opening: Open, key: StudyKey
) -> None:
    other = opening(store, key=dataclasses.replace(key, memory=None))
    assert opening(store).id == study.id
    assert other.id != study.id
    assert [each.id for each in store.studies()] == [other.id, study.id]
    assert store.studies(key.script) == store.studies()
    assert store.studies("elsewhere.py") == ()


def test_fresh_begins_a_new_study_and_keeps_the_old(
    store: Store, study: StudyRecord, opening: Open
) -> None:
    store.add_seconds(study, 5)
    fresh = opening(store, fresh=True)
    assert fresh.id == f"{study.id}-2"
    assert fresh.seconds == 0
    assert opening(store).id == fresh.id
    assert opening(store, fresh=True).id == f"{study.id}-3"
    assert store.study(study.id).seconds == 5


def test_studies_whose_fingerprints_begin_alike_get_their_own_names(
    store: Store, opening: Open, key: StudyKey, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Seventy thousand studies make such a pair likely; here it is arranged."""
    first = opening(store)
    other = dataclasses.replace(key, memory=1)
    monkeypatch.setattr(
        StudyKey, "fingerprint", property(lambda key: first.id + "0" * 56 if key == other else "")
    )
    assert opening(store, key=other).id == f"{first.id}-2"


def test_facts_left_out_seconds_and_launches_are_kept(
    store: Store, study: StudyRecord, facts: Facts
) -> None:
    assert study.facts is None
    assert [store.next_launch(study) for _ in range(3)] == [0, 1, 2]
    store.set_facts(study, facts)
    store.leave_out(study, "precision", "bf16", "it drifted")
    store.leave_out(study, "precision", "bf16", "again")
    store.leave_out(study, "checkpointing", "all", "no blocks")
    store.add_seconds(study, 1.5, (("Ray", 1.0), ("other", 0.5)))
    after = store.add_seconds(study, 2.0, (("Ray", 0.25),))
    assert after == store.study(study.id)
    assert after.facts == facts
    assert after.left_out == (
        ("precision", "bf16", "it drifted"),
        ("checkpointing", "all", "no blocks"),
    )
    assert (after.seconds, after.launches) == (3.5, 3)
    assert after.seconds_by_phase == (("Ray", 1.25), ("other", 0.5))


def test_a_finished_trial_is_amended(
    store: Store, study: StudyRecord, plan: Plan, report: Report
) -> None:
    """Real steps take the place of a probe, or the check refuses what was measured."""
    first = report(plan)
    probed = dataclasses.replace(
        first,
        measurements=tuple(dataclasses.replace(each, probed=True) for each in first.measurements),
    )
    running, trial = store.add_trials(study, [Plan(), plan], launch=0, owner=Owner.current())
    kept = store.finish(trial, probed)
    assert kept.report == probed
    amended = dataclasses.replace(first, measurements=first.measurements[:1])
    assert store.amend(kept, amended) == dataclasses.replace(kept, report=amended)
    refused = dataclasses.replace(
        first, verdict=Verdict.REFUSED, best=None, measurements=(), out_of_memory=None
    )
    assert store.amend(kept, refused).report == refused
    assert store.trials(study) == (running, dataclasses.replace(kept, report=refused))
    with pytest.raises(StorageError, match="has not finished"):
        store.amend(running, refused)


def test_a_key_tells_apart_all_it_names(key: StudyKey) -> None:
    changes: dict[str, Any] = {
        "script": "x.py",
        "digest": "0",
        "args": (),
        "environment": (("ACCELERATE_MIXED_PRECISION", "bf16"),),
        "gpu": "B200",
        "gpus": 2,
        "memory": None,
        "allow": "exact",
        "spread": 2,
    }
    assert set(changes) == {field.name for field in dataclasses.fields(key)}
    others = [dataclasses.replace(key, **{name: value}) for name, value in changes.items()]
    assert len({each.fingerprint for each in [key, *others]}) == 1 + len(others)


def test_a_key_follows_links_and_contents(tmp_path: Path, script: Script, key: StudyKey) -> None:
    (tmp_path / "link.py").symlink_to("train.py")
    linked = dataclasses.replace(script, target=str(tmp_path / "link.py"))
    assert script_path(linked) == key.script == str(tmp_path.resolve() / "train.py")
    (tmp_path / "train.py").write_text("pass  # edited\n")
    edited = StudyKey.of(linked, gpu=key.gpu, gpus=1, memory=key.memory, allow=key.allow)
    assert dataclasses.replace(edited, digest=key.digest) == key
    assert edited != key


def test_a_copied_script_is_called_as_where_it_came_from(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    script = Script(target="train.py", cwd=str(tmp_path))
    monkeypatch.setenv(ORIGIN, "/home/me/work")
    assert script_path(script) == "/home/me/work/train.py"
    outside = dataclasses.replace(script, target="../other.py")
    assert script_path(outside) == str(tmp_path.parent / "other.py")


def test_a_module_is_known_by_its_file_where_there_is_one(tmp_path: Path) -> None:
    (tmp_path / "project").mkdir()
    (tmp_path / "project" / "__main__.py").touch()
    here = Script(target="project", module=True, cwd=str(tmp_path))
    assert script_path(here) == str(tmp_path.resolve() / "project" / "__main__.py")
    elsewhere = dataclasses.replace(here, target="json.tool")
    assert script_path(elsewhere) == "json.tool"
    assert StudyKey.of(elsewhere, gpu="CPU", gpus=1, memory=None, allow="exact").digest == ""


def test_a_script_that_cannot_be_read_is_a_usage_error(tmp_path: Path) -> None:
    gone = Script(target="gone.py", cwd=str(tmp_path))
    with pytest.raises(UsageError, match=r"gone\.py cannot be read: No such file"):
        StudyKey.of(gone, gpu="CPU", gpus=1, memory=None, allow="exact")


# --- trials -----------------------------------------------------------------------------------


def test_trials_are_numbered_within_their_study(
    store: Store, study: StudyRecord, opening: Open, plan: Plan
) -> None:
    me = Owner.current()
    first = store.add_trials(study, [Plan(), plan], launch=0, owner=me)
    second = store.add_trials(study, [plan], launch=1, owner=me)
    other = store.add_trials(opening(store, fresh=True), [plan], launch=0, owner=me)
    assert [(t.number, t.launch, t.plan) for t in (*first, *second)] == [
        (0, 0, Plan()),
        (1, 0, plan),
        (2, 1, plan),
    ]
    assert other[0].number == 0
    assert store.trials(study) == (*first, *second)
    assert first[0].owner.same(me)
    assert (first[0].budget, first[0].versions) == (study.budget, study.versions)


def test_a_report_comes_back_exactly(
    store: Store, study: StudyRecord, plan: Plan, report: Report
) -> None:
    (trial,) = store.add_trials(study, [plan], launch=0, owner=Owner.current())
    done = store.finish(trial, report(plan))
    (again,) = store.trials(study)
    assert again == done
    assert again.report == report(plan)
    assert again.state is State.FINISHED
    assert again.verdict is Verdict.MEASURED
    assert again.measurement is not None
    assert isinstance(again.measurement.losses, tuple)
    assert again.ended is not None
    assert again.ended >= again.created


@pytest.mark.parametrize("verdict", [v for v in Verdict if v is not Verdict.INTERRUPTED])
def test_a_bare_report_with_any_verdict_comes_back(
    store: Store, study: StudyRecord, verdict: Verdict
) -> None:
    (trial,) = store.add_trials(study, [Plan()], launch=0, owner=Owner.current())
    bare = TrialReport(index=0, plan=Plan(), verdict=verdict)
    store.finish(trial, bare)
    assert store.trials(study)[0].report == bare


def test_losses_that_are_no_numbers_come_back(
    store: Store, study: StudyRecord, plan: Plan, report: Report
) -> None:
    (trial,) = store.add_trials(study, [plan], launch=0, owner=Owner.current())
    given = report(plan, Verdict.DRIFTED)
    odd = dataclasses.replace(given.measurements[0], losses=(math.inf, -math.inf, math.nan))
    store.finish(trial, dataclasses.replace(given, measurements=(odd,)))
    measurement = store.trials(study)[0].measurement
    assert measurement is not None
    assert measurement.losses[:2] == (math.inf, -math.inf)
    assert math.isnan(measurement.losses[2])


def test_the_first_trial_with_a_trace_is_the_reference(
    store: Store, study: StudyRecord, plan: Plan, report: Report
) -> None:
    trace = Trace(
        names=("weight", "bias"),
        sizes=(12, 3),
        rounding=(1e-7, math.inf),
        epsilon=1e-7,
        buckets=8,
        start="AAAA",
        steps=(TracedStep(losses=(2.5, math.nan), inputs="BBBB", drew=True), TracedStep()),
    )
    plans = [plan, plan.replace(micro_batch="auto"), Plan()]
    trials = store.add_trials(study, plans, launch=0, owner=Owner.current())
    assert store.reference(study) is None
    store.finish(trials[0], report(plans[0]))
    store.finish(trials[2], report(plans[2]), trace=dataclasses.replace(trace, names=()))
    kept = store.finish(trials[1], report(plans[1]), trace=trace)
    found = store.reference(study)
    assert found is not None
    assert found[0] == kept
    assert repr(found[1]) == repr(trace)  # NaN is not equal to itself


def test_stray_bytes_in_a_traceback_do_not_lose_the_trial(
    store: Store, study: StudyRecord, plan: Plan, report: Report
) -> None:
    (trial,) = store.add_trials(study, [plan], launch=0, owner=Owner.current())
    store.finish(trial, dataclasses.replace(report(plan), traceback="caf\udce9\0"))
    kept = store.trials(study)[0].report
    assert kept is not None
    assert kept.traceback == "caf\\udce9\\0"


def test_only_a_running_trial_moves(
    store: Store, study: StudyRecord, plan: Plan, report: Report
) -> None:
    done, left = store.add_trials(study, [Plan(), plan], launch=0, owner=Owner.current())
    store.finish(done, report(Plan()))
    before = store.trials(study, state=State.FINISHED)
    message = "trial 0 of study .* is finished and stays so; only a running trial is"
    with pytest.raises(StorageError, match=message):
        store.finish(done, report(Plan()))
    with pytest.raises(StorageError, match=message):
        store.release(done)
    store.release(left)
    with pytest.raises(StorageError, match="has no trial 1"):
        store.finish(left, report(plan))
    with pytest.raises(StorageError, match="has no trial 1"):
        store.release(left)
    assert store.trials(study) == before
    (again,) = store.add_trials(study, [plan], launch=1, owner=Owner.current())
    assert again.number == left.number


def test_a_report_on_another_plan_or_an_interruption_finishes_nothing(
    store: Store, study: StudyRecord, plan: Plan, report: Report
) -> None:
    (trial,) = store.add_trials(study, [plan], launch=0, owner=Owner.current())
    with pytest.raises(StorageError, match="cannot finish it"):
        store.finish(trial, report(Plan()))
    with pytest.raises(StorageError, match="release it"):
        store.finish(trial, report(plan, Verdict.INTERRUPTED))
    assert store.trials(study)[0].state is State.RUNNING


def test_a_plan_is_finished_once_in_a_search_and_confirmed_at_will(
    store: Store, study: StudyRecord, opening: Open, plan: Plan, report: Report
) -> None:
    me = Owner.current()
    first, second = store.add_trials(study, [plan] * 2, launch=0, owner=me)
    store.finish(first, report(plan))
    with pytest.raises(StorageError, match="another trial of this study has finished the same"):
        store.finish(second, report(plan))
    assert store.trials(study)[1].state is State.RUNNING
    assert store.trials(study)[1].report is None
    for _ in range(2):
        (again,) = store.add_trials(study, [plan], launch=1, owner=me, purpose=Purpose.CONFIRM)
        store.finish(again, report(plan))
    (elsewhere,) = store.add_trials(opening(store, fresh=True), [plan], launch=0, owner=me)
    store.finish(elsewhere, report(plan))
    confirmed = store.trials(study, purpose=Purpose.CONFIRM)
    assert [trial.number for trial in confirmed] == [2, 3]
    assert [t.number for t in store.trials(study, state=State.FINISHED)] == [0, 2, 3]


def test_a_bandwidth_replaces_an_earlier_one(store: Store, study: StudyRecord) -> None:
    machine = MachineKey.of(study.hardware, study.versions)
    slow, fast = (
        Bandwidth(all_reduce=rate, all_gather=2 * rate, reduce_scatter=3 * rate)
        for rate in (1e9, 1 / 3 * 1e12)
    )
    assert store.bandwidths(machine) == {}
    for ranks, each in ((4, slow), (2, slow), (4, fast)):
        store.set_bandwidth(machine, ranks, each)
    assert store.bandwidths(machine) == {2: slow, 4: fast}
    assert store.bandwidths(dataclasses.replace(machine, torch="2.11.0")) == {}


def test_a_discovery_replaces_an_earlier_one_of_its_name(store: Store) -> None:
    key = FittedKey(function="m.f", arguments="0" * 64, device="NVIDIA H200", memory=1 << 40)
    assert store.discoveries(key) == {}
    store.learn(key, {"fitted": {"batch_size": 8}, "other": 1}, versions={"torch": "2"})
    store.learn(key, {"fitted": {"batch_size": 4}}, versions={"torch": "3"})
    found = store.discoveries(key)
    assert list(found) == ["fitted", "other"]
    assert found["fitted"].content == {"batch_size": 4}
    assert found["fitted"].versions == {"torch": "3"}
    assert store.discoveries(dataclasses.replace(key, memory=1)) == {}


def test_a_failure_inside_a_transaction_leaves_nothing(store: Store, study: StudyRecord) -> None:
    def break_a_rule() -> None:
        with store.writing() as session:
            session.get_one(StudyRow, study.id).budget = 1
            session.add(EventRow(kind=None, payload={}, versions={}))

    with pytest.raises(StorageError, match=r"(?i)cannot be used: .*not.null constraint"):
        break_a_rule()
    assert store.study(study.id) == study
    assert store.events() == ()


def test_the_number_of_checkpointed_blocks_is_kept(
    store: Store, study: StudyRecord, report: Report
) -> None:
    plan = Plan.of({"checkpointing": "auto", "micro_batch": "auto"})
    (trial,) = store.add_trials(study, [plan], launch=0, owner=Owner.current())
    given = report(plan)
    measured = tuple(dataclasses.replace(m, checkpointing="7") for m in given.measurements)
    store.finish(trial, dataclasses.replace(given, measurements=measured))
    (kept,) = store.trials(study)
    assert kept.measurement == measured[-1]
    assert kept.measurement.plan(plan)["checkpointing"] == "7"


def test_a_study_with_an_unknown_level_opens(
    path: Path, opening: Open, plan: Plan, report: Report
) -> None:
    with Store(str(path)) as store:
        study, said = opening(store), list[str]()
        old, kept = store.add_trials(study, [Plan(), plan], launch=0, owner=Owner.current())
        for trial in (old, kept):
            store.finish(trial, report(trial.plan))
        with sqlite3.connect(path) as other:
            levels = '{"optimizer": "paged"}'
            other.execute("UPDATE trial SET plan = ? WHERE id = ?", (levels, old.id))
    with Store(str(path)) as store:
        store.say = said.append
        (study,) = store.studies()
        assert [trial.id for trial in store.trials(study)] == [kept.id]
        (line,) = said
        assert "optimizer has no level 'paged'" in line
        assert "\n" not in line


SPOILT = ["[1]", "no JSON", "7", '{"precision": 8}', '{"telepathy": "on"}']


@pytest.mark.parametrize("written", SPOILT)
def test_a_spoilt_plan_costs_its_trial_alone(
    path: Path, opening: Open, plan: Plan, report: Report, written: str
) -> None:
    with Store(str(path)) as store:
        said: list[str] = []
        study, me = opening(store), Owner.current()
        spoilt, sound = store.add_trials(study, [Plan(), plan], launch=0, owner=me)
        for trial in (spoilt, sound):
            store.finish(trial, report(trial.plan))
        with sqlite3.connect(path) as other:
            other.execute("UPDATE trial SET plan = ? WHERE id = ?", (written, spoilt.id))
        store.say = said.append
        assert [trial.id for trial in store.trials(study)] == [sound.id]
        assert store.trials(study, state=State.FINISHED) == store.trials(study)
        (line,) = said  # once
        named = f"left out: trial 0 of study {study.id} in the store {path} cannot be read: "
        assert line.startswith(f"{named}its plan: ")
        assert "\n" not in line
        with pytest.raises(StorageError, match=r"trial 0 of study .* cannot be read") as caught:
            store.amend(spoilt, report(Plan()))
        assert "--fresh" in str(caught.value)


@pytest.mark.parametrize(
    ("table", "column", "written"),
    [
        ("study", "script", '["train.py"]'),
        ("study", "left_out", '[["precision"]]'),
        ("study", "versions", "[]"),
        ("study", "facts", "{"),
        ("trial", "report", "{"),
        ("trial", "report", '{"index": 0}'),
        ("trial", "versions", '"new"'),
        ("event", "payload", "[]"),
    ],
)
def test_whatever_is_spoilt_is_named_and_left_out(
    path: Path, opening: Open, plan: Plan, report: Report, table: str, column: str, written: str
) -> None:
    with Store(str(path)) as store:
        opening(store)
        said: list[str] = []
        study = opening(store, fresh=True)
        (trial,) = store.add_trials(study, [plan], launch=0, owner=Owner.current())
        store.finish(trial, report(plan))
        store.record_event("tick", {})
        with sqlite3.connect(path) as other:
            last = f"rowid = (SELECT max(rowid) FROM {table})"
            other.execute(f"UPDATE {table} SET {column} = ? WHERE {last}", (written,))
        store.say = said.append
        found = len(store.studies()), len(store.trials(study)), len(store.events())
        assert sum(found) == 2 + 1 + 1 - 1
        (line,) = said
        assert line.startswith("left out: ")
        assert str(path) in line


def test_only_what_a_launcher_sets_is_taken_from_a_store(
    store: Store, key: StudyKey, script: Script, hardware: Hardware
) -> None:
    """Whoever can write to it must not get code into the process that `run` starts."""
    ours = {
        "ACCELERATE_MIXED_PRECISION": "bf16",
        "FSDP_VERSION": "2",
        "OMP_NUM_THREADS": "1",
        "PYTHONUNBUFFERED": "1",
        "PYTHONWARNINGS": "error",
        "TORCHELASTIC_RUN_ID": "autofit",
    }
    theirs = dict.fromkeys(("LD_PRELOAD", "LD_AUDIT", "PYTHONPATH", "PYTHONSTARTUP", "PATH"), "x")
    theirs |= dict.fromkeys(("BASH_ENV", "NCCL_NET_PLUGIN", "TORCHINDUCTOR_CACHE_DIR", "A;B"), "x")
    environment = tuple(sorted({**ours, **theirs}.items()))
    given = dataclasses.replace(script, environment=environment)
    terms: dict[str, Any] = {"script": given, "hardware": hardware, "budget": 1, "versions": {}}
    study = store.open_study(key, **terms)
    assert dict(store.study(study.id).script.environment) == ours
    terms["script"] = dataclasses.replace(script, environment=(("PYTHONWARNINGS", "all:0:a.b"),))
    assert store.open_study(key, **terms).script.environment == ()


# --- events -----------------------------------------------------------------------------------


def test_events_are_kept_in_order(store: Store, study: StudyRecord) -> None:
    (trial,) = store.add_trials(study, [Plan()], launch=0, owner=Owner.current())
    rescue = store.record_event("rescue", {"step": 3, "to": ["a"]}, study=study, trial=trial)
    other = store.record_event("fitted", {"batch": None}, versions={"torch": "2"})
    assert store.events() == (rescue, other)
    assert store.events("rescue") == store.events(study=study) == (rescue,)
    assert (rescue.study, rescue.trial, rescue.versions) == (study.id, trial.id, study.versions)
    assert (other.study, other.trial, other.payload) == (None, None, {"batch": None})


def test_an_event_of_a_study_that_is_not_there_is_refused(store: Store, study: StudyRecord) -> None:
    with pytest.raises(StorageError, match=r"(?i)foreign key constraint"):
        store.record_event("rescue", {}, study=dataclasses.replace(study, id="0"))


def test_the_documented_code_runs(
    path: Path,
    opening: Open,
    report: Report,
    root: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    with Store(str(path)) as store:
        study = opening(store)
        (trial,) = store.add_trials(study, [Plan()], launch=0, owner=Owner.current())
        store.finish(trial, report(Plan()))
    page = (root / "docs" / "how-to" / "read-the-store.md").read_text()
    trials, points = re.findall(r"```python\n(.*?)```", page, re.S)
    monkeypatch.chdir(path.parent)
    exec(trials, {})
    assert capsys.readouterr().out == f"{study.id} 0 as it is {Verdict.MEASURED}\n"
    exec(points, {})
    assert capsys.readouterr().out.startswith("micro 8 213.3")
