"""The model in force: the one on record, or a first look where there is none; kept in the user's database."""

from __future__ import annotations

import sys
import threading

from autoconv.common import code_hash
from autoconv.common.forks import renew_in_children
from autoconv.cpu.machine.cached import forget_cached
from autoconv.cpu.machine.model import BUSY, Machine
from autoconv.errors import RecordError
from autoconv.paths import cache_folder
from autoconv.records.store import TextStore

_in_force: dict[str, Machine] = {}  # by the device's key: a process keeps to what it found first, or measured
_lock = threading.RLock()
renew_in_children(sys.modules[__name__], "_lock", threading.RLock)


def machine_in_force(key: str, instruction_set: str, threads: int, matrix_unit: str | None = None) -> Machine:
    """The model that estimates go by: on record, or measured roughly now and put there.

    A rough one that was measured while the machine was busy is measured again by the next process, and stays where the
    machine is still busy: from every other model other estimates follow, and other candidates to time.

    Parameters
    ----------
    key : str
        Of the device.
    instruction_set : str
    threads : int
    matrix_unit : str or None

    Returns
    -------
    Machine
    """
    if key not in _in_force:
        with _lock:
            if key not in _in_force:
                found = recorded(key, instruction_set, threads)
                if found is None or (not found.thorough and found.busy > BUSY):
                    found = _measured(key, instruction_set, threads, matrix_unit, thorough=False, instead_of=found)
                _in_force[key] = found
    return _in_force[key]


def put_in_force(key: str, machine: Machine) -> None:
    """Have estimates and kernels of this process go by a model: by that of the process which asks for them.

    Parameters
    ----------
    key : str
        Of the device.
    machine : Machine
    """
    with _lock:
        _enforce(key, machine)


def _enforce(key: str, machine: Machine) -> None:
    """Go by a model from now on; what followed from another one is forgotten."""
    if _in_force.get(key) != machine:
        _in_force[key] = machine
        forget_cached()


def survey(key: str, instruction_set: str, threads: int, matrix_unit: str | None = None) -> Machine:
    """The thorough model, measured now unless one of a quiet machine is on record; in force from now on.

    One that is on record stays where the machine is still busy.

    What a record lacks, as where no kernel could be compiled or a matrix unit was not permitted, is measured and put
    there.

    Parameters
    ----------
    key, instruction_set, threads, matrix_unit
        As for `machine_in_force`.

    Returns
    -------
    Machine
    """
    with _lock:
        found = recorded(key, instruction_set, threads)
        if found is None or not found.thorough or found.busy > BUSY:
            complete = found is not None and found.thorough and not _lacking(found, instruction_set, matrix_unit)
            doubtful = found if complete else None
            found = _measured(key, instruction_set, threads, matrix_unit, thorough=True, instead_of=doubtful)
        elif _lacking(found, instruction_set, matrix_unit):
            from autoconv.cpu.machine.measure import completed  # rarely needed

            found = completed(found, instruction_set, threads, matrix_unit)
            _put(key, found)
        _enforce(key, found)
        return found


def recorded(key: str, instruction_set: str, threads: int) -> Machine | None:
    """What is on record and can be read.

    Parameters
    ----------
    key, instruction_set, threads
        As for `machine_in_force`.

    Returns
    -------
    Machine or None
    """
    store = TextStore(cache_folder())
    text = store.get(_name(key))
    found = None
    if text is not None:
        try:
            found = Machine.parse(text)
        except RecordError as error:
            store.report(f"{store.directory}: the record of this machine is ignored: {error}")
    store.close()
    return (
        found
        if found is not None and found.threads == threads and "float32" in found.peaks.get(instruction_set, {})
        else None
    )


def _measured(
    key: str,
    instruction_set: str,
    threads: int,
    matrix_unit: str | None,
    *,
    thorough: bool,
    instead_of: Machine | None = None,
) -> Machine:
    """A new model, which is put on record; or the one that is there, where the new one would be as doubtful."""
    from autoconv.cpu.machine.measure import measure  # rarely needed

    found = measure(instruction_set, threads, matrix_unit, thorough=thorough)
    if instead_of is not None and found.busy > BUSY:
        return instead_of
    _put(key, found)
    return found


def _lacking(found: Machine, instruction_set: str, matrix_unit: str | None) -> bool:
    """Whether it was measured where less could be."""
    lacks_peaks = "int8" not in found.peaks[instruction_set] or matrix_unit not in (None, *found.peaks)
    return lacks_peaks or found.jumps is None or found.handed is None


def _put(key: str, found: Machine) -> None:
    def newest(old: str | None) -> str:
        """A quick look does not take the place of a thorough one that another process has put there meanwhile."""
        try:
            keep = old is not None and not found.thorough and Machine.parse(old).thorough
        except RecordError:
            keep = False
        return old if keep and old is not None else found.text

    store = TextStore(cache_folder())
    store.update(_name(key), newest)
    store.close()


def _name(key: str) -> str:
    """By the code that measures, too: what other code has found under the same name may be something else."""
    return f"machine|{code_hash.version(Machine.__module__)}|{key}"
