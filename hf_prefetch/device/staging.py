"""StagingRing: the way to the device for banks that don't lie in page-locked memory: few page-locked chunks, filled by threads.

A copy from ordinary memory is slow and holds whoever enqueues it, and what is in a file can't be copied at all. So such a bank
is read, part by part, into chunks that are page-locked, and goes on from there. One thread does this for one device, bank after
bank, in the order in which they were sent; while it enqueues the copy of one chunk, others are read.

[Note: the orderings of a chunk]
A chunk is written by the host and read by the copy stream:

    read after write    a chunk's copy is enqueued when it has been filled: the host has done that before
    write after read    `_fill` holds the thread until `chunk.free`, recorded on the copy stream behind the chunk's last copy
    in the slot         the copy stream was made to wait for `slot.free` before the upload was sent, and `slot.ready` is
                        recorded here, behind the last chunk. Whoever waits for that event first waits here until it is
                        recorded (invariant 2); whoever takes the slot for something else, until nothing is under way

[Note: threads and forks]
A forked child has no threads, and its locks may be held by one that it doesn't have. So it begins anew: with chunks, locks
and threads of its own.
"""

from __future__ import annotations

import os
import threading
from collections import deque
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor, wait
from typing import Any

from ..banks.layout import ALIGNMENT
from ..memory.pinned import Arena
from ..memory.store import StoredBank
from ..streams import StreamDevice
from .chunks import Chunk, Meter, Upload

__all__ = ["StagingRing"]

# One that is read, one that waits for its turn, one that is copied; as large as it takes for the full rate of the link.
CHUNKS = 3
CHUNK_NBYTES = 16 * 2**20
# A bank comes in at least so many parts, or nothing would overlap.
_PARTS = 4
# Threads that read, and how much each takes at a time.
_READERS = 4
_READ_NBYTES = 4 * 2**20


