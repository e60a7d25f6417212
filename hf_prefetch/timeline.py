"""Timeline: when each bank was copied, waited for and computed with, as spans that can be plotted or traced.

Recorded only inside `with model.expert_prefetch.timeline() as timeline:`; outside it costs one comparison a call.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from .streams import StreamDevice

if TYPE_CHECKING:
    from matplotlib.axes import Axes

__all__ = ["Span", "Timeline"]

Kind = Literal["copy", "wait", "compute"]

# One row each in a plot and in a trace: what the copy stream did, and what the compute stream did.
_ROWS: dict[Kind, str] = {"copy": "copy stream", "wait": "compute stream", "compute": "compute stream"}
_COLOURS: dict[Kind, str] = {"copy": "#4878a8", "wait": "#d65f5f", "compute": "#6aa84f"}


@dataclass(frozen=True)
class Span:
    """What a stream did for one bank.

    Attributes:
        kind: "copy" on the copy stream; "wait" and "compute" (the experts' own kernels) on the compute stream.
        bank: path of the experts module.
        device: name of the device.
        begin, end: seconds on the device since the timeline's first mark.
    """

    kind: Kind
    bank: str
    device: str
    begin: float
    end: float


class Timeline:
    """Spans of the calls made while it was recorded."""

    def __init__(self) -> None:
        self._marks: list[tuple[Kind, str, StreamDevice, Any, Any]] = []

    def add(self, kind: Kind, bank: str, device: StreamDevice, begin: Any, end: Any) -> None:
        """Note a span between two marks of a device; they are read later."""
        self._marks.append((kind, bank, device, begin, end))

    def spans(self) -> list[Span]:
        """All spans whose end the device has reached, in the order of their beginning."""
        spans = []
        origins: dict[StreamDevice, Any] = {}
        for _, _, device, begin, _ in self._marks:
            if device not in origins or (device.elapsed(origins[device], begin) or 0.0) < 0:
                origins[device] = begin
        for kind, bank, device, begin, end in self._marks:
            times = device.elapsed(origins[device], begin), device.elapsed(origins[device], end)
            if times[0] is not None and times[1] is not None:
                spans.append(Span(kind, bank, device.name, times[0], times[1]))
        return sorted(spans, key=lambda span: span.begin)

    def plot(self, axes: Axes | None = None) -> Axes:
        """Draw the spans: time to the right, one row a stream. Needs matplotlib.

        Raises:
            ValueError: nothing was recorded.
        """
        from matplotlib import pyplot
        from matplotlib.patches import Patch

        spans = self.spans()
        if not spans:
            raise ValueError("Nothing was recorded: run the model inside `with model.expert_prefetch.timeline() as timeline:`.")
        if axes is None:
            _, axes = pyplot.subplots(figsize=(10, 2.2), layout="constrained")
        rows = list(dict.fromkeys(_ROWS.values()))
        scale, unit = (1e3, "ms") if spans[-1].end < 10 else (1.0, "s")
        for kind, colour in _COLOURS.items():
            bars = [(span.begin * scale, (span.end - span.begin) * scale) for span in spans if span.kind == kind]
            axes.broken_barh(bars, (rows.index(_ROWS[kind]) - 0.4, 0.8), facecolors=colour, edgecolor="white", linewidth=0.4)
        axes.set_yticks(range(len(rows)), rows)
        axes.invert_yaxis()
        axes.set_xlabel(f"time on the device ({unit})")
        axes.legend(
            handles=[Patch(color=colour, label=kind) for kind, colour in _COLOURS.items()],
            loc="upper center",
            bbox_to_anchor=(0.5, 1.3),
            ncols=3,
            frameon=False,
        )
        return axes

    def save_trace(self, path: str | Path) -> None:
        """Write the spans in the format that chrome://tracing and Perfetto read."""
        events = [
            {
                "name": f"{span.kind} {span.bank}",
                "cat": span.kind,
                "ph": "X",
                "pid": span.device,
                "tid": _ROWS[span.kind],
                "ts": span.begin * 1e6,
                "dur": (span.end - span.begin) * 1e6,
            }
            for span in self.spans()
        ]
        Path(path).write_text(json.dumps({"traceEvents": events}))
