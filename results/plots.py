"""Draw recorded experiments along training, and the pictures of the README."""

import statistics

import train
from common import BadInput, Parser, atomic_file, comma_list, did_you_mean
from look.plots import COLOURS, Picture, headline, lines, panels, pca, png

from .compare import DATA, EXPERIMENTS, read_records


def embeddings_picture():
    """Draw the embeddings of sentences in five languages before and after the default training."""
    run = train.start("mexma", data="toy", eval_every=10_000, eval_limit=25)
    figure, (before, after) = panels(1, 2, 3)
    pca(run.evaluation().embeddings, before, "before training", joined=25)
    list(run.steps())
    pca(run.evaluation().embeddings, after, f"after {run.train.steps} steps", joined=25)
    return headline(figure, "25 sentences in five languages: training brings the translations of a "
                    "sentence, joined by a line, together")


def health_picture():
    """Draw loss, RankMe and the cosine of unrelated sentences while an encoder collapses."""
    figure, axes = panels(1, 3, 2)
    logs = {}
    for label, flags in (("alignment alone", dict(mlm_weight=0.0, koleo_weight=0.0)),
                         ("all of MEXMA", {})):
        run = train.start("mexma", data="toy", steps=150, eval_every=15, eval_limit=200, **flags)
        logs[label] = {record["step"]: record["eval"] for record in run.steps() if "eval" in record}
    for axis, (metric, name) in zip(axes, (
            ("validation/align", "alignment loss (held out)"), ("geometry/rankme", "RankMe"),
            ("geometry/cosine/same", "cosine of unrelated\nsentences"))):
        lines({label: (list(log), [scores[metric] for scores in log.values()])
               for label, log in logs.items()}, "training step", name, axis=axis)
        if axis is not axes[0]:
            axis.get_legend().remove()
    return headline(figure, "With the alignment loss alone an encoder collapses: the loss falls to "
                    "zero, RankMe to one, and the cosine of unrelated sentences rises to one")


def climb_picture():
    """Draw what the experiment `climb` found: curves by depth, by groups, and R2 of directions."""
    scores = [record["eval"] for record in read_records("climb") if record["label"] == "learner"]
    figure = Picture(figsize=(5.4, 4.6), layout="constrained")
    axes = figure.subplot_mosaic([["depth", "depth"], ["groups", "directions"]])

    def mean(metric):
        return statistics.fmean(one[metric] for one in scores)

    axis, texts = axes["depth"], [2 ** power for power in range(8, 18)]
    for contexts, color in (("latents", COLOURS[0]), ("tokens", COLOURS[1])):
        for depth, style in ((3, "-"), (4, "--"), (5, ":")):
            found = [mean(f"found, depth {depth}, {number} texts/{contexts}") for number in texts]
            axis.plot(texts, found, style, color=color, label=f"{contexts}, depth {depth}")
    axis.set(xscale="log", ylim=(0, 105), xlabel="number of texts", ylabel="symbols found, %",
             title="With latents all depths need the same number of texts;\n"
                   "with tokens each level of depth costs more")
    axis.legend(loc="lower right", ncols=2)

    axis, groups = axes["groups"], (4, 6, 7, 8, 9, 10, 12, 16)
    for number, marker in ((2048, "o"), (4096, "s"), (8192, "^")):
        found = [mean(f"found, {number} texts/{count} codes") for count in groups]
        axis.plot(groups, found, marker=marker, markersize=3, label=f"{number:,} texts")
    axis.axvline(8, color="black", linewidth=1, linestyle=":", label="8 symbols")
    axis.set(ylim=(0, 105), xlabel="groups at each level", ylabel="symbols found, %",
             title="Fewer groups than symbols find little;\nmore groups need more texts")
    axis.legend(loc="lower right", ncols=2, frameon=True, framealpha=1, edgecolor="white")

    axis, directions = axes["directions"], range(1, 32)
    r2 = [[one[f"R2/{number}"] for one in scores] for number in directions]
    axis.bar(directions, list(map(statistics.fmean, r2)), color=COLOURS[2], label="mean")
    axis.vlines(directions, list(map(min, r2)), list(map(max, r2)), color="black", linewidth=1,
                label="range over grammars")
    axis.set(xlabel="direction of a masked pair of tokens", ylabel="R2 given the context",
             title="The context explains 7 directions (the\nparent); 24 (its synonyms) have R2 = 0")
    axis.legend(loc="upper right")
    return figure


PICTURES = {"embeddings": embeddings_picture, "health": health_picture, "climb": climb_picture}


def experiment_picture(name, metric, labels=(), flops=False):
    """Draw a metric of recorded runs along training, against steps or compute."""
    series = {}
    records = read_records(name)
    if not records:
        known = [*PICTURES, *EXPERIMENTS]
        raise BadInput(f"there is no picture or experiment {name!r}{did_you_mean(name, known)}")
    for label in labels or ():
        if label not in {record["label"] for record in records}:
            raise BadInput(f"{name} has no row {label!r} (see python -m results show {name})")
    for record in records:
        scale = record["flops"] / record["steps"] / 1e12 if flops else 1
        points = {int(step) * scale: one[metric] for step, one in record.get("curve", {}).items()
                  if metric in one}
        if points and record["label"] in (labels or [record["label"]]):
            positions, values = series.setdefault(record["label"], (list(points), []))
            values.append(list(points.values())[:len(positions)])
    if not series:
        raise BadInput(f"{name} has no {metric} along training (see python -m results show)")
    axis, = panels(height=2.8)[1]
    axis.figure.set_figwidth(5.4)
    y = {name: heading for heading, name in DATA["columns"].items()}.get(metric, metric)
    return lines(series, "compute, TFLOP" if flops else "training step", y, axis=axis,
                 title=f"{name}: {y} along training (mean and range over seeds)")


def plot_command(words):
    parser = Parser("python -m results plot", "Draw a recorded experiment along training, or one "
                    f"of the README's pictures: {', '.join(PICTURES)}. Writes NAME.png.")
    parser.add_argument("name", metavar="NAME", help="an experiment, or a picture")
    parser.add_argument("--metric", default="retrieval/xsim", help="metric of an experiment "
                        "[retrieval/xsim]")
    parser.add_argument("--rows", type=comma_list, help="rows of an experiment, comma-separated "
                        "[all]")
    parser.add_argument("--flops", action="store_true", help="draw against FLOPs, not steps")
    options = parser.parse_args(words)
    figure = PICTURES[options.name]() if options.name in PICTURES else experiment_picture(
        options.name, options.metric, options.rows, options.flops)
    out = f"{options.name}.png"
    with atomic_file(out) as file:
        file.write(png(figure))
    print(out)
