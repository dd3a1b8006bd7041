"""The papers' evaluation protocols beyond the core's, of a run folder.

    python -m tasks out/x --tasks matrix,tokens,attention          # of the run's own test rows
    python -m tasks out/x --tasks sts,senteval --files data        # of published sets
    python -m tasks out/y --tasks regex                            # the answers of a causal model
    python -m tasks out/x --tasks retrieval --data flores200_dataset/devtest --hard F --hard-types J
    python -m tasks finetune out/x --task mrpc                     # trains the model: see --help

What each task says is in tasks/README.md. Numbers go to stdout and into the run's eval.json; those
of other rows than the run's own into a file named by what was asked for.
"""
import sys
from functools import partial

import evaluate
from corpora import EvaluationRows
from corpora.program import BadInput, comma_list, exit_status
from tasks import analysis, answers, command, finetune, mining, probes


def always(evaluation, options):
    return ""


def with_columns(evaluation, options):
    return evaluate.no_retrieval(evaluation)


def with_answers(evaluation, options):
    return evaluate.no_generate(evaluation)


FUNCTIONS = {name: (partial(answers.scores, judge), with_answers)
             for name, judge in answers.JUDGES.items()}
FUNCTIONS |= {  # name: (scores(evaluation, options), why it cannot be done)
    "spider": (FUNCTIONS["spider"][0], answers.no_spider),
    "hellaswag": (answers.hellaswag, answers.no_choice),
    "hellaswag-letter": (answers.hellaswag_letter, answers.no_choice),
    "matrix": (mining.matrix, with_columns),
    "margins": (mining.margins, with_columns),
    "bucc": (mining.bucc, with_columns),
    "mine": (mining.mine, partial(mining.files_missing, mining.bucc_files)),
    "tatoeba": (mining.tatoeba, partial(mining.files_missing, mining.tatoeba_files)),
    "poolings": (analysis.poolings, always),
    "gap": (analysis.gap, always),
    "spectrum": (analysis.spectra, always),
    "linear": (analysis.linear, with_columns),
    "tokens": (analysis.tokens, with_columns),
    "attention": (analysis.attention, analysis.no_blocks),
    "uniform": (analysis.uniform, with_columns),
}
TASKS = {name: (*both, command.about(name)) for name, both in FUNCTIONS.items()}
SENTENCES = evaluate.ROWS | command.about("sets")
OWN_ROWS = {"mine", "tatoeba", *probes.SETS}  # tasks that read nothing of --data


def make_tasks(options):
    """{name: evaluate.Task} of the core and of this folder, bound to TaskOptions."""
    known = dict(TASKS)
    for name in probes.SETS:
        known[name] = (partial(probes.sentences, name), partial(probes.no_sets, name), SENTENCES)
    tasks = dict(evaluate.TASKS)
    for name, (scores, unavailable, about) in known.items():
        usual = evaluate.ANSWERS if name in answers.JUDGES else evaluate.ROWS
        tasks[name] = evaluate.Task(partial(scores, options=options),
                                    partial(unavailable, options=options), usual | about)
    return tasks


def describe(results, tasks):
    """Let `about` know metrics by their whole names, such as set/pooling/metric."""
    for name in results:
        task, _, rest = name.partition("/")
        metric = rest.split("/")[-1]
        if metric in tasks[task].about:
            tasks[task].about[rest] = tasks[task].about[metric]


def parse(argv):
    parser = command.parser("python -m tasks", __doc__)
    add = parser.add_argument
    add("--tasks", type=comma_list, required=True,
        help=f"some of {', '.join([*evaluate.TASKS, *TASKS, *probes.SETS])}")
    add("--data", help="other rows than the run's own: toy, files, or a folder of CODE.devtest")
    add("--langs", type=comma_list, default=[], help="columns; the first is searched in")
    add("--split", choices=("train", "valid", "test", "all"), help="[what was not trained on]")
    add("--limit", type=command.positive(int), help="at most so many rows [1000; of a folder, all]")
    add("--max-new", type=command.positive(int), help="cut answers after so many tokens")
    add("--hard", help="altered sentences of the first language: eng_Latn_augmented.devtest")
    add("--hard-types", help="what each was made from: eng_Latn_errtype.devtest.json")
    add("--sets", type=comma_list, help="published sets, such as sst2,mrpc [all there are]")
    add("--task-langs", type=comma_list, default=["en"],
        help=f"languages of {', '.join(probes.IN_LANGUAGES)} [en]")
    add("--no-controls", action="store_true", help="without untrained model and bag of words")
    asked = parser.parse_args(argv)
    if not asked.tasks:
        raise BadInput("--tasks names nothing: give names with commas between them")
    if bool(asked.hard) != bool(asked.hard_types):
        raise BadInput("--hard and --hard-types go together: the altered sentences, and what each "
                       "was made from")
    return asked


def evaluation_of(run, asked):
    own_rows = OWN_ROWS | {"gap"} if asked.sets else OWN_ROWS
    if set(asked.tasks) <= own_rows:
        no_rows = EvaluationRows("", {"": ["", ""]})
        return evaluate.Evaluation(run.model, run.tokenizer, no_rows, run.first.get("affixes"),
                                   run.config.get("max_length"))
    evaluation = evaluate.evaluation_of(run, asked.data, asked.langs, asked.split, asked.limit,
                                        asked.max_new)
    if asked.hard:
        gold = next(iter(evaluation.texts.values()))
        evaluation.hard = mining.hard_rows(asked.hard, asked.hard_types, gold)
    return evaluation


def main(argv=None):
    argv = sys.argv[1:] if argv is None else argv
    if argv[:1] == ["finetune"]:
        return finetune.main(argv[1:])
    asked = parse(argv)
    options = probes.TaskOptions(asked.files, asked.sets, asked.task_langs, asked.limit,
                                 not asked.no_controls)
    run = evaluate.open_run(asked.run, evaluate.usable_device(asked.device))
    tasks = make_tasks(options)
    results = evaluate.run(evaluation_of(run, asked), asked.tasks, tasks)
    name = evaluate.file_name(asked)
    if asked.hard:
        name = name.replace(".json", "-hard.json")
    evaluate.write_results(run.folder, name, results)
    describe(results, tasks)
    before = {name.removesuffix("/untrained"): value for name, value in results.items()
              if name.endswith("/untrained")}
    command.show(results, asked.json, tasks, before)


if __name__ == "__main__":
    sys.exit(exit_status(main))
