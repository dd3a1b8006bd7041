"""Metrics and tables that more than one file of this folder needs, and what was trained on."""

import sys
from collections import Counter
from pathlib import Path

import corpora
from corpora.program import BadInput, comma_list
from evaluate import TASKS, exact, mean, percent, search, starts_with, unit

UNSEEN = {
    "rows_new_prompt": ("", "", "prompts that were not trained on"),
    "rows_unseen": ("", "", "gold texts that were not trained on"),
}
GENERATE = TASKS["generate"].about | {
    "exact_new_prompt": ("%", "higher", "exact, of prompts not trained on"),
    "exact_unseen": ("%", "higher", "exact, of gold texts not trained on"),
}


def read_table(name):
    """The rows of a table in this folder, without its header."""
    text = Path(__file__).with_name(name).read_text(encoding="utf-8")
    return [line.split("\t") for line in text.splitlines()[1:]]


def known_metrics(task):
    """metrics.tsv -> {metric: (unit, which way is better, what it is)} of a task."""
    rows = read_table("metrics.tsv")
    return {metric: tuple(more) for tasks, metric, *more in rows if task in tasks.split()}


def top1(x, y):
    """Percent of the rows of x whose nearest row of y by cosine is their own: (N, D), (N, D)."""
    found = search(x, y, 1).indices[:, 0].tolist()
    return percent([i == j for i, j in enumerate(found)])


def alignment(x, y, power=2):
    """mean |u_i - v_i|^power of matched unit rows: (N, D), (N, D) -> 0 (best)..2^power.
    [Wang & Isola 2020, sec. 4]"""
    return (unit(x) - unit(y)).norm(dim=1).pow(power).mean().item()


def ngrams(text, n):
    return Counter(text[i:i + n] for i in range(len(text) - n + 1))


def chrf(written, golds):
    """How many runs of 1 to 6 characters do N texts share with N others? -> 0..100: F2 of precision
    and recall, counted over all texts and then averaged over lengths. Space does not count.
    [Popović 2015, with the sums of sacreBLEU]"""
    pairs = [("".join(one.split()), "".join(gold.split())) for one, gold in zip(written, golds)]
    shares = []  # (precision, recall) of each length
    for n in range(1, 7):
        found = Counter()
        for one, gold in pairs:
            ours = ngrams(one, n)
            theirs = ngrams(gold, n)
            found.update(same=(ours & theirs).total(), ours=ours.total(), theirs=theirs.total())
        # Longer than all texts of a side is no length to count.
        if found["ours"] and found["theirs"]:
            shares.append((found["same"] / found["ours"], found["same"] / found["theirs"]))
    if not any(precision for precision, _ in shares):
        return 0.0
    precision, recall = map(mean, zip(*shares))
    return 100 * 5 * precision * recall / (4 * precision + recall)


def answer_scores(answers, judged, train_texts=None):
    """{metric: True, False or None (left out) of each answer} -> {metric: percent}, and counts.
    With a set of `train_texts` the first metric is given once more, for the prompts and for the
    gold texts that are not among them."""
    scores = {metric: share(flags) for metric, flags in judged.items()}
    scores |= {"stop": percent(answers.stopped), "rows": len(answers.golds)}
    if train_texts is not None:
        metric = next(iter(judged))
        for name, texts in (("new_prompt", answers.prompts), ("unseen", answers.golds)):
            new = [flag for flag, text in zip(judged[metric], texts)
                   if text.strip() not in train_texts]
            scores[f"{metric}_{name}"] = share(new)
            scores[f"rows_{name}"] = len(new) - new.count(None)
    return {name: value for name, value in scores.items() if value is not None}


def share(flags):
    """Percent of True, without the None; None if nothing is left."""
    flags = [flag for flag in flags if flag is not None]
    return percent(flags) if flags else None


def judge_texts(answers, options):
    """The core's own: the same text, and a text that begins with it."""
    pairs = list(zip(answers.written, answers.golds))
    return {"exact": [exact(*pair) for pair in pairs],
            "startswith": [starts_with(*pair) for pair in pairs]}, {}


def texts_trained_on(config):
    """All texts that a run was trained on, a set. None if they are not here."""
    if not config["data"]:
        return None
    try:
        return corpora.train_texts(config["data"], comma_list(config.get("langs", "")),
                                   config.get("skip_bad", False), not config.get("eval_data"),
                                   config.get("header", "yes"))
    except BadInput as error:
        print(f"note: the scores of unseen rows are left out: {error}", file=sys.stderr)
        return None


def texts_apart(config, evaluation, data=None, header=None):
    """Texts to train on, at most 20,000 of the first column, and those of an Evaluation, each text
    once and none in both, without a chat's system texts -> two EvaluationRows. The first are what
    the run of this config was trained on or, of other `data`, its training split."""
    spec = data or config["data"]
    header = header or (not data and config.get("header")) or "yes"
    source = corpora.open_text(spec, list(evaluation.texts), config.get("skip_bad", False),
                               header=header)
    # With --eval-data the run was trained on every row of its own file.
    whole = not data and config.get("eval_data") and not source.embedded
    column = next(iter(evaluation.texts))
    tested = {text: row for row, text in enumerate(evaluation.texts[column])}
    texts = dict.fromkeys(row[0] for row in source.rows("all" if whole else "train"))
    texts = [text for text in texts if text and text not in tested][:20_000]
    if len(texts) < 2:
        raise BadInput(f"invert learns from texts that it does not test, 2 at least, and {spec} "
                       f"has {len(texts)}: give --split test, a smaller --limit, or --data with "
                       "more")
    if len(texts) < 1000:
        print(f"note: invert learns from {len(texts)} texts alone, too few to say much of a model",
              file=sys.stderr)
    once = {name: [all_of[row] for row in tested.values()]
            for name, all_of in evaluation.texts.items()}
    return (corpora.EvaluationRows(source.name, {column: texts}),
            corpora.EvaluationRows(evaluation.rows.name, once))
