"""Who leaves a thread behind is told so, and what is tested next is not."""

from __future__ import annotations

import threading

import pytest

import threads
from threads import all_end, staging_threads


def test_only_the_one_who_leaves_it_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(threads, "PATIENCE", 0.05)
    end = threading.Event()
    thread = threading.Thread(target=end.wait, name="hf_prefetch_staging", daemon=True)

    def leave() -> None:
        with all_end():
            thread.start()
            assert staging_threads() == [thread]

    with pytest.raises(AssertionError, match=r"left behind: \['hf_prefetch_staging'\]"):
        leave()
    assert staging_threads() == []
    with all_end():
        pass
    end.set()
    thread.join()


def test_threads_that_end_a_moment_later() -> None:
    """As those of a ring do that a garbage collection has found."""
    with all_end():
        threading.Thread(target=threading.Event().wait, args=(0.1,), name="hf_prefetch_staging_reader_0").start()
        assert staging_threads()
