"""The papers' evaluation protocols beyond the core's, of a run folder.

    python -m tasks out/x --tasks matrix,tokens,attention          # of the run's own test rows
    python -m tasks out/x --tasks sts,senteval --files data        # of published sets
    python -m tasks out/y --tasks regex                            # the answers of a causal model
    python -m tasks out/x --tasks invert                           # what a small decoder reads
    python -m tasks out/x --tasks retrieval --data flores200_dataset/devtest --hard F --hard-types J
    python -m tasks finetune out/x --task mrpc                     # trains the model: see --help

What each task says, and where the numbers go, is in tasks/README.md.
"""

import json
import sys
from functools import partial

import evaluate
from corpora import EvaluationRows
from corpora.program import BadInput, comma_list, exit_status
from tasks import analysis, answers, finetune, invert, metrics, mining, probes


def always(evaluation, options):
    return ""


def with_columns(evaluation, options):
    return evaluate.no_retrieval(evaluation)


def with_answers(evaluation, options):
    return evaluate.no_generate(evaluation)


# {name: (scores(evaluation, options), why it cannot be done)}.
FUNCTIONS = {name: (partial(answers.answer_task, judge), with_answers)
             for name, judge in answers.JUDGES.items()}
FUNCTIONS |= {
    "spider": (FUNCTIONS["spider"][0], answers.no_spider),
    "generate": (partial(answers.answer_task, metrics.judge_texts), with_answers),
    "hellaswag-letter": (answers.hellaswag_letter, answers.no_choice),
    "matrix": (mining.matrix, with_columns),
    "bucc": (mining.bucc, with_columns),
    "bucc2018": (mining.bucc2018, partial(mining.files_missing, mining.bucc_files)),
    "tatoeba": (mining.tatoeba, partial(mining.files_missing, mining.tatoeba_files)),
    "poolings": (analysis.poolings, always),
    "gap": (analysis.gap, always),
    "spectrum": (analysis.spectra, always),
    "frequencies": (analysis.frequencies, always),
    "linear": (analysis.linear, with_columns),
    "places": (analysis.places, analysis.no_places),
    "tokens": (analysis.tokens, with_columns),
    "attention": (analysis.attention, analysis.no_blocks),
    "uniform": (analysis.uniform, with_columns),
    "invert": (invert.invert, always),
}
FUNCTIONS |= {name: (partial(probes.sentences, name), partial(probes.no_sets, name))
              for name in probes.SETS}
NAMES = list(dict.fromkeys([*evaluate.TASKS, *FUNCTIONS]))
# Tasks that judge what a model writes.
ANSWERING = (*answers.JUDGES, "generate")
# Tasks that read published sets, and nothing of --data.
ON_SETS = ("bucc2018", "tatoeba", *probes.SETS)


def make_tasks(options):
    """{name: evaluate.Task} of the core and of this folder, bound to TaskOptions."""
    tasks = dict(evaluate.TASKS)
    for name, (scores, unavailable) in FUNCTIONS.items():
        known = evaluate.ROWS | metrics.known_metrics("sets" if name in probes.SETS else name)
        if name in ANSWERING:
            known |= evaluate.ANSWERS | metrics.UNSEEN
        if name == "generate":
            known |= metrics.GENERATE
        tasks[name] = evaluate.Task(partial(scores, options=options),
                                    partial(unavailable, options=options), known)
    return tasks


def describe(results, tasks):
    """Let `about` know metrics by their whole names, such as set/pooling/metric."""
    for name in results:
        task, _, rest = name.partition("/")
        metric = rest.split("/")[-1]
        if metric in tasks[task].about:
            tasks[task].about[rest] = tasks[task].about[metric]
        if metric in mining.LISTS:
            unit, better, _ = evaluate.about(name, tasks)
            tasks[task].about[rest] = (unit, better, f"mean over {mining.LISTS[metric]}")


def parse_flags(argv):
    parser = evaluate.make_parser("python -m tasks", __doc__, NAMES)
    add = parser.add_argument
    add("--files", default="data", help="folder of the published sets [data]")
    add("--sets", type=comma_list, help="published sets, such as sst2,mrpc [all there are]")
    add("--task-langs", type=comma_list, default=["en"],
        help=f"languages of {', '.join(probes.IN_LANGUAGES)} [en]")
    add("--no-controls", action="store_true", help="without untrained model and bag of words")
    add("--hard", help="altered sentences of the first language: eng_Latn_augmented.devtest")
    add("--hard-types", help="what each was made from: eng_Latn_errtype.devtest.json")
    asked = parser.parse_args(argv)
    if not asked.tasks:
        raise BadInput("--tasks names nothing: python -m tasks --help lists them")
    if bool(asked.hard) != bool(asked.hard_types):
        raise BadInput("--hard and --hard-types go together: the altered sentences, and what each "
                       "was made from")
    return asked


def reads_sets_alone(asked):
    return set(asked.tasks) <= {*ON_SETS, *(["gap"] if asked.sets else [])}


def asked_evaluation(run, asked):
    """A RunFolder and the flags -> Evaluation."""
    if reads_sets_alone(asked):
        no_rows = EvaluationRows("published sets", {"": ["", ""]})
        return evaluate.Evaluation(run.model, run.tokenizer, no_rows, run.first.get("affixes"),
                                   run.config.get("max_length"), pool=asked.pool)
    evaluation = evaluate.evaluation_of(run, asked.data, asked.langs, asked.split, asked.limit,
                                        asked.max_new, asked.pool, asked.header)
    if asked.hard:
        gold = next(iter(evaluation.texts.values()))
        evaluation.hard = mining.hard_rows(asked.hard, asked.hard_types, gold)
    evaluation.train_texts = None
    if set(asked.tasks) & {*ANSWERING}:
        evaluation.train_texts = metrics.texts_trained_on(run.config)
    if "invert" in asked.tasks:
        evaluation.apart = metrics.texts_apart(run.config, evaluation, asked.data, asked.header)
    return evaluation


def main(argv=None):
    argv = sys.argv[1:] if argv is None else argv
    if argv[:1] == ["finetune"]:
        return finetune.main(argv[1:])
    asked = parse_flags(argv)
    options = probes.TaskOptions(asked.files, asked.sets, asked.task_langs, asked.limit,
                                 not asked.no_controls, asked.pool)
    run = evaluate.open_run(asked.run, evaluate.usable_device(asked.device))
    tasks = make_tasks(options)
    evaluation = asked_evaluation(run, asked)
    names = evaluate.choose_tasks(evaluation, asked.tasks, tasks)
    path = evaluate.results_file(asked, asked.hard or reads_sets_alone(asked))
    results = evaluate.run(evaluation, names, tasks)
    results |= mining.list_means(results)
    describe(results, tasks)
    before = {name.removesuffix("/untrained"): value for name, value in results.items()
              if name.endswith("/untrained")}
    if asked.json:
        print(json.dumps(results))
    else:
        shown = {name: value for name, value in results.items() if not name.endswith("/untrained")}
        print("\n".join([evaluate.table(shown, before, tasks), *options.lines]))
    if path:
        label = evaluation.label
        if reads_sets_alone(asked):
            label = f"published sets, pool {evaluation.pool}, limit {asked.limit}"
        evaluate.write_results(run.folder, path, results, label)


if __name__ == "__main__":
    sys.exit(exit_status(main))
