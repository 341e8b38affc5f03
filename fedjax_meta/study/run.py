"""Runs a study: tunes every system alike, trains it with every seed, and saves what it finds as it comes.

A run's folder holds `study.yaml` (all its fields), `run.json` (versions, devices, clients, fingerprints), `metrics.jsonl`
(one line for each evaluation of each member), `results/` (one file for each finished system), `state/` (checkpoints) and the
report; after an error `error.txt`, with its traceback; where processes share it also `parts/`, with the metrics of each system
as they come.
"""

import contextlib
import dataclasses
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

import jax

from fedjax_meta import disk, imports, process, runtime
from fedjax_meta.study import folder as folders
from fedjax_meta.study import presets
from fedjax_meta.study import tuning as choice
from fedjax_meta.study.check import check
from fedjax_meta.study.job import Job, Outcome
from fedjax_meta.study.phase import Ahead, RunContext, Stopped, Watcher
from fedjax_meta.study.result_files import Metrics
from fedjax_meta.study.scenario import Clients
from fedjax_meta.study.study import Study

_PAUSE = 1.0
"""Seconds between two looks at what other processes have finished."""

__all__ = ["Outcome", "Stopped", "Watcher", "build", "check_folder", "run", "shared"]


def build(study: Study, data_dir: str | None = None) -> dict[str, Clients]:
    """The clients of every scenario."""
    return {name: scenario.build(data_dir) for name, scenario in study.scenarios.items()}


def run(
    study: Study,
    folder: str | Path,
    *,
    watcher: Watcher | None = None,
    clients: Mapping[str, Clients] | None = None,
    command: str = "",
    should_stop: Callable[[], bool] | None = None,
) -> list[Outcome]:
    """Runs what is not finished of a study.

    Args:
      study: what to run.
      folder: of the run; made if it is not there. A run that was stopped goes on where it was.
      watcher: is told of every step, and may show it; nothing is shown when not given.
      clients: of every scenario, as `build` gives them; built here when not given.
      command: how the run was started, for the record.
      should_stop: asked about once a second, between rounds; the run saves what it has reached where it returns true.

    Returns:
      The outcomes, scenario by scenario.

    Raises:
      Stopped: `should_stop` ended the run; the same call goes on.
      ValueError: several processes, a scenario that cannot be built, a system that a scenario refuses, a folder that holds
        another study (the message names each field that differs).
      OSError: the folder cannot be written, or another process has it.
    """
    folder, built = Path(folder), build(study) if clients is None else clients
    _check_start(study, built)
    disk.lock(folder)
    check_folder(study, folder, built)
    jobs = _jobs(study, built)
    folders.open_run(study, folder, built, command)
    outcomes = []
    with _errors_noted(folder), _context(folder, watcher or Watcher(), should_stop) as context:
        for number, job in enumerate(jobs):
            outcomes.append(_run_job(job, jobs[number + 1 :], context))
            context.watcher.end(outcomes[-1])
    _save_presets(study, folder, outcomes)
    folders.close_run(folder)
    return outcomes


@contextlib.contextmanager
def shared(
    study: Study,
    folder: str | Path,
    *,
    watcher: Watcher | None = None,
    clients: Mapping[str, Clients] | None = None,
    command: str = "",
    should_stop: Callable[[], bool] | None = None,
) -> Iterator[list[Outcome] | None]:
    """Takes part in a run that other processes may share: each calls this with the same study and folder.

    A process trains systems that no other one has; what a process had that died is taken by another. When all systems are
    finished, the block begins: with the outcomes in the process that is to report them, with `None` in the others as soon as that
    one's block has ended; where it fails, another one is to report. Numbers are those of `run`, and so are arguments and errors.

    Example:
      ```
      with shared(study, folder, watcher=watcher) as outcomes:
          if outcomes is not None:
              page.write_all(folder, study, build(study), outcomes, "python my_script.py")
      ```
    """
    folder, built = Path(folder), build(study) if clients is None else clients
    earlier = folders.ending(folder)
    _check_start(study, built)
    jobs = _jobs(study, built)
    common = folder / folders.PARTS  # who has it writes what belongs to all
    with contextlib.ExitStack() as stack:
        context = stack.enter_context(_context(folder, watcher or Watcher(), should_stop))
        with _turn(common, context.should_stop):
            at_work = disk.locked(folder, patience=_PAUSE / 5)
            if not stack.enter_context(disk.held(folder, shared=True)):
                raise disk.in_use(folder)
            # Short runs may begin and end while this process prepares itself: it took part in them all the same.
            if at_work or folders.ending(folder) not in (None, earlier):
                folders.join_run(study, folder, built)
            else:
                check_folder(study, folder, built)
                folders.open_run(study, folder, built, command)
        stack.enter_context(_errors_noted(folder))
        _train_free(jobs, context)
        with _turn(common, context.should_stop):
            if folders.ending(folder) is not None:
                yield None
                return
            whole = context._replace(metrics=Metrics(folder))
            outcomes = [_run_job(job, [], whole) for job in jobs]
            _save_presets(study, folder, outcomes)
            yield outcomes
            folders.close_run(folder)


