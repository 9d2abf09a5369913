"""The undisturbed steps between two points where something is due: their batches, and their
dispatches to the device."""

import math
from collections import deque
from time import perf_counter
from typing import Any

import jax

from fulgurite._src.callbacks import RUNTIME_ERRORS
from fulgurite._src.data.readers import BatchItem
from fulgurite._src.execution.batch_buffer import BatchBuffer
from fulgurite._src.execution.dispatch import MAX_IN_FLIGHT
from fulgurite._src.execution.step_parts import Dispatch, StepResults
from fulgurite._src.fit.compiling import compile_for_other_shapes
from fulgurite._src.fit.records import Record
from fulgurite._src.fit.running import LoopState, RunningFit
from fulgurite._src.model.media import MEDIA_ACTION
from fulgurite._src.tree.specs import shape_signature
from fulgurite._src.waits import WaitAbandoned
from fulgurite.errors import DataError


class StepDispatcher:
    """Collects batches and hands their steps to the device, up to the nearest step at which
    something is due.

    Args:
        fit: the running fit.
        steps_per_execution: the largest number of steps in one dispatch.
        device_arrays: the arrays on the device that indexed batches are gathered from, or None.
    """

    def __init__(self, fit: RunningFit, steps_per_execution: int, device_arrays: Any) -> None:
        self._fit = fit
        self._progress = fit.progress
        self._state = fit.state
        self._scheduler = fit.scheduler
        self._steps_per_execution = steps_per_execution
        self._device_arrays = device_arrays
        # What was dispatched, in words, and an array of each.
        self._in_flight: deque[tuple[str, Any]] = deque()
        self._newest_steps = "a step"
        self._newest_results: tuple[StepResults | None, Any] = (None, None)
        self._data_error: Exception | None = None

    def run_until_due(self) -> None:
        """Run steps until something is due: by a step, by the clock, at the end of an epoch, or
        because of a stop request."""
        fit, progress, timings = self._fit, self._progress, self._fit.timings
        first = progress.step
        compile_seconds = timings.seconds["compile"]
        data_seconds = 0.0
        wait_seconds = 0.0
        dispatch_seconds = 0.0
        update_rule = fit.program.update_rule.for_step(progress.step, progress.step_range)
        self._compiled_step = fit.program.get_compiled_step(self._steps_per_execution, update_rule)
        target = self._scheduler.next_due(progress.step, progress.step_range)
        while True:
            started = perf_counter()
            fit.resume_point.loop_state = LoopState.FETCHING
            items, buffer = self._collect_batches(target)
            fetched = perf_counter()
            self._bound_in_flight()
            free = perf_counter()
            dispatch = self._prepare(buffer) if items else None
            fit.resume_point.loop_state = LoopState.STEPPING
            if dispatch is None:
                break
            target = self._advance(items, target)
            self._run(dispatch, len(items), is_due=progress.step == target)
            del dispatch  # it holds batches, as the device does for as long as it needs them
            # Not before: what was not trained on is the next fit's.
            fit.data_iterator.consume(len(items))
            dispatched = perf_counter()
            data_seconds += fetched - started
            wait_seconds += free - fetched
            dispatch_seconds += dispatched - free
            fit.records.flush(wait=False)
            if items[-1].epoch_end or progress.step >= target:
                break
            if self._scheduler.poll_requests(progress.step):
                break
        dispatch_seconds -= timings.seconds["compile"] - compile_seconds
        num_steps = progress.step - first
        timings.add("data", data_seconds, num_steps)
        timings.add("dispatch", dispatch_seconds, num_steps)
        timings.add("wait", wait_seconds, num_steps)

    def emit_media(self) -> None:
        """Emit the media of the newest step, if it was known beforehand that they are due."""
        results, due = self._newest_results
        due_names = self._fit.engine.services.due_names
        if results is None or not due[due_names.index(MEDIA_ACTION)]:
            return
        media = self._compiled_step.get_media(results)
        if not media:
            return
        step = self._progress.step
        flat = self._state.flat
        program, records = self._fit.program, self._fit.records

        def finish() -> Record:
            program.check_finite(program.read_nonfinite(flat))
            values = records.select_writable("train", jax.device_get(media))
            return Record("media", "train", step, values)

        records.enqueue([*jax.tree.leaves(media), *flat.packed], finish)

    def name_failed_steps(self) -> str:
        """Name the steps whose callback failed: those of the oldest dispatch whose results
        cannot be read, or those that were being dispatched."""
        for steps, array in self._in_flight:
            try:
                array.block_until_ready()
            except RUNTIME_ERRORS:
                return steps
        if self._fit.is_between_steps:
            return f"after step {self._progress.step}"
        return self._newest_steps

    # --- batches ----------------------------------------------------------------------------------

    def _collect_batches(self, target: float) -> tuple[list[BatchItem], BatchBuffer]:
        """Return the batches of the next dispatch: as many as fit before `target`, all of the same
        shapes, of one epoch. Where the data fails, those before it are trained on first; none where
        it was abandoned."""
        if self._data_error is not None:
            raise self._data_error
        buffer = self._compiled_step.make_buffer()
        try:
            items = [self._look_ahead(0)]
        except WaitAbandoned as wait:
            self._fit.abandoned_wait = wait
            return [], buffer
        buffer.add(items[0].batch)
        room = self._divide_evenly(target - self._progress.step)
        while len(items) < room and not items[-1].epoch_end:
            if self._scheduler.should_stop_soon:
                break
            try:
                item = self._look_ahead(len(items))
            except Exception as error:
                self._data_error = error
                break
            except WaitAbandoned as wait:
                self._fit.abandoned_wait = wait
                break
            if shape_signature(item.batch) != shape_signature(items[0].batch):
                break
            items.append(item)
            buffer.add(item.batch)
        return items, buffer

    def _divide_evenly(self, num_steps: float) -> float:
        """Return the size of the next dispatch, of several of about equal size that take
        `num_steps` together: of 50 steps 13 and not 16, which would leave a dispatch of 2."""
        largest = self._compiled_step.steps_per_execution
        if num_steps <= largest or math.isinf(num_steps):
            return min(largest, num_steps)
        return math.ceil(num_steps / math.ceil(num_steps / largest))

    def _look_ahead(self, number: int) -> BatchItem:
        """Return an item that is not trained on yet.

        Args:
            number: how many items come before it.
        """
        step = self._progress.step + number
        data_iterator = self._fit.data_iterator
        try:
            item = data_iterator.look_ahead(number)
        except Exception as error:
            error.add_note(f"while {data_iterator.label} made the batch for step {step + 1}")
            raise
        if item is None:
            stop = self._progress.step_range.stop
            of_steps = "" if stop is None else f" of {stop}"
            raise DataError(
                f"data ended after {step} steps{of_steps}. An iterator can be used up once: pass "
                "what can be iterated over again, such as fg.ArrayData or a list, or ask for fewer "
                "steps"
            )
        return item

    # --- dispatches -------------------------------------------------------------------------------

    def _bound_in_flight(self) -> None:
        """Wait for an old dispatch, if as many as may be are under way."""
        if len(self._in_flight) == MAX_IN_FLIGHT:
            self._in_flight[0][1].block_until_ready()
            self._in_flight.popleft()

    def _prepare(self, buffer: BatchBuffer) -> Dispatch | None:
        """Check and place the batches of the next steps, and compile these if need be; None where
        the compiler was abandoned."""
        progress = self._progress
        if progress.step == progress.first_step:
            # There is nothing to save yet.
            self._fit.resume_point.loop_state = LoopState.STEPPING
        try:
            return self._compiled_step.prepare(
                self._state.flat,
                buffer,
                self._scheduler.nothing_due,
                progress.step,
                self._device_arrays,
                # XLA may take minutes, and the state is there as it was before.
                patience=0.0,
            )
        except WaitAbandoned as wait:
            self._fit.abandoned_wait = wait
            return None

    def _advance(self, items: list[BatchItem], target: float) -> float:
        """Count the steps of a dispatch, and return where something is due next."""
        progress = self._progress
        expected = progress.step_range
        progress.advance(items)
        step, step_range = progress.step, progress.step_range
        if step_range is expected:
            return target
        for message in self._scheduler.describe_uneven_spacing(step, expected, step_range):
            self._fit.notify(message)
        return self._scheduler.next_due(step - 1, step_range)

    def _run(self, dispatch: Dispatch, num_steps: int, *, is_due: bool) -> None:
        """Hand the steps of a dispatch to the device."""
        due = self._scheduler.due_flags if is_due else self._scheduler.nothing_due
        last = self._progress.step
        first = last - num_steps + 1
        self._newest_steps = f"training step {first}"
        if num_steps > 1:
            self._newest_steps = (
                f"one of the training steps {first} to {last} (Engine(steps_per_execution=1) tells "
                "which)"
            )
        flat, results = self._compiled_step.run(dispatch, due)
        self._state.flat = flat
        self._in_flight.append((self._newest_steps, flat.packed[0]))
        self._newest_results = (results, due)
        if first == self._progress.first_step + 1:
            # While the device is busy.
            compile_for_other_shapes(self._fit, self._compiled_step, first - 1, self._device_arrays)