class StagingRing:
    """The chunks of one device and the threads that fill them. Nothing is allocated or started before it is needed.

    Args:
        device: where banks go.
        largest: bytes of the largest bank.
    """

    def __init__(self, device: StreamDevice, largest: int) -> None:
        self.device = device
        self._chunk_nbytes = min(CHUNK_NBYTES, -(-largest // (_PARTS * ALIGNMENT)) * ALIGNMENT)
        self._is_refused = False
        self._begin_anew()

    def _begin_anew(self) -> None:
        self._process = os.getpid()
        self._chunks: list[Chunk] = []
        self._turn = 0
        self._meter = Meter()
        # Taken itself, not through the condition: see [Note: Ctrl-C and locks] in workers.py.
        self._lock = threading.RLock()
        self._changed = threading.Condition(self._lock)
        self._queue: deque[Upload] = deque()
        self._thread: threading.Thread | None = None
        self._pool: ThreadPoolExecutor | None = None
        self._own: set[int] = set()
        self._is_stopping = False

    def held(self) -> int:
        """Host memory held for chunks, in bytes."""
        return sum(chunk.arena.nbytes for chunk in self._chunks)

    @property
    def nbytes(self) -> int:
        """Bytes that were read into chunks so far."""
        return self._meter.nbytes

    @property
    def seconds(self) -> float:
        """How long at least one thread was reading."""
        return self._meter.seconds

    def takes(self, stored: StoredBank) -> bool:
        """Whether a bank comes this way: it is in a file, or in memory that is not page-locked while chunks can be."""
        if stored.is_on_disk:
            return True
        return not stored.is_pinned and self.device.can_pin and self._has_pinned_chunks()

    def _has_pinned_chunks(self) -> bool:
        self._after_fork()
        if not self._is_refused:
            self._allocate()
            if self._is_refused and not any(chunk.upload for chunk in self._chunks):
                self._free_chunks()
        return not self._is_refused

    def _allocate(self) -> None:
        while len(self._chunks) < CHUNKS:
            # Private pages: a forked child gets copies of these few, and must not write to its parent's.
            chunk = Chunk(Arena(self._chunk_nbytes, shared=False), self.device.new_event())
            self._chunks.append(chunk)
            if self.device.can_pin and not self._is_refused:
                chunk.arena.touch()
                self._is_refused = chunk.arena.pin(self.device) is not None

    # -- what others ask for ------------------------------------------------------------------------------------------

    def send(self, upload: Upload) -> None:
        """Have a bank on its way. The copy stream waits already for the slot to be free."""
        self._after_fork()
        self._allocate()
        upload.process, upload.asked_for, upload.chunks = self._process, 0, 0
        with self._lock:
            self._queue.append(upload)
            self._changed.notify_all()
        self._start()

    def cancel(self, upload: Upload) -> None:
        """Nobody wants it any more. A part of it may be under way for a moment still: see `synchronize`."""
        upload.is_cancelled = True
        with self._lock:
            if upload in self._queue:
                self._queue.remove(upload)
            self._changed.notify_all()

    def wait(self, upload: Upload) -> None:
        """Hold the caller until all copies of an upload are enqueued, and `ready` is recorded.

        Raises:
            Exception: whatever came in the way of it: a file that can't be read, say.
        """
        self._after_fork()
        if upload.goes_on and not self._is_live(upload):
            # It never got there: an interrupt came, or a fork.
            self.send(upload)
        self.synchronize(upload)
        if upload.error is not None:
            # Once it is raised it refers to the caller's frames, and so to the model. Nothing here may keep it.
            error, upload.error, upload.is_cancelled = upload.error, None, True
            try:
                raise error.with_traceback(None)
            finally:
                del error

    def synchronize(self, upload: Upload) -> None:
        """Hold the caller until nothing is read or enqueued for an upload any more, whatever became of it."""
        self._after_fork()
        self._start()
        with self._lock:
            self._changed.wait_for(lambda: not self._is_live(upload))

    def _is_live(self, upload: Upload) -> bool:
        return upload.process == self._process and (upload.chunks > 0 or upload in self._queue)

    def runs_here(self) -> bool:
        """Whether the current thread is one of the ring's own."""
        return threading.get_ident() in self._own

    def close(self) -> None:
        """End the threads, wait for the last copies and free the chunks. Idempotent; it can be used again."""
        self._after_fork()
        with self._lock:
            for upload in (*self._queue, *(chunk.upload for chunk in self._chunks)):
                if upload is not None:
                    upload.is_cancelled = True
            self._queue.clear()
            self._is_stopping = True
            self._changed.notify_all()
        if self._thread is not None and self._thread.is_alive():
            self._thread.join()
        if self._pool is not None:
            self._pool.shutdown()
        self._free_chunks()
        with self._lock:
            self._thread = self._pool = None
            self._own.clear()
            self._is_stopping = False
            # Whoever is not joined, since an interrupt came in its start, ends as well.
            self._changed.notify_all()

    def _free_chunks(self) -> None:
        for chunk in self._chunks:
            if chunk.was_copied:
                self.device.synchronize(chunk.free)
            chunk.arena.unpin()
        self._chunks.clear()

    def _after_fork(self) -> None:
        if self._process != os.getpid():
            self._begin_anew()

    # -- the thread ---------------------------------------------------------------------------------------------------

    def _start(self) -> None:
        """Have the thread at work, if there is any."""
        if not self._queue or (self._thread is not None and self._thread.is_alive()):
            return
        if self._pool is None:
            self._pool = ThreadPoolExecutor(_READERS, "hf_prefetch_staging_reader", self._note_thread)
        # A daemon, since it sleeps when nothing is to be done: whoever ends the model, or the interpreter, closes the ring.
        self._thread = threading.Thread(target=self._work, name="hf_prefetch_staging", daemon=True)
        self._thread.start()

    def _note_thread(self) -> None:
        self._own.add(threading.get_ident())

    def _work(self) -> None:
        self._note_thread()
        reading: deque[Chunk] = deque()
        try:
            while True:
                chunk = self._next(may_sleep=not reading)
                if chunk is not None:
                    reading.append(chunk)
                    self._fill(chunk)
                elif not reading:
                    return
                if chunk is None or len(reading) == CHUNKS - 1:
                    self._send(reading.popleft())
        except BaseException as error:  # noqa: BLE001 - it is raised where somebody waits for one of the banks
            self._give_up(reading, error.with_traceback(None))

    def _is_replaced(self) -> bool:
        """Whether the thread that asks is not the ring's any more: an interrupt came in its start, and another was started."""
        return self._thread is not threading.current_thread()

    def _give_up(self, reading: Iterable[Chunk], error: BaseException) -> None:
        for chunk in reading:
            wait(chunk.reads)
            self._done_with(chunk, error)
        with self._lock:
            while self._queue:
                self._queue.popleft().error = error
            self._changed.notify_all()

    def _next(self, *, may_sleep: bool) -> Chunk | None:
        """The next chunk, and which part of which upload it gets; None if there is none, and, if it may sleep, at the end."""
        with self._lock:
            while True:
                while self._queue and not self._queue[0].goes_on:
                    self._queue.popleft()
                    self._changed.notify_all()
                is_replaced = self._is_replaced()
                if self._queue and not is_replaced:
                    break
                if self._is_stopping or is_replaced or not may_sleep:
                    return None
                self._changed.wait_for(lambda: self._queue or self._is_stopping or self._is_replaced())
            upload, chunk = self._queue[0], self._chunks[self._turn % CHUNKS]
            self._turn += 1
            chunk.upload, chunk.begin = upload, upload.asked_for
            chunk.nbytes = min(self._chunk_nbytes, upload.stored.bank.nbytes - chunk.begin)
            upload.asked_for += chunk.nbytes
            upload.chunks += 1
            if upload.asked_for == upload.stored.bank.nbytes:
                self._queue.popleft()
            return chunk

    def _fill(self, chunk: Chunk) -> None:
        """Begin to read what belongs into a chunk."""
        if chunk.was_copied:
            self.device.synchronize(chunk.free)
        assert self._pool is not None
        chunk.reads = [self._pool.submit(self._read, chunk, begin) for begin in range(0, chunk.nbytes, _READ_NBYTES)]

    def _read(self, chunk: Chunk, begin: int) -> None:
        assert chunk.upload is not None
        if chunk.upload.goes_on:
            end = min(begin + _READ_NBYTES, chunk.nbytes)
            with self._meter.reading(end - begin):
                chunk.upload.stored.read(chunk.begin + begin, chunk.arena.block[begin:end])

    def _send(self, chunk: Chunk) -> None:
        """Enqueue the copy of a chunk, as soon as it has been read."""
        upload, stream, error = chunk.upload, self.device.copy_stream(), None
        assert upload is not None
        try:
            wait(chunk.reads)
            for read in chunk.reads:
                read.result()
            if upload.goes_on:
                self._copy(upload, chunk, stream)
        except BaseException as caught:  # noqa: BLE001 - it is raised where somebody waits for the bank
            # Without this frame, which would keep it, and with it the slot, until a garbage collection comes.
            error = caught.with_traceback(None)
        self._done_with(chunk, error)

    def _copy(self, upload: Upload, chunk: Chunk, stream: Any) -> None:
        end = chunk.begin + chunk.nbytes
        if upload.timeline and upload.begin is None:
            upload.begin = self.device.mark(stream)
        chunk.was_copied = True
        self.device.copy(stream, upload.destination[chunk.begin : end], chunk.arena.block[: chunk.nbytes])
        self.device.record(chunk.free, stream)
        if end == upload.stored.bank.nbytes:
            self.device.record(upload.ready, stream)
            if upload.timeline:
                upload.timeline.add("copy", upload.stored.bank.name, self.device, upload.begin, self.device.mark(stream))
            upload.is_done = True

    def _done_with(self, chunk: Chunk, error: BaseException | None) -> None:
        upload = chunk.upload
        assert upload is not None
        chunk.reads, chunk.upload = [], None
        with self._lock:
            upload.error = upload.error or error
            upload.chunks -= 1
            self._changed.notify_all()
