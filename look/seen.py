"""Read runs, and name them by the settings in which they differ."""

import json
import math
import os
from pathlib import Path
from typing import NamedTuple

import evaluate
from base import metrics
from base.common import BadInput, shown
from harness import runs
from harness.rows import rows_of
from objectives import IN_BATCH

# Settings that do not make two runs different ones.
IGNORED = {"seed", "size"} | runs.RESUME_MAY_CHANGE - {"steps", "data", "eval_data"}


class Seen(NamedTuple):
    name: str      # of the folder
    header: dict   # the first line of the log
    records: list  # its other lines; {"step", "eval"} or {"step", "loss", ...}
    run: Path      # the folder

    def curve(self, metric):
        """Return {step: value} of a metric in the log."""
        return {record["step"]: number(found[metric]) for record in self.records
                for found in [record.get("eval", record)] if metric in found}

    def evaluations(self):
        """Return {step: {metric: number}}."""
        return {record["step"]: record["eval"] for record in self.records if record.get("eval")}

    def scores(self, index=-1):
        """Return {metric: number} of an evaluation; {} without one."""
        return ([*self.evaluations().values()] or [{}])[index]

    def last(self):
        """Return the numbers of the last evaluation and of the last logged step."""
        logged = [record for record in self.records if "loss" in record]
        facts = {key: logged[-1][key] for key in ("step", "seconds")} if logged else {}
        return facts | self.scores()

    def verdicts(self):
        """Return {step: metrics.verdict}. That of random weights means nothing."""
        said = {}
        for step, results in self.evaluations().items():
            if "geometry/rankme" in results and (step or self.header["config"].get("init")):
                said[step] = metrics.verdict(results)
        return said


def number(value):
    """Return a logged value as a float: the log writes NaN and infinity as strings."""
    value = float(value)
    return value if math.isfinite(value) else math.nan


def see(run):
    """Return what the log in the folder of a run says. Raises BadInput."""
    folder = Path(run).expanduser()
    return Seen(str(folder), runs.read_header(folder), runs.read_log(folder)[1:], folder)


def since(one):
    """Return the last verdict of a run and the first step at which it was found; None without."""
    stretch = None
    for step, verdict in one.verdicts().items():
        if stretch is None or stretch[0] != verdict:
            stretch = verdict, step
    return stretch


# ---- names: the settings in which runs differ


def settings_of(header):
    """Return {name: value}: the settings of a run that can change its numbers."""
    flat = {"processes": header.get("processes", 1)}  # --batch is per process
    for name, value in header["config"].items():
        flat |= value if isinstance(value, dict) else {name: value}
    return {name: value for name, value in flat.items() if name not in IGNORED}


def loss_of(one, total=True):
    """Return the settings that say which loss a run minimizes; of a term of it, without the weights
    of the terms. Numbers of different losses are not comparable."""
    settings = settings_of(one.header)
    # More texts in a batch are more candidates of InfoNCE, more neighbors of KoLeo.
    by_batch = total and settings.get("koleo_weight") or (
        "temperature" in settings and settings.get("align", "info_nce") in IN_BATCH)
    return tuple((name, str(value)) for name, value in sorted(settings.items())
                 if name in ("objective", "align", "temperature", "labels", "gamma")
                 or name.startswith("mask_") or total and name.endswith("_weight")
                 or name in ("batch", "processes") and by_batch)


def differing(every):
    """Return the names of the settings that are not equal in all dictionaries."""
    names = dict.fromkeys(name for one in every for name in one)
    return [name for name in names if any(one.get(name) != every[0].get(name) for one in every)]


def grouped(every):
    """Return {label: list of Seen}. Runs that differ only in their seed have one label, and a label
    names the settings in which runs of one objective differ."""
    groups = {}
    for one in every:
        groups.setdefault(json.dumps(settings_of(one.header), sort_keys=True), []).append(one)
    parts = []  # runs with equal settings and equal seeds are kept apart
    for members in groups.values():
        seeds = {one.header["config"].get("seed") for one in members}
        parts += [members] if len(seeds) == len(members) else [[one] for one in members]
    every = [settings_of(members[0].header) for members in parts]
    several = len({one.get("objective") for one in every}) > 1
    labels = []
    for one, members in zip(every, parts):
        names = differing([other for other in every
                           if other.get("objective") == one.get("objective")])
        words = [f"{name.replace('_', '-')} {in_words(one.get(name))}" for name in names[:4]]
        if several or not words:
            words.insert(0, one.get("objective", members[0].name))
        labels.append(", ".join(words))
    return {f"{label} ({members[0].name})" if labels.count(label) > 1 else label: members
            for label, members in zip(labels, parts)}


def in_words(value):
    return f"{value:g}" if isinstance(value, float) else shown(value)


# ---- the model and its rows


def evaluation(one):
    """Return an Evaluation of a Seen on the first complete rows that its training was evaluated on;
    for an imported model, which has none, on rows of the toy language. Raises BadInput without a
    model."""
    if not os.path.isfile(one.run / "model.pt"):
        raise BadInput("there is no model.pt yet: the first checkpoint writes it")
    opened = runs.open_run(one.run)
    config = opened.config
    data = "" if config["data"] else "toy"
    split = "" if data or config.get("eval_data") else "valid"
    rows = rows_of(opened, data, (), split, config.get("eval_limit"))
    rows = evaluate.encoded(opened, rows.complete(runs.UNTRAINED_ROWS))
    return evaluate.Evaluation(opened.model, rows, answer_limit=10)
