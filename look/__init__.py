"""Pictures of a batch, a run, several runs, and of what the model learned.

    look.page("out/mexma")            the page of a run, in a notebook's cell
    look.curves(run_a, run_b)         its curves alone; a run is a train.Run or a folder

The functions import matplotlib only when you call them.
"""


def page(*runs):
    """Return the page that `python -m look RUN ...` writes, for a notebook's cell."""
    from . import report, seen
    return report.Page([*map(seen.see, runs)])


def curves(*runs, metrics=()):
    """Return one Figure with a panel for each metric of the runs' logs (default: all)."""
    from . import panels, seen
    return panels.curves_figure(seen.grouped(map(seen.see, runs)), metrics)
