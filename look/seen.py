"""Read runs, name them by the settings in which they differ, and rebuild their untrained models."""

import json
import math
import os
from dataclasses import fields
from pathlib import Path
from typing import NamedTuple

import torch

import corpora
import evaluate
import runs
import settings
import train
from common import BadInput, shown
from model import ModelConfig
from objectives import OBJECTIVES

# Settings that do not make two runs different ones.
IGNORED = {"seed", "size"} | runs.RESUME_MAY_CHANGE - {"steps", "data", "eval_data"}


class Seen(NamedTuple):
    name: str        # of the folder, or of the objective
    first: dict      # the first line of the log
    records: list    # its other lines; {"step", "eval"} or {"step", "loss", ...}
    run: object      # the folder, or a train.Run that writes none
    objective: type  # its class; None if that is in a file

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
        """Return {step: what the health line says}. That of random weights means nothing."""
        said = {}
        for step, results in self.evaluations().items():
            if "geometry/rankme" in results and (step or self.first["config"].get("init")):
                said[step] = evaluate.diagnose(results).rpartition(" -> ")[2]
        return said


def number(value):
    """Return a logged value as a float: the log writes NaN and infinity as strings."""
    value = float(value)
    return value if math.isfinite(value) else math.nan


def see(run):
    """Return what the log of a run says: of a folder, or of a train.Run. Raises BadInput."""
    kind = run.objective_class if isinstance(run, train.Run) else None
    if kind and not run.writes:
        first, *records = json.loads(json.dumps([runs.describe(run), *run.records]))
        return Seen(kind.name, first, records, run, kind)
    folder = Path(run.folder if kind else run).expanduser()
    first = runs.read_first(folder)
    # The log may be somebody else's: never run a file because its "command" names it.
    return Seen(str(folder), first, runs.read_log(folder)[1:], folder,
                kind or OBJECTIVES.get(first["config"].get("objective")))


def since(one):
    """Return the last verdict of a run and the first step at which it was found; None without."""
    stretch = None
    for step, verdict in one.verdicts().items():
        if stretch is None or stretch[0] != verdict:
            stretch = verdict, step
    return stretch


# ---- names: the settings in which runs differ


def settings_of(first):
    """Return {name: value}: the settings of a run that can change its numbers."""
    flat = {}
    for name, value in first["config"].items():
        flat |= value if isinstance(value, dict) else {name: value}
    return {name: value for name, value in flat.items() if name not in IGNORED}


def differing(every):
    """Return the names of the settings that are not equal in all dictionaries."""
    names = dict.fromkeys(name for one in every for name in one)
    return [name for name in names if any(one.get(name) != every[0].get(name) for one in every)]


def grouped(every):
    """Return {label: list of Seen}. Runs that differ only in their seed have one label, and a label
    names the settings in which runs of one objective differ."""
    groups = {}
    for one in every:
        groups.setdefault(json.dumps(settings_of(one.first), sort_keys=True), []).append(one)
    parts = []  # runs with equal settings and equal seeds are kept apart
    for members in groups.values():
        seeds = {one.first["config"].get("seed") for one in members}
        parts += [members] if len(seeds) == len(members) else [[one] for one in members]
    every = [settings_of(members[0].first) for members in parts]
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


# ---- the models and the rows


def options_of(one):
    """Return the options of a run's objective. Raises BadInput without its class."""
    name = one.first["config"].get("objective")
    if not one.objective:
        raise BadInput(f"{shown(name)} is an objective from a file, which is not run here"
                       if name else "this model was imported and has no objective")
    return one.objective.Config(**one.first["config"][name])


def untrained(one, tokenizer):
    """Return the model of step 0: its weights are a function of the seed, or those of --init.
    Raises BadInput if that run, or the objective's class, is missing."""
    config = one.first["config"]
    lacking = {field.name for field in fields(settings.TrainConfig)} - config.keys()
    if lacking:
        raise BadInput(f"the log lacks the setting {min(lacking)}: the model was imported, or "
                       "trained by another version, whose first weights may be different ones")
    given = settings.pick(settings.TrainConfig, config)
    init = None
    if given.init:
        init = runs.adapt_init(runs.open_run(given.init), one.objective, options_of(one))
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(given.seed)
        model = runs.make_model(given, ModelConfig(**config["model"]), init, tokenizer.special)
    return model.eval()


def evaluation(one, limit=200):
    """Return an Evaluation of a Seen on the first rows that its training was evaluated on; for an
    imported model, which has none, on rows of the toy language. Raises BadInput without a model."""
    if isinstance(one.run, train.Run):
        rows = one.run.rows
        texts = corpora.EvaluationRows(rows.name, rows.texts, rows.system, rows.hard).complete()
        found = evaluate.Evaluation(one.run.model, evaluate.EncodedRows(
            texts, rows.tokenizer, rows.config, rows.affixes, rows.max_length))
    elif not os.path.isfile(one.run / "model.pt"):
        raise BadInput("there is no model.pt yet: the first checkpoint writes it")
    else:
        opened = runs.open_run(one.run)
        data = "" if opened.config["data"] else "toy"
        split = "" if data or opened.config.get("eval_data") else "valid"
        found = evaluate.evaluation_of(opened, data, (), split, limit, complete=True)
    found.answer_limit = 20
    return found
