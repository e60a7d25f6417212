"""Timeline: when each bank was copied, waited for and computed with, as spans that can be plotted or traced.

Recorded only inside `with model.expert_prefetch.timeline() as timeline:`; outside it costs one comparison a call.
"""

from __future__ import annotations

import json
import re
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
# From Okabe and Ito's palette, told apart with every common kind of colour vision.
_COLOURS: dict[Kind, str] = {"copy": "#0072B2", "wait": "#E69F00", "compute": "#009E73"}
# Parts of the whole time from which on a span has an edge, and room for the number of its layer.
_EDGE, _LABEL = 0.004, 0.016


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
        """All spans in the order of their beginning. Waits until the device has reached their ends."""
        self._wait()
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

    def _wait(self) -> None:
        """Hold the host until what was recorded has happened: a look back, which orders nothing."""
        for device in {device: None for _, _, device, _, _ in self._marks}:
            for stream in (device.compute_stream(), device.copy_stream()):
                event = device.new_event()
                device.record(event, stream)
                device.synchronize(event)

    def plot(self, axes: Axes | None = None) -> Axes:
        """Draw the spans: time to the right, one row a stream, each bar with the number of its layer if there is room.

        Needs matplotlib.

        Raises:
            ValueError: nothing was recorded.
            ImportError: there is no matplotlib.
        """
        try:
            from matplotlib import pyplot
            from matplotlib.patches import Patch
        except ImportError as error:
            raise ImportError(
                "timeline.plot() needs matplotlib: pip install '.[plot]' in the folder of hf_prefetch."
            ) from error

        spans = self.spans()
        if not spans:
            raise ValueError("Nothing was recorded: run the model inside `with model.expert_prefetch.timeline() as timeline:`.")
        if axes is None:
            _, axes = pyplot.subplots(figsize=(10, 2.4), layout="constrained")
        rows = list(dict.fromkeys(_ROWS.values()))
        last = max(span.end for span in spans)
        scale, unit = (1e3, "ms") if last < 10 else (1.0, "s")
        for span in spans:
            row, width = rows.index(_ROWS[span.kind]), span.end - span.begin
            # A narrow one has an edge of its own colour: it is a line then, and not invisible.
            edge = "white" if width > _EDGE * last else _COLOURS[span.kind]
            bar = (span.begin * scale, width * scale)
            axes.broken_barh([bar], (row - 0.4, 0.8), facecolor=_COLOURS[span.kind], edgecolor=edge, linewidth=0.6)
            layer = re.search(r"\d+", span.bank)
            if layer and span.kind != "wait" and width > _LABEL * last:
                middle = (span.begin + span.end) / 2 * scale
                axes.text(middle, row, layer[0], color="white", fontsize=8, ha="center", va="center", clip_on=True)
        axes.set_yticks(range(len(rows)), rows)
        axes.tick_params(axis="y", length=0)
        axes.invert_yaxis()
        axes.set_xlim(-0.01 * last * scale, 1.01 * last * scale)
        axes.set_xlabel(f"time on the device ({unit})")
        axes.spines[["top", "right", "left"]].set_visible(False)
        axes.legend(
            handles=[Patch(color=colour, label=kind) for kind, colour in _COLOURS.items()],
            loc="lower right",
            bbox_to_anchor=(1.0, 1.0),
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