def check_folder(study: Study, folder: Path, built: Mapping[str, Clients]) -> None:
    """Refuses a folder that holds another study, or results of other options; writes nothing.

    Raises:
      ValueError: the message has what differs, with both values.
    """
    folders.check_run(study, folder, built)
    for job in _jobs(study, built):
        job.check(folder)


def _run_job(job: Job, ahead: Sequence[Job], context: RunContext) -> Outcome:
    """What a job finds; an error in a user's own code names the system."""
    try:
        return job.run(ahead, context)
    except Stopped:
        raise  # a signal may have come while a user's own code ran
    except Exception as error:
        if imports.place_of(error) is None:
            raise
        raise ValueError(f"{', '.join(job.where)}: {imports.said(error)}") from error
    finally:
        runtime.give_back_free_memory()


def _check_start(study: Study, built: Mapping[str, Clients]) -> None:
    if jax.process_count() > 1:
        raise ValueError(
            f"a study runs in one process, and JAX sees {jax.process_count()}: start processes that do not know of each other, "
            "which can share a run, or train one method over all of them with simulate"
        )
    check(study, built)


def _jobs(study: Study, built: Mapping[str, Clients]) -> list[Job]:
    return [Job(study, scenario, name, built[scenario]) for scenario in built for name in study.systems_on(scenario)]


@contextlib.contextmanager
def _errors_noted(folder: Path) -> Iterator[None]:
    """Keeps an error that ends the run for whoever looks into the folder later."""
    try:
        yield
    except (Stopped, process.Stopped):
        raise
    except Exception as error:
        folders.note_error(folder, error)
        raise


@contextlib.contextmanager
def _context(folder: Path, watcher: Watcher, should_stop: Callable[[], bool] | None) -> Iterator[RunContext]:
    """Where jobs leave what they find."""
    ahead = Ahead()
    try:
        yield RunContext(folder, Metrics(folder), watcher, should_stop or (lambda: False), ahead)
    finally:
        ahead.close()


@contextlib.contextmanager
def _turn(folder: Path, should_stop: Callable[[], bool]) -> Iterator[None]:
    """Gives a folder to this process for the length of a block, as soon as no other one has it."""
    with contextlib.ExitStack() as stack:
        while not stack.enter_context(disk.held(folder)):
            if should_stop():
                raise Stopped("waiting for another process, which opens the run or reports it")
            time.sleep(_PAUSE)
        yield


def _train_free(jobs: Sequence[Job], context: RunContext) -> None:
    """Runs the jobs that no other process has, until all are finished."""
    left, waits = list(jobs), False
    while left:
        for job in list(left):
            part = folders.part(context.folder, *job.where)
            with disk.held(part) as mine:
                if mine:
                    context.watcher.end(_run_job(job, [], context._replace(metrics=Metrics(part))))
                    left.remove(job)
        if left:
            if context.should_stop():
                raise Stopped(f"waiting for {len(left)} of {len(jobs)} systems, which other processes train")
            if not waits:
                context.watcher.wait([job.where for job in left])
            waits = True
            time.sleep(_PAUSE)


def _save_presets(study: Study, folder: Path, outcomes: Sequence[Outcome]) -> None:
    """What the grids found, as presets: `presets/SCENARIO.yaml`."""
    content = folders.read_run(folder)
    for name, scenario in study.scenarios.items():
        tuned = [outcome for outcome in outcomes if outcome.scenario == name and outcome.tuning]
        if not tuned:
            continue
        systems = {}
        for outcome in tuned:
            system = study.system(outcome.system, name)
            best = choice.best(outcome.tuning, study.tuned_by)
            systems[outcome.system] = {
                "method": system.method,
                "options": dict(system.options),
                **({"rates": dict(study.systems[outcome.system].changing)} if system.changing else {}),
                "chosen": outcome.chosen,
                "score": float(best.kind.text(best.score)),
                "metric": best.kind.label,
                "trials": len(outcome.tuning),
                "at the end of its grid": outcome.at_edge,
                "federation": dict(system.federation),
            }
        facts = {"study": study.title, "command": content["command"], "versions": content["versions"], "git": content["git"]}
        tuning = {**dataclasses.asdict(study.tuning), "rounds": study.tuning.rounds or study.rounds}
        tree = {"scenario": dataclasses.asdict(scenario), **facts, "tuning": tuning, "systems": systems}
        presets.write(folder / "presets" / f"{name}.yaml", tree, keep=True)
