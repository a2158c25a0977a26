"""The report in a terminal."""

from __future__ import annotations

from rich.console import Console
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from rlhf_lightning.app.memory_plan import phases
from rlhf_lightning.app.memory_plan.report import Report
from rlhf_lightning.app.memory_plan.simulation import ITERATED, Simulation
from rlhf_lightning.app.memory_plan.sizes import gib, readable
from rlhf_lightning.app.memory_plan.tracker import ACTIVATIONS, CACHE, CASTS, GRADIENTS, HEAD

# In the order in which they are printed, with the words for it.
PARTS = {
    phases.WEIGHTS: "weights",
    phases.OPTIMIZER: "optimizer state (Adam)",
    phases.BUCKETS: "DDP's gradient buckets",
    GRADIENTS: "gradients",
    phases.GATHERED: "weights gathered from the shards",
    CASTS: "weights cast to bf16",
    phases.COPIED: "weights prepared for generation",
    ACTIVATIONS: "activations",
    HEAD: "logits, in chunks",
    CACHE: "KV cache",
    phases.ROLLOUT: "rollout",
    phases.STEP: "temporaries of the step",
}


ON_A_CPU = (
    "counted are tensors: a process on a CPU also holds what it imports, and freed memory that the "
    "C library keeps (docs/memory.md)"
)


def print_report(report: Report, *, title: str, console: Console | None = None) -> None:
    """Print the report: what takes how much when, whether it fits, what would change it."""
    console = console or Console(highlight=False)
    console.print(_about(report, title))
    console.print(_parts(report))
    if report.simulated is not None:
        console.print(_simulated(report.simulated, report.num_devices))
    console.print(_verdict(report))
    if report.choices:
        console.print(_choices(report))
    for note in report.notes:
        console.print(Text(f"assumed: {note}", style="dim"))
    if report.device == "cpu":
        console.print(Text(ON_A_CPU, style="dim"))


def _about(report: Report, title: str) -> Panel:
    grid = Table.grid(padding=(0, 2, 0, 0))
    grid.add_column(style="dim", no_wrap=True)
    grid.add_column(overflow="fold")
    for name, value in report.about.items():
        grid.add_row(name, Text(value))
    return Panel(grid, title=Text(f"memory: {title}"), title_align="left", border_style="dim")


def _parts(report: Report) -> Table:
    table = Table(box=None, padding=(0, 1), pad_edge=False, title_justify="left")
    table.add_column("GiB on each device, at the peak of a phase", no_wrap=True)
    for name in report.phases:
        style = "bold" if name == report.peak_phase else None
        table.add_column(name, justify="right", style=style)
    rows = report.phases.values()
    known = [part for part in PARTS if any(row.get(part) for row in rows)]
    for part in known:
        table.add_row(PARTS[part], *(gib(row[part]) if row.get(part) else "" for row in rows))
        if part == phases.WEIGHTS and len(report.models) > 1:
            for model, size in report.models.items():
                cells = [Text(gib(size), style="dim")] + [Text("")] * (len(rows) - 1)
                table.add_row(Text(f"  {model}", style="dim"), *cells)
    if report.runtime:
        table.add_row("runtime (CUDA context)", *[gib(report.runtime)] * len(rows))
    totals = {name: sum(row.values()) + report.runtime for name, row in report.phases.items()}
    table.add_section()
    cells = [
        Text(gib(size) + (" *" if name == report.peak_phase else ""), style="bold")
        for name, size in totals.items()
    ]
    table.add_row(Text("total (* the peak)", style="bold"), *cells)
    return table


def _simulated(found: Simulation, num_devices: int) -> Table:
    host = f"memory of rank 0's machine, while it reads or exports a model: {gib(found.whole)}"
    caption = Text(host, style="dim")
    table = Table(box=None, padding=(0, 1), pad_edge=False, caption=caption, caption_justify="left")
    table.add_column(f"GiB of one of {num_devices} ranks, by FSDP2", no_wrap=True)
    table.add_column("held at most", justify="right")
    table.add_column("received in an iteration", justify="right")
    for phase, peak in found.peaks.items():
        once = "" if phase in ITERATED else " (once)"
        table.add_row(f"{phase}{once}", gib(peak), gib(found.received[phase]))
    table.add_section()
    total = sum(found.received[phase] for phase in ITERATED if phase in found.received)
    table.add_row("iteration", gib(max(found.peaks.values())), gib(total), style="bold")
    return table


def _verdict(report: Report) -> Text:
    what = "tensors of " if report.device == "cpu" else ""
    verb = "take" if what else "takes"
    where = f"{what}{report.peak_phase} {verb} {readable(report.total)} on each device"
    if report.device_memory is None:
        return Text(f"\n{where}. Say what a device has with plan.device_memory=80GiB.")
    has = readable(report.device_memory)
    if report.fits:
        share = report.total / report.device_memory
        return Text(f"\nIt fits: {where}, {share:.0%} of {has}.", style="green")
    short = readable(report.total - report.device_memory)
    return Text(f"\nIt does not fit: {where}, {short} more than its {has}.", style="red")


def _choices(report: Report) -> Table:
    title = "What would make it smaller" if report.fits else "What would make it fit"
    table = Table(box=None, padding=(0, 1), pad_edge=False)
    table.add_column(title, overflow="fold")
    table.add_column("GiB", justify="right", no_wrap=True)
    table.add_column("", no_wrap=True)
    table.add_column("at the price of", style="dim")
    fits = {True: Text("fits", style="green"), False: Text("no", style="red"), None: Text("")}
    for choice in (*report.choices, report.together):
        if choice is not None:
            settings = " ".join(choice.settings)
            table.add_row(settings, gib(choice.total), fits[choice.fits], choice.cost)
    if (
        report.together is None
        and report.fits is False
        and not any(choice.fits for choice in report.choices)
    ):
        table.add_row("(none of these is enough, nor all of them together)", "", "", "")
    return table
