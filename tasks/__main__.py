"""The papers' evaluation protocols beyond the core's, of a run folder.

    python -m tasks out/x --tasks matrix,tokens,attention          # of the run's own test rows
    python -m tasks out/x --tasks sts,senteval --files data        # of published sets
    python -m tasks out/y --tasks regex                            # the answers of a causal model
    python -m tasks out/x --tasks retrieval --data flores200_dataset/devtest --hard F --hard-types J
    python -m tasks finetune out/x --task mrpc                     # trains the model: see --help

What each task says is in tasks/README.md. Numbers go to stdout and into the run's eval.json; those
of other rows than the run's own into a file named by what was asked for.
"""
import json
import sys
from functools import partial

import evaluate
from corpora import EvaluationRows
from corpora.program import BadInput, Parser, comma_list, exit_status
from tasks import analysis, answers, finetune, mining, probes


def always(evaluation, options):
    return ""


def with_columns(evaluation, options):
    return evaluate.no_retrieval(evaluation)


def with_answers(evaluation, options):
    return evaluate.no_generate(evaluation)


RANKS = {  # metric: (unit, which way is better, what it is)
    "effective_rank": ("", "higher", "directions in use, centred"),
    "stable_rank": ("", "higher", "variance over that of its largest direction"),
    "rank_90": ("", "higher", "directions that hold 90 % of the variance, centred"),
    "spectral_entropy": ("", "higher", "log effective rank, 0 to 1"),
    "uniformity": ("", "lower", "0 is one point, -4 the whole sphere"),
    "alignment": ("", "lower", "squared distance of translations"),
}
GAP = RANKS | {
    "token": ("%", "", "a linear probe finds the row's most frequent token"),
    "semantic": ("%", "higher", "a linear probe finds the label (of scores: Spearman)"),
    "gap": ("%", "higher", "semantic - token"),
    "class_alignment": ("", "lower", "squared distance of rows of one class"),
    "class_separation": ("", "lower", "distance within classes over that between"),
}
RIGHT = ("%", "higher", "right class, label, letter or ending")
SENTENCES = evaluate.ROWS | {
    "accuracy": RIGHT,
    "f1": ("%", "higher", "F1 of the pairs that mean the same"),
    "mcc": ("", "higher", "Matthews' correlation, times 100"),
    "spearman": ("", "higher", "rank correlation of similarity and score, times 100"),
    "pearson": ("", "higher", "correlation of similarity and score, times 100"),
    "ap_cosine": ("%", "higher", "average precision of the cosine"),
    "ap_max": ("%", "higher", "the best of cosine, two distances, dot product"),
}
TASKS = {  # name: (scores(evaluation, options), why it cannot be done, what its metrics are)
    "regex": (partial(answers.scores, answers.judge_regex), with_answers, {
        "equal": ("%", "higher", "it denotes the gold expression's language"),
        "equal_not_vacuous": ("%", "higher", "where gold matches some lines and not all"),
        "rows_vacuous": ("", "", "rows whose gold matches no line, or every line")}),
    "gsm8k": (partial(answers.scores, answers.judge_gsm8k), with_answers, {
        "number": ("%", "higher", "its final number is the gold one"),
        "released": ("%", "higher", "as LLM-JEPA's code judges it")}),
    "spider": (partial(answers.scores, answers.judge_spider), answers.no_spider, {
        "result": ("%", "higher", "it returns what the gold query returns"),
        "rows_left_out": ("", "", "rows whose gold query cannot be run")}),
    "nq": (partial(answers.scores, answers.judge_nq), with_answers, {
        "substring": ("%", "higher", "it contains a gold answer"),
        "released": ("%", "higher", "as LLM-JEPA's code judges it")}),
    "label": (partial(answers.scores, answers.judge_label), with_answers, {
        "accuracy": RIGHT, "majority": ("%", "", "share of the most frequent label")}),
    "hellaswag": (answers.hellaswag, answers.no_choice, {
        "accuracy": RIGHT, "accuracy_normalised": ("%", "higher", "by likelihood per token")}),
    "hellaswag-letter": (answers.hellaswag_letter, answers.no_choice, {
        "accuracy": RIGHT, "released": ("%", "higher", "after 128 tokens, as LLM-JEPA's code")}),
    "matrix": (mining.matrix, with_columns, {
        "xsim": ("%", "lower", "every language searched in every other, mean")}),
    "bucc": (mining.bucc, with_columns, {
        "f1": ("%", "higher", "nearest by cosine, F1 weighted as in MTEB")}),
    "mine": (mining.mine, partial(mining.files_missing, mining.bucc_files), {
        "f1": ("%", "higher", "translations mined out of two texts: ratio margin, k = 4"),
        "precision": ("%", "higher", "what was mined is right"),
        "recall": ("%", "higher", "what is right was mined"),
        "threshold": ("", "", "least margin of what is taken")}),
    "tatoeba": (mining.tatoeba, partial(mining.files_missing, mining.tatoeba_files), {
        "accuracy": ("%", "higher", "nearest by cosine is the translation, both ways"),
        "accuracy_into_eng": ("%", "higher", "the same, found in English"),
        "accuracy_from_eng": ("%", "higher", "the same, English searched for"),
        "error": ("%", "lower", "100 - accuracy")}),
    "poolings": (analysis.poolings, always, RANKS),
    "gap": (analysis.gap, always, GAP),
    "spectrum": (analysis.spectra, always, RANKS | {
        "explained_1": ("%", "lower", "variance in the largest principal component"),
        "explained_10": ("%", "lower", "in the first 10")}),
    "linear": (analysis.linear, with_columns, {
        "residual": ("", "lower", "|T X - C|, best linear map X of column 1 to another"),
        "residual_held_out_unit": ("", "lower", "relative, held out, of unit rows"),
        "residual_relative": ("", "lower", "over |C|; 0 if rows_per_width < 1"),
        "residual_held_out": ("", "lower", "on every second row, X fitted to the others"),
        "singular_100": ("", "lower", "mean of the 100 largest singular values of T - C")}),
    "tokens": (analysis.tokens, with_columns, {
        "translation": ("%", "higher", "nearest token is in a translation of the row"),
        "same_sentence": ("%", "lower", "in the same row"),
        "same_language": ("%", "lower", "is the same token in another row of the column"),
        "other": ("%", "lower", "anything else")}),
    "attention": (analysis.attention, analysis.no_blocks, {
        "entropy": ("", "", "nats: of the sentence's token, last layer, mean of heads"),
        "entropy_of_mean": ("", "", "of the heads' mean"),
        "entropy_uniform": ("", "", "log of the tokens in a row: the most there can be"),
        "on_first": ("%", "", "of that attention on the first token"),
        "on_end": ("%", "", "on the last")}),
    "uniform": (analysis.uniform, with_columns, {
        "xsim": ("%", "lower", "wrong translation found"),
        "xsim++": ("%", "lower", "wrong translation found among hard negatives"),
        "top1": ("%", "higher", "nearest by cosine is the translation"),
        "change": ("%", "", "(own pooling - this one) / own")}),
}
OWN_ROWS = ("mine", "tatoeba", *probes.SETS)  # tasks that read nothing of --data


