"""Evaluate a run by the protocols of the papers. tasks/README.md says what each task measures."""

import contextlib
import json
from functools import partial

import corpora
import evaluate
from base.common import BadInput, comma_list, did_you_mean, shown, usable_device
from harness import runs, screen
from tasks import analysis, answers, mining, probes, sets


def make_tasks(flags=None):
    """Return {task: function of an Evaluation}, given the flags of the command."""
    tasks = {name: partial(probes.sentences, name, flags=flags) for name in probes.SETS}
    return evaluate.TASKS | tasks | {
        "bucc": mining.bucc,
        "poolings": analysis.poolings, "spectrum": analysis.spectra,
        "gap": partial(analysis.gap, flags=flags), "frequencies": analysis.frequencies,
        "linear": analysis.linear, "embedding-position": analysis.embedding_position,
        "tokens": analysis.tokens, "attention": analysis.attention, "uniform": analysis.uniform,
        "hellaswag-letter": answers.hellaswag_letter,
        "baselines": partial(answers.baselines, flags=flags),
        **{name: partial(answers.answer_task, name, flags=flags) for name in answers.JUDGES}}


def parse_flags(words):
    parser = evaluate.make_parser("python -m tasks", f"{__doc__} python -m tasks finetune trains "
                                  "the model first.", make_tasks())
    add = parser.add_argument
    add("--files", default="data", help="folder of the data sets [data]")
    add("--sets", type=comma_list, help="data sets to use, e.g. sst2,mrpc [all in --files]")
    add("--task-langs", type=comma_list, default=["en"],
        help=f"languages of {', '.join(probes.IN_LANGUAGES)} [en]")
    add("--no-controls", action="store_true",
        help="data sets: do not also score an untrained model and the mean of token embeddings")
    add("--hard", help="xsim++: hard negatives: altered sentences of the first column, a line each")
    add("--hard-types", help="xsim++: JSON file {line of --hard: {src: original, errtype: type}}")
    flags = parser.parse_args(words)
    if not flags.tasks:
        raise BadInput("--tasks is missing: python -m tasks --tasks list")
    for name in flags.sets or ():
        if name not in sets.CLASSES:
            raise BadInput(f"there is no set {shown(name)!r} among {', '.join(sets.CLASSES)}"
                           f"{did_you_mean(name, sets.CLASSES)}")
    flags.of_sets = set(flags.tasks) <= probes.SETS.keys()  # no task reads the rows of --data
    unread = ["data", "langs", "split", "hard"] + ([] if "gap" in flags.tasks else ["limit"])
    for flag in unread:
        if flags.of_sets and getattr(flags, flag):
            raise BadInput(f"--{flag} has no effect on {', '.join(flags.tasks)}, which read the "
                           "data sets of --files: remove it")
    if bool(flags.hard) != bool(flags.hard_types):
        raise BadInput("--hard and --hard-types belong together: give both, or neither")
    if "spider" in flags.tasks and not answers.databases(flags).is_dir():
        raise sets.Missing(answers.databases(flags))
    flags.train_rows = None
    return flags


def make_evaluation(opened, flags):
    """Return the Evaluation of a RunFolder on the rows that the flags choose."""
    if flags.of_sets:
        rows = corpora.EvaluationRows("data sets", {"": ["", ""]})
        return evaluate.Evaluation(opened.model, evaluate.encoded(opened, rows), pool=flags.pool)
    evaluation = evaluate.evaluation_of(opened, flags.data, flags.langs, flags.split, flags.limit,
                                        flags.pool, complete=True)
    if flags.hard:
        gold = next(iter(evaluation.texts.values()))
        evaluation.rows.hard = mining.hard_rows(flags.hard, flags.hard_types, gold)
        evaluation.rows.reordered = mining.reordered(evaluation.rows.hard, gold)
        evaluation.rows.order_of = ""  # all kinds
    return evaluation


def main(words):
    """Run `python -m tasks` with the words after it."""
    flags = parse_flags(words)
    opened = runs.open_run(flags.run, usable_device(flags.device))
    # Before any task runs: a missing table should not be found after an hour.
    flags.tables = {name: probes.read_sets(name, flags) for name in flags.tasks
                    if name in probes.SETS}
    evaluation = make_evaluation(opened, flags)
    config = opened.config
    if config.get("data") and set(flags.tasks) & {"baselines", *answers.JUDGES}:
        with contextlib.suppress(BadInput):  # the data may be on another machine
            source = corpora.open_text(config["data"], config.get("langs", ""),
                                       views=opened.header["views"])
            everything = config.get("eval_data") and not source.embedded
            flags.train_rows = [row[:source.num_text_columns]
                                for row in source.rows("all" if everything else "train")]
    results = evaluate.run(evaluation, flags.tasks, make_tasks(flags))
    if flags.json:
        print(json.dumps(results), flush=True)
    else:
        for task in flags.tasks:
            print(screen.table({name: value for name, value in results.items()
                                  if name.startswith(f"{task}/")}), flush=True)
    if not (flags.hard or flags.of_sets):
        runs.keep_results(flags, opened, results, evaluation.rows.label)
