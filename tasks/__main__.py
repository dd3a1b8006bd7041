"""Evaluate a run by the protocols of the papers.

    python -m tasks out/x --tasks matrix,tokens,attention      # on the run's own test rows
    python -m tasks out/x --tasks sts,senteval --files data    # on data sets with labels
    python -m tasks out/y --tasks gsm8k                        # answers of a causal model
    python -m tasks finetune out/x --task mrpc                 # trains the model: see --help
"""

import argparse
import json
from functools import partial

import corpora
import evaluate
from common import BadInput, comma_list, run_program, usable_device, warn
from tasks import analysis, answers, finetune, mining, probes


def make_tasks(options):
    """Return {task: function of an Evaluation}, given probes.Options."""
    return evaluate.TASKS | {
        "matrix": mining.matrix, "bucc": mining.bucc,
        "tatoeba": partial(mining.tatoeba, options=options),
        "poolings": analysis.poolings, "spectrum": analysis.spectra,
        "gap": partial(analysis.gap, options=options), "frequencies": analysis.frequencies,
        "linear": analysis.linear, "embedding-position": analysis.embedding_position,
        "tokens": analysis.tokens, "attention": analysis.attention, "uniform": analysis.uniform,
        "hellaswag-letter": answers.hellaswag_letter,
        **{name: partial(probes.sentences, name, options=options) for name in probes.SETS},
        **{name: partial(answers.answer_task, name, options=options) for name in answers.JUDGES}}


def parse_flags(words):
    parser = evaluate.make_parser("python -m tasks", __doc__, make_tasks(probes.Options()))
    parser.epilog = "tasks/README.md says what each task measures and needs."
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    add = parser.add_argument
    add("--files", default="data", help="folder of the data sets [data]")
    add("--sets", type=comma_list, help="data sets to use, e.g. sst2,mrpc [all that are there]")
    add("--task-langs", type=comma_list, default=["en"],
        help=f"languages of {', '.join(probes.IN_LANGUAGES)} [en]")
    add("--no-controls", action="store_true",
        help="skip the untrained model and the bag of embeddings")
    add("--hard", help="xsim++: altered sentences of the first language, one per line")
    add("--hard-types", help="xsim++: JSON file with the source and the type of each of them")
    options = parser.parse_args(words)
    if not options.tasks:
        raise BadInput("--tasks is missing: python -m tasks --help lists them")
    if bool(options.hard) != bool(options.hard_types):
        raise BadInput("--hard and --hard-types are needed together")
    return options


def reads_only_sets(flags):
    """Do all tasks read --files, and none the rows of --data?"""
    return set(flags.tasks) <= {"tatoeba", *probes.SETS, *(["gap"] if flags.sets else [])}


def make_evaluation(opened, flags):
    """Return the Evaluation of a RunFolder on the rows that the flags choose."""
    if reads_only_sets(flags):
        name = f"data sets of {flags.files}, pool {flags.pool}, limit {flags.limit}"
        return evaluate.Evaluation(opened.model, opened.tokenizer,
                                   corpora.EvaluationRows(name, {"": ["", ""]}),
                                   opened.first["affixes"], opened.config.get("max_length"),
                                   pool=flags.pool)
    evaluation = evaluate.evaluation_of(opened, flags.data, flags.langs, flags.split, flags.limit,
                                        flags.pool)
    if flags.hard:
        gold = next(iter(evaluation.texts.values()))
        evaluation.hard = mining.hard_rows(flags.hard, flags.hard_types, gold)
    return evaluation


def texts_trained_on(config):
    """Return the set of all texts that a run was trained on, or None if they are not here."""
    if not config.get("data"):
        return None
    try:
        rows = corpora.rows_trained_on(config["data"], comma_list(config.get("langs", "")),
                                       not config.get("eval_data"))
        return {text.strip() for row in rows for text in row if text}
    except BadInput as error:
        warn(f"the scores on unseen rows are left out: {error}")
        return None


def main(words):
    if words[:1] == ["finetune"]:
        return finetune.main(words[1:])
    flags = parse_flags(words)
    options = probes.Options(flags.files, flags.sets, flags.task_langs, flags.limit,
                             not flags.no_controls, flags.pool)
    opened = evaluate.open_run(flags.run, usable_device(flags.device))
    for name in set(flags.tasks) & set(probes.SETS):
        probes.find_sets(name, options)  # a missing table should not be found after an hour
    evaluation = make_evaluation(opened, flags)
    if set(flags.tasks) & set(answers.JUDGES):
        options.train_texts = texts_trained_on(opened.config)
    is_own = not (flags.hard or reads_only_sets(flags))
    label = evaluation.rows.name if reads_only_sets(flags) else evaluation.label
    path = evaluate.results_file(flags, label) if flags.out or is_own else None
    results = evaluate.run(evaluation, flags.tasks, make_tasks(options))
    results |= mining.list_means(results)
    if flags.json:
        print(json.dumps(results))
    else:
        for task in flags.tasks:
            scores = {name: x for name, x in results.items() if name.startswith(f"{task}/")}
            before = {name.removesuffix("/untrained"): scores.pop(name)
                      for name in [*scores] if name.endswith("/untrained")}
            about = evaluate.METRICS if task in evaluate.TASKS else {}
            print(evaluate.table(scores, before, about))
    if path:
        evaluate.write_results(path, results, label, opened.model_hash)


if __name__ == "__main__":
    run_program(main)
