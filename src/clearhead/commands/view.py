"""`clearhead view`: the page of an analysed run, a graph, circuit curves, a fidelity report or a sparse model."""

from pathlib import Path
from typing import Any

from clearhead.atlas.read import Atlas
from clearhead.commands.opening.run_folders import refuse_several
from clearhead.commands.opening.saved_graph import find_graph
from clearhead.commands.printing import curve_report, fidelity_report, graph_report
from clearhead.commands.printing.sparse_report import evaluation_of, is_sparse_run
from clearhead.commands.printing.sparse_report import write_page as write_sparse_page
from clearhead.commands.printing.table import say
from clearhead.config import View
from clearhead.errors import ClearheadError
from clearhead.view.page import write_page


def plan(config: View) -> dict[str, Any]:
    """Where the page will come from and lie."""
    if is_sparse_run(config.run):
        return {"evaluation": evaluation_of(config.run), "page": page_of(config)}
    if curve_report.is_curve_run(config.run):
        held = sum(len(one.curves) for one in curve_report.curves_of(config.run))
        return {"curves": held, "against": config.against, "page": page_of(config)}
    if fidelity_report.is_report(config.run):
        held = len(fidelity_report.report_of(config.run)["runs"])
        return {"fidelity of": f"{held} runs", "page": page_of(config)}
    if (graph := find_graph(config.run)) is not None:
        return {"graph": graph, "against": config.against, "page": page_of(config)}
    path = atlas_of(config.run)
    atlas = Atlas(path)
    held = {table: atlas.sql(f"select count(*) as n from {table}")[0]["n"] for table in ("units", "spectra")}
    what = {"heads": held["spectra"]} if held["spectra"] else {"units": held["units"]}
    return {"atlas": path, **what, "page": page_of(config)}


def run(config: View) -> None:
    """Write the page, and print its path."""
    say(f"page: {write(config)}")


def write(config: View) -> Path:
    """Write the page and return its path."""
    runs = [config.run] if config.against is None else [config.run, config.against]
    if curve_report.is_curve_run(config.run):
        return curve_report.write_page(runs, page_of(config))
    if find_graph(config.run) is not None:
        return graph_report.write_page(config.run, config.against, page_of(config))
    if config.against is not None:
        raise ClearheadError(
            f"two runs share a page where both hold a graph or circuit curves; {config.run} holds neither. Leave out "
            "--against"
        )
    if fidelity_report.is_report(config.run):
        return fidelity_report.write_page(config.run, page_of(config))
    if is_sparse_run(config.run):
        return write_sparse_page(config.run, evaluation_of(config.run), page_of(config))
    return write_page(atlas_of(config.run), page_of(config))


def atlas_of(run: Path) -> Path:
    """The atlas of a run directory, or the directory itself when it is an atlas.

    Raises `ClearheadError`, saying which verb writes one, when there is none.
    """
    for folder in (run, run / "atlas"):
        if (folder / "atlas.json").exists():
            return folder
    if (run / "lorsa").exists():
        raise ClearheadError(f"{run} has not been analysed yet; type: clearhead analyze {run}")
    refuse_several(run)
    raise ClearheadError(
        f"{run} holds no atlas, no graph and is no run directory; `clearhead analyze RUN` writes an atlas, and so "
        "does `clearhead spectral run`; `clearhead trace` writes a graph"
    )


def page_of(config: View) -> Path:
    """The file of the page: as given, or page.html beside the atlas, the graph or the evaluation."""
    if any(is_kind(config.run) for is_kind in (is_sparse_run, curve_report.is_curve_run, fidelity_report.is_report)):
        return config.out or config.run / "page.html"
    if find_graph(config.run) is not None:
        return config.out or graph_report.page_beside(config.run)
    return config.out or atlas_of(config.run).parent / "page.html"
