"""The papers' evaluation protocols beyond the core's, of a run folder.

    python -m tasks out/x --tasks matrix,tokens,attention          # of the run's own test rows
    python -m tasks out/x --tasks sts,senteval --files data        # of published sets
    python -m tasks out/y --tasks regex                            # the answers of a causal model
    python -m tasks out/x --tasks retrieval --data flores200_dataset/devtest --hard F --hard-types J
    python -m tasks finetune out/x --task mrpc                     # trains the model: see --help

What each task says, and where the numbers go, is in tasks/README.md.
"""
import json
import sys
from functools import partial

from corpora.program import wing_imports

with wing_imports():
    import evaluate
    from corpora import EvaluationRows
    from corpora.program import BadInput, comma_list, exit_status, unmet
    from tasks import analysis, answers, finetune, metrics, mining, probes


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
    "generate": (partial(answers.scores, metrics.judge_texts), with_answers),
    "hellaswag-letter": (answers.hellaswag_letter, answers.no_choice),
    "matrix": (mining.matrix, with_columns),
    "margins": (mining.margins, with_columns),
    "bucc": (mining.bucc, with_columns),
    "bucc2018": (mining.bucc2018, partial(mining.files_missing, mining.bucc_files)),
    "tatoeba": (mining.tatoeba, partial(mining.files_missing, mining.tatoeba_files)),
    "poolings": (analysis.poolings, always),
    "gap": (analysis.gap, always),
    "spectrum": (analysis.spectra, always),
    "linear": (analysis.linear, with_columns),
    "tokens": (analysis.tokens, with_columns),
    "attention": (analysis.attention, analysis.no_blocks),
    "uniform": (analysis.uniform, with_columns),
}
TASKS = {name: (*both, metrics.about(name)) for name, both in FUNCTIONS.items()}
TASKS["generate"] = (*FUNCTIONS["generate"], metrics.GENERATE)
SENTENCES = evaluate.ROWS | metrics.about("sets")
ANSWERING = (*answers.JUDGES, "generate")  # tasks that judge what a model writes
ON_SETS = (*probes.SETS, "gap")            # tasks that read published sets
OWN_ROWS = ("bucc2018", "tatoeba", *probes.SETS)  # tasks that read nothing of --data
# Tasks that read tokens, or have poolings of their own
UNPOOLED = (*ANSWERING, "hellaswag-letter", "poolings", "tokens", "attention")


def make_tasks(options):
    """{name: evaluate.Task} of the core and of this folder, bound to TaskOptions."""
    known = dict(TASKS)
    for name in probes.SETS:
        known[name] = (partial(probes.sentences, name), partial(probes.no_sets, name), SENTENCES)
    tasks = dict(evaluate.TASKS)
    for name, (scores, unavailable, about) in known.items():
        usual = evaluate.ANSWERS | metrics.UNSEEN if name in ANSWERING else evaluate.ROWS
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
        if metric in mining.LISTS:
            unit, better, _ = evaluate.about(name, tasks)
            tasks[task].about[rest] = (unit, better, f"mean over {mining.LISTS[metric]}")


def parse(argv):
    known = list(dict.fromkeys([*evaluate.TASKS, *TASKS, *probes.SETS]))
    parser = evaluate.make_parser("python -m tasks", __doc__, known)
    add = parser.add_argument
    add("--files", help="folder of the published sets [data]")
    add("--sets", type=comma_list, help="published sets, such as sst2,mrpc [all there are]")
    add("--task-langs", type=comma_list,
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
    if set(asked.tasks) <= set(known):
        refuse_unread(asked, known)
    return asked


def refuse_unread(asked, known):
    """BadInput for a flag that none of the tasks reads."""
    readers = dict.fromkeys(("data", "langs", "header", "split"), set(known) - {*OWN_ROWS})
    readers |= {"max_new": ANSWERING, "hard": ("retrieval", "uniform"), "sets": ON_SETS,
                "task_langs": ON_SETS, "no_controls": probes.SETS, "pool": set(known) - {*UNPOOLED},
                "limit": set(known) - {"bucc2018", "tatoeba"},
                "files": ("bucc2018", "tatoeba", "spider", *ON_SETS)}
    for option, tasks in readers.items():
        value = getattr(asked, option)
        needs = {option: "tasks=" + "|".join(sorted(tasks))}
        lines = [unmet(needs, {option: value}, {"tasks": name}) for name in asked.tasks]
        if value and all(lines):
            raise BadInput(lines[0])


def evaluation_of(run, asked):
    if reads_sets_alone(asked):
        no_rows = EvaluationRows("", {"": ["", ""]})
        return evaluate.Evaluation(run.model, run.tokenizer, no_rows, run.first.get("affixes"),
                                   run.config.get("max_length"), pool=asked.pool)
    evaluation = evaluate.evaluation_of(run, asked.data, asked.langs, asked.split, asked.limit,
                                        asked.max_new, asked.pool, asked.header)
    if asked.hard:
        gold = next(iter(evaluation.texts.values()))
        evaluation.hard = mining.hard_rows(asked.hard, asked.hard_types, gold)
    evaluation.train_texts = None
    if set(asked.tasks) & {*ANSWERING}:
        evaluation.train_texts = metrics.train_texts(run.config)
    return evaluation


def reads_sets_alone(asked):
    return set(asked.tasks) <= {*OWN_ROWS, *(["gap"] if asked.sets else [])}


def main(argv=None):
    argv = sys.argv[1:] if argv is None else argv
    if argv[:1] == ["finetune"]:
        return finetune.main(argv[1:])
    asked = parse(argv)
    options = probes.TaskOptions(asked.files or "data", asked.sets, asked.task_langs or ("en",),
                                 asked.limit, not asked.no_controls, asked.pool)
    run = evaluate.open_run(asked.run, evaluate.usable_device(asked.device))
    tasks = make_tasks(options)
    evaluation = evaluation_of(run, asked)
    names = evaluate.choose(evaluation, asked.tasks, tasks)
    place = evaluate.place_of(asked, evaluation)
    label = evaluation.label
    if reads_sets_alone(asked):
        label = f"published sets, pool {evaluation.pool}, limit {asked.limit}"
        place = place if asked.out else "eval-sets.json"
    results = evaluate.run(evaluation, names, tasks)
    results |= mining.list_means(results)
    describe(results, tasks)
    before = {name.removesuffix("/untrained"): value for name, value in results.items()
              if name.endswith("/untrained")}
    text = json.dumps(results) if asked.json else evaluate.table(results, before, tasks)
    evaluate.report(run.folder, place, label, results, text)


if __name__ == "__main__":
    sys.exit(exit_status(main))