def make_tasks(options):
    """{name: evaluate.Task} of the core and of this folder, bound to TaskOptions."""
    known = dict(TASKS)
    for name in probes.SETS:
        known[name] = (partial(probes.sentences, name), partial(probes.no_sets, name), SENTENCES)
    tasks = dict(evaluate.TASKS)
    for name, (scores, unavailable, about) in known.items():
        usual = evaluate.ANSWERS if name in answers.JUDGES else evaluate.ROWS
        tasks[name] = evaluate.Task(partial(scores, options=options),
                                    partial(unavailable, options=options), usual | about, False)
    return tasks


def describe(results, tasks):
    """Let `about` know metrics by their whole names, such as set/pooling/metric."""
    for name in results:
        task, _, rest = name.partition("/")
        metric = rest.split("/")[-1]
        if metric in tasks[task].about:
            tasks[task].about[rest] = tasks[task].about[metric]


def parse(argv):
    parser = Parser("python -m tasks", __doc__)
    add = parser.add_argument
    add("run", metavar="RUN", help="folder of a run, such as out/mexma")
    add("--tasks", type=comma_list, required=True,
        help=f"some of {', '.join([*evaluate.TASKS, *TASKS, *probes.SETS])}")
    add("--data", help="other rows than the run's own: toy, files, or a folder of CODE.devtest")
    add("--langs", type=comma_list, default=[], help="columns; the first is searched in")
    add("--split", choices=("train", "valid", "test", "all"), help="[what was not trained on]")
    add("--limit", type=int, help="at most so many rows [1000; of a folder, all]")
    add("--max-new", type=int, help="cut answers after so many tokens")
    add("--hard", help="altered sentences of the first language: eng_Latn_augmented.devtest")
    add("--hard-types", help="what each was made from: eng_Latn_errtype.devtest.json")
    add("--files", default="data", help="folder of the published sets [data]")
    add("--sets", type=comma_list, help="of these only some, such as sst2,mrpc [all there are]")
    add("--task-langs", type=comma_list, default=["en"],
        help=f"languages of {', '.join(probes.IN_LANGUAGES)} [en]")
    add("--no-controls", action="store_true", help="without untrained model and bag of words")
    add("--probe-epochs", type=int, help="of hybrid-probes [the paper's, 10 to 90]")
    add("--device", help="cpu, cuda, cuda:1 [cuda if there is one]")
    add("--json", action="store_true", help="print every number, as one JSON object")
    return parser.parse_args(argv)


def main(argv=None):
    argv = sys.argv[1:] if argv is None else argv
    if argv[:1] == ["finetune"]:
        return finetune.main(argv[1:])
    asked = parse(argv)
    for flag in ("limit", "max_new", "probe_epochs"):
        value = getattr(asked, flag)
        if value is not None and value < 1:
            raise BadInput(f"--{flag.replace('_', '-')} {value} is too low: give at least 1")
    if not asked.tasks:
        raise BadInput("--tasks names nothing: give names with commas between them")
    if bool(asked.hard) != bool(asked.hard_types):
        raise BadInput("--hard and --hard-types go together: the altered sentences, and what each "
                       "was made from")
    options = probes.TaskOptions(asked.files, asked.sets, asked.task_langs, asked.limit,
                                 not asked.no_controls, asked.probe_epochs)
    run = evaluate.open_run(asked.run, evaluate.usable_device(asked.device))
    own_rows = OWN_ROWS + (("gap",) if asked.sets else ())
    if set(asked.tasks) <= set(own_rows):
        no_rows = EvaluationRows("", {"": ["", ""]})
        evaluation = evaluate.Evaluation(run.model, run.tokenizer, no_rows,
                                         run.first.get("affixes"), progress=True)
    else:
        evaluation = evaluate.evaluation_of(run, asked.data, asked.langs, asked.split, asked.limit,
                                            asked.max_new)
    if asked.hard:
        gold = next(iter(evaluation.texts.values()))
        evaluation.hard = mining.hard_rows(asked.hard, asked.hard_types, gold)
    judged = run.model.config.causal and set(asked.tasks) & {"generate", *answers.JUDGES}
    if judged and run.config["data"]:
        evaluation.train_texts = evaluate.training_texts(run.config)
    tasks = make_tasks(options)
    results = evaluate.run(evaluation, asked.tasks, tasks)
    name = evaluate.file_name(asked)
    if asked.hard:
        name = name.replace(".json", "-hard.json")
    evaluate.write_results(run.folder, name, results)
    describe(results, tasks)
    if asked.json:
        print(json.dumps(results))
        return
    before = {name.removesuffix("/untrained"): value for name, value in results.items()
              if name.endswith("/untrained")}
    print(evaluate.table(results, before, tasks))


if __name__ == "__main__":
    sys.exit(exit_status(main))
